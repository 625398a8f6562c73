"""What the workspace is after a power loss: the head, and on top of it what the journal can prove (C4).

Invariant: local bytes are believed only if the journal says that they were fdatasynced since they last began to be this
block's bytes. Everything else falls back to the newest frame known, or a hole; the caller punches it. What was fsynced
is never lost by it: a block fsynced once stays believed through later unsynced overwrites (each page is then old or
new, as on any filesystem), and a file is never cut below its length at its last fsync, or in the head.

A block's bytes begin anew when its record was dropped, became a hole, or had a frame: from then on they may have been
evicted and come back. That is why a claimed block's record is journalled before its bytes go (L4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from spotwarp_fs.core.changes import SEQ_KEY, ChangeCounter, Recorder, dropped_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes, Record, Replaced, SessionBegun, Synced
from spotwarp_fs.core.ports import KVWrite
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    INODE_TABLE,
    BlockState,
    EntryRecord,
    InodeRecord,
    NodeTable,
    block_key,
    decode_u32,
    encode_u32,
    encode_u64,
    ino_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
    key_name,
    name_key,
    table_range,
)
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, ChangeSeq, Inode

BLOCKS_MAX: Final = 1 << 32
_JOURNALLED_NODE_TABLES: Final = (NodeTable.IN_FLIGHT, NodeTable.ORPHANS, NodeTable.META)


@dataclass(frozen=True, slots=True)
class CutBack:
    """A file that was changed after its last fsync and lost some of it."""

    ino: Inode
    size_before: int
    size_after: int
    blocks: tuple[BlockIndex, ...]
    """Those that fell back to an older frame, to a hole, or beyond the new end."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the caller does next, in this order: `keep_only` for every data file, truncate, sync, then the journal."""

    trusted: Mapping[Inode, frozenset[BlockIndex]]
    """Blocks whose local bytes count. All others are punched, and files that are not here removed."""
    sizes: Mapping[Inode, int]
    """What the data files of trusted inodes are truncated to."""
    cut_back: tuple[CutBack, ...]
    """For the report: everything else is as it was at the newest record."""
    journal: tuple[Record, ...]
    """What the journal must hold before anybody changes anything."""


def rebuild(txn: KVWrite, head_seq: ChangeSeq, records: Iterable[Record], *, has_base: bool = False) -> Rebuilt:
    """Bring the map, loaded from a head at *head_seq*, to where the journal's valid prefix leads.

    When the head *has_base*, block records that the map lacks may still lie there.

    Every change is noted for the next cut, under a seq above all that the journal holds.
    """
    assert next(iter(txn.scan(*table_range(NodeTable.CHANGELOG))), None) is None, "the map is the head's, unchanged"
    records = list(records)
    later = [r for r in records if isinstance(r, Changes | Replaced | Synced) and r.seq > head_seq]
    replay = _Replay(txn, head_seq, _Unloaded(has_base=has_base))
    # A sync speaks of changes up to its seq, wherever in the journal it came to stand.
    for record in sorted(later, key=lambda r: (r.seq, isinstance(r, Synced))):
        replay.take(record)

    counter = ChangeCounter(max([head_seq, *(r.seq for r in later)]))
    txn.put(SEQ_KEY, encode_u64(counter.seq))
    recorder = Recorder(txn, counter)
    replay.apply_rows(recorder)
    verdicts = replay.apply_files(recorder)

    trusted = {ino: verdict.trusted for ino, verdict in verdicts.items() if verdict.trusted}
    sessions = [r for r in records if isinstance(r, SessionBegun)]
    return Rebuilt(
        trusted=trusted,
        sizes={ino: verdicts[ino].size for ino in trusted},
        cut_back=tuple(verdict.report for verdict in verdicts.values() if verdict.report is not None),
        journal=(*sessions, *_as_records(txn, counter.seq, verdicts)),
    )


def _as_records(txn: KVWrite, seq: ChangeSeq, judged: Iterable[Inode]) -> list[Record]:
    """The rebuilt changes as one record, so that a second power loss finds nothing of what was cut back.

    What was left of a file is proven, be it only its size: so each counts as synced.
    """
    keys = [row[1:] for row, _ in txn.scan(*table_range(NodeTable.CHANGES))]
    drops = dropped_ranges(txn.scan(*table_range(NodeTable.RANGES)), seq)
    change_set = ChangeSet.of(drops, {key: txn.get(key) for key in keys})
    return [Changes(seq, change_set), *(Synced(seq, ino) for ino in judged)] if change_set else []


class _Block:
    """What the journal tells of one block."""

    __slots__ = ("began", "changed", "fallback", "head_counts", "state")

    def __init__(self, *, head_counts: bool) -> None:
        self.state: BlockState | None = None
        self.began: ChangeSeq | None = None
        """Since when the local bytes are this block's without a break; None while it has none that are needed."""
        self.changed = ChangeSeq(0)
        self.fallback: BlockState | None = None
        self.head_counts = head_counts
        """Without a fallback of its own the head's record holds, if there is one."""

    def take(self, seq: ChangeSeq, value: bytes | None) -> None:
        # An empty value is a hole over a base that was not loaded.
        self.state = BlockState.decode(value) if value else None
        self.changed = seq
        if self.state is not None and self.state.dirty:
            self.began = seq if self.began is None else self.began
            return
        self.began = None
        self.head_counts = False
        self.fallback = None if self.state is None else self.state.without_local_bytes()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What becomes of one file."""

    size: int
    records: Mapping[BlockIndex, BlockState | None]
    """New records (None: a hole); a block that is not here keeps the head's."""
    trusted: frozenset[BlockIndex]
    lost_records: int
    report: CutBack | None


