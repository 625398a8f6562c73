"""Replace half-done things of a served state by whole versions out of older states, as one change set (P-05).

First everything half done is taken out of the tree, then older versions are put in its place, path by path, and last,
where no complete thing of a family or glob would be left, the newest complete one of any retained state is put back.
Invariant: after it, nothing that the served state lists as half done is there in that version, and everything else is
as it was (core/subtrees.py says how inode numbers and link counts come out right).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.inflight import DIRECTORY_DTYPE, family, join
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.policies import NameGlobs
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import ENTRY_TABLE, EntryRecord, block_key, ino_range, key_name
from spotwarp_fs.core.retention import State, touches, within
from spotwarp_fs.core.subtrees import BlockCopy, Copier, Tree, Views, record_of, resolve, split
from spotwarp_fs.core.takeover import Replacement
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode, ManifestNumber


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One line of the takeover's report."""

    path: bytes
    at: ManifestNumber
    """The state that has the half-done version."""
    source: ManifestNumber | None
    """Where the version served instead comes from; None: nothing is served at this path."""
    torn: bool

    def hint(self, workspace: str) -> str:
        """Give the command that fetches what was left out."""
        path = self.path.decode("utf-8", "backslashreplace")
        return f"spotwarp cp {shlex.quote(f'{workspace}:{path}')} DEST --at {self.at}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a takeover changes in the state it serves."""

    changes: dict[bytes, bytes | None]
    drops: dict[Inode, BlockIndex]
    copies: tuple[BlockCopy, ...]
    left_out: tuple[LeftOut, ...]
    put_back: tuple[tuple[bytes, ManifestNumber], ...]
    """Complete things that only an older state had, by path."""
    missing: tuple[bytes, ...]
    """Families and globs of which no retained state has a complete thing, or none that could be put back."""

    def change_set(self, blocks: Mapping[BlockCopy, Iterable[tuple[BlockIndex, bytes]]]) -> ChangeSet:
        """Complete the plan with the block rows (published form) of every one of `copies`."""
        rows = {block_key(copy.target, index): ref for copy in self.copies for index, ref in blocks[copy]}
        return ChangeSet.of(self.drops, self.changes | rows)


class Globs(Protocol):
    """What is atomic; `core.policies.Policies` is one."""

    @property
    def atomic(self) -> NameGlobs:
        """Globs of files."""
        ...

    @property
    def atomic_dirs(self) -> NameGlobs:
        """Globs of directories."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The state that a takeover serves, before anything in it is replaced."""

    number: ManifestNumber
    view: KVRead


@dataclass(frozen=True, slots=True)
class Older:
    """What may be taken from: the retained states, and a way to read each."""

    states: Sequence[State]
    views: Views


def replace_in_flight(
    served: Served,
    replacements: Sequence[Replacement],
    older: Older,
    globs: Globs,
    allocate: Callable[[], Inode],
    behind: Sequence[InFlightItem] = (),
) -> Plan:
    """Plan the served state without its half-done things.

    *behind* is what the head had in flight when an older state is served: of its kinds, too, something complete must be
    there. *allocate* gives fresh inode numbers.
    """
    tree = Tree(served.view)
    marked = {r.item.ino for r in replacements if r.item.kind == "file"}
    outermost = _outermost(r.item for r in replacements)
    found = [r for r in replacements if r.item.path in outermost and tree.remove(r.item.path)]
    copier = Copier(tree, older.views, allocate, marked)
    left_out = []
    for replacement in found:
        path, source = replacement.item.path, replacement.source
        placed = source is not None and copier.copy(source, path)
        left_out.append(LeftOut(path, served.number, source if placed else None, replacement.item.torn))
    rescue = _Rescue(tree, copier, [state for state in older.states if state.number != served.number], globs)
    outermost = _outermost(behind)
    put_back, missing = rescue.run([*(r.item for r in found), *(i for i in behind if i.path in outermost)])
    return Plan(tree.changes(), tree.drops, tuple(copier.copies), tuple(left_out), put_back, missing)


def _outermost(items: Iterable[InFlightItem]) -> set[bytes]:
    """Give the paths of those that do not lie in a directory which is half done as a whole."""
    every = list(items)
    directories = [item.path for item in every if item.kind == "directory"]
    return {item.path for item in every if not any(d != item.path and within(item.path, d) for d in directories)}


