"""The node's local state in memory, for simulated worlds: `kv.py` and `datafiles.py` again, with a power switch.

Invariant: an unfair fault is never injected. After `power_loss` every page holds what it held at its last sync or
something that was written to it since, each on its own; what was synced and not touched again is untouched.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from copy import deepcopy
from types import TracebackType
from typing import Final, Protocol

from spotwarp_fs.core.journal import Record, SessionBegun, decode_prefix, encode_record, still_needed
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, ChangeSeq, Inode

PAGE_BYTES: Final = 4096
KEY_BYTES_MAX: Final = 511


class Chance(Protocol):
    """What is needed of a seeded `random.Random`."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


class _Sorted:
    """A map with its keys in order; whoever pins it keeps the next writer from changing it."""

    __slots__ = ("changes", "keys", "pins", "rows")

    def __init__(self, rows: dict[bytes, bytes], keys: list[bytes]) -> None:
        self.rows = rows
        self.keys = keys
        self.pins = 0
        self.changes = 0

    def copy(self) -> _Sorted:
        return _Sorted(dict(self.rows), list(self.keys))

    def put(self, key: bytes, value: bytes) -> None:
        self.changes += 1
        if key not in self.rows:
            insort(self.keys, key)
        self.rows[key] = value

    def delete(self, key: bytes) -> bool:
        self.changes += 1
        if self.rows.pop(key, None) is None:
            return False
        del self.keys[bisect_left(self.keys, key)]
        return True

    def take_back(self, undo: dict[bytes, bytes | None]) -> None:
        for key, value in undo.items():
            if value is None:
                self.delete(key)
            else:
                self.put(key, value)

    def scan(self, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        at = bisect_left(self.keys, start)
        changes = self.changes
        while at < len(self.keys) and (stop is None or self.keys[at] < stop):
            yield self.keys[at], self.rows[self.keys[at]]
            assert self.changes == changes, "the map changed under a scan: collect first"
            at += 1


class MemoryKV:
    """`core.ports.KVStore` in memory; views are copied when the next change would disturb them."""

    def __init__(self) -> None:
        self._rows = _Sorted({}, [])
        self._undo: dict[bytes, bytes | None] | None = None

    def read(self) -> _MemoryRead:
        """Open a read view for one step."""
        return _MemoryRead(self._committed())

    def write(self) -> _MemoryWrite:
        """Open the write transaction for one step."""
        return _MemoryWrite(self)

    def snapshot(self) -> _MemoryRead:
        """Open a read view that may be kept across awaits."""
        return _MemoryRead(self._committed())

    def reopened(self) -> MemoryKV:
        """Give the map as the next process finds it after a kill: committed rows, no open views."""
        fresh = MemoryKV()
        fresh._rows = self._committed().copy()
        return fresh

    def close(self) -> None:
        """Let go of nothing."""

    def _committed(self) -> _Sorted:
        """The rows as the last finished write block left them."""
        if not self._undo:
            return self._rows
        before = self._rows.copy()
        before.take_back(self._undo)
        return before

    def _writable(self) -> _Sorted:
        """The rows, no longer those that an open view looks at."""
        if self._rows.pins:
            self._rows = self._rows.copy()
        return self._rows


class _MemoryRead:
    """A read view, for a `with` block or until `close`."""

    __slots__ = ("_closed", "_rows")

    def __init__(self, rows: _Sorted) -> None:
        self._rows = rows
        self._closed = False
        rows.pins += 1

    def get(self, key: bytes) -> bytes | None:
        assert not self._closed, "this view has ended"
        return self._rows.rows.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        assert not self._closed, "this view has ended"
        return self._rows.scan(start, stop)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._rows.pins -= 1

    def __enter__(self) -> _MemoryRead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MemoryWrite:
    """The write transaction: changes are made in place and taken back if the block fails."""

    __slots__ = ("_kv", "_undo")

    def __init__(self, kv: MemoryKV) -> None:
        self._kv = kv

    def __enter__(self) -> _MemoryWrite:
        assert self._kv._undo is None, "a write transaction is open"
        self._undo: dict[bytes, bytes | None] = {}
        self._kv._undo = self._undo
        return self

    def get(self, key: bytes) -> bytes | None:
        return self._kv._rows.rows.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        return self._kv._rows.scan(start, stop)

    def put(self, key: bytes, value: bytes) -> None:
        assert 0 < len(key) <= KEY_BYTES_MAX, "a key has 1 to 511 bytes"
        rows = self._kv._writable()
        self._undo.setdefault(key, rows.rows.get(key))
        rows.put(key, bytes(value))

    def delete(self, key: bytes) -> bool:
        rows = self._kv._writable()
        self._undo.setdefault(key, rows.rows.get(key))
        return rows.delete(key)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._kv._undo = None
        if kind is not None and self._undo:
            self._kv._writable().take_back(self._undo)


class _MemoryFile:
    """A sparse file: what a reader sees, what the disk holds for sure, and which pages differ."""

    __slots__ = ("content", "disk", "emptied", "pages", "unsynced")

    def __init__(self) -> None:
        self.content = bytearray()
        self.disk: bytes | None = None
        """Content at the last sync; None while the file's very name may be lost."""
        self.pages: set[int] = set()
        self.unsynced: set[int] = set()
        self.emptied: set[int] = set()
        """Pages that were a hole at some time since the last sync: filesystems journal that before they write data."""

    def change(self, offset: int, data: bytes) -> None:
        stop = offset + len(data)
        if len(self.content) < stop:
            self.content.extend(bytes(stop - len(self.content)))
        self.content[offset:stop] = data
        pages = range(offset // PAGE_BYTES, -(-stop // PAGE_BYTES))
        self.pages.update(pages)
        self.unsynced.update(pages)

    def cut(self, size: int) -> None:
        if size < len(self.content):
            pages = range(size // PAGE_BYTES, -(-len(self.content) // PAGE_BYTES))
            del self.content[size:]
            self.unsynced.update(pages)
            self.emptied.update(range(-(-size // PAGE_BYTES), pages.stop))
            self.pages.difference_update(range(-(-size // PAGE_BYTES), pages.stop))

    def punch(self, offset: int, length: int) -> None:
        stop = min(offset + length, len(self.content))
        if offset >= stop:
            return
        self.content[offset:stop] = bytes(stop - offset)
        self.unsynced.update(range(offset // PAGE_BYTES, -(-stop // PAGE_BYTES)))
        last = -(-stop // PAGE_BYTES) if stop == len(self.content) else stop // PAGE_BYTES
        emptied = range(-(-offset // PAGE_BYTES), last)
        self.pages.difference_update(emptied)
        self.emptied.update(emptied)

    def read(self, offset: int, length: int) -> bytes:
        found = bytes(self.content[offset : offset + length])
        return found + bytes(length - len(found))

    def sync(self) -> None:
        self.disk = bytes(self.content)
        self.unsynced.clear()
        self.emptied.clear()

    def lose_power(self, rng: Chance) -> None:
        """Let each page that is not synced be the old or the new one, or empty if it was so in between."""
        old = self.disk or b""
        size = len(self.content) if rng.random() < 0.5 else len(old)
        after = bytearray(old[:size].ljust(size, b"\0"))
        for page in sorted(self.unsynced):
            start = page * PAGE_BYTES
            stop = min(start + PAGE_BYTES, size)
            if start < size and rng.random() < 0.5:
                after[start:stop] = self.read(start, stop - start)
            elif start < size and page in self.emptied and rng.random() < 0.5:
                after[start:stop] = bytes(stop - start)
        self.content = after
        starts = range(0, size, PAGE_BYTES)
        self.pages = {start // PAGE_BYTES for start in starts if after[start : start + PAGE_BYTES].strip(b"\0")}
        self.sync()


class MemoryDataFiles:
    """`core.ports.DataFiles` in memory, with the same spool as `SparseDataFiles`."""

    def __init__(self) -> None:
        self._files: dict[Inode, _MemoryFile] = {}
        self._aside: dict[str, dict[Inode, _MemoryFile]] = {}
        self._blocks: dict[str, dict[tuple[Inode, int], bytes]] = {}
        self._failed: set[Inode] = set()
        self.sync_errors: set[Inode] = set()
        """The next sync of these fails, once, as Linux does it; their unsynced pages then count as clean."""

    def pread(self, ino: Inode, offset: int, length: int) -> bytes:
        """Read; holes and what lies beyond the end are zeros."""
        file = self._files.get(ino)
        return bytes(length) if file is None else file.read(offset, length)

    def pread_cached(self, ino: Inode, offset: int, length: int) -> bytes | None:
        """Read without waiting, which memory never does."""
        return self.pread(ino, offset, length)

    def pwrite(self, ino: Inode, offset: int, data: bytes | memoryview) -> None:
        """Write all of *data*."""
        self._files.setdefault(ino, _MemoryFile()).change(offset, bytes(data))

    def truncate(self, ino: Inode, size: int) -> None:
        """Cut the data file at *size* if it is longer."""
        if ino in self._files:
            self._files[ino].cut(size)

    def punch(self, ino: Inode, offset: int, length: int) -> None:
        """Make a hole."""
        if ino in self._files:
            self._files[ino].punch(offset, length)

    def clear(self, ino: Inode, offset: int, length: int) -> None:
        """Punch the range if the data file reaches into it."""
        self.punch(ino, offset, length)

    def keep_only(self, ino: Inode, blocks: frozenset[BlockIndex]) -> None:
        """Punch every block but these; a file that keeps none is removed."""
        if not blocks:
            self.remove(ino)
        elif ino in self._files:
            for index in range(-(-len(self._files[ino].content) // BLOCK_BYTES)):
                if index not in blocks:
                    self.punch(ino, index * BLOCK_BYTES, BLOCK_BYTES)

    def sync(self, ino: Inode) -> None:
        """Put the file on disk, or raise OSError until `clear_failed`."""
        if ino in self.sync_errors:
            self.sync_errors.discard(ino)
            self._failed.add(ino)
        if ino in self._failed:
            raise OSError(errno.EIO, f"an earlier fdatasync of inode {ino:x} failed: {os.strerror(errno.EIO)}")
        if ino in self._files:
            self._files[ino].sync()

    def failed(self, ino: Inode) -> bool:
        """Return whether a sync of *ino* failed since the last `clear_failed`."""
        return ino in self._failed

    def clear_failed(self, ino: Inode) -> None:
        """Forget a failed sync: every block that was unsynced then has been written again, or dropped."""
        self._failed.discard(ino)

    def set_aside(self, ino: Inode, token: str) -> None:
        """Move the data file into the spool under *token*."""
        if ino in self._files:
            if ino in self._aside.get(token, {}):
                raise FileExistsError(errno.EEXIST, f"inode {ino:x} is set aside already", token)
            self._aside.setdefault(token, {})[ino] = self._files.pop(ino)

    def pread_aside(self, ino: Inode, token: str, offset: int, length: int) -> bytes:
        """Read from a data file that `set_aside` moved."""
        return self._aside[token][ino].read(offset, length)

    def append_aside_block(self, token: str, ino: Inode, block: int, data: bytes | memoryview) -> None:
        """Keep a block's bytes under *token*; the first copy stays, later ones are newer than the cut."""
        self._blocks.setdefault(token, {}).setdefault((ino, block), bytes(data))

    def read_aside_block(self, token: str, ino: Inode, block: int) -> bytes:
        """Read a block that `append_aside_block` kept; KeyError when there is none."""
        return self._blocks[token][ino, block]

    def drop_aside(self, token: str) -> None:
        """Delete everything kept under *token*."""
        self._aside.pop(token, None)
        self._blocks.pop(token, None)

    def spool_bytes(self) -> int:
        """Return what the spools occupy."""
        files = sum(len(file.pages) * PAGE_BYTES for files in self._aside.values() for file in files.values())
        return files + sum(len(data) for blocks in self._blocks.values() for data in blocks.values())

    def remove(self, ino: Inode) -> None:
        """Delete the data file, if any."""
        self._files.pop(ino, None)
        self._failed.discard(ino)

    def inodes(self) -> Iterator[Inode]:
        """Give every inode that has a data file."""
        yield from sorted(self._files)

    def allocated_bytes(self, ino: Inode) -> int:
        """Return what the data file occupies."""
        return len(self._files[ino].pages) * PAGE_BYTES if ino in self._files else 0

    def close(self) -> None:
        """Let go of nothing."""

    def restarted(self) -> MemoryDataFiles:
        """Give the files as the next process finds them after a kill: all bytes, no spools (a start deletes them)."""
        fresh = MemoryDataFiles()
        fresh._files = self._files
        return fresh

    def copied(self) -> MemoryDataFiles:
        """Give files of the same state, so that power can be lost in more than one way."""
        fresh = MemoryDataFiles()
        fresh._files = deepcopy(self._files)
        return fresh

    def power_loss(self, rng: Chance) -> MemoryDataFiles:
        """Give the files as the next boot finds them: pages that were not synced are old or new, each on its own."""
        fresh = MemoryDataFiles()
        for ino in sorted(self._files):
            file = self._files[ino]
            if file.disk is not None or rng.random() < 0.5:
                file.lose_power(rng)
                fresh._files[ino] = file
        return fresh


class MemoryJournal:
    """`core.journal.JournalLog` in memory: what `append` returned from survives `power_loss`."""

    def __init__(self, stream: bytes = b"") -> None:
        kept, valid = decode_prefix(stream)
        self._records = kept
        self._stream = bytearray(stream[:valid])
        self._failed = False
        self.sync_error = False
        """The next append is written and cannot be synced, once."""

    def append(self, records: Sequence[Record]) -> None:
        """Add records."""
        if self._failed or self.sync_error:
            self._failed, self.sync_error = True, False
            raise OSError(errno.EIO, "the journal cannot be believed until it is rewritten")
        self._records.extend(records)
        for record in records:
            self._stream += encode_record(record)

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others."""
        self._records = list(records)
        self._stream = bytearray(b"".join(map(encode_record, records)))
        self._failed = False

    def compact(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others but the sessions."""
        self.rewrite([*(record for record in self._records if isinstance(record, SessionBegun)), *records])

    def prune(self, published: ChangeSeq, sessions: frozenset[str]) -> None:
        """Drop what the manifest at *published* covers, and every session but these."""
        self.rewrite(still_needed(self._records, published, sessions))

    def records(self) -> list[Record]:
        """Read all records back."""
        return list(self._records)

    @property
    def size_bytes(self) -> int:
        """Length of the journal."""
        return len(self._stream)

    def close(self) -> None:
        """Let go of nothing."""

    def reopened(self, torn: bytes = b"") -> MemoryJournal:
        """Give the journal as the next process or boot reads it, with *torn* bytes behind what was synced."""
        return MemoryJournal(bytes(self._stream) + torn)
