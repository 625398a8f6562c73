"""Count which bytes of which packs the retained states reach, in one pass over a base and the changes after it.

A block record is live from the state that put it to the state before the one that replaced it; it counts for every
retained state in between. Invariant: the answer is exact (a frame that several blocks share counts once), and memory is
bounded by the changes given and 8 bytes per distinct frame, never by the base's records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    FRAME_REF_BYTES,
    PACK_KEY_BYTES,
    FrameRef,
    key_block,
    key_ino,
    pack_from_bytes,
    pack_key_bytes,
)
from spotwarp_fs.core.types import BlockIndex, Inode, ManifestNumber, PackId

_PLACE: Final = slice(PACK_KEY_BYTES, PACK_KEY_BYTES + 8)
"""Offset and stored bytes of a FrameRef: what tells the frames of a pack apart."""
_COMPACT_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class PackLive:
    """What is reached of a pack."""

    head_bytes: int = 0
    retained_bytes: int = 0
    """Reached by any retained state, the head included."""
    anchored: bool = False
    """Reached by a state that stays for long (named, pinned), or metadata: counts whole and is never repacked."""


class _Frames:
    """Distinct frames per pack."""

    def __init__(self) -> None:
        self._places: dict[bytes, bytearray] = {}
        self._compact_at: dict[bytes, int] = {}

    def add(self, value: bytes) -> None:
        """Count the frame that a block record names."""
        assert len(value) == FRAME_REF_BYTES, f"a published block record has {len(value)} bytes"
        pack = value[:PACK_KEY_BYTES]
        places = self._places.get(pack)
        if places is None:
            places = self._places[pack] = bytearray()
        places += value[_PLACE]
        if len(places) > self._compact_at.get(pack, _COMPACT_BYTES):
            places[:] = self.distinct(pack).tobytes()
            self._compact_at[pack] = 2 * len(places) + _COMPACT_BYTES

    def packs(self) -> Iterable[bytes]:
        return self._places.keys()

    def distinct(self, pack: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        return np.unique(np.frombuffer(bytes(self._places.get(pack, b"")), dtype=">u8"))


def _stored_bytes(places: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> int:
    return int((places & np.uint64(0xFFFF_FFFF)).sum())


class Sweep:
    """Collects what retained states reach; one instance for all the bases that they need.

    *anchors* are those of *retained* that stay for long.
    """

    def __init__(
        self, head: ManifestNumber, retained: Iterable[ManifestNumber], anchors: Iterable[ManifestNumber] = ()
    ) -> None:
        self._head = head
        self._retained = sorted({*retained, head})
        self._anchors = sorted(set(anchors))
        self._of_head = _Frames()
        self._of_others = _Frames()
        self._anchored: set[bytes] = set()
        self._metadata: set[bytes] = set()

    def metadata(self, frames: Iterable[FrameRef]) -> None:
        """Count the packs of metadata frames: roots and sections of the chain of every retained state."""
        self._metadata.update(pack_key_bytes(frame.pack) for frame in frames)

    def chain(
        self,
        base_number: ManifestNumber,
        base_blocks: Iterable[tuple[bytes, bytes]],
        change_sets: Sequence[tuple[ManifestNumber, ChangeSet]],
        upto: ManifestNumber | None = None,
    ) -> None:
        """Sweep the states from a base on, as far as its change sets go.

        *base_blocks* are the base's rows of table b in any order, *change_sets* those of the states after it, in order
        and without a gap. Retained states older than the base need the chain that they were published with; *upto* ends
        a chain whose later states another one covers.
        """
        last = change_sets[-1][0] if change_sets else base_number
        assert [n for n, _ in change_sets] == list(range(base_number + 1, last + 1)), "a chain has no gap"
        stop = min(last, upto if upto is not None else last) + 1
        changes = _Changes(change_sets)
        untouched = self._counters(base_number, stop)
        for key, value in base_blocks:
            if changes.touch(key):
                self._count_versions(changes.versions(key, base_number, value, stop))
            else:
                for counter in untouched:
                    counter(value)
        for key in changes.new_keys():
            self._count_versions(changes.versions(key, base_number, None, stop))

    def _count_versions(self, versions: Iterable[tuple[int, int, bytes]]) -> None:
        for start, until, ref in versions:
            for counter in self._counters(start, until):
                counter(ref)

    def _counters(self, start: int, until: int) -> list[Callable[[bytes], None]]:
        """Tell where a record counts that is in the states from *start* to before *until*."""
        counters: list[Callable[[bytes], None]] = []
        if start <= self._head < until:
            counters.append(self._of_head.add)
        elif _any_within(self._retained, start, until):
            counters.append(self._of_others.add)
        if _any_within(self._anchors, start, until):
            counters.append(self._anchor)
        return counters

    def _anchor(self, ref: bytes) -> None:
        self._anchored.add(ref[:PACK_KEY_BYTES])

    def result(self) -> dict[PackId, PackLive]:
        """Give what was reached; a pack that is not here is reached by nothing."""
        found: dict[PackId, PackLive] = {}
        for pack in {*self._of_head.packs(), *self._of_others.packs(), *self._metadata}:
            of_head = self._of_head.distinct(pack)
            either = np.union1d(of_head, self._of_others.distinct(pack))
            anchored = pack in self._anchored or pack in self._metadata
            found[pack_from_bytes(pack)] = PackLive(_stored_bytes(of_head), _stored_bytes(either), anchored)
        return found


def _any_within(numbers: list[ManifestNumber], start: int, until: int) -> bool:
    at = bisect_left(numbers, start)
    return at < len(numbers) and numbers[at] < until


class _Changes:
    """The changes of a chain by key and by inode, to be asked for one key at a time."""

    def __init__(self, change_sets: Sequence[tuple[ManifestNumber, ChangeSet]]) -> None:
        self._by_key: dict[bytes, list[tuple[int, bytes | None]]] = {}
        self._drops: dict[Inode, list[tuple[int, BlockIndex]]] = {}
        self._asked: set[bytes] = set()
        for number, change_set in change_sets:
            for drop in change_set.drops:
                self._drops.setdefault(drop.ino, []).append((number, drop.first_block))
            for key, value in change_set.changes:
                if key[:1] == BLOCK_TABLE:
                    self._by_key.setdefault(key, []).append((number, value))

    def touch(self, key: bytes) -> bool:
        """Tell whether anything here concerns *key*, which the base has."""
        if key in self._by_key:
            self._asked.add(key)
            return True
        return key_ino(key) in self._drops

    def new_keys(self) -> Iterator[bytes]:
        """Give the keys that the base did not have."""
        yield from (key for key in self._by_key if key not in self._asked)

    def versions(
        self, key: bytes, base_number: int, value: bytes | None, stop: int
    ) -> Iterator[tuple[int, int, bytes]]:
        """Give every value that *key* had, with the first state that has it and the first that has it no more."""
        since = base_number
        for number, fresh in self._events(key):
            if value is not None and since < min(number, stop):
                yield since, min(number, stop), value
            since, value = number, fresh
        if value is not None and since < stop:
            yield since, stop, value

    def _events(self, key: bytes) -> list[tuple[int, bytes | None]]:
        """Merge single changes with the drops that cover the key; of one state the single change is the last word."""
        block = key_block(key)
        drops = self._drops.get(key_ino(key), ())
        events: dict[int, bytes | None] = {number: None for number, first in drops if first <= block}
        events |= dict(self._by_key.get(key, ()))
        return sorted(events.items(), key=lambda event: event[0])
