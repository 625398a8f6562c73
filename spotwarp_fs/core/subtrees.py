"""Take things out of a state, and put things of older states into it, without knowing any block.

Invariants: the link count of every inode touched is what its names say (M-a); an inode number is kept if the state has
no other use for it, or if it is the half-done file itself, and is fresh otherwise, so that what was whole never changes
its content; a directory above keeps its times, so that no program takes an old checkpoint for the newest.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from spotwarp_fs.core.inflight import DIRECTORY_DTYPE, join
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    ENTRY_TABLE,
    XATTR_TABLE,
    EntryRecord,
    InodeRecord,
    entry_key,
    ino_range,
    inode_key,
    key_name,
    xattr_key,
)
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode, ManifestNumber

Views = Callable[[ManifestNumber], KVRead]
"""A retained state, of which only names, inodes and xattrs need to be loaded."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The blocks of *target* become those that *ino* has in state *source*."""

    source: ManifestNumber
    ino: Inode
    target: Inode


def resolve(view: KVRead, path: bytes) -> EntryRecord | None:
    """Follow *path* from the root by entries alone (a symlink on the way leads nowhere)."""
    entry = EntryRecord(ROOT_INODE, DIRECTORY_DTYPE)
    for name in path.split(b"/") if path else ():
        value = view.get(entry_key(entry.ino, name))
        if value is None:
            return None
        entry = EntryRecord.decode(value)
    return entry


def split(path: bytes) -> tuple[bytes, bytes]:
    """Give the directory above and the name."""
    parent, _, name = path.rpartition(b"/")
    return parent, name


_PREFIX_BYTES: Final = 9
"""Table and inode: every key of the tree begins with them, and every scan here stays within them."""


@dataclass(slots=True)
class Tree:
    """The served state with changes on top; of blocks it only knows that they are dropped."""

    below: KVRead
    drops: dict[Inode, BlockIndex] = field(default_factory=dict)
    _changes: dict[bytes, dict[bytes, bytes | None]] = field(default_factory=dict)

    def changes(self) -> dict[bytes, bytes | None]:
        """What differs from the served state."""
        every = (item for rows in self._changes.values() for item in rows.items())
        return {key: value for key, value in every if self.below.get(key) != value}

    def set(self, key: bytes, value: bytes | None) -> None:
        """Put or delete a row."""
        self._changes.setdefault(key[:_PREFIX_BYTES], {})[key] = value

    def get(self, key: bytes) -> bytes | None:
        """Read through the changes."""
        fresh = self._changes.get(key[:_PREFIX_BYTES], {})
        return fresh[key] if key in fresh else self.below.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Read all rows of one inode in one table through the changes."""
        assert len(start) == _PREFIX_BYTES, start
        fresh = self._changes.get(start)
        if fresh is None:
            yield from self.below.scan(start, stop)
            return
        rows = {key: value for key, value in self.below.scan(start, stop) if key not in fresh}
        rows |= {key: value for key, value in fresh.items() if value is not None}
        yield from sorted(rows.items())

    def record(self, ino: Inode) -> InodeRecord | None:
        """Return the inode, or None."""
        value = self.get(inode_key(ino))
        return InodeRecord.decode(value) if value is not None else None

    def put_record(self, ino: Inode, record: InodeRecord) -> None:
        """Set the inode."""
        self.set(inode_key(ino), record.encode())

    def link(self, ino: Inode, count: int) -> int:
        """Add to the link count; returns the new one."""
        record = self.record(ino)
        assert record is not None, f"inode {ino} has a name and no record"
        self.put_record(ino, replace(record, nlink=record.nlink + count))
        return record.nlink + count

    def enter(self, parent: Inode, name: bytes, entry: EntryRecord) -> None:
        """Add a name; the parent's times stay."""
        self.set(entry_key(parent, name), entry.encode())
        if entry.dtype == DIRECTORY_DTYPE:
            self.link(parent, 1)

    def remove(self, path: bytes) -> bool:
        """Take *path* and all below it out; False when there is no such path."""
        above, name = split(path)
        parent, entry = resolve(self, above), resolve(self, path)
        if parent is None or entry is None:
            return False
        self.set(entry_key(parent.ino, name), None)
        if entry.dtype == DIRECTORY_DTYPE:
            self.link(parent.ino, -1)
        doomed = [entry]
        while doomed:
            entry = doomed.pop()
            if entry.dtype == DIRECTORY_DTYPE:
                for key, value in list(self.scan(*ino_range(ENTRY_TABLE, entry.ino))):
                    self.set(key, None)
                    doomed.append(EntryRecord.decode(value))
                self._erase(entry.ino)
            elif self.link(entry.ino, -1) == 0:
                self._erase(entry.ino)
        return True

    def _erase(self, ino: Inode) -> None:
        self.set(inode_key(ino), None)
        self.clear(ino)

    def clear(self, ino: Inode) -> None:
        """Drop xattrs and blocks of *ino*."""
        for key, _ in list(self.scan(*ino_range(XATTR_TABLE, ino))):
            self.set(key, None)
        if self.below.get(inode_key(ino)) is not None:
            self.drops[ino] = BlockIndex(0)


