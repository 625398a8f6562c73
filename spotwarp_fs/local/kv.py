"""The metadata map on disk: one LMDB environment, never synced.

Invariant: what a `write` block committed survives a kill of the process (the page cache keeps it), and nothing here is
believed after a power loss: LMDB without sync was broken by 24 of 24 modelled ones, so the map is thrown away then and
rebuilt from the head and the journal (C4). There is no `writemap`, so a full disk is an error and never a SIGBUS.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NoReturn

import lmdb
import trio

from spotwarp_fs.core.errors import Corrupt

MAP_BYTES: Final = 64 << 30 if sys.maxsize > 1 << 32 else 1 << 30
"""Address space, not disk: the file is as long as what was ever written."""
MAP_BYTES_MIN: Final = 1 << 28
READERS_MAX: Final = 512
_PROBE_KEY: Final = b"\xff probe"
READER_CHECK_S: Final = 60.0
SPARE_READERS: Final = 16
"""Ended read transactions kept for reuse: a read then costs one renewal."""

_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.VersionMismatchError)

Damage = Callable[[str], None]
"""Hears what LMDB said, once a map turns out damaged while it is open."""


class LmdbKV:
    """`core.ports.KVStore` on LMDB, in the directory *path*, which no other process may have open.

    A write block belongs to the thread that opened it and is not nested; a second thread waits for it to end. A
    snapshot may wander between threads, used by one at a time. When LMDB finds the open file damaged, *on_damage* hears
    of it (on whatever thread that is) before Corrupt is raised.
    """

    def __init__(self, path: Path, *, map_bytes: int = MAP_BYTES, on_damage: Damage | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._env = _open(path, map_bytes)
        self._on_damage = on_damage
        self._env.reader_check()
        self._writer = 0

    def read(self) -> _Read:
        """Open a read view for one step."""
        return _Read(self)

    def write(self) -> _Write:
        """Open the write transaction for one step.

        Its end raises OSError(ENOSPC) when the disk or the map is full and Corrupt when the file is damaged; either way
        nothing of the block was committed.
        """
        return _Write(self)

    def snapshot(self) -> _Snapshot:
        """Open a read view that may be kept across awaits and used in a worker thread."""
        return _Snapshot(self)

    def reader_check(self) -> int:
        """Free the slots of readers whose process died, which pin pages for ever (M-g); call it each minute."""
        return int(self._env.reader_check())

    async def watch_readers(self) -> None:
        """Do so each minute, until cancelled."""
        while True:
            await trio.sleep(READER_CHECK_S)
            self.reader_check()

    def used_bytes(self) -> int:
        """Return what the map occupies on disk; it never shrinks."""
        return os.stat(self._path / "data.mdb").st_blocks * 512

    def length_bytes(self) -> int:
        """Return how long the file is by its own count of pages."""
        return (int(self._env.info()["last_pgno"]) + 1) * int(self._env.stat()["psize"])

    def check_pages(self) -> int:
        """Visit every page and every row, and allocate one; gives the number of rows or raises Corrupt.

        A file that is cut short or badly damaged may kill the process instead: ask from one that may die.
        """
        try:
            with self._env.begin(write=True) as txn:
                txn.put(_PROBE_KEY, b"")
                txn.abort()
            with open(os.devnull, "wb") as nowhere:
                self._env.copyfd(nowhere.fileno(), compact=True)
            return self._count_rows()
        except lmdb.Error as error:
            self._translate(error)

    def _count_rows(self) -> int:
        rows, last = 0, b""
        with self._env.begin() as txn:
            for rows, (key, _) in enumerate(txn.cursor().iternext(), 1):  # noqa: B007 (the last number is the answer)
                if key <= last:
                    raise Corrupt(f"the metadata map in {self._path} is damaged: {key!r} stands after {last!r}")
                last = key
        return rows

    def close(self) -> None:
        """Close the map; open snapshots end with it."""
        self._env.close()

    def _translate(self, error: lmdb.Error) -> NoReturn:
        if self._on_damage is not None and isinstance(error, _DAMAGED):
            self._on_damage(str(error))
        _raise_translated(error, self._path)


class _Read:
    """A read view that lasts for a `with` block."""

    __slots__ = ("_kv", "_txn", "get")
    get: Callable[[bytes], bytes | None]

    def __init__(self, kv: LmdbKV) -> None:
        self._kv = kv

    def __enter__(self) -> _Read:
        try:
            self._txn = self._kv._env.begin()
        except lmdb.Error as error:
            self._kv._translate(error)
        self.get = self._txn.get
        return self

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order."""
        return _scan(self._txn, start, stop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._txn.abort()
        if isinstance(error, lmdb.Error):
            self._kv._translate(error)


class _Write:
    """The write transaction; `get`, `put` and `delete` are LMDB's own methods, because every request runs through them.

    What they raise is translated when the block ends, where the transaction is aborted anyway.
    """

    __slots__ = ("_kv", "_txn", "delete", "get", "put")
    get: Callable[[bytes], bytes | None]
    put: Callable[[bytes, bytes], None]
    delete: Callable[[bytes], bool]

    def __init__(self, kv: LmdbKV) -> None:
        self._kv = kv

    def __enter__(self) -> _Write:
        kv, me = self._kv, get_ident()
        # LMDB's write lock is not recursive: a nested block would wait for itself for ever.
        assert kv._writer != me, "a write transaction is open in this thread"
        try:
            txn = kv._env.begin(write=True)
        except lmdb.Error as error:
            kv._translate(error)
        kv._writer = me
        self._txn = txn
        self.get, self.put, self.delete = txn.get, txn.put, txn.delete
        return self

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order; collect before changing anything."""
        return _scan(self._txn, start, stop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._kv._writer == get_ident(), "a write transaction ends in the thread that opened it"
        self._kv._writer = 0
        if kind is None:
            try:
                self._txn.commit()
            except lmdb.Error as failure:
                self._kv._translate(failure)
            return
        self._txn.abort()
        if isinstance(error, lmdb.Error):
            self._kv._translate(error)


class _Snapshot:
    """A read transaction that outlives the step that opened it."""

    __slots__ = ("_kv", "_txn")

    def __init__(self, kv: LmdbKV) -> None:
        self._kv = kv
        try:
            self._txn = kv._env.begin()
        except lmdb.Error as error:
            kv._translate(error)

    def get(self, key: bytes) -> bytes | None:
        """Read one row."""
        try:
            value: bytes | None = self._txn.get(key)
        except lmdb.Error as error:
            self._kv._translate(error)
        return value

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order."""
        try:
            yield from _scan(self._txn, start, stop)
        except lmdb.Error as error:
            self._kv._translate(error)

    def close(self) -> None:
        """End the view."""
        self._txn.abort()


def _scan(txn: Any, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    with txn.cursor() as cursor:
        if not cursor.set_range(start):
            return
        if stop is None:
            yield from cursor.iternext()
            return
        for item in cursor.iternext():
            if item[0] >= stop:
                return
            yield item


def _open(path: Path, map_bytes: int) -> Any:
    """Open the environment with as much address space as the process may have (RLIMIT_AS halves the wish)."""
    while True:
        try:
            return lmdb.open(
                os.fspath(path), map_size=map_bytes, sync=False, metasync=False, writemap=False, max_dbs=0,
                max_readers=READERS_MAX, max_spare_txns=SPARE_READERS,
            )  # fmt: skip
        except lmdb.MemoryError as error:
            if map_bytes // 2 < MAP_BYTES_MIN:
                raise OSError(errno.ENOMEM, f"no address space for a map of {map_bytes} bytes", str(path)) from error
            map_bytes //= 2
        except lmdb.Error as error:
            _raise_translated(error, path)


def _raise_translated(error: lmdb.Error, path: Path) -> NoReturn:
    """Raise what the caller can act on; a wrong key or a misuse stays LMDB's own error."""
    if isinstance(error, lmdb.MapFullError):
        raise OSError(errno.ENOSPC, "the metadata map has reached its fixed size", str(path)) from error
    if isinstance(error, lmdb.DiskError):
        number = errno.EIO if "No space" not in str(error) else errno.ENOSPC
        raise OSError(number, f"the metadata map cannot be written ({error})", str(path)) from error
    if isinstance(error, _DAMAGED):
        raise Corrupt(f"the metadata map in {path} is damaged: {error}") from error
    raise error