class _File:
    """What the journal tells of one inode's contents."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size
        self.size = head_size
        self.floor = head_size
        """The file is not cut below this: its size at the last fsync (or in the head), or any smaller one since."""
        self.synced = ChangeSeq(0)
        self.dropped: BlockIndex | None = None
        self.blocks: dict[BlockIndex, _Block] = {}

    def set_size(self, size: int) -> None:
        self.size = size
        self.floor = min(self.floor, size)

    def drop(self, first: BlockIndex) -> None:
        self.dropped = first if self.dropped is None else min(first, self.dropped)
        self.floor = min(self.floor, first * BLOCK_BYTES)
        self.blocks = {block: known for block, known in self.blocks.items() if block < first}

    def change(self, seq: ChangeSeq, block: BlockIndex, value: bytes | None) -> None:
        known = self.blocks.get(block)
        if known is None:
            head_counts = self.dropped is None or block < self.dropped
            known = self.blocks[block] = _Block(head_counts=head_counts)
        known.take(seq, value)

    def sync(self, seq: ChangeSeq) -> None:
        self.synced = max(self.synced, seq)
        self.floor = self.size

    def judge(self, ino: Inode, head_has: Callable[[BlockIndex], bool]) -> _Verdict:
        """Decide block by block, then where the file ends."""
        records: dict[BlockIndex, BlockState | None] = {}
        trusted: set[BlockIndex] = set()
        unsure: set[BlockIndex] = set()
        fallen: set[BlockIndex] = set()
        for block, known in sorted(self.blocks.items()):
            if known.state is None or not known.state.dirty:
                records[block] = known.fallback
                continue
            if known.changed > self.synced:
                unsure.add(block)
            assert known.began is not None
            if known.began <= self.synced:
                records[block] = known.state
                trusted.add(block)
                continue
            fallen.add(block)
            if not (known.head_counts and head_has(block)):
                records[block] = known.fallback
        size = self._end(unsure, fallen)
        beyond = {block for block in self.blocks if block * BLOCK_BYTES >= size}
        had = {block for block, known in self.blocks.items() if known.state is not None}
        lost = {block for block in had if block in beyond or (block in records and records[block] is None)}
        report = None
        if fallen or size != self.size:
            report = CutBack(ino, self.size, size, tuple(sorted(fallen | (had & beyond))))
        records = {block: state for block, state in records.items() if block not in beyond}
        return _Verdict(size, records, frozenset(trusted - beyond), len(lost), report)

    def _end(self, unsure: set[BlockIndex], fallen: set[BlockIndex]) -> int:
        """Where the file ends: at its proven prefix, if anything behind that was changed after the last fsync."""
        if not unsure:
            return self.size
        size = min(self.size, max(self.floor, min(unsure) * BLOCK_BYTES))
        last = BlockIndex(size // BLOCK_BYTES)
        if last in fallen and size % BLOCK_BYTES:
            # The older frame may reach beyond an unsynced truncation; nothing says that its rest is void (H5), so the
            # truncation is undone with the rest of what was not synced.
            size = max(size, self._fallback_end(last))
        return size

    def _fallback_end(self, block: BlockIndex) -> int:
        known = self.blocks[block]
        start = block * BLOCK_BYTES
        if known.fallback is not None and known.fallback.frame is not None:
            return start + known.fallback.frame.raw_bytes
        return min(self.head_size, start + BLOCK_BYTES) if known.head_counts else 0


class _Unloaded:
    """Block records that still lie in the head's base (`engine/blockmaps.py` reads the same rows)."""

    def __init__(self, *, has_base: bool) -> None:
        self._has_base = has_base

    def _counts_below(self, recorder: Recorder, ino: Inode) -> int:
        """Up to which block the base's records of *ino* count; 0 when there are none, or all are loaded."""
        cutoff = recorder.get(ino_key(NodeTable.UNLOADED, ino))
        if not self._has_base or cutoff == b"":
            return 0
        return BLOCKS_MAX if cutoff is None else decode_u32(cutoff)

    def may_have(self, recorder: Recorder, ino: Inode) -> bool:
        """May any record of *ino* lie in the base only?"""
        return self._counts_below(recorder, ino) > 0

    def head_has(self, recorder: Recorder, ino: Inode, block: BlockIndex) -> bool:
        """Is there a record of the head's, here or possibly in the base?"""
        value = recorder.get(block_key(ino, block))
        return bool(value) if value is not None else block < self._counts_below(recorder, ino)

    def drop(self, recorder: Recorder, ino: Inode, first: BlockIndex) -> None:
        """Drop block records, also those in the base."""
        recorder.drop_blocks(ino, first)
        if first < self._counts_below(recorder, ino):
            recorder.put_local(ino_key(NodeTable.UNLOADED, ino), encode_u32(first))

    def put(self, recorder: Recorder, ino: Inode, block: BlockIndex, state: BlockState | None) -> None:
        """Set a record; a hole over the base is an empty value, which hides what the base has."""
        key = block_key(ino, block)
        if state is not None:
            recorder.put(key, state.encode())
        elif self.head_has(recorder, ino, block):
            if block < self._counts_below(recorder, ino):
                recorder.put(key, b"")
            else:
                recorder.delete(key)


