"""Decide what was in flight at a cut, so that a takeover never serves half a checkpoint (P-05).

A *mark* says "written since its last write handle was released"; it belongs to an inode, is set by the first write
whatever the file is called, and lives in the map, because names decide late (M-a) and handles die with the daemon
(C12). Globs are looked at only here, with the names of the cut. Invariants: fsync never ends a mark (L10); the close of
a dying process never clears one; whatever is listed inside an atomic directory, the directory is listed too; the cost
is bounded by the marks plus the directories given as candidates, never by the size of the tree.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol

from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    ENTRY_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    backward_name,
    entry_key,
    ino_range,
    inode_key,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.types import ROOT_INODE, Inode

SECOND_NS: Final = 1_000_000_000
RELEASE_AFTER_NS: Final = 30 * SECOND_NS
"""A file that was flushed and not written for so long counts as released: RELEASE comes late or not at all (M6, M8)."""
UNCHANGED_NS: Final = 60 * SECOND_NS
"""Without a sibling and a marker, a directory is complete when nothing in it changed for so long."""
ATOMIC_MAX_AGE_NS: Final = 900 * SECOND_NS
STREAM_AGES: Final = 4
"""A file without an atomic name that is written for longer than this many times `atomic_max_age` is a log, not a part
of a checkpoint: it no longer holds the directory around it in flight."""
NAMES_MAX: Final = 4096
"""Names of one directory that are compared; a checkpoint with more is judged by its first ones."""
MARKERS: Final = frozenset({b"trainer_state.json", b".metadata", b"latest"})
DIRECTORY_DTYPE: Final = 0o040000 >> 12

_MARK = struct.Struct(">qqB")
_DYING, _TORN = 1, 2
_DIGITS = re.compile(rb"[0-9]+")


@dataclass(frozen=True, slots=True)
class Mark:
    """An inode was written; value of table F. All times are of one clock, the engine's wall."""

    since_ns: int
    """First write after the last release."""
    flushed_ns: int = 0
    """Last flush, if nothing was written after it, else 0; of a torn mark: when it became torn."""
    dying: bool = False
    """A process that was dying of a signal closed it: the last release will leave it torn."""
    torn: bool = False
    """Its handles are gone and nobody said that the content is whole."""

    def encode(self) -> bytes:
        """Pack into the value of table F."""
        return _MARK.pack(self.since_ns, self.flushed_ns, self.dying * _DYING | self.torn * _TORN)

    @classmethod
    def decode(cls, value: bytes) -> Mark:
        """Unpack a value of table F."""
        since_ns, flushed_ns, flags = _MARK.unpack(value)
        return cls(since_ns, flushed_ns, bool(flags & _DYING), bool(flags & _TORN))


class Standing(Enum):
    """What a mark means at a moment."""

    OPEN = "open"
    TORN = "torn"
    RELEASED = "released"


def standing(mark: Mark, now_ns: int) -> Standing:
    """Tell whether the marked file is in flight, torn, or counts as released."""
    if mark.torn:
        return Standing.TORN
    if not mark.flushed_ns or abs(now_ns - mark.flushed_ns) < RELEASE_AFTER_NS:
        return Standing.OPEN
    return Standing.TORN if mark.dying else Standing.RELEASED


def on_write(mark: Mark | None, now_ns: int) -> Mark:
    """After a write or truncate through an open file; the same object comes back when there is nothing to store.

    A write to a torn file begins anew: whoever continues it answers for its content by the way it closes.
    """
    if mark is None or mark.torn:
        return Mark(since_ns=now_ns)
    return replace(mark, flushed_ns=0) if mark.flushed_ns else mark


def on_truncate(mark: Mark | None, now_ns: int, *, writers: int) -> Mark | None:
    """After a change of size by path: with nobody writing it is whole in itself, and no release would ever end it."""
    return on_write(mark, now_ns) if writers else mark


