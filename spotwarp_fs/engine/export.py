"""What a cut publishes: every change up to its seq, as the values of its snapshot.

Invariant: a block that was dirty at the cut is exported with the frame that was sealed from its bytes at the cut,
never with a later one; an inode without a name is exported as deleted (M-c), and one whose names are all scratch too,
unless no state ever had it (C18).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from spotwarp_fs.core.changes import dropped_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    XATTR_TABLE,
    BlockState,
    InodeRecord,
    NodeTable,
    changelog_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
    table_range,
)
from spotwarp_fs.core.scratch import is_unseen, published
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, ChangeSeq, Inode
from spotwarp_fs.engine.cut import Cut

BY_INODE = frozenset({INODE_TABLE, XATTR_TABLE, BLOCK_TABLE})
OF_TREE = frozenset(TREE_TABLES)


def export(cut: Cut, head_seq: ChangeSeq) -> ChangeSet:
    """Make the change set of *cut* (CPU work; may run in a worker thread while the loop goes on).

    *head_seq* is the change seq of the head, which it will follow.
    """
    view = published(cut.snapshot)
    unseen = _Unseen(cut.snapshot, head_seq)
    ranges = dropped_ranges(view.scan(*table_range(NodeTable.RANGES)), cut.seq)
    drops = {ino: first for ino, first in ranges.items() if not unseen[ino]}
    holes = Counter(ino for (ino, _), frame in cut.sealed.items() if frame is None)
    nameless = _Nameless(view)
    changes: dict[bytes, bytes | None] = {}
    for _, key in view.scan(NodeTable.CHANGELOG, changelog_key(ChangeSeq(cut.seq + 1))):
        table = key[:1]
        if table in OF_TREE and unseen[key_ino(key)]:
            continue
        if table not in BY_INODE:
            changes[key] = view.get(key)
        elif not nameless[key_ino(key)]:
            changes[key] = _value(cut, table, key, view.get(key), holes)
        elif table == INODE_TABLE:
            drops[key_ino(key)] = BlockIndex(0)
            changes[key] = None
            # Also those that an earlier manifest has: only reaping deletes them here, and the node may not live to it.
            changes.update((xattr, None) for xattr, _ in cut.snapshot.scan(*ino_range(XATTR_TABLE, key_ino(key))))
        elif table == XATTR_TABLE:
            changes[key] = None
    return ChangeSet.of(drops, changes)


class _Nameless(dict[Inode, bool]):
    """Whether an inode has no name at the cut, or is gone: looked up once each."""

    def __init__(self, view: KVRead) -> None:
        super().__init__()
        self._view = view

    def __missing__(self, ino: Inode) -> bool:
        value = self._view.get(inode_key(ino))
        self[ino] = value is None or InodeRecord.decode(value).nlink == 0
        return self[ino]


class _Unseen(dict[Inode, bool]):
    """Whether the head has nothing of an inode, or of what a directory holds, because it is scratch."""

    def __init__(self, view: KVRead, head_seq: ChangeSeq) -> None:
        super().__init__()
        self._view = view
        self._head_seq = head_seq

    def __missing__(self, ino: Inode) -> bool:
        self[ino] = is_unseen(self._view, ino, self._head_seq)
        return self[ino]


def _value(cut: Cut, table: bytes, key: bytes, value: bytes | None, holes: Counter[Inode]) -> bytes | None:
    """The published value of a record of an inode that has a name."""
    if table == BLOCK_TABLE:
        return _frame_of(cut, key, value) if value else None
    if table == INODE_TABLE and value is not None and key_ino(key) in holes:
        record = InodeRecord.decode(value)
        return replace(record, allocated=record.allocated - holes[key_ino(key)] * BLOCK_BYTES).encode()
    return value


def _frame_of(cut: Cut, key: bytes, value: bytes) -> bytes | None:
    """The published value of a block: its frame, or None when it is a hole."""
    state = BlockState.decode(value)
    if state.frame is not None:
        return state.frame.encode()
    place = (key_ino(key), key_block(key))
    assert place in cut.sealed, f"block {place} was dirty at the cut and is not sealed"
    frame = cut.sealed[place]
    return None if frame is None else frame.encode()
