"""Which packages a node needs, and how they get here: wheels only, by pip, for each CPython that an image may have.

Invariant: a node gets the versions that this controller itself runs with, wherever they exist for its Python; nothing
is ever built or installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio

from provisioner.bundling.archive import Member
from provisioner.bundling.entry import COMMON, site_of
from provisioner.core.errors import BadWish

VERSIONS: Final = ("3.11", "3.12", "3.13")
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
"""Of glibc 2.28 and older: every image that still gets updates."""
DISTRIBUTION: Final = "spotwarp"
UV: Final = "uv"
"""Brings a Python where the image's is too old (`core.bootstrap`)."""
DOWNLOAD_S: Final = 1800.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_PURE: Final = re.compile(r"-py3-none-any\.whl$|-py2\.py3-none-any\.whl$")
BOTOCORE_KEPT: Final = frozenset({"s3", "sts", "sso", "sso-oidc", "signin"})
"""Of 400 services a node uses S3, and others only to get at keys."""
_BOTOCORE: Final = re.compile(r"botocore/data/([^/]+)/")
_TESTS: Final = re.compile(r"^(numpy|trio)/(.*/)?(tests|_tests)/")


def requirements() -> list[str]:
    """Return what the distribution needs to run, without extras; FUSE needs a compiler, so a node goes without."""
    found = importlib.metadata.requires(DISTRIBUTION) or []
    return sorted(line.partition(";")[0].strip() for line in found if "extra ==" not in line)


def constraints() -> list[str]:
    """Return every package of this environment with its version."""
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if _NAME.fullmatch(name) and version)


def fingerprint() -> str:
    """Say what the download depends on, for the cache."""
    needed = {_NAME.match(line)[0].lower() for line in requirements()}  # type: ignore[index]
    pinned = [line for line in constraints() if line.partition("==")[0].lower() in needed]
    return "\n".join([*VERSIONS, *PLATFORMS, *requirements(), *pinned])


async def download(place: Path) -> None:
    """Fetch all wheels into directories below *place*, or raise BadWish that says what pip said."""
    pins = place / "constraints.txt"
    pins.write_text("\n".join(constraints()) + "\n")
    for version in VERSIONS:
        target = place / version
        try:
            await _pip(target, version, ["-c", str(pins), *requirements()])
        except BadWish:
            # A version that this Python has may not exist for that one.
            await _pip(target, version, requirements())
    await _pip(place / UV, VERSIONS[0], ["--no-deps", UV])


async def _pip(target: Path, version: str, what: list[str]) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", version, *platforms, "--dest", str(target), *what,
    ]  # fmt: skip
    with trio.move_on_after(DOWNLOAD_S):
        done = await trio.run_process(
            command, stdin=subprocess.DEVNULL, capture_stdout=True, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode == 0:
            return
        said = done.stdout.decode(errors="replace").strip().splitlines()[-3:]
        raise BadWish(
            f"the packages that a node with Python {version} needs cannot be fetched here: {' / '.join(said)}. The "
            "controller needs pip and a way to a package index for this, once"
        )
    raise BadWish(f"the packages for Python {version} did not arrive within {DOWNLOAD_S:.0f} s: is the network there?")


def unpacked(place: Path) -> Iterator[tuple[str, Member]]:
    """Give the members of the archive that the wheels below *place* make."""
    for version in VERSIONS:
        for wheel in sorted((place / version).glob("*.whl")):
            below = COMMON if _PURE.search(wheel.name) else site_of(version)
            for name, body in _content(wheel):
                yield f"{below}/{name}", Member(body)
    for wheel in sorted((place / UV).glob("*.whl")):
        with zipfile.ZipFile(wheel) as content:
            for name in content.namelist():
                if name.endswith("/scripts/uv"):
                    yield UV, Member(content.read(name), executable=True)


def _content(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as content:
        for name in sorted(content.namelist()):
            if not name.endswith("/") and _wanted(name):
                yield name, content.read(name)


def _wanted(name: str) -> bool:
    service = _BOTOCORE.match(name)
    if service is not None and service[1] not in BOTOCORE_KEPT:
        return False
    top = name.partition("/")[0]
    return not _TESTS.match(name) and not top.endswith(".data")