def on_flush(mark: Mark | None, now_ns: int, *, dying: bool) -> Mark | None:
    """After a FLUSH; *dying*: the process that opened the file is exiting of a signal.

    It alone never ends a mark, since a child process that closes its copy flushes in mid-write (M7). A file that has
    counted as released before its opener died stays whole.
    """
    if mark is None or standing(mark, now_ns) is not Standing.OPEN:
        return mark
    return replace(mark, flushed_ns=now_ns, dying=mark.dying or dying)


def on_release(mark: Mark | None, now_ns: int, *, writers: int) -> Mark | None:
    """After the RELEASE of a write handle, *writers* of which are left on this inode; None: the mark's row goes."""
    if mark is None or mark.torn or writers:
        return mark
    return replace(mark, flushed_ns=now_ns, torn=True) if mark.dying else None


def on_daemon_restart(mark: Mark, now_ns: int) -> Mark | None:
    """After a start of the daemon: no handle exists any more, so what was not released is torn (C12)."""
    if standing(mark, now_ns) is Standing.RELEASED:
        return None
    return mark if mark.torn else replace(mark, flushed_ns=mark.flushed_ns or now_ns, torn=True)


class AtomicNames(Protocol):
    """The globs that decide; `core.policies.Policies` is one."""

    def is_atomic(self, name: bytes) -> bool:
        """Tell whether a file of this name must be served whole or not at all."""
        ...

    def is_atomic_dir(self, name: bytes) -> bool:
        """Tell whether a directory of this name is complete only as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a cut has to say about things half done."""

    items: tuple[InFlightItem, ...]
    """Sorted by path, one per name; the directories among them are candidates of the next cut."""
    settled: tuple[Inode, ...]
    """Marks that count as released: their rows may go if they still are what the snapshot says."""
    due_ns: int | None
    """When something here may end by the clock alone: a cut is due then even if nothing changes."""

    @property
    def quiescent(self) -> bool:
        """Nothing is being worked on (torn things do not count)."""
        return all(item.torn for item in self.items)


def family(name: bytes) -> bytes:
    """A name with its numbers made equal: two steps of one thing have one family.

    >>> family(b"checkpoint-500") == family(b"checkpoint-1000")
    True
    """
    return _DIGITS.sub(b"#", name)


def candidates(
    view: KVRead, changed: Iterable[bytes], names: AtomicNames, listed: Iterable[InFlightItem]
) -> set[Inode]:
    """Directories that a cut must judge: those whose entries changed since the head, and those that the head listed.

    *changed* are the keys of the cut's change rows, *listed* the in-flight items of the published head.
    """
    found = {item.ino for item in listed if item.kind == "directory"}
    for key in changed:
        if key[:1] != ENTRY_TABLE:
            continue
        found.add(key_ino(key))
        value = view.get(key) if names.is_atomic_dir(key_name(key)) else None
        if value is not None and EntryRecord.decode(value).dtype == DIRECTORY_DTYPE:
            found.add(EntryRecord.decode(value).ino)
    return found


def closing(view: KVRead, now_ns: int) -> list[Inode]:
    """List files that were flushed and whose release is still to come: a cut waits up to a second for these (C11)."""
    rows = view.scan(*table_range(NodeTable.IN_FLIGHT))
    marks = ((key_ino(key), Mark.decode(value)) for key, value in rows)
    return [ino for ino, mark in marks if mark.flushed_ns and standing(mark, now_ns) is Standing.OPEN]


