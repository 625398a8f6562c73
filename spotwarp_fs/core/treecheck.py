"""Check that the namespace of a tree says one thing only: our fsck, run after each step of the model tests.

Invariant: an empty answer means that every entry leads to an inode, every inode has exactly the names and link count
that its record claims, every directory hangs below the root, and nothing is kept for inodes that do not exist.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from spotwarp_fs.core.attributes import dtype
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    INODE_TABLE,
    XATTR_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    backward_name,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.types import NAME_BYTES_MAX, ROOT_INODE, Inode


@dataclass(frozen=True, slots=True)
class _Facts:
    """The whole namespace in memory."""

    records: dict[Inode, InodeRecord] = field(default_factory=dict)
    entries: dict[tuple[Inode, bytes], EntryRecord] = field(default_factory=dict)
    names: dict[Inode, set[tuple[Inode, bytes]]] = field(default_factory=dict)
    subdirectories: dict[Inode, list[Inode]] = field(default_factory=dict)

    def is_directory(self, ino: Inode) -> bool:
        return ino in self.records and stat.S_ISDIR(self.records[ino].mode)


def check(tree: KVRead, *, node_tables: bool = True) -> list[str]:
    """Return what is wrong, one sentence each; without *node_tables*, N and O are not looked at (a bare manifest)."""
    facts = _read(tree)
    problems = [*_entries(facts), *_link_counts(facts), *_reachability(facts), *_leftovers(tree, facts)]
    if node_tables:
        problems += [*_backward_names(tree, facts), *_orphans(tree, facts)]
    return problems


def _read(tree: KVRead) -> _Facts:
    facts = _Facts()
    for key, value in tree.scan(*table_range(INODE_TABLE)):
        facts.records[key_ino(key)] = InodeRecord.decode(value)
    for key, value in tree.scan(*table_range(ENTRY_TABLE)):
        parent, name, entry = key_ino(key), key_name(key), EntryRecord.decode(value)
        facts.entries[parent, name] = entry
        facts.names.setdefault(entry.ino, set()).add((parent, name))
        if facts.is_directory(entry.ino):
            facts.subdirectories.setdefault(parent, []).append(entry.ino)
    return facts


def _entries(facts: _Facts) -> Iterator[str]:
    for (parent, name), entry in facts.entries.items():
        where = f"entry {name!r} of inode {parent}"
        if not facts.is_directory(parent):
            yield f"{where}: the parent is not a directory"
        if not 0 < len(name) <= NAME_BYTES_MAX or name in (b".", b"..") or b"/" in name or b"\0" in name:
            yield f"{where}: not a possible name"
        record = facts.records.get(entry.ino)
        if record is None:
            yield f"{where}: leads to inode {entry.ino}, which does not exist"
        elif dtype(record.mode) != entry.dtype:
            yield f"{where}: says type {entry.dtype}, inode {entry.ino} has type {dtype(record.mode)}"


def _link_counts(facts: _Facts) -> Iterator[str]:
    for ino, record in facts.records.items():
        names = len(facts.names.get(ino, ()))
        expected = names
        if stat.S_ISDIR(record.mode):
            expected = 2 + len(facts.subdirectories.get(ino, ())) if names or ino == ROOT_INODE else 0
            if names > 1 or (ino == ROOT_INODE and names):
                yield f"directory {ino} has {names} names"
        if record.nlink != expected:
            yield f"inode {ino} has link count {record.nlink}, its names make {expected}"
        if stat.S_ISLNK(record.mode) and record.size != len(record.target):
            yield f"symlink {ino} has size {record.size}, its target {len(record.target)} bytes"


def _reachability(facts: _Facts) -> Iterator[str]:
    """Find directories with a name that no path from the root leads to: a cycle, or below a removed directory."""
    if not facts.is_directory(ROOT_INODE):
        yield f"inode {ROOT_INODE}, the root, is not a directory"
    reached: set[Inode] = set()
    pending = [ROOT_INODE]
    while pending:
        ino = pending.pop()
        if ino not in reached:
            reached.add(ino)
            pending.extend(facts.subdirectories.get(ino, ()))
    for ino in facts.records:
        if facts.is_directory(ino) and ino not in reached and facts.names.get(ino):
            yield f"directory {ino} can't be reached from the root"


def _leftovers(tree: KVRead, facts: _Facts) -> Iterator[str]:
    for table in (XATTR_TABLE, BLOCK_TABLE):
        strangers = {key_ino(key) for key, _ in tree.scan(*table_range(table))} - facts.records.keys()
        for ino in sorted(strangers):
            yield f"table {table.decode()} has records of inode {ino}, which does not exist"


def _backward_names(tree: KVRead, facts: _Facts) -> Iterator[str]:
    backward = {(*backward_name(key), key_ino(key)) for key, _ in tree.scan(*table_range(NodeTable.NAMES))}
    forward = {(parent, name, entry.ino) for (parent, name), entry in facts.entries.items()}
    for parent, name, ino in sorted(forward - backward):
        yield f"entry {name!r} of inode {parent} -> {ino} is missing in table N"
    for parent, name, ino in sorted(backward - forward):
        yield f"table N says {name!r} of inode {parent} -> {ino}, table e does not"


def _orphans(tree: KVRead, facts: _Facts) -> Iterator[str]:
    noted = {key_ino(key) for key, _ in tree.scan(*table_range(NodeTable.ORPHANS))}
    unlinked = {ino for ino, record in facts.records.items() if record.nlink == 0}
    for ino in sorted(unlinked - noted):
        yield f"inode {ino} has no name and is not noted as an orphan"
    for ino in sorted(noted - unlinked):
        yield f"inode {ino} is noted as an orphan, but has a name or does not exist"