@dataclass(frozen=True, slots=True)
class _Rescue:
    """Sees to it that a program finds a complete thing of each kind that it lost, if there ever was one."""

    tree: Tree
    copier: Copier
    states: Sequence[State]
    globs: Globs

    def run(self, items: Sequence[InFlightItem]) -> tuple[tuple[tuple[bytes, ManifestNumber], ...], tuple[bytes, ...]]:
        """Return what was put back, and what could not be.

        The family (same directory, same name but for numbers) comes first, because a program looks there; a glob of the
        whole workspace could be satisfied by an unrelated file.
        """
        put_back: list[tuple[bytes, ManifestNumber]] = []
        missing: list[bytes] = []
        wanted = {(*split(item.path), item.kind == "directory") for item in items}
        families = {(above, family(name), directory) for above, name, directory in wanted}
        for above, kin, directory in sorted(families):
            if any(_alike(self.tree, above=above, kin=kin, directory=directory)):
                continue
            rescued = self._newest(partial(_alike, above=above, kin=kin, directory=directory))
            if rescued is None:
                missing.append(join(above, kin))
            else:
                put_back.append(rescued)
        for glob, directory in sorted(self._globs_of(wanted)):
            match = NameGlobs((glob,)).matches
            if any(_everywhere(self.tree, match=match, directory=directory)):
                continue
            rescued = self._newest(partial(_everywhere, match=match, directory=directory))
            if rescued is None:
                missing.append(glob.encode())
            else:
                put_back.append(rescued)
        return tuple(put_back), tuple(missing)

    def _globs_of(self, wanted: set[tuple[bytes, bytes, bool]]) -> set[tuple[str, bool]]:
        found = set()
        for _, name, directory in wanted:
            for glob in (self.globs.atomic_dirs if directory else self.globs.atomic).globs:
                if NameGlobs((glob,)).matches(name):
                    found.add((glob, directory))
        return found

    def _newest(self, search: Callable[[KVRead], Iterator[tuple[int, bytes]]]) -> tuple[bytes, ManifestNumber] | None:
        """Put the newest whole thing that *search* finds back, out of the newest state that has one."""
        for state in sorted(self.states, key=lambda state: state.number, reverse=True):
            for _, found in sorted(search(self.copier.views(state.number)), reverse=True):
                path = self._whole(found)
                if not touches(state.in_flight, path) and self.copier.copy(state.number, path):
                    return path, state.number
        return None

    def _whole(self, path: bytes) -> bytes:
        """Give the outermost atomic directory around *path* that is gone: no part of it comes back without the rest."""
        names = path.split(b"/")
        for depth, name in enumerate(names[:-1], 1):
            above = b"/".join(names[:depth])
            if self.globs.atomic_dirs.matches(name) and resolve(self.tree, above) is None:
                return above
        return path


def _alike(view: KVRead, *, above: bytes, kin: bytes, directory: bool) -> Iterator[tuple[int, bytes]]:
    """Give (ctime, path) of the things of one family in the directory *above*."""
    parent = resolve(view, above)
    if parent is None or parent.dtype != DIRECTORY_DTYPE:
        return
    for key, value in view.scan(*ino_range(ENTRY_TABLE, parent.ino)):
        entry = EntryRecord.decode(value)
        if (entry.dtype == DIRECTORY_DTYPE) == directory and family(key_name(key)) == kin:
            yield record_of(view, entry.ino).ctime_ns, join(above, key_name(key))


def _everywhere(view: KVRead, *, match: Callable[[bytes], bool], directory: bool) -> Iterator[tuple[int, bytes]]:
    """Give (ctime, path) of everything in the tree whose name matches."""
    pending = [(ROOT_INODE, b"")]
    while pending:
        parent, above = pending.pop()
        for key, value in view.scan(*ino_range(ENTRY_TABLE, parent)):
            entry, path = EntryRecord.decode(value), join(above, key_name(key))
            if entry.dtype == DIRECTORY_DTYPE:
                pending.append((entry.ino, path))
            if (entry.dtype == DIRECTORY_DTYPE) == directory and match(key_name(key)):
                yield record_of(view, entry.ino).ctime_ns, path
