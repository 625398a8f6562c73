"""A store in a plain directory: a local disk, NFS, or a parallel filesystem that all nodes mount.

Invariant: an object appears whole or not at all, and is on disk before the call that made it returns. Create-only is
`link()`, which refuses an existing name; `rename()` would replace it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from spotwarp_fs.core.errors import Denied, NotFound, PreconditionFailed, SpotwarpError, Unavailable, Unsupported
from spotwarp_fs.core.ports import Lane, ObjectInfo, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.keys import checked, range_stop
from spotwarp_fs.store.limits import TEMP_FILE_AGE_MAX_S, LaneThreads

PRIVATE: Final = ".spotwarp-store"
"""Temporary files and the lock live here, on the same filesystem as the objects and outside every listing."""
NO_LINKS: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})

T = TypeVar("T")


class DirectoryStore:
    """Objects are files below *root*; its clock is this node's, so all its users should keep time together."""

    def __init__(self, root: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._root = root
        self._private = root / PRIVATE
        self._now_ns = now_ns
        self._threads = LaneThreads()
        self._seen_root = root.is_dir()
        self._swept = False
        self.url = f"file://{root}"

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        return await self._run(lane, key, lambda: self._get(key, start, length))

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return await self._run(lane, key, lambda: self._info(key, self._stat(key)))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return await self._run(lane, key, lambda: self._replace(key, body, None), writing=True)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object, or raise PreconditionFailed."""
        return await self._run(lane, key, lambda: self._create(key, body), writing=True)

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*."""
        return await self._run(lane, key, lambda: self._replace(key, body, etag), writing=True)

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give what is below *prefix*, as it was while the directories were walked."""
        for info in await self._run(lane, prefix, lambda: list(self._list(prefix, after))):
            yield info

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete, whether or not the keys are there."""
        if keys:
            await self._run(lane, keys[0], lambda: self._delete(keys))

    async def link(self, key: ObjectKey, lives_s: int) -> str:
        """Return a URL for processes that see the same directory; it never ends."""
        return f"file://{self._path(key)}"

    async def aclose(self) -> None:
        """Do nothing: no descriptor is kept between calls."""

    async def _run(self, lane: Lane, key: str, call: Callable[[], T], *, writing: bool = False) -> T:
        def guarded() -> T:
            try:
                return call()
            except OSError as error:
                raise self._translate(error, key, writing=writing) from error

        return await self._threads.run(lane, guarded)

    def _translate(self, error: OSError, key: str, *, writing: bool) -> SpotwarpError:
        if error.errno in ABSENT and not writing:
            # An unmounted NFS would otherwise look like an empty store.
            if self._seen_root and not self._root.is_dir():
                return Unavailable(f"{self._root} was there and is gone: is it mounted?")
            return NotFound(f"{key} is not in {self.url}")
        if error.errno in REFUSED:
            return Denied(f"{key} in {self.url}: {error.strerror}; this user needs to read and write there")
        return Unavailable(f"{key} in {self.url}: {error.strerror}")

    def _path(self, key: str) -> Path:
        assert key.split("/")[0] != PRIVATE, f"{key} is the store's own"
        return self._root / checked(key)

    def _stat(self, key: ObjectKey) -> os.stat_result:
        found = os.stat(self._path(key))
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "a directory, not an object")
        return found

    def _get(self, key: ObjectKey, start: int, length: int | None) -> Stored:
        # Objects are replaced by rename, so an open descriptor is one version of the object from end to end.
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as source:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "a directory, not an object")
            wanted = range_stop(key, found.st_size, start, length) - start
            source.seek(start)
            body = source.read(wanted)
        if len(body) != wanted:
            raise Unavailable(f"{key} in {self.url}: {len(body)} bytes came, {wanted} are there")
        return Stored(body, _etag(found), self._now_s())

    def _create(self, key: ObjectKey, body: bytes) -> ObjectInfo:
        target = self._path(key)
        with self._written(target, body) as temp:
            try:
                os.link(temp, target)
            except FileExistsError as error:
                raise PreconditionFailed(f"{key} exists in {self.url}") from error
            except OSError as error:
                if error.errno in NO_LINKS or (error.errno == errno.EPERM and os.access(target.parent, os.W_OK)):
                    raise Unsupported(
                        f"{self.url} has no hard links ({error.strerror}): create-only needs them"
                    ) from error
                raise
        _sync_directory(target.parent)
        return self._info(key, os.stat(target))

    def _replace(self, key: ObjectKey, body: bytes, etag: str | None) -> ObjectInfo:
        target = self._path(key)
        with self._written(target, body) as temp, self._locked():
            if etag is not None:
                found = _etag_or_none(target)
                if found != etag:
                    raise PreconditionFailed(f"{key} is {found or 'absent'}, not {etag}, in {self.url}")
            os.rename(temp, target)
            made = os.stat(target)
        _sync_directory(target.parent)
        return self._info(key, made)

    @contextmanager
    def _written(self, target: Path, body: bytes) -> Iterator[Path]:
        """Give a synced temporary file with *body*, and remove what is left of it."""
        self._prepare()
        _make_directories(target.parent, self._root)
        temp = self._private / f"{os.urandom(8).hex()}.tmp"
        try:
            with temp.open("xb") as sink:
                sink.write(body)
                sink.flush()
                os.fsync(sink.fileno())
            yield temp
        finally:
            temp.unlink(missing_ok=True)

    def _prepare(self) -> None:
        if self._seen_root and not self._root.is_dir():
            raise Unavailable(f"{self._root} was there and is gone: is it mounted?")
        self._private.mkdir(parents=True, exist_ok=True)
        self._seen_root = True
        if not self._swept:
            self._swept = True
            self._sweep()

    def _sweep(self) -> None:
        for temp in self._private.glob("*.tmp"):
            try:
                if self._now_s() - temp.stat().st_mtime > TEMP_FILE_AGE_MAX_S:
                    temp.unlink()
            except FileNotFoundError:
                continue  # another process swept it

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's one lock: comparing an etag and replacing the object must not be interleaved."""
        fd = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        if self._seen_root and not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the store's directory")
        for key, found in self._walk(prefix.rpartition("/")[0]):
            if key.startswith(prefix) and key > after:
                yield self._info(ObjectKey(key), found)

    def _walk(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Give files below *folder* in key order: a directory sorts as its name with the slash that follows it."""
        try:
            with os.scandir(self._root / folder) as entries:
                names = sorted(f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            key = f"{folder}/{name}" if folder else name
            if key.startswith(f"{PRIVATE}/"):
                continue
            if name.endswith("/"):
                yield from self._walk(key[:-1])
                continue
            try:
                yield key, os.stat(self._root / key)
            except FileNotFoundError:
                continue  # deleted while we walked

    def _delete(self, keys: list[ObjectKey]) -> None:
        if not self._root.is_dir():
            if self._seen_root:
                raise FileNotFoundError(errno.ENOENT, "the store's directory")
            return
        self._prepare()
        parents = set()
        with self._locked():
            for key in keys:
                try:
                    self._path(key).unlink()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                parents.add(self._path(key).parent)
        for parent in parents:
            _sync_directory(parent)

    def _info(self, key: ObjectKey, found: os.stat_result) -> ObjectInfo:
        return ObjectInfo(key, found.st_size, found.st_mtime_ns / 1e9, _etag(found), self._now_s())

    def _now_s(self) -> float:
        return self._now_ns() / 1e9


def _etag(found: os.stat_result) -> str:
    return f"{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}"


def _etag_or_none(path: Path) -> str | None:
    try:
        return _etag(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _make_directories(folder: Path, root: Path) -> None:
    """Make *folder* and what it needs, each synced into its parent, so that no crash drops a linked object."""
    missing = []
    while folder != root and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        _sync_directory(made.parent)


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
