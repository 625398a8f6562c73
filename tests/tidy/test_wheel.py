"""Does the wheel install and answer on a machine without compiler, FUSE or this checkout?

A fresh environment takes wheels only, and pyfuse3 cannot be imported in it, as on a laptop.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT, tracked

COMMANDS = [
    ("--help",),
    ("ls", "--help"),
    ("cp", "--help"),
    ("cat", "--help"),
    ("doctor", "--help"),
    ("config", "show"),
]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SPOTWARP", "AWS"))}
    environment["HOME"] = str(cwd)
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, as a packager would from a tarball; the checkout keeps no build directory."""
    base = tmp_path_factory.mktemp("wheel")
    for path in tracked("spotwarp_fs", "provisioner", "pyproject.toml", "README.md", "LICENSE"):
        copy = base / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")
    run(*pip, "--wheel-dir", base, base / "source", cwd=base)
    (built,) = base.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"spotwarp_fs", "provisioner", "spotwarp"}
    sources = {str(path.relative_to(ROOT)) for path in tracked("spotwarp_fs/*.py", "provisioner/*.py")}
    assert sources <= set(names)


@pytest.mark.timeout(240)
def test_a_fresh_machine_without_fuse_can_use_it(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:", wheel, cwd=tmp_path)
    run(
        python,
        "-c",
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('pyfuse3') is not None)",
        cwd=tmp_path,
    )
    for command in COMMANDS:
        assert run(tmp_path / "venv" / "bin" / "spotwarp", *command, cwd=tmp_path)

    # The laptop's whole errand: push a directory, look at it, fetch it, with a store that is a directory.
    project = tmp_path / "project"
    project.mkdir()
    (project / "notes.txt").write_bytes(b"as it was")
    store = ("--store", f"file://{tmp_path}/bucket")
    spotwarp = tmp_path / "venv" / "bin" / "spotwarp"
    run(spotwarp, "push", project, "laptop", *store, cwd=tmp_path)
    assert "notes.txt" in run(spotwarp, "ls", "laptop:", *store, cwd=tmp_path)
    run(spotwarp, "cp", "laptop:notes.txt", tmp_path / "fetched.txt", *store, cwd=tmp_path)
    assert (tmp_path / "fetched.txt").read_bytes() == b"as it was"
