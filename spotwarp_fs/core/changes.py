"""Note every change to the published tables, in the transaction that makes it.

Invariant: a key of a published table is never put or deleted except through a Recorder, and its row in the change log
has a seq above every cut begun before the change. A cut at seq S exports every row with seq <= S; only a confirmed
publish of S drops them. A row that was changed again after the cut has moved to a seq above S and stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotwarp_fs.core.ports import KVWrite
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    NodeTable,
    block_key,
    decode_u32,
    decode_u64,
    encode_u32,
    encode_u64,
    ino_range,
    range_key,
    table_range,
)
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode

SEQ_KEY = NodeTable.META + b"change_seq"
RECENT_MAX = 100_000
"""Keys remembered as "already noted since the last barrier"; forgetting them early only costs a row rewritten."""


class ChangeCounter:
    """The seq and the keys already noted since the last barrier (a cut or a journal record).

    Lives as long as the session; rebuilt from the map at start.
    """

    def __init__(self, seq: ChangeSeq) -> None:
        self.seq = seq
        self.barrier_seq = seq
        self._recent: set[bytes] = set()
        self._recent_ranges: dict[Inode, tuple[bytes, int]] = {}

    def has_noted(self, key: bytes) -> bool:
        """Tell whether the next cut takes *key* anyway; the answer may be a wrong no."""
        return key in self._recent

    def rolled_back(self) -> None:
        """A transaction was aborted: what it noted is not in the map, so nothing counts as noted any more."""
        self._recent.clear()
        self._recent_ranges.clear()

    def barrier(self) -> ChangeSeq:
        """Everything noted so far is at or below the seq returned; every later change gets a higher one."""
        self._recent.clear()
        self._recent_ranges.clear()
        self.barrier_seq = self.seq
        return self.seq


class Recorder:
    """A write transaction whose puts and deletes of published tables are noted for the next cut."""

    def __init__(self, txn: KVWrite, counter: ChangeCounter) -> None:
        self._txn = txn
        self._counter = counter

    @property
    def seq(self) -> ChangeSeq:
        """The seq of the newest change noted."""
        return self._counter.seq

    def get(self, key: bytes) -> bytes | None:
        """Return the value of *key*, or None."""
        return self._txn.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)`; collect before changing anything."""
        return self._txn.scan(start, stop)

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of a published table."""
        self._txn.put(key, value)
        self.touch(key)

    def delete(self, key: bytes) -> None:
        """Remove a key of a published table."""
        if self._txn.delete(key):
            self.touch(key)

    def put_local(self, key: bytes, value: bytes) -> None:
        """Set a key of a node table, or a local fact of a block: nothing to export."""
        self._txn.put(key, value)

    def delete_local(self, key: bytes) -> bool:
        """Remove a key of a node table."""
        return self._txn.delete(key)

    def touch(self, key: bytes) -> None:
        """Note that *key* must be in the next cut (also when its value stays, as for a dirty block written again)."""
        counter = self._counter
        if key in counter._recent:
            return
        row = NodeTable.CHANGES + key
        earlier = self._txn.get(row)
        if earlier is not None:
            self._txn.delete(NodeTable.CHANGELOG + earlier)
        counter.seq = ChangeSeq(counter.seq + 1)
        seq = encode_u64(counter.seq)
        self._txn.put(row, seq)
        self._txn.put(NodeTable.CHANGELOG + seq, key)
        self._txn.put(SEQ_KEY, seq)
        if len(counter._recent) >= RECENT_MAX:
            counter._recent.clear()
        counter._recent.add(key)

    def drop_blocks(self, ino: Inode, first: BlockIndex) -> None:
        """Delete every block record of *ino* from *first* on, also those still lying in the base.

        One range row says it for all of them; rows are merged only within one barrier, so that a cut never takes a
        later truncation for an earlier one.
        """
        _, stop = ino_range(BLOCK_TABLE, ino)
        for key, _ in list(self._txn.scan(block_key(ino, first), stop)):
            self._txn.delete(key)
            self._forget(key)
        recent = self._counter._recent_ranges.get(ino)
        if recent is not None:
            row, merged = recent
            if first >= merged:
                return
        else:
            self._counter.seq = ChangeSeq(self._counter.seq + 1)
            row = range_key(ino, self._counter.seq)
            self._txn.put(SEQ_KEY, encode_u64(self._counter.seq))
        self._txn.put(row, encode_u32(first))
        self._counter._recent_ranges[ino] = (row, first)

    def _forget(self, key: bytes) -> None:
        """A single change that a range row now covers needs no row of its own, unless an open cut may hold it."""
        row = NodeTable.CHANGES + key
        seq = self._txn.get(row)
        if seq is not None and decode_u64(seq) > self._counter.barrier_seq:
            self._txn.delete(row)
            self._txn.delete(NodeTable.CHANGELOG + seq)
            self._counter._recent.discard(key)


def confirm_ranges(txn: KVWrite, published: ChangeSeq) -> None:
    """Drop the range rows that a confirmed publish at seq *published* covers."""
    for row, _ in list(txn.scan(*table_range(NodeTable.RANGES))):
        if decode_u64(row, 9) <= published:
            txn.delete(row)


def dropped_ranges(txn_rows: Iterator[tuple[bytes, bytes]], upto: ChangeSeq) -> dict[Inode, BlockIndex]:
    """Fold range rows up to a seq into "first dropped block" per inode."""
    ranges: dict[Inode, BlockIndex] = {}
    for row, value in txn_rows:
        if decode_u64(row, 9) <= upto:
            ino, first = Inode(decode_u64(row, 1)), BlockIndex(decode_u32(value))
            ranges[ino] = min(first, ranges.get(ino, first))
    return ranges
