"""Change sets: what turns one state of the metadata map into the next, and what a base is made of.

Invariant: a change set is applied in one order only: first its drops, then its puts and deletes. A key is in it at most
once, so its puts and deletes are final values and their order among themselves does not matter.

    record stream = drops in rising order of inode, then changes in rising order of key
        drop      1 | ino u64 | first block u32          every block record of ino from there on is gone (H4)
        put       2 | key bytes u16 | value bytes u32 | key | value
        delete    3 | key bytes u16 | key

Keys and values are those of core/records.py; a block's value is its 56-byte FrameRef. A base is a stream of puts alone.
The fsync journal and salvage use the same stream (there a block's value is the node's BlockState).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.records import BLOCK_TABLE, block_key, ino_range, key_block, key_ino
from spotwarp_fs.core.types import BlockIndex, Inode

Put = tuple[bytes, bytes]
Change = tuple[bytes, bytes | None]
"""A key and its new value; None deletes it."""

_DROP: Final = struct.Struct(">BQI")
_PUT: Final = struct.Struct(">BHI")
_DELETE: Final = struct.Struct(">BH")
_LAST_BLOCK: Final = BlockIndex((1 << 32) - 1)
_DROP_OP, _PUT_OP, _DELETE_OP = 1, 2, 3


@dataclass(frozen=True, slots=True, order=True)
class DropBlocks:
    """All block records of *ino* from *first_block* on, whether or not anybody knows which there are."""

    ino: Inode
    first_block: BlockIndex

    @property
    def start(self) -> bytes:
        """First key that goes."""
        return block_key(self.ino, self.first_block)

    @property
    def last_key(self) -> bytes:
        """Last key that can go."""
        return block_key(self.ino, _LAST_BLOCK)

    @property
    def stop(self) -> bytes:
        """First key that stays."""
        return ino_range(BLOCK_TABLE, self.ino)[1]


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """Drops by rising inode (one each), then changes by rising key (one each)."""

    drops: Sequence[DropBlocks] = ()
    changes: Sequence[Change] = ()

    @classmethod
    def of(cls, drops: Mapping[Inode, BlockIndex], changes: Mapping[bytes, bytes | None]) -> ChangeSet:
        """Bring unordered facts into order."""
        return cls(tuple(DropBlocks(*drop) for drop in sorted(drops.items())), tuple(sorted(changes.items())))

    def __bool__(self) -> bool:
        return bool(self.drops or self.changes)


NOTHING: Final = ChangeSet()
"""Changes nothing."""


def encode_drop(drop: DropBlocks) -> bytes:
    """Write one drop."""
    return _DROP.pack(_DROP_OP, drop.ino, drop.first_block)


def encode_change(key: bytes, value: bytes | None) -> bytes:
    """Write one put or delete."""
    if value is None:
        return _DELETE.pack(_DELETE_OP, len(key)) + key
    return _PUT.pack(_PUT_OP, len(key), len(value)) + key + value


def encode_records(change_set: ChangeSet) -> bytes:
    """Write a whole change set as one record stream."""
    parts = [encode_drop(drop) for drop in change_set.drops]
    parts += [encode_change(key, value) for key, value in change_set.changes]
    return b"".join(parts)


def decode_records(stream: bytes) -> ChangeSet:
    """Read a record stream, or raise Corrupt when it is damaged or out of order."""
    drops: list[DropBlocks] = []
    changes: list[Change] = []
    at = 0
    try:
        while at < len(stream):
            operation = stream[at]
            if operation == _PUT_OP:
                _, key_bytes, value_bytes = _PUT.unpack_from(stream, at)
                key_at = at + _PUT.size
                value_at = key_at + key_bytes
                at = value_at + value_bytes
                changes.append((stream[key_at:value_at], stream[value_at:at]))
            elif operation == _DELETE_OP:
                _, key_bytes = _DELETE.unpack_from(stream, at)
                key_at = at + _DELETE.size
                at = key_at + key_bytes
                changes.append((stream[key_at:at], None))
            elif operation == _DROP_OP and not changes:
                _, ino, first = _DROP.unpack_from(stream, at)
                at += _DROP.size
                drops.append(DropBlocks(Inode(ino), BlockIndex(first)))
            else:
                raise Corrupt(f"record stream of {len(stream)} bytes has operation {operation} at byte {at}")
    except struct.error as error:
        raise Corrupt(f"record stream of {len(stream)} bytes ends inside the record at byte {at}") from error
    if at != len(stream):
        raise Corrupt(f"record stream of {len(stream)} bytes ends inside a record that needs {at}")
    _check_order(drops, changes)
    return ChangeSet(drops, changes)


def _check_order(drops: list[DropBlocks], changes: list[Change]) -> None:
    for before, after in pairwise(drops):
        if before.ino >= after.ino:
            raise Corrupt(f"record stream drops inode {after.ino} after inode {before.ino}")
    for (before_key, _), (after_key, _) in pairwise(changes):
        if before_key >= after_key:
            raise Corrupt(f"record stream has key {after_key.hex()} after key {before_key.hex()}")


def puts_of(change_set: ChangeSet) -> list[Put]:
    """Take a change set for a piece of a base, or raise Corrupt if it holds anything but puts."""
    puts = [(key, value) for key, value in change_set.changes if value is not None]
    if change_set.drops or len(puts) != len(change_set.changes):
        raise Corrupt(f"a base holds {len(change_set.drops)} drops, {len(change_set.changes) - len(puts)} deletes")
    return puts


def concat(parts: Iterable[ChangeSet]) -> ChangeSet:
    """Join the sections of one change set, in their order."""
    drops: list[DropBlocks] = []
    changes: list[Change] = []
    for part in parts:
        drops.extend(part.drops)
        changes.extend(part.changes)
    _check_order(drops, changes)
    return ChangeSet(drops, changes)


def apply(state: MutableMapping[bytes, bytes], change_set: ChangeSet) -> None:
    """Change *state* as the manifest of *change_set* says: the plain meaning that every other way must agree with."""
    drops = {drop.ino: drop.first_block for drop in change_set.drops}
    for key in [key for key in state if drops and key[:1] == BLOCK_TABLE and _dropped(key, drops)]:
        del state[key]
    for key, value in change_set.changes:
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value


def fold(change_sets: Iterable[ChangeSet]) -> ChangeSet:
    """Give the one change set that does what *change_sets* do one after the other.

    A later drop takes earlier puts of its blocks away, so that at the end all drops can come first.
    """
    drops: dict[Inode, BlockIndex] = {}
    changes: dict[bytes, bytes | None] = {}
    blocks: dict[Inode, set[bytes]] = {}
    for change_set in change_sets:
        for drop in change_set.drops:
            drops[drop.ino] = min(drop.first_block, drops.get(drop.ino, drop.first_block))
            kept = blocks.get(drop.ino, set())
            gone = {key for key in kept if key >= drop.start}
            kept -= gone
            for key in gone:
                del changes[key]
        for key, value in change_set.changes:
            changes[key] = value
            if key[:1] == BLOCK_TABLE:
                blocks.setdefault(key_ino(key), set()).add(key)
    return ChangeSet.of(drops, changes)


def _dropped(block: bytes, drops: Mapping[Inode, BlockIndex]) -> bool:
    first = drops.get(key_ino(block))
    return first is not None and key_block(block) >= first


def part_of(change_set: ChangeSet, start: bytes, stop: bytes | None) -> ChangeSet:
    """Cut out what concerns keys in `[start, stop)` (no end when None): changes that lie there, drops that reach in."""
    changes = change_set.changes
    lower = bisect_left(changes, start, key=_key)
    upper = len(changes) if stop is None else bisect_left(changes, stop, key=_key)
    drops = change_set.drops
    first = bisect_right(drops, start, key=_drop_stop)
    last = len(drops) if stop is None else bisect_left(drops, stop, key=_drop_start)
    return ChangeSet(drops[first:last], changes[lower:upper])


def _key(change: Change) -> bytes:
    return change[0]


def _drop_start(drop: DropBlocks) -> bytes:
    return drop.start


def _drop_stop(drop: DropBlocks) -> bytes:
    return drop.stop
