"""What a cut publishes: every change up to its seq, as the values of its snapshot.

The snapshot is read in one go, before anything is uploaded; frames are filled in when the store has them. Invariant: a
block that was dirty at the cut is exported with the frame that was sealed from its bytes at the cut, never with a later
one; an inode without a name is exported as deleted (M-c), and one whose names are all scratch too, unless no state ever
had it (C18).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spotwarp_fs.core.changes import dropped_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    XATTR_TABLE,
    BlockState,
    FrameRef,
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


@dataclass(frozen=True, slots=True)
class Draft:
    """The changes of a cut, without the frames of what was dirty at it."""

    drops: dict[Inode, BlockIndex]
    changes: dict[bytes, bytes | None]
    dirty: list[bytes]
    """Keys of `changes` whose frames are to come."""


def export(cut: Cut, head_seq: ChangeSeq) -> ChangeSet:
    """Make the change set of a sealed cut whose snapshot is still open."""
    return complete(draft(cut, head_seq), cut.sealed)


def draft(cut: Cut, head_seq: ChangeSeq) -> Draft:
    """Read what *cut* changes out of its snapshot (CPU work; may run in a worker thread while the loop goes on).

    *head_seq* is the change seq of the head, which it will follow.
    """
    view = published(cut.snapshot)
    unseen = _Unseen(cut.snapshot, head_seq)
    ranges = dropped_ranges(view.scan(*table_range(NodeTable.RANGES)), cut.seq)
    drops = {ino: first for ino, first in ranges.items() if not unseen[ino]}
    nameless = _Nameless(view)
    changes: dict[bytes, bytes | None] = {}
    dirty: list[bytes] = []
    for _, key in view.scan(NodeTable.CHANGELOG, changelog_key(ChangeSeq(cut.seq + 1))):
        table = key[:1]
        if table in OF_TREE and unseen[key_ino(key)]:
            continue
        if table not in BY_INODE:
            changes[key] = view.get(key)
        elif not nameless[key_ino(key)]:
            changes[key] = _frame_of(key, view.get(key), dirty) if table == BLOCK_TABLE else view.get(key)
        elif table == INODE_TABLE:
            drops[key_ino(key)] = BlockIndex(0)
            changes[key] = None
            # Also those that an earlier manifest has: only reaping deletes them here, and the node may not live to it.
            changes.update((xattr, None) for xattr, _ in cut.snapshot.scan(*ino_range(XATTR_TABLE, key_ino(key))))
        elif table == XATTR_TABLE:
            changes[key] = None
    return Draft(drops, changes, dirty)


def complete(draft: Draft, sealed: Mapping[tuple[Inode, BlockIndex], FrameRef | None]) -> ChangeSet:
    """Fill in the frames of the blocks that were dirty at the cut; None stands for a hole (CPU work)."""
    changes = draft.changes
    holes: Counter[Inode] = Counter()
    for key in draft.dirty:
        place = key_ino(key), key_block(key)
        assert place in sealed, f"block {place} was dirty at the cut and is not sealed"
        frame = sealed[place]
        changes[key] = None if frame is None else frame.encode()
        holes[place[0]] += frame is None
    for ino, count in holes.items():
        value = changes.get(inode_key(ino)) if count else None
        if value is not None:
            record = InodeRecord.decode(value)
            allocated = max(0, record.allocated - count * BLOCK_BYTES)
            changes[inode_key(ino)] = replace(record, allocated=allocated).encode()
    return ChangeSet.of(draft.drops, changes)


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


def _frame_of(key: bytes, value: bytes | None, dirty: list[bytes]) -> bytes | None:
    """The published value of a block: its frame, or None when it is a hole; one without a frame goes to *dirty*."""
    if not value:
        return None
    frame = BlockState.decode(value).frame
    if frame is None:
        dirty.append(key)
        return None
    return frame.encode()
