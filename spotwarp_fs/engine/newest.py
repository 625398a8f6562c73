"""Find the newest complete checkpoint.

Invariant: what is found is whole in the head: nothing in flight, no unpublished change of its own.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from spotwarp_fs.core import paths
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    ENTRY_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    inode_key,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.scratch import join, published
from spotwarp_fs.core.types import Inode


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An atomic directory or file."""

    ino: Inode
    path: bytes
    mtime_ns: int


def newest_checkpoint(snapshot: KVRead, policies: Policies, unsafe: Container[int]) -> Checkpoint | None:
    """Return the newest atomic directory, or else file, that is none of the *unsafe* inodes."""
    view = published(snapshot)
    best: dict[bool, tuple[int, bytes, Inode]] = {}
    for key, value in view.scan(*table_range(ENTRY_TABLE)):
        name, entry = key_name(key), EntryRecord.decode(value)
        directory = policies.is_atomic_dir(name)
        if entry.ino in unsafe or not (directory or policies.is_atomic(name)):
            continue
        record = view.get(inode_key(entry.ino))
        pending = view.get(NodeTable.CHANGES + key) or view.get(NodeTable.CHANGES + inode_key(entry.ino))
        if record is None or pending is not None:
            continue
        mtime_ns = InodeRecord.decode(record).mtime_ns
        if directory not in best or mtime_ns > best[directory][0]:
            best[directory] = mtime_ns, key, entry.ino
    found = best.get(True) or best.get(False)
    if found is None:
        return None
    mtime_ns, key, ino = found
    return Checkpoint(ino, join(paths.path_of(view, key_ino(key)) or b"", key_name(key)), mtime_ns)