@dataclass(slots=True)
class Copier:
    """Puts things of older states into the tree."""

    tree: Tree
    views: Views
    allocate: Callable[[], Inode]
    marked: set[Inode]
    """Half-done files: their numbers, and nobody else's, may be used while they still have a name."""
    copies: list[BlockCopy] = field(default_factory=list)
    _targets: dict[tuple[ManifestNumber, Inode], Inode] = field(default_factory=dict)
    """What a file of an older state has become, so that its hard links find each other again."""

    def copy(self, source: ManifestNumber, path: bytes) -> bool:
        """Put *path*, with all below it, as it was in *source*; False when it was not there or its place is taken."""
        view = self.views(source)
        entry = resolve(view, path)
        if entry is None or resolve(self.tree, path) is not None:
            return False
        above, name = split(path)
        parent = self._directory(view, above)
        if parent is None:
            return False
        pending = [(parent, name, entry)]
        while pending:
            parent, name, entry = pending.pop()
            if entry.dtype != DIRECTORY_DTYPE:
                self.tree.enter(parent, name, EntryRecord(self._file(source, view, entry.ino), entry.dtype))
                continue
            target = self._put_directory(view, entry.ino)
            self.tree.enter(parent, name, EntryRecord(target, entry.dtype))
            for key, value in view.scan(*ino_range(ENTRY_TABLE, entry.ino)):
                pending.append((target, key_name(key), EntryRecord.decode(value)))
        return True

    def _directory(self, view: KVRead, path: bytes) -> Inode | None:
        """Return the directory at *path*, recreated as it was if it is gone; None if something else took its place."""
        at, walked = ROOT_INODE, b""
        for name in path.split(b"/") if path else ():
            walked = join(walked, name)
            value = self.tree.get(entry_key(at, name))
            if value is None:
                old = resolve(view, walked)
                assert old is not None, f"{path!r} was resolved in this state"
                target = self._put_directory(view, old.ino)
                self.tree.enter(at, name, EntryRecord(target, DIRECTORY_DTYPE))
                at = target
                continue
            entry = EntryRecord.decode(value)
            if entry.dtype != DIRECTORY_DTYPE:
                return None
            at = entry.ino
        return at

    def _put_directory(self, view: KVRead, ino: Inode) -> Inode:
        target = ino if self.tree.record(ino) is None else self.allocate()
        self.tree.put_record(target, replace(record_of(view, ino), nlink=2))
        self._put_xattrs(view, ino, target)
        return target

    def _file(self, source: ManifestNumber, view: KVRead, ino: Inode) -> Inode:
        known = self._targets.get((source, ino))
        if known is not None:
            self.tree.link(known, 1)
            return known
        here = self.tree.record(ino)
        target = ino if here is None or ino in self.marked else self.allocate()
        self.marked.discard(ino)
        links = here.nlink if here is not None and target == ino else 0
        record = record_of(view, ino)
        self.tree.clear(target)
        self.tree.put_record(target, replace(record, nlink=links + 1))
        self._put_xattrs(view, ino, target)
        if stat.S_ISREG(record.mode) and record.size:
            self.copies.append(BlockCopy(source, ino, target))
        self._targets[source, ino] = target
        return target

    def _put_xattrs(self, view: KVRead, ino: Inode, target: Inode) -> None:
        for key, value in view.scan(*ino_range(XATTR_TABLE, ino)):
            self.tree.set(xattr_key(target, key_name(key)), value)


def record_of(view: KVRead, ino: Inode) -> InodeRecord:
    """Read the record of an inode that has a name."""
    value = view.get(inode_key(ino))
    assert value is not None, f"inode {ino} has a name and no record"
    return InodeRecord.decode(value)
