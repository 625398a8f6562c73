"""What the fsync journal has to be told: every change of the map since its last record, as values of now.

Invariant: a record never repeats what an earlier one said, for a truncation told twice would drop what was fsynced
after it; and what an open cut may publish stands apart from what came later, so that a head at that cut takes the
second part only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice, pairwise

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes, Replaced
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    TREE_TABLES,
    BlockState,
    NodeTable,
    block_key,
    changelog_key,
    decode_u32,
    decode_u64,
    ino_key,
    inode_key,
    key_ino,
    table_range,
)
from spotwarp_fs.core.scratch import MADE_SO, is_scratch, is_unseen, published
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode

ROWS_PER_STEP_MAX = 1_000


def few_rows(view: KVRead, since: ChangeSeq, seq: ChangeSeq) -> bool:
    """Return whether `changes_between` is quick enough for the event loop."""
    log = view.scan(changelog_key(ChangeSeq(since + 1)), changelog_key(ChangeSeq(seq + 1)))
    rows = chain(log, view.scan(*table_range(NodeTable.RANGES)))
    return sum(1 for _ in islice(rows, ROWS_PER_STEP_MAX + 1)) <= ROWS_PER_STEP_MAX


def changes_between(view: KVRead, edges: Sequence[ChangeSeq], synced: Iterable[Inode]) -> Changes:
    """Tell what changed after the first of *edges* up to the last; those between are cuts that may have been published.

    In-flight marks of the files *synced* come along. Scratch is left out: a head has no place for it.
    """
    parts = [(upto, _part(view, after, upto)) for after, upto in pairwise(edges)]
    seq, last = parts.pop()
    shown = published(view)
    marks = {key: shown.get(key) for key in (ino_key(NodeTable.IN_FLIGHT, ino) for ino in synced)}
    last = ChangeSet(last.drops, tuple(sorted((dict(last.changes) | marks).items())))
    return Changes(seq, last, tuple(part for part in parts if part[1]))


def _part(view: KVRead, after: ChangeSeq, upto: ChangeSeq) -> ChangeSet:
    shown = published(view)
    rows = view.scan(changelog_key(ChangeSeq(after + 1)), changelog_key(ChangeSeq(upto + 1)))
    keys = (key for _, key in rows if key[:1] not in TREE_TABLES or not is_unseen(view, key_ino(key), MADE_SO))
    drops: dict[Inode, BlockIndex] = {}
    for row, value in view.scan(*table_range(NodeTable.RANGES)):
        ino, first = Inode(decode_u64(row, 1)), BlockIndex(decode_u32(value))
        if after < decode_u64(row, 9) <= upto and not is_scratch(view, ino):
            drops[ino] = min(first, drops.get(ino, first))
    return ChangeSet.of(drops, {key: shown.get(key) for key in keys})


def replaced(view: KVRead, changes: Changes, blocks: Iterable[tuple[Inode, BlockIndex]]) -> list[Replaced]:
    """Tell which of *blocks*, known to the journal as only here, need their local bytes no more."""
    told = {key for _, part in changes.parts_after(ChangeSeq(0)) for key, _ in part.changes}
    found = []
    for ino, block in blocks:
        key = block_key(ino, block)
        if key in told or view.get(inode_key(ino)) is None or is_scratch(view, ino):
            continue
        value = view.get(key)
        state = BlockState.decode(value) if value else None
        if state is None or not state.dirty:
            found.append(Replaced(changes.seq, key, None if state is None else state.without_local_bytes().encode()))
    return found
