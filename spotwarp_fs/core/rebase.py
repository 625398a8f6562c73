"""Plan how a base and the change sets after it become the next base, from published objects alone.

Invariant: the result equals applying the change sets one by one (core/changesets.py: `apply`), and a section that no
change concerns is taken over by reference: what is held in memory is bounded by the changes, not by the base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.core.changesets import NOTHING, ChangeSet, DropBlocks, Put, part_of, puts_of
from spotwarp_fs.core.sections import SECTION_BYTES, Root, Section, kind_of

SMALL_SECTION_BYTES: Final = SECTION_BYTES // 4
"""A section below this is written anew together with a neighbour that is, so that small ones do not pile up."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """This section stays as it is, where it is."""

    section: Section


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Load *section* if there is one, merge its puts (or *puts*) with *part*, write what comes out."""

    section: Section | None
    puts: Sequence[Put]
    part: ChangeSet


Step = Reuse | Rewrite


def plan_merge(base: Root | None, changes: ChangeSet) -> list[Step]:
    """Give the steps, in key order, that turn *base* into the next base; *changes* are folded (`changesets.fold`)."""
    if base is None or not base.sections:
        puts = puts_of(base.records) if base else ()
        return [Rewrite(None, puts, changes)] if puts or changes else []
    steps = list(_steps(base.sections, changes))
    return [_joined(steps, at) for at in range(len(steps))]


def merge_section(puts: Iterable[Put], part: ChangeSet) -> Iterator[Put]:
    """Apply *part* to sorted puts, streaming: what `apply` does to a dict, in key order and without one."""
    survivors = _without_dropped(puts, part.drops)
    changes = iter(part.changes)
    old = next(survivors, None)
    new = next(changes, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old[0] < new[0]):
            assert old is not None
            yield old
            old = next(survivors, None)
            continue
        if old is not None and old[0] == new[0]:
            old = next(survivors, None)
        if new[1] is not None:
            yield new[0], new[1]
        new = next(changes, None)


def _without_dropped(puts: Iterable[Put], drops: Sequence[DropBlocks]) -> Iterator[Put]:
    """Leave out what the drops cover; both are sorted, so each drop is looked at once."""
    waiting = iter(drops)
    drop = next(waiting, None)
    for key, value in puts:
        while drop is not None and drop.stop <= key:
            drop = next(waiting, None)
        if drop is None or key < drop.start:
            yield key, value


def _steps(sections: Sequence[Section], changes: ChangeSet) -> Iterator[Step]:
    """Cut the key space at the sections: each section's own keys, and the gaps between them."""
    gap_start = b""
    for section in sections:
        yield from _gap(changes, gap_start, section.first_key)
        gap_start = section.last_key + b"\0"
        part = part_of(changes, section.first_key, gap_start)
        if _covered(section, part):
            yield from [Rewrite(None, (), part)] if part.changes else []
        elif part:
            yield Rewrite(section, (), part)
        else:
            yield Reuse(section)
    yield from _gap(changes, gap_start, None)


def _gap(changes: ChangeSet, start: bytes, stop: bytes | None) -> Iterator[Step]:
    """Between sections there is nothing to drop, only puts to add (and deletes of what is not there)."""
    part = part_of(changes, start, stop)
    if part.changes:
        yield Rewrite(None, (), ChangeSet((), part.changes))


def _covered(section: Section, part: ChangeSet) -> bool:
    """Does one drop take the whole section away? Then it need not be loaded (a 300 GB file was deleted)."""
    return any(drop.start <= section.first_key and section.last_key < drop.stop for drop in part.drops)


def _joined(steps: Sequence[Step], at: int) -> Step:
    """Write a small section anew where a neighbour of its kind is."""
    step = steps[at]
    if isinstance(step, Rewrite) or step.section.frame.raw_bytes >= SMALL_SECTION_BYTES:
        return step
    beside = (*steps[max(at - 1, 0) : at], *steps[at + 1 : at + 2])
    if any(isinstance(other, Rewrite) and _same_kind(step.section, other) for other in beside):
        return Rewrite(step.section, (), NOTHING)
    return step


def _same_kind(section: Section, rewrite: Rewrite) -> bool:
    if rewrite.section is not None:
        return rewrite.section.kind is section.kind
    return any(kind_of(key) is section.kind for key, _ in rewrite.part.changes)
