"""The node's copy of file contents: one sparse file per inode, and the spool of what a cut still needs.

    <directory>/data/<3 hex>/<inode hex>          same offsets as the file itself
    <directory>/spool/<token>/<inode hex>         a whole data file set aside for the cut *token*
    <directory>/spool/<token>/blocks              single blocks set aside; their places are known in memory only

Invariant: the map says which bytes here count; this class never decides it. After a failed fdatasync an inode stays
failed until `clear_failed`, because Linux reports the failure once and then calls the lost pages clean (H10).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Lock, local
from typing import Final

from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.local.disk import fdatasync, sync_directory, write_all
from spotwarp_fs.local.openfiles import OpenFiles, open_files_limit
from spotwarp_fs.local.punching import punch_hole

SYNC_LOCKS: Final = 64
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_WOULD_WAIT = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_NEIGHBOURS_SHIFT: Final = 12
"""So many low bits of an inode number are left out of its directory's name: files that are made one after the other
lie in one directory. ext4 spreads directories over the disk, so a file in another one each time costs it cold reads."""
_EARLIER_NAME_LENGTH: Final = 2
"""Directories of cache format 1 had two digits, the lowest ones."""
_TOKEN_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


class SparseDataFiles:
    """`core.ports.DataFiles` in *directory*; all methods may be called from any thread."""

    def __init__(self, directory: Path, *, open_files_max: int | None = None) -> None:
        self._data = os.fspath(directory / "data")
        self._spool = directory / "spool"
        for made in (directory / "data", self._spool):
            made.mkdir(parents=True, exist_ok=True)
        arrange(directory)
        self._files = OpenFiles(open_files_max or open_files_limit())
        self._scratch = _Scratch()
        self._lock = Lock()
        self._syncing = [Lock() for _ in range(SYNC_LOCKS)]
        self._failed: dict[Inode, OSError] = {}
        self._named: set[Inode] = set()
        self._tokens: dict[str, _Aside] = {}

    def pread(self, ino: Inode, offset: int, length: int) -> bytes:
        """Read; holes and what lies beyond the end are zeros."""
        return self._pread(self._path(ino), offset, length)

    def pread_cached(self, ino: Inode, offset: int, length: int) -> bytes | None:
        """Read without waiting for the disk, or None when that is not possible."""
        file = self._files.use(self._path(ino)) if _NOWAIT else None
        if file is None:
            return None
        buffer = self._scratch.buffer(length)
        with file as fd:
            try:
                count = os.preadv(fd, [buffer[:length]], offset, _NOWAIT)
            except OSError as error:
                if error.errno in _WOULD_WAIT:
                    return None
                raise
            if count < length and offset + count < os.fstat(fd).st_size:
                return None
        return bytes(buffer[:count]) + bytes(length - count)

    def pwrite(self, ino: Inode, offset: int, data: bytes | memoryview) -> None:
        """Write all of *data*."""
        file = self._files.use(self._path(ino), create=True)
        assert file is not None
        with file as fd:
            write_all(fd, offset, data)

    def truncate(self, ino: Inode, size: int) -> None:
        """Cut the data file at *size* if it is longer."""
        file = self._files.use(self._path(ino))
        if file is not None:
            with file as fd:
                if os.fstat(fd).st_size > size:
                    os.ftruncate(fd, size)

    def punch(self, ino: Inode, offset: int, length: int) -> None:
        """Make a hole, giving the space back."""
        file = self._files.use(self._path(ino))
        if file is not None:
            with file as fd:
                punch_hole(fd, offset, length)

    def clear(self, ino: Inode, offset: int, length: int) -> None:
        """Punch the range if the data file reaches into it; makes the file, for a write follows."""
        file = self._files.use(self._path(ino), create=True)
        assert file is not None
        with file as fd:
            if os.fstat(fd).st_size > offset:
                punch_hole(fd, offset, length)

    def keep_only(self, ino: Inode, blocks: frozenset[BlockIndex]) -> None:
        """Punch every block but these (after a rebuild); a file that keeps none is removed."""
        if not blocks:
            self.remove(ino)
            return
        file = self._files.use(self._path(ino))
        if file is not None:
            with file as fd:
                for start, stop in list(data_extents(fd)):
                    for index in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                        if index not in blocks:
                            punch_hole(fd, index * BLOCK_BYTES, BLOCK_BYTES)

    def sync(self, ino: Inode) -> None:
        """Put contents and name of the data file on disk; raises OSError now and until `clear_failed` if it fails."""
        file = self._files.use(self._path(ino))
        if file is None:
            self._raise_failed(ino)
            return
        # Two at once on one descriptor: only one of them would be told of a failure.
        with file as fd, self._syncing[ino % SYNC_LOCKS]:
            self._raise_failed(ino)
            try:
                fdatasync(fd)
                if ino not in self._named:
                    self._sync_name(ino)
            except OSError as error:
                self._failed[ino] = error
                raise

    def failed(self, ino: Inode) -> bool:
        """Return whether a sync of *ino* failed since the last `clear_failed`."""
        return ino in self._failed

    def clear_failed(self, ino: Inode) -> None:
        """Forget a failed sync: every block that was unsynced then has been written again, or dropped."""
        self._failed.pop(ino, None)

    def set_aside(self, ino: Inode, token: str) -> None:
        """Move the data file into the spool under *token*, leaving none (a no-op without a data file)."""
        aside = self._aside(token)
        target = os.path.join(aside.directory, f"{ino:x}")
        if self._files.rename(self._path(ino), target):
            self._named.discard(ino)
            aside.bytes_of_files += os.stat(target).st_blocks * 512

    def pread_aside(self, ino: Inode, token: str, offset: int, length: int) -> bytes:
        """Read from a data file that `set_aside` moved."""
        return self._pread(os.path.join(self._tokens[token].directory, f"{ino:x}"), offset, length, must_exist=True)

    def append_aside_block(self, token: str, ino: Inode, block: int, data: bytes | memoryview) -> None:
        """Keep a block's bytes under *token*; the first copy stays, later ones are newer than the cut."""
        aside = self._aside(token)
        with self._lock:
            if (ino, block) in aside.blocks:
                return
            file = self._files.use(os.path.join(aside.directory, "blocks"), create=True)
            assert file is not None
            with file as fd:
                write_all(fd, aside.bytes_of_blocks, data)
            aside.blocks[ino, block] = (aside.bytes_of_blocks, len(data))
            aside.bytes_of_blocks += len(data)

    def read_aside_block(self, token: str, ino: Inode, block: int) -> bytes:
        """Read a block that `append_aside_block` kept; KeyError when there is none."""
        aside = self._tokens[token]
        offset, length = aside.blocks[ino, block]
        return self._pread(os.path.join(aside.directory, "blocks"), offset, length, must_exist=True)

    def drop_aside(self, token: str) -> None:
        """Delete everything kept under *token*."""
        with self._lock:
            aside = self._tokens.pop(token, None)
        if aside is not None:
            self._files.forget_below(aside.directory)
            shutil.rmtree(aside.directory)

    def spool_bytes(self) -> int:
        """Return what the spools occupy."""
        if not self._tokens:  # asked before every write, and mostly there is none
            return 0
        with self._lock:
            return sum(aside.bytes_of_files + aside.bytes_of_blocks for aside in self._tokens.values())

    def remove(self, ino: Inode) -> None:
        """Delete the data file, if any."""
        self._named.discard(ino)
        self._failed.pop(ino, None)
        self._files.unlink(self._path(ino))

    def inodes(self) -> Iterator[Inode]:
        """Give every inode that has a data file."""
        for directory in sorted(os.listdir(self._data)):
            for name in sorted(os.listdir(os.path.join(self._data, directory))):
                yield Inode(int(name, 16))

    def allocated_bytes(self, ino: Inode) -> int:
        """Return what the data file occupies on disk."""
        try:
            return os.stat(self._path(ino)).st_blocks * 512
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Close every descriptor."""
        self._files.close()

    def _path(self, ino: Inode) -> str:
        return data_name(self._data, ino)

    def _pread(self, path: str, offset: int, length: int, *, must_exist: bool = False) -> bytes:
        file = self._files.use(path)
        if file is None:
            if must_exist:
                raise FileNotFoundError(errno.ENOENT, "nothing was set aside here", path)
            return bytes(length)
        with file as fd:
            found = os.pread(fd, length, offset)
            while found and len(found) < length:
                more = os.pread(fd, length - len(found), offset + len(found))
                if not more:
                    break
                found += more
        return found if len(found) == length else found + bytes(length - len(found))

    def _raise_failed(self, ino: Inode) -> None:
        earlier = self._failed.get(ino)
        if earlier is not None:
            reason = f"an earlier fdatasync of inode {ino:x} failed: {earlier.strerror}"
            raise OSError(earlier.errno or errno.EIO, reason)

    def _sync_name(self, ino: Inode) -> None:
        """A synced file whose directory entry is not on disk is lost all the same."""
        for directory in (os.path.dirname(self._path(ino)), self._data):
            sync_directory(directory)
        self._named.add(ino)

    def _aside(self, token: str) -> _Aside:
        assert token, "a spool token has a name"
        assert set(token) <= _TOKEN_CHARACTERS, f"a spool token is a plain name, not {token!r}"
        with self._lock:
            aside = self._tokens.get(token)
            if aside is None:
                directory = self._spool / token
                directory.mkdir(parents=True)
                aside = self._tokens[token] = _Aside(os.fspath(directory))
            return aside


def data_name(data: str, ino: Inode) -> str:
    """Return where the data file of *ino* lies in the directory *data*."""
    return f"{data}/{ino >> _NEIGHBOURS_SHIFT & 0xFFF:03x}/{ino:x}"


def data_path(directory: Path, ino: Inode) -> Path:
    """Return where the data file of *ino* lies below the *directory* of a `SparseDataFiles`."""
    return Path(data_name(os.fspath(directory / "data"), ino))


def arrange(directory: Path) -> None:
    """Bring data files below *directory* that an earlier version made to where they are looked for now."""
    data = directory / "data"
    for earlier in [each for each in data.iterdir() if len(each.name) == _EARLIER_NAME_LENGTH]:
        for file in list(earlier.iterdir()):
            target = data_path(directory, Inode(int(file.name, 16)))
            target.parent.mkdir(exist_ok=True)
            file.rename(target)
        earlier.rmdir()


class _Aside:
    """What one cut has set aside."""

    __slots__ = ("blocks", "bytes_of_blocks", "bytes_of_files", "directory")

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.blocks: dict[tuple[Inode, int], tuple[int, int]] = {}
        self.bytes_of_blocks = 0
        self.bytes_of_files = 0


class _Scratch(local):
    """One read buffer per thread: `preadv` must be given one, and making one of 1 MiB costs more than the read."""

    _buffer = memoryview(bytearray())

    def buffer(self, length: int) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        return self._buffer


def data_extents(fd: int) -> Iterator[tuple[int, int]]:
    """Give the parts of a file that are not holes."""
    position = 0
    while True:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position