def closing_atomic(view: KVRead, names: AtomicNames, now_ns: int) -> bool:
    """Tell whether any of `closing` has an atomic name or lies in an atomic directory."""
    places = Names(view, names)
    for ino in closing(view, now_ns):
        for parent, name in places.of(ino):
            place = places.place(parent)
            if place is not None and (place.within or names.is_atomic(name)):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a directory is, and the atomic directories that it lies in (itself included), outermost first."""

    path: bytes
    within: tuple[Inode, ...]


class Names:
    """Paths out of the backward entries of one view, remembered."""

    def __init__(self, view: KVRead, names: AtomicNames) -> None:
        self._view = view
        self._names = names
        self._places: dict[Inode, Place | None] = {ROOT_INODE: Place(b"", ())}

    def of(self, ino: Inode) -> Iterator[tuple[Inode, bytes]]:
        """Give (parent, name) of every name of *ino*."""
        for key, _ in self._view.scan(*ino_range(NodeTable.NAMES, ino)):
            yield backward_name(key)

    def place(self, directory: Inode) -> Place | None:
        """Return where *directory* is, or None when it is no longer in the tree."""
        chain: list[tuple[Inode, bytes]] = []
        at = directory
        while at not in self._places:
            up = next(self.of(at), None)
            if up is None or len(chain) > NAMES_MAX:
                self._places[at] = None
                break
            chain.append((at, up[1]))
            at = up[0]
        for ino, name in reversed(chain):
            above = self._places[at]
            self._places[ino] = None if above is None else self._below(above, ino, name)
            at = ino
        return self._places[directory]

    def _below(self, above: Place, ino: Inode, name: bytes) -> Place:
        within = (*above.within, ino) if self._names.is_atomic_dir(name) else above.within
        return Place(join(above.path, name), within)


def join(path: bytes, name: bytes) -> bytes:
    """One step down; the root's path is empty."""
    return path + b"/" + name if path else name


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory holds, two levels deep, with digits made equal and counted."""

    names: Counter[bytes]
    changed_ns: int
    marker: bool
    container: bool
    """It holds several atomic directories of one family: a run, whose checkpoints are judged one by one."""


def contents(view: KVRead, directory: Inode, names: AtomicNames) -> Contents:
    """Read what *directory* holds: its own names and those of its subdirectories."""
    found: Counter[bytes] = Counter()
    changed_ns = _changed_ns(view, directory)
    marker = False
    nested: Counter[bytes] = Counter()
    for name, entry in _listing(view, directory):
        found[family(name)] += 1
        marker = marker or name in MARKERS
        changed_ns = max(changed_ns, _changed_ns(view, entry.ino))
        if entry.dtype != DIRECTORY_DTYPE:
            continue
        if names.is_atomic_dir(name):
            nested[family(name)] += 1
        for inner, below in _listing(view, entry.ino):
            found[join(family(name), family(inner))] += 1
            marker = marker or inner in MARKERS
            changed_ns = max(changed_ns, _changed_ns(view, below.ino))
    return Contents(found, changed_ns, marker, container=any(count > 1 for count in nested.values()))


def _listing(view: KVRead, directory: Inode) -> Iterator[tuple[bytes, EntryRecord]]:
    for count, (key, value) in enumerate(view.scan(*ino_range(ENTRY_TABLE, directory))):
        if count >= NAMES_MAX:
            return
        yield key_name(key), EntryRecord.decode(value)


def _changed_ns(view: KVRead, ino: Inode) -> int:
    """The ctime, which a program cannot set back as it can an mtime."""
    value = view.get(inode_key(ino))
    return InodeRecord.decode(value).ctime_ns if value is not None else 0


@dataclass(slots=True)
class _Findings:
    """What the marks alone say, before directories are judged."""

    items: list[InFlightItem] = field(default_factory=list)
    settled: list[Inode] = field(default_factory=list)
    due_ns: list[int] = field(default_factory=list)
    holding: dict[Inode, bool] = field(default_factory=dict)
    """Atomic directories with something marked inside; True while all of it is torn."""


def in_flight(
    view: KVRead,
    names: AtomicNames,
    now_ns: int,
    directories: Iterable[Inode],
    atomic_max_age_ns: int = ATOMIC_MAX_AGE_NS,
) -> InFlight:
    """List what was in flight at the cut whose snapshot is *view*; *directories* come from `candidates`."""
    places = Names(view, names)
    found = _Findings()
    for key, value in view.scan(*table_range(NodeTable.IN_FLIGHT)):
        _judge_mark(places, names, key_ino(key), Mark.decode(value), now_ns, atomic_max_age_ns, found)
    judged: set[Inode] = set(found.holding)
    for directory in directories:
        place = places.place(directory)
        if place is not None:
            judged.update(place.within)
    _Judgement(view, names, places, now_ns, atomic_max_age_ns, found).judge(judged)
    due_ns = min((due for due in found.due_ns if due > now_ns), default=None)
    return InFlight(tuple(sorted(found.items, key=lambda item: item.path)), tuple(found.settled), due_ns)


def _judge_mark(
    places: Names, names: AtomicNames, ino: Inode, mark: Mark, now_ns: int, max_age_ns: int, found: _Findings
) -> None:
    """Turn one mark into items for its atomic names, and remember the atomic directories around all of them."""
    now = standing(mark, now_ns)
    if now is Standing.RELEASED:
        found.settled.append(ino)
        return
    torn = now is Standing.TORN
    if not torn and mark.flushed_ns:
        found.due_ns.append(mark.flushed_ns + RELEASE_AFTER_NS)
    lasted_ns = (mark.flushed_ns if torn else now_ns) - mark.since_ns
    for parent, name in places.of(ino):
        place = places.place(parent)
        if place is None:
            continue
        atomic = names.is_atomic(name)
        if atomic:
            found.items.append(InFlightItem(ino, join(place.path, name), "file", torn))
        if atomic or lasted_ns <= STREAM_AGES * max_age_ns:
            for directory in place.within:
                found.holding[directory] = found.holding.get(directory, True) and torn


class _Judgement:
    """Judge atomic directories, those unchanged for longest first, so that a complete one can vouch for the next."""

    def __init__(
        self, view: KVRead, names: AtomicNames, places: Names, now_ns: int, max_age_ns: int, found: _Findings
    ) -> None:
        self._view = view
        self._names = names
        self._places = places
        self._now_ns = now_ns
        self._max_age_ns = max_age_ns
        self._found = found
        self._doubtful: set[Inode] = set()
        """Not known to be complete: no sibling may be compared with these."""

    def judge(self, directories: set[Inode]) -> None:
        """Add an item for every directory that is not complete."""
        known = {ino: contents(self._view, ino, self._names) for ino in directories}
        self._doubtful = set(directories)
        for ino, held in sorted(known.items(), key=lambda pair: (pair[1].changed_ns, pair[0])):
            place = self._places.place(ino)
            torn = self._found.holding.get(ino)
            ends_ns = None if place is None else self._ends_ns(ino, held)
            if place is None or held.container or (torn is None and ends_ns is None):
                self._doubtful.discard(ino)
                continue
            if ends_ns is not None:
                self._found.due_ns.append(ends_ns)
            self._found.items.append(InFlightItem(ino, place.path, "directory", bool(torn) and ends_ns is None))

    def _ends_ns(self, ino: Inode, held: Contents) -> int | None:
        """When names alone stop keeping this directory in flight; None when they do not."""
        sibling = self._newest_complete_sibling(ino)
        if sibling is not None:
            limit_ns = self._max_age_ns if sibling - held.names else 0
        else:
            limit_ns = 0 if held.marker else UNCHANGED_NS
        # A clock that stepped back must not keep a directory in flight for ever, hence the distance and not the age.
        return held.changed_ns + limit_ns if abs(self._now_ns - held.changed_ns) < limit_ns else None

    def _newest_complete_sibling(self, ino: Inode) -> Counter[bytes] | None:
        """Names of the directory that *ino* is compared with.

        A lone one that lacks what the one before it has is not believed: it may be what a crash left behind.
        """
        parent, name = next(self._places.of(ino))
        prefix = _DIGITS.split(name, maxsplit=1)[0]
        found: list[tuple[int, Inode]] = []
        for key, value in self._view.scan(entry_key(parent, prefix), ino_range(ENTRY_TABLE, parent)[1]):
            other = key_name(key)
            if not other.startswith(prefix):
                break
            entry = EntryRecord.decode(value)
            alike = entry.dtype == DIRECTORY_DTYPE and family(other) == family(name)
            if alike and entry.ino != ino and entry.ino not in self._doubtful:
                found.append((_changed_ns(self._view, entry.ino), entry.ino))
        newest = [contents(self._view, sibling, self._names).names for _, sibling in sorted(found, reverse=True)[:2]]
        if len(newest) == 2 and newest[1] > newest[0]:
            return newest[1]
        return newest[0] if newest else None
