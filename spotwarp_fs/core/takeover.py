"""Decide which state a takeover serves, and write going back as changes on top of the head (P-05, L3, L8, L12).

Served is, in this order: the head, if nothing was in flight at its cut; the newest quiescent state, if it is young
enough and nothing was promised since; else the head, with each thing in flight replaced by its newest complete version.
Torn things are replaced in all three: they do not make a state worse to fall back to, but they are half files all the
same, and a program that resumes from the newest name would load them. Invariants: no state that answered a barrier is
gone behind; going back touches tree keys only, so that names, retention and condemned packs stay as the head has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.inflight import AtomicNames, Names, join
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    InodeRecord,
    inode_key,
    key_ino,
)
from spotwarp_fs.core.retention import State, newest_quiescent, source_of
from spotwarp_fs.core.types import BlockIndex, Inode, ManifestNumber

ATOMIC_MAX_AGE_S: Final = 900.0
_FORMAT_BITS: Final = 0o170000
_REGULAR: Final = 0o100000


@dataclass(frozen=True, slots=True)
class Replacement:
    """A half-done thing, and the newest retained state in which its path was whole (None: in no state we have)."""

    item: InFlightItem
    source: ManifestNumber | None


@dataclass(frozen=True, slots=True)
class ServeHead:
    """Nothing was half done at the head's cut."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """Everything takes its value of state *to*."""

    to: ManifestNumber
    replaced: tuple[Replacement, ...]
    """Torn things that are half done there as well."""
    behind: tuple[InFlightItem, ...]
    """What the head had in flight."""


@dataclass(frozen=True, slots=True)
class ServeHeadWithout:
    """The head, with its half-done things replaced."""

    replaced: tuple[Replacement, ...]
    kept_for: ManifestNumber | None
    """The answered barrier that forbade an older state, if that was the reason."""


Serve = ServeHead | GoBack | ServeHeadWithout


def decide(
    states: Sequence[State],
    retained: Iterable[ManifestNumber],
    atomic_max_age_s: float = ATOMIC_MAX_AGE_S,
) -> Serve:
    """Decide what a takeover of the head serves.

    *states* are all the manifests that were read, the head among them, and it is no error to have read too few: a
    manifest between the quiescent state and the head that is missing counts as one that answered a barrier. Only
    *retained* ones are gone back to or taken from. Ages are differences of server time.
    """
    head = max(states, key=lambda state: state.number)
    usable = set(retained)
    whole = [state for state in states if state.number in usable or state.number == head.number]
    if head.quiescent:
        return ServeHeadWithout(_replacements(head, whole), None) if head.in_flight else ServeHead()
    quiescent = newest_quiescent(whole)
    barrier: ManifestNumber | None = None
    if quiescent is not None and head.created_s - quiescent.created_s <= atomic_max_age_s:
        barrier = _barrier_after(quiescent.number, head.number, states)
        if barrier is None:
            return GoBack(quiescent.number, _replacements(quiescent, whole), head.in_flight)
    return ServeHeadWithout(_replacements(head, whole), barrier)


def _barrier_after(quiescent: ManifestNumber, head: ManifestNumber, states: Iterable[State]) -> ManifestNumber | None:
    """Return the newest manifest after *quiescent* that answered a barrier, or may have."""
    silent = {state.number for state in states if not state.barrier}
    return next((ManifestNumber(n) for n in range(head, quiescent, -1) if n not in silent), None)


def _replacements(served: State, whole: Iterable[State]) -> tuple[Replacement, ...]:
    states = list(whole)
    return tuple(Replacement(item, source_of(item.path, states, upto=served.number)) for item in served.in_flight)


def blocks_needed(after: ChangeSet) -> set[Inode]:
    """Tell whose block maps of the older state `going_back` will read: the engine loads these first."""
    touched = {key_ino(key) for key, _ in after.changes if key[:1] == BLOCK_TABLE}
    return touched | {drop.ino for drop in after.drops}


def going_back(after: ChangeSet, older: KVRead) -> ChangeSet:
    """Give the changes that bring every tree key which *after* touched back to its value in *older*.

    *after* is the fold of all change sets between the older state and the head.
    """
    drops: dict[Inode, BlockIndex] = {}
    changes: dict[bytes, bytes | None] = {}
    for drop in after.drops:
        if older.get(inode_key(drop.ino)) is None:
            drops[drop.ino] = BlockIndex(0)
        changes.update(older.scan(drop.start, drop.stop))
    for key, _ in after.changes:
        table = key[:1]
        if table not in TREE_TABLES:
            continue
        value = older.get(key)
        if value is None and table == BLOCK_TABLE and older.get(inode_key(key_ino(key))) is None:
            # A file that did not exist yet: one drop instead of a deletion per block.
            drops[key_ino(key)] = BlockIndex(0)
        else:
            changes[key] = value
    return ChangeSet.of(drops, changes)


def lost_files(after: ChangeSet, head: KVRead, names: AtomicNames) -> Iterator[bytes]:
    """Give the paths, in the head, of regular files that going back takes changes from: what a report must name."""
    places = Names(head, names)
    for key, value in after.changes:
        if key[:1] != INODE_TABLE or value is None:
            continue
        if InodeRecord.decode(value).mode & _FORMAT_BITS != _REGULAR:
            continue
        for parent, name in places.of(key_ino(key)):
            place = places.place(parent)
            if place is not None:
                yield join(place.path, name)
