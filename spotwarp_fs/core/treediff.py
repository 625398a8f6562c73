"""Decide what a walk means: what was renamed, is linked, is new, has changed, and what may be forgotten (C19).

Invariants: a name that is missing is forgotten only when a complete walk that began after that has missed it again
(additions before deletions), or when the very file that it led to is there under another name; nothing that stands in
the way of a thing of another type is forgotten earlier either: the new thing is withheld until then.

What counts as the same file: the numbers (`st_dev`, `st_ino`) are used again at once after a removal, so a rename is
believed only if size and mtime are as they were too (of a placeholder, which is held open: the size). A directory must
have its mtime, or hold a file that is believed. Where that fails the thing is new, and is read.

A file saved over another one of its type replaces it at once, as rename(2) does. If that other one went to a directory
that had been listed before, the next walk finds it there.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from typing import Final

from spotwarp_fs.core.treeplan import Link, Places, Plan
from spotwarp_fs.core.walked import (
    Found,
    Known,
    KnownEntry,
    Walked,
    is_at_or_below,
    is_clean,
    join,
    path_of,
    same_type,
)
from spotwarp_fs.core.witness import StatResult

PASSES_MAX: Final = 8
"""Things that wait for one another to move away: longer chains are taken apart."""
EVIDENCE_LOOKS_MAX: Final = 10_000
"""So many things in a directory are looked at to find one that shows that it is the same directory."""
PARKING: Final = b".spotwarp-moving"
"""Where a file is between two steps when it is in the way of another one, with a number behind it."""


def plan(walked: Walked, known: Known, pending: Mapping[bytes, int], number: int) -> Plan:
    """Decide about walk *number*, which began after every walk with a smaller number was decided about.

    *pending* is what the plan before said; *known* is not changed.
    """
    planner = _Planner(walked, known, pending, number)
    planner.directories()
    planner.files()
    planner.missing()
    return planner.plan


class _Planner:
    """One walk being decided about."""

    def __init__(self, walked: Walked, known: Known, pending: Mapping[bytes, int], number: int) -> None:
        self._places = Places(known)
        self.plan = Plan(self._places.steps)
        self._walked = walked
        self._known = known
        self._pending = pending
        self._number = number
        self._found = _without_stale(walked.found)
        self._by_identity: dict[tuple[int, int], list[Found]] = {}
        for found in self._found.values():
            self._by_identity.setdefault(_identity(found.status), []).append(found)
        self._vanished = set(walked.vanished)
        self._unseen = {path for path, _ in walked.unreadable} | set(walked.other_filesystems)
        self._twins: dict[tuple[int, int], tuple[bytes, int | None]] = {}
        """Files with several names: where the first of them is, and its inode in the workspace (None: new)."""
        self._parked = 0

    def _is_elsewhere(self, entry: KnownEntry) -> bool:
        """Tell whether a file or directory that is not at its path has been found at another one."""
        witness = entry.witness
        if witness is None:
            return False
        for found in self._by_identity.get((witness.dev, witness.ino), ()):
            there = self._places.at(found.path)
            arrived = there is None or there.witness is None or not there.witness.same_file(found.status)
            if arrived and self._is_believed(entry, found):
                return True
        return False

    def _is_believed(self, entry: KnownEntry, found: Found) -> bool:
        """Tell whether *found* is what *entry* was; of a directory, also by something that it still holds."""
        if _unaltered(entry, found.status):
            return True
        pending = [(entry, found)]
        looks = 0
        while pending and looks < EVIDENCE_LOOKS_MAX:
            above, at = pending.pop()
            for name, child in (above.children or {}).items():
                looks += 1
                below = self._found.get(join(at.path, name))
                if below is not None and child.witness is not None and child.witness.same_file(below.status):
                    if _unaltered(child, below.status):
                        return True
                    pending.append((child, below))
        return False

    # Steps.

    def _rename(self, entry: KnownEntry, found: Found) -> None:
        self._places.move(entry, found.path)
        self._keep(entry, found)

    def _keep(self, entry: KnownEntry, found: Found) -> None:
        self._places.settled.add(entry)
        if not is_clean(entry.witness, found.status):
            self.plan.changed.append(found)

    def _may_clear(self, entry: KnownEntry) -> bool:
        return self._walked.complete and self._first_missed(entry) < self._number and not self._is_elsewhere(entry)

    # Directories: parents before children, and again as long as one makes way for another.

    def directories(self) -> None:
        """Settle every directory that was found."""
        waiting = [found for found in self._found.values() if stat.S_ISDIR(found.status.st_mode)]
        for _ in range(PASSES_MAX):
            before = len(waiting)
            waiting = [found for found in waiting if not self._directory(found, may_wait=True)]
            if len(waiting) in (0, before):
                break
        for found in waiting:
            self._directory(found, may_wait=False)

    def _directory(self, found: Found, *, may_wait: bool) -> bool:
        """Settle one directory; False: what is in its way may still move."""
        path = found.path
        if path and not self._places.has_directory(path):
            return not may_wait
        here = self._places.at(path)
        if here is not None and here.children is None:
            if self._is_elsewhere(here):
                self._park(here)
            elif not self._may_clear(here):
                self.plan.withheld.append(path)
                return True
            else:
                self._places.clear(here, path)
            here = None
        if here is None:
            source = self._source_of_directory(found)
            if source is not None:
                self._rename(source, found)
            else:
                self._places.make_directory(found)
            return True
        same = here.witness is None or here.witness.same_file(found.status)
        if may_wait and path and not same and self._is_elsewhere(here):
            return False
        # Another directory than the one known here: the names are what counts, and its files come one by one.
        self._keep(here, found)
        return True

    def _source_of_directory(self, found: Found) -> KnownEntry | None:
        for entry in self._known.entries_by_identity(*_identity(found.status)):
            if (
                entry.children is not None
                and entry.parent is not None
                and not self._places.is_used(entry)
                and not is_at_or_below(found.path, self._places.now(entry))
                and self._is_believed(entry, found)
            ):
                return entry
        return None

    # Files, and everything else that is not a directory.

    def files(self) -> None:
        """Settle everything else that was found."""
        waiting, blocked = [], []
        for found in self._found.values():
            if stat.S_ISDIR(found.status.st_mode) or not self._places.has_directory(found.path):
                continue
            here = self._places.at(found.path)
            if here is not None and (here.children is not None or not same_type(here.witness, found.status)):
                blocked.append(found)
            elif here is not None and (here.witness is None or here.witness.same_file(found.status)):
                self._in_place(here, found)
            else:
                waiting.append(found)
        self._waiting(waiting)
        for found in blocked:
            self._blocked(found)

    def _waiting(self, waiting: list[Found]) -> None:
        """Settle what is not at its known place, one after the other as the places become free."""
        for _ in range(PASSES_MAX):
            before = len(waiting)
            waiting = [found for found in waiting if not self._file(found)]
            if len(waiting) in (0, before):
                break
        for found in waiting:
            # Circles of renames, and long chains: everything in the way goes aside first.
            here = self._places.at(found.path)
            if here is not None:
                self._park(here)
        for found in waiting:
            self._file(found)

    def _in_place(self, here: KnownEntry, found: Found) -> None:
        twin = self._twin(found) if found.status.st_nlink > 1 else None
        if twin is not None and twin[1] != here.ino:
            self._link(twin[0], found)
        else:
            self._keep(here, found)

    def _twin(self, found: Found) -> tuple[bytes, int | None] | None:
        """Return another name of a file with several; the first one found becomes the one for all others."""
        identity = _identity(found.status)
        twin = self._twins.get(identity)
        if twin is None:
            here = self._places.at(found.path)
            for entry in self._known.entries_by_identity(*identity):
                if entry is not here and _unaltered(entry, found.status) and self._is_still_there(entry):
                    twin = self._twins[identity] = (self._places.now(entry), entry.ino)
                    break
        if twin is None:
            here = self._places.at(found.path)
            same = here is not None and (here.witness is None or here.witness.same_file(found.status))
            self._twins[identity] = (found.path, here.ino if here is not None and same else None)
        return twin

    def _is_still_there(self, entry: KnownEntry) -> bool:
        if entry in self._places.settled:
            return True
        path = path_of(entry)
        return path not in self._found and not self._is_below(path, self._vanished) and not self._places.is_used(entry)

    def _link(self, source: bytes, found: Found) -> None:
        self._places.make_file(found.path)
        self.plan.links.append(Link(source, found.path))

    def _file(self, found: Found) -> bool:
        """Settle a file that is not the one known there; False: that one has to move first."""
        here = self._places.at(found.path)
        if here is not None and self._is_elsewhere(here):
            return False
        source = self._source_of_file(found)
        if found.status.st_nlink > 1:
            twin = self._twins.get(_identity(found.status)) if source is not None else self._twin(found)
            if twin is not None and (source is None or twin[1] != source.ino):
                self._link(twin[0], found)
                return True
            if source is not None:
                self._twins.setdefault(_identity(found.status), (found.path, source.ino))
        if source is not None:
            self._rename(source, found)
        elif here is not None and len(self._known.entries_by_inode(here.ino)) == 1:
            self._keep(here, found)
        else:
            self._places.make_file(found.path)
            self.plan.appeared.append(found)
        return True

    def _source_of_file(self, found: Found) -> KnownEntry | None:
        """Return what was renamed to this path: a file with one name cannot be at its old one any more."""
        for entry in self._known.entries_by_identity(*_identity(found.status)):
            if (
                entry.children is None
                and not self._places.is_used(entry)
                and _unaltered(entry, found.status)
                and (found.status.st_nlink == 1 or not self._is_still_there(entry))
            ):
                return entry
        return None

    def _park(self, entry: KnownEntry) -> None:
        """Put a file aside that is in the way, and has been found elsewhere: it goes there in a later step.

        If that place turns out to be withheld, the file keeps the odd name until the next walk.
        """
        while self._known.get(PARKING + b"%d" % self._parked) is not None:
            self._parked += 1
        self._places.move(entry, PARKING + b"%d" % self._parked)
        self._parked += 1

    def _blocked(self, found: Found) -> None:
        """Settle a file that has the name of a thing of another type."""
        here = self._places.at(found.path)
        if here is not None:
            if not self._may_clear(here):
                self.plan.withheld.append(found.path)
                return
            for entry in self._held_back(here):
                self._park(entry)
            self._places.clear(here, found.path)
        self._file(found)

    def _held_back(self, entry: KnownEntry) -> list[KnownEntry]:
        """Return what is in or below *entry* and has been found elsewhere, at a place that it cannot have yet."""
        waiting = {
            _identity(found.status): found
            for found in self._found.values()
            if not self._places.is_new(found.path) and not self._is_placed(found)
        }
        held, pending = [], [entry] if waiting else []
        while pending:
            entry = pending.pop()
            if self._places.is_used(entry) or entry in self._places.moved:
                continue
            witness = entry.witness
            if entry.children is not None:
                pending.extend(entry.children.values())
            elif witness is not None:
                found = waiting.get((witness.dev, witness.ino))
                if found is not None and _unaltered(entry, found.status):
                    held.append(entry)
        return held

    def _is_placed(self, found: Found) -> bool:
        entry = self._places.at(found.path)
        return entry is not None and entry in self._places.settled

    # What is missing.

    def missing(self) -> None:
        """Decide what is kept and what is forgotten of that which was not found."""
        missing = self._missing_entries()
        removals: set[bytes] = set()
        for entry in missing:
            self._miss(entry, self._first_missed(entry), removals)
        for path, first in self._pending.items():
            kept = self._known.get(path)
            if kept is None or kept in missing or self._places.is_used(kept) or kept in self._places.moved:
                continue
            if any(above in missing for above in _above(kept)):
                self._miss(kept, first, removals)
            elif not self._was_looked_for(path):
                self.plan.pending[self._places.now(kept)] = first
        self.plan.removals = sorted(path for path in removals if not self._is_below(path, removals - {path}))

    def _miss(self, entry: KnownEntry, first: int, removals: set[bytes]) -> None:
        if self._walked.complete and first < self._number and not self._held_back(entry):
            removals.add(self._places.now(entry))
        else:
            self.plan.pending[self._places.now(entry)] = first

    def _missing_entries(self) -> set[KnownEntry]:
        """Topmost only. What lies below a directory that is new here, or another one, was all reported as found."""
        missing: set[KnownEntry] = set()
        pending = [entry for path in self._walked.vanished if (entry := self._known.get(path)) is not None]
        while pending:
            entry = pending.pop()
            if entry in self._places.gone:
                continue
            if entry not in self._places.settled:
                if not self._is_below(self._places.now(entry), self._unseen):
                    missing.add(entry)
            elif entry.children is not None:
                pending.extend(entry.children.values())
        return missing

    def _first_missed(self, entry: KnownEntry) -> int:
        path, first = path_of(entry), self._number
        while path:
            first = min(first, self._pending.get(path, first))
            path = path.rpartition(b"/")[0]
        return first

    def _was_looked_for(self, path: bytes) -> bool:
        """Tell whether the walk would have missed *path*, were it missing."""
        if self._is_below(path, self._unseen):
            return False
        return self._walked.directories is None or path.rpartition(b"/")[0] in self._walked.directories

    def _is_below(self, path: bytes, paths: set[bytes]) -> bool:
        while path not in paths and path:
            path = path.rpartition(b"/")[0]
        return path in paths


def _identity(status: StatResult) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _unaltered(entry: KnownEntry, status: StatResult) -> bool:
    """Tell whether this is what was seen, at whatever path, with the content that it had."""
    witness = entry.witness
    return (
        witness is not None
        and witness.same_file(status)
        and same_type(witness, status)
        and (witness.size == status.st_size or entry.children is not None)
        and (witness.mtime_ns == status.st_mtime_ns or witness.absent)
    )


def _above(entry: KnownEntry) -> list[KnownEntry]:
    found = []
    while entry.parent is not None:
        entry = entry.parent
        found.append(entry)
    return found


def _without_stale(found: list[Found]) -> dict[bytes, Found]:
    """By path. A thing with one name that was found under two has moved during the walk: the later look counts."""
    last: dict[tuple[int, int, int], bytes] = {}
    for each in found:
        last[(*_identity(each.status), stat.S_IFMT(each.status.st_mode))] = each.path
    return {
        each.path: each
        for each in found
        if (each.status.st_nlink > 1 and not stat.S_ISDIR(each.status.st_mode))
        or last[(*_identity(each.status), stat.S_IFMT(each.status.st_mode))] == each.path
    }
