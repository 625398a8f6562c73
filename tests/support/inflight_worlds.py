"""A small tree in memory, written the way the node's map is, for tests of in-flight rules and takeovers."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace

from spotwarp_fs.core.inflight import Mark
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    EntryRecord,
    FrameRef,
    InodeRecord,
    NodeTable,
    block_key,
    entry_key,
    ino_key,
    ino_range,
    inode_key,
    key_ino,
    key_name,
    name_key,
)
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode, PackId

SECOND = 1_000_000_000
DIRECTORY_MODE = 0o040755
FILE_MODE = 0o100644


class DictView:
    """A dict of keys, scanned in order."""

    def __init__(self, rows: dict[bytes, bytes] | None = None) -> None:
        self.rows = dict(rows or {})

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(self.rows)
        first = bisect.bisect_left(keys, start)
        last = len(keys) if stop is None else bisect.bisect_left(keys, stop)
        for key in keys[first:last]:
            yield key, self.rows[key]


class World(DictView):
    """Paths in, records out; time is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000 * SECOND
        self._next = 1
        self._inode(ROOT_INODE, InodeRecord(DIRECTORY_MODE, 2, 0, 0, 0))

    def copy(self) -> World:
        other = World()
        other.rows, other.now, other._next = dict(self.rows), self.now, self._next
        return other

    def _inode(self, ino: Inode, record: InodeRecord) -> None:
        self.rows[inode_key(ino)] = record.encode()

    def record(self, ino: Inode) -> InodeRecord:
        return InodeRecord.decode(self.rows[inode_key(ino)])

    def find(self, path: str) -> Inode | None:
        at = ROOT_INODE
        for name in filter(None, path.split("/")):
            value = self.rows.get(entry_key(at, name.encode()))
            if value is None:
                return None
            at = EntryRecord.decode(value).ino
        return at

    def at(self, path: str) -> Inode:
        ino = self.find(path)
        assert ino is not None, path
        return ino

    def _parent(self, path: str) -> tuple[Inode, bytes]:
        parent, _, name = path.rpartition("/")
        return self.mkdir(parent), name.encode()

    def _touch(self, ino: Inode, *, links: int = 0) -> None:
        record = self.record(ino)
        self._inode(ino, replace(record, ctime_ns=self.now, mtime_ns=self.now, nlink=record.nlink + links))

    def _enter(self, path: str, ino: Inode, dtype: int) -> None:
        parent, name = self._parent(path)
        self.rows[entry_key(parent, name)] = EntryRecord(ino, dtype).encode()
        self.rows[name_key(ino, parent, name)] = b""
        self._touch(parent, links=int(dtype == DIRECTORY_MODE >> 12))

    def mkdir(self, path: str) -> Inode:
        found = self.find(path)
        if found is not None:
            return found
        self._next += 1
        ino = Inode(self._next)
        self._inode(ino, InodeRecord(DIRECTORY_MODE, 2, 0, 0, 0, ctime_ns=self.now, mtime_ns=self.now))
        self._enter(path, ino, DIRECTORY_MODE >> 12)
        return ino

    def write(self, path: str, content: str = "", *, mark: Mark | None = None) -> Inode:
        """Write in place; *content* stands for the frame of block 0."""
        ino = self.find(path)
        if ino is None:
            self._next += 1
            ino = Inode(self._next)
            self._inode(ino, InodeRecord(FILE_MODE, 1, 0, 0, 0))
            self._enter(path, ino, FILE_MODE >> 12)
        self._inode(ino, replace(self.record(ino), size=len(content), ctime_ns=self.now, mtime_ns=self.now))
        frame = FrameRef(PackId("00000001-0000000000000001"), 0, 1, len(content), content.encode().ljust(32, b"\0"))
        self.rows[block_key(ino, BlockIndex(0))] = frame.encode()
        self.mark(ino, mark)
        return ino

    def mark(self, ino: Inode, mark: Mark | None) -> None:
        row = ino_key(NodeTable.IN_FLIGHT, ino)
        if mark is None:
            self.rows.pop(row, None)
        else:
            self.rows[row] = mark.encode()

    def open_mark(self) -> Mark:
        return Mark(since_ns=self.now)

    def torn_mark(self) -> Mark:
        return Mark(since_ns=self.now, flushed_ns=self.now, torn=True)

    def link(self, source: str, target: str) -> None:
        ino = self.at(source)
        self._enter(target, ino, FILE_MODE >> 12)
        self._inode(ino, replace(self.record(ino), nlink=self.record(ino).nlink + 1))

    def unlink(self, path: str) -> None:
        ino = self.at(path)
        self._leave(path, ino)
        record = self.record(ino)
        if record.mode == DIRECTORY_MODE or record.nlink == 1:
            self.mark(ino, None)
            for key in [k for k in self.rows if k[:1] in b"ibxe" and key_ino(k) == ino]:
                assert key[:1] != b"e", "directory not empty"
                del self.rows[key]
        else:
            self._inode(ino, replace(record, nlink=record.nlink - 1))

    def _leave(self, path: str, ino: Inode) -> None:
        parent, name = self._parent(path)
        del self.rows[entry_key(parent, name)]
        del self.rows[name_key(ino, parent, name)]
        self._touch(parent, links=-int(self.record(ino).mode == DIRECTORY_MODE))

    def rmtree(self, path: str) -> None:
        for name in self.names(path):
            child = f"{path}/{name}"
            if self.record(self.at(child)).mode == DIRECTORY_MODE:
                self.rmtree(child)
            else:
                self.unlink(child)
        self.unlink(path)

    def rename(self, source: str, target: str) -> None:
        ino = self.at(source)
        if self.find(target) is not None:
            self.unlink(target)
        dtype = self.record(ino).mode >> 12
        self._leave(source, ino)
        self._enter(target, ino, dtype)

    def names(self, path: str) -> list[str]:
        return [key_name(key).decode() for key, _ in self.scan(*ino_range(b"e", self.at(path)))]


def content(view: DictView, path: str) -> str | None:
    """What a reader of *path* would get, or None."""
    at = ROOT_INODE
    for name in filter(None, path.split("/")):
        value = view.get(entry_key(at, name.encode()))
        if value is None:
            return None
        at = EntryRecord.decode(value).ino
    blocks = [
        FrameRef.decode(value).digest.rstrip(b"\0").decode() for _, value in view.scan(*ino_range(BLOCK_TABLE, at))
    ]
    return "".join(blocks)


def tree(view: DictView, at: Inode = ROOT_INODE, path: str = "") -> dict[str, str]:
    """Every path with what it leads to: content of a file, '/' for a directory."""
    found: dict[str, str] = {}
    for key, value in view.scan(*ino_range(b"e", at)):
        name = f"{path}/{key_name(key).decode()}".lstrip("/")
        entry = EntryRecord.decode(value)
        if entry.dtype == DIRECTORY_MODE >> 12:
            found |= {name: "/"} | tree(view, entry.ino, name)
        else:
            found[name] = content(view, name) or ""
    return found
