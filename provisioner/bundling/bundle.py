"""The archive as a whole, made once for each state of the sources and brought to the store once.

Invariant: what lies in the cache under a name is what the sources and versions behind that name make; it appears whole
or not at all, so that two controllers may make it at the same time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import trio

import provisioner
import spotwarp_fs
from provisioner.bundling import wheels
from provisioner.bundling.archive import Member, digest, files_below, pack
from provisioner.bundling.entry import COMMON, NAME, Here, entry_text
from provisioner.core.rendezvous import bundle_key

PACKAGES: Final = (spotwarp_fs, provisioner)
LEFT_OUT: Final = frozenset({"simulator", "bundling"})
"""Parts of the provisioner that only a controller has a use for."""
KEPT_MAX: Final = 3
"""Archives in the cache; older ones are deleted."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """An archive on this machine."""

    path: Path
    sha256: str

    @property
    def key(self) -> str:
        """Where it lies in the store."""
        return bundle_key(self.sha256)


class BigShelf(Protocol):
    """The store, as far as an archive needs it (`provisioner.meeting.StoreShelf`)."""

    async def has(self, key: str) -> bool:
        """Tell whether the object is there."""
        ...

    async def put_big(self, key: str, body: bytes) -> None:
        """Create or replace an object that takes its time."""
        ...


async def make_bundle(cache: Path) -> Bundle:
    """Return the archive for rented nodes, from the *cache* directory or made now; takes a minute, and pip's network.

    Raises BadWish when the packages cannot be fetched.
    """
    path = _place(cache)
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="wheels-", dir=cache) as place:
            await wheels.download(Path(place))
            body = await trio.to_thread.run_sync(_rented, Path(place))
        _write_whole(path, body)
        _forget_old(cache)
    path.touch()
    return Bundle(path, await trio.to_thread.run_sync(lambda: digest(path.read_bytes())))


def made_before(cache: Path) -> bool:
    """Tell whether `make_bundle` has nothing to fetch."""
    return _place(cache).exists()


def _place(cache: Path) -> Path:
    name = hashlib.sha256(f"{_sources_digest()}\n{wheels.fingerprint()}\n{entry_text()}".encode()).hexdigest()[:32]
    return cache / f"rented-{name}.tgz"


def make_light_bundle(cache: Path) -> Bundle:
    """Return the archive for nodes on this very machine: they use this interpreter and its packages where they are."""
    body = pack({NAME: Member(entry_text(_here()).encode())}, last=NAME)
    found = digest(body)
    path = cache / f"local-{found[:32]}.tgz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _write_whole(path, body)
    return Bundle(path, found)


async def upload_bundle(shelf: BigShelf, bundle: Bundle) -> None:
    """Bring the archive to the store, unless it is there; raises what the shelf raises."""
    if not await shelf.has(bundle.key):
        await shelf.put_big(bundle.key, await trio.to_thread.run_sync(bundle.path.read_bytes))


def _here() -> Here:
    """Describe the running interpreter: our packages first, so that a checkout goes before an installed version."""
    own = [str(Path(str(package.__file__)).resolve().parents[1]) for package in PACKAGES]
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    found = [os.path.realpath(path) for path in sys.path if path and os.path.isdir(path)]
    others = [path for path in found if not any(path == one or path == f"{one}/lib-dynload" for one in standard)]
    interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Here(interpreter, version, tuple(dict.fromkeys([*own, *others])))


def _rented(place: Path) -> bytes:
    members = dict(wheels.unpacked(place))
    members |= {f"{COMMON}/{name}": Member(body) for name, body in _sources()}
    members[NAME] = Member(entry_text().encode())
    return pack(members, last=NAME)


def _sources() -> Iterator[tuple[str, bytes]]:
    """Give our own packages as they are imported here, and the metadata that tells their version."""
    for package in PACKAGES:
        root = Path(str(package.__file__)).parent
        left_out = LEFT_OUT if package is provisioner else frozenset[str]()
        for name, body in files_below(root, leave_out=left_out):
            yield f"{root.name}/{name}", body
    version = importlib.metadata.version(wheels.DISTRIBUTION)
    text = f"Metadata-Version: 2.1\nName: {wheels.DISTRIBUTION}\nVersion: {version}\n"
    yield f"{wheels.DISTRIBUTION}-{version}.dist-info/METADATA", text.encode()


def _sources_digest() -> str:
    found = hashlib.sha256()
    for name, body in _sources():
        found.update(f"{name} {hashlib.sha256(body).hexdigest()}\n".encode())
    return found.hexdigest()


def _write_whole(path: Path, body: bytes) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(body)
    draft.replace(path)


def _forget_old(cache: Path) -> None:
    made = sorted(cache.glob("rented-*.tgz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[KEPT_MAX:]:
        path.unlink(missing_ok=True)