class _Replay:
    """Folds the records into final values, then writes them."""

    def __init__(self, txn: KVWrite, head_seq: ChangeSeq, unloaded: _Unloaded) -> None:
        self._txn = txn
        self._head_seq = head_seq
        self._unloaded = unloaded
        self._rows: dict[bytes, bytes | None] = {}
        self._files: dict[Inode, _File] = {}

    def take(self, record: Changes | Replaced | Synced) -> None:
        match record:
            case Synced(seq, ino):
                self._file(ino).sync(seq)
            case Replaced(seq, key, value):
                self._change(seq, key, value)
            case Changes():
                for seq, change_set in record.parts_after(self._head_seq):
                    for drop in change_set.drops:
                        self._file(drop.ino).drop(drop.first_block)
                    for key, value in change_set.changes:
                        self._change(seq, key, value)

    def _change(self, seq: ChangeSeq, key: bytes, value: bytes | None) -> None:
        if key[:1] == BLOCK_TABLE:
            self._file(key_ino(key)).change(seq, key_block(key), value)
            return
        self._rows[key] = value
        if key[:1] == INODE_TABLE and value is not None:
            self._file(key_ino(key)).set_size(InodeRecord.decode(value).size)

    def _file(self, ino: Inode) -> _File:
        file = self._files.get(ino)
        if file is None:
            value = self._txn.get(inode_key(ino))
            file = self._files[ino] = _File(InodeRecord.decode(value).size if value else 0)
        return file

    def apply_rows(self, recorder: Recorder) -> None:
        """Write everything but blocks, and what the node derives from it."""
        for key, value in sorted(self._rows.items()):
            table = key[:1]
            if table == ENTRY_TABLE:
                _move_name(recorder, key, value)
            if table.isupper():
                assert table in _JOURNALLED_NODE_TABLES, f"table {table!r} is derived, not journalled"
                assert key != SEQ_KEY, "the change seq is the journal's own"
                _put_local(recorder, key, value)
            elif value is None:
                recorder.delete(key)
            else:
                recorder.put(key, value)
            if table == INODE_TABLE:
                unlinked = value is not None and InodeRecord.decode(value).nlink == 0
                _put_local(recorder, ino_key(NodeTable.ORPHANS, key_ino(key)), b"" if unlinked else None)

    def apply_files(self, recorder: Recorder) -> dict[Inode, _Verdict]:
        """Write blocks, and the sizes that they prove."""
        verdicts: dict[Inode, _Verdict] = {}
        for ino, file in sorted(self._files.items()):
            value = recorder.get(inode_key(ino))
            if value is None:
                self._unloaded.drop(recorder, ino, BlockIndex(0))
                continue
            verdict = verdicts[ino] = file.judge(ino, partial(self._unloaded.head_has, recorder, ino))
            first = file.dropped
            if verdict.size < file.head_size:
                end = BlockIndex(-(-verdict.size // BLOCK_BYTES))
                first = end if first is None else min(first, end)
            if first is not None:
                self._unloaded.drop(recorder, ino, first)
            for block, state in verdict.records.items():
                self._unloaded.put(recorder, ino, block, state)
            record = InodeRecord.decode(value)
            allocated = max(0, record.allocated - verdict.lost_records * BLOCK_BYTES)
            if not self._unloaded.may_have(recorder, ino):
                # Its record may know of holes, found by sealing, that the journal never heard of.
                allocated = _records_held(recorder, ino) * BLOCK_BYTES
            if (verdict.size, allocated) != (record.size, record.allocated):
                recorder.put(inode_key(ino), replace(record, size=verdict.size, allocated=allocated).encode())
        return verdicts


def _records_held(recorder: Recorder, ino: Inode) -> int:
    return sum(1 for _, value in recorder.scan(*ino_range(BLOCK_TABLE, ino)) if value)


def _move_name(recorder: Recorder, key: bytes, value: bytes | None) -> None:
    """Keep the backward entries (table N) in step with a directory entry."""
    parent, name = key_ino(key), key_name(key)
    before = recorder.get(key)
    if before is not None:
        recorder.delete_local(name_key(EntryRecord.decode(before).ino, parent, name))
    if value is not None:
        recorder.put_local(name_key(EntryRecord.decode(value).ino, parent, name), b"")


def _put_local(recorder: Recorder, key: bytes, value: bytes | None) -> None:
    if value is None:
        recorder.delete_local(key)
    else:
        recorder.put_local(key, value)
