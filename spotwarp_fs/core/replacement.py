"""Replace half-done things of a served state by whole versions out of older states, as one change set (P-05).

First everything half done is taken out of the tree, then older versions are put in its place, path by path, and last,
where no complete thing of a family or glob would be left, the newest complete one of any retained state is put back.
Invariants: link counts are counted anew (M-a); an inode number is kept if the served state has no use for it, or if it
is the half-done file itself, and is fresh otherwise, so that nothing that was not half done changes its content; a
directory above keeps its times, so that no program takes an old checkpoint for the newest.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.inflight import DIRECTORY_DTYPE, family, join
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.policies import NameGlobs
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    ENTRY_TABLE,
    XATTR_TABLE,
    EntryRecord,
    InodeRecord,
    block_key,
    entry_key,
    ino_range,
    inode_key,
    key_name,
    xattr_key,
)
from spotwarp_fs.core.retention import State, touches, within
from spotwarp_fs.core.takeover import Replacement
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode, ManifestNumber

Views = Callable[[ManifestNumber], KVRead]
"""A retained state, of which only names, inodes and xattrs need to be loaded."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The blocks of *target* become those that *ino* has in state *source*."""

    source: ManifestNumber
    ino: Inode
    target: Inode


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


def replace_in_flight(
    served: KVRead,
    at: ManifestNumber,
    replacements: Sequence[Replacement],
    views: Views,
    states: Iterable[State],
    globs: Globs,
    allocate: Callable[[], Inode],
) -> Plan:
    """Plan the state *at* without its half-done things.

    *states* are the retained ones that something may be put back from; *allocate* gives fresh inode numbers.
    """
    tree = _Tree(served)
    outermost = _outermost(replacements)
    marked = {r.item.ino for r in replacements if r.item.kind == "file"}
    found = [r for r in outermost if tree.remove(r.item.path)]
    copier = _Copier(tree, views, allocate, marked)
    left_out = []
    for replacement in found:
        path, source = replacement.item.path, replacement.source
        placed = source is not None and copier.copy(source, path)
        left_out.append(LeftOut(path, at, source if placed else None, replacement.item.torn))
    put_back, missing = _Rescue(tree, copier, at, states, globs).run([r.item for r in found])
    return Plan(tree.changes(), tree.drops, tuple(copier.copies), tuple(left_out), put_back, missing)


def _outermost(replacements: Sequence[Replacement]) -> list[Replacement]:
    """Leave out what lies in a directory that is replaced as a whole."""
    directories = [r.item.path for r in replacements if r.item.kind == "directory"]
    return [r for r in replacements if not any(d != r.item.path and within(r.item.path, d) for d in directories)]


def resolve(view: KVRead, path: bytes) -> EntryRecord | None:
    """Follow *path* from the root by entries alone (a symlink on the way leads nowhere)."""
    entry = EntryRecord(ROOT_INODE, DIRECTORY_DTYPE)
    for name in path.split(b"/") if path else ():
        value = view.get(entry_key(entry.ino, name))
        if value is None:
            return None
        entry = EntryRecord.decode(value)
    return entry


def _split(path: bytes) -> tuple[bytes, bytes]:
    parent, _, name = path.rpartition(b"/")
    return parent, name


_PREFIX_BYTES: Final = 9
"""Table and inode: every key of the tree begins with them, and every scan here stays within them."""


@dataclass(slots=True)
class _Tree:
    """The served state with changes on top; of blocks it only knows that they are dropped."""

    below: KVRead
    drops: dict[Inode, BlockIndex] = field(default_factory=dict)
    _changes: dict[bytes, dict[bytes, bytes | None]] = field(default_factory=dict)

    def changes(self) -> dict[bytes, bytes | None]:
        """What differs from the served state."""
        every = (item for rows in self._changes.values() for item in rows.items())
        return {key: value for key, value in every if self.below.get(key) != value}

    def set(self, key: bytes, value: bytes | None) -> None:
        """Put or delete a row."""
        self._changes.setdefault(key[:_PREFIX_BYTES], {})[key] = value

    def get(self, key: bytes) -> bytes | None:
        """Read through the changes."""
        fresh = self._changes.get(key[:_PREFIX_BYTES], {})
        return fresh[key] if key in fresh else self.below.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Read all rows of one inode in one table through the changes."""
        assert len(start) == _PREFIX_BYTES, start
        fresh = self._changes.get(start)
        if fresh is None:
            yield from self.below.scan(start, stop)
            return
        rows = {key: value for key, value in self.below.scan(start, stop) if key not in fresh}
        rows |= {key: value for key, value in fresh.items() if value is not None}
        yield from sorted(rows.items())

    def record(self, ino: Inode) -> InodeRecord | None:
        """Return the inode, or None."""
        value = self.get(inode_key(ino))
        return InodeRecord.decode(value) if value is not None else None

    def put_record(self, ino: Inode, record: InodeRecord) -> None:
        """Set the inode."""
        self.set(inode_key(ino), record.encode())

    def link(self, ino: Inode, count: int) -> int:
        """Add to the link count; returns the new one."""
        record = self.record(ino)
        assert record is not None, f"inode {ino} has a name and no record"
        self.put_record(ino, replace(record, nlink=record.nlink + count))
        return record.nlink + count

    def enter(self, parent: Inode, name: bytes, entry: EntryRecord) -> None:
        """Add a name; the parent's times stay."""
        self.set(entry_key(parent, name), entry.encode())
        if entry.dtype == DIRECTORY_DTYPE:
            self.link(parent, 1)

    def remove(self, path: bytes) -> bool:
        """Take *path* and all below it out; False when there is no such path."""
        above, name = _split(path)
        parent, entry = resolve(self, above), resolve(self, path)
        if parent is None or entry is None:
            return False
        self.set(entry_key(parent.ino, name), None)
        if entry.dtype == DIRECTORY_DTYPE:
            self.link(parent.ino, -1)
        doomed = [entry]
        while doomed:
            entry = doomed.pop()
            if entry.dtype == DIRECTORY_DTYPE:
                for key, value in list(self.scan(*ino_range(ENTRY_TABLE, entry.ino))):
                    self.set(key, None)
                    doomed.append(EntryRecord.decode(value))
                self._erase(entry.ino)
            elif self.link(entry.ino, -1) == 0:
                self._erase(entry.ino)
        return True

    def _erase(self, ino: Inode) -> None:
        self.set(inode_key(ino), None)
        self.clear(ino)

    def clear(self, ino: Inode) -> None:
        """Drop xattrs and blocks of *ino*."""
        for key, _ in list(self.scan(*ino_range(XATTR_TABLE, ino))):
            self.set(key, None)
        if self.below.get(inode_key(ino)) is not None:
            self.drops[ino] = BlockIndex(0)


@dataclass(slots=True)
class _Copier:
    """Puts things of older states into the tree."""

    tree: _Tree
    views: Views
    allocate: Callable[[], Inode]
    marked: set[Inode]
    """Half-done files: their numbers, and nobody else's, may be used while they still have a name."""
    copies: list[BlockCopy] = field(default_factory=list)
    _targets: dict[tuple[ManifestNumber, Inode], Inode] = field(default_factory=dict)
    """What a file of an older state has become, so that its hard links find each other again."""

    def copy(self, source: ManifestNumber, path: bytes) -> bool:
        """Put *path*, with all below it, as it was in *source*; False when it was not there or its place is taken."""
        view = self.views(source)
        entry = resolve(view, path)
        if entry is None or resolve(self.tree, path) is not None:
            return False
        above, name = _split(path)
        parent = self._directory(view, above)
        if parent is None:
            return False
        pending = [(parent, name, entry)]
        while pending:
            parent, name, entry = pending.pop()
            if entry.dtype != DIRECTORY_DTYPE:
                self.tree.enter(parent, name, EntryRecord(self._file(source, view, entry.ino), entry.dtype))
                continue
            target = self._put_directory(view, entry.ino)
            self.tree.enter(parent, name, EntryRecord(target, entry.dtype))
            for key, value in view.scan(*ino_range(ENTRY_TABLE, entry.ino)):
                pending.append((target, key_name(key), EntryRecord.decode(value)))
        return True

    def _directory(self, view: KVRead, path: bytes) -> Inode | None:
        """Return the directory at *path*, recreated as it was if it is gone; None if something else took its place."""
        at, walked = ROOT_INODE, b""
        for name in path.split(b"/") if path else ():
            walked = join(walked, name)
            value = self.tree.get(entry_key(at, name))
            if value is None:
                old = resolve(view, walked)
                assert old is not None, f"{path!r} was resolved in this state"
                target = self._put_directory(view, old.ino)
                self.tree.enter(at, name, EntryRecord(target, DIRECTORY_DTYPE))
                at = target
                continue
            entry = EntryRecord.decode(value)
            if entry.dtype != DIRECTORY_DTYPE:
                return None
            at = entry.ino
        return at

    def _put_directory(self, view: KVRead, ino: Inode) -> Inode:
        target = ino if self.tree.record(ino) is None else self.allocate()
        self.tree.put_record(target, replace(_record(view, ino), nlink=2))
        self._put_xattrs(view, ino, target)
        return target

    def _file(self, source: ManifestNumber, view: KVRead, ino: Inode) -> Inode:
        known = self._targets.get((source, ino))
        if known is not None:
            self.tree.link(known, 1)
            return known
        here = self.tree.record(ino)
        target = ino if here is None or ino in self.marked else self.allocate()
        self.marked.discard(ino)
        links = here.nlink if here is not None and target == ino else 0
        record = _record(view, ino)
        self.tree.clear(target)
        self.tree.put_record(target, replace(record, nlink=links + 1))
        self._put_xattrs(view, ino, target)
        if stat.S_ISREG(record.mode) and record.size:
            self.copies.append(BlockCopy(source, ino, target))
        self._targets[source, ino] = target
        return target

    def _put_xattrs(self, view: KVRead, ino: Inode, target: Inode) -> None:
        for key, value in view.scan(*ino_range(XATTR_TABLE, ino)):
            self.tree.set(xattr_key(target, key_name(key)), value)


def _record(view: KVRead, ino: Inode) -> InodeRecord:
    value = view.get(inode_key(ino))
    assert value is not None, f"inode {ino} has a name and no record"
    return InodeRecord.decode(value)


@dataclass(frozen=True, slots=True)
class _Rescue:
    """Sees to it that a program finds a complete thing of each kind that it lost, if there ever was one."""

    tree: _Tree
    copier: _Copier
    at: ManifestNumber
    states: Iterable[State]
    globs: Globs

    def run(self, items: Sequence[InFlightItem]) -> tuple[tuple[tuple[bytes, ManifestNumber], ...], tuple[bytes, ...]]:
        """Return what was put back, and what could not be.

        The family (same directory, same name but for numbers) comes first, because a program looks there; a glob of the
        whole workspace could be satisfied by an unrelated file.
        """
        put_back: list[tuple[bytes, ManifestNumber]] = []
        missing: list[bytes] = []
        wanted = {(*_split(item.path), item.kind == "directory") for item in items}
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
            if state.number == self.at:
                continue
            for _, path in sorted(search(self.copier.views(state.number)), reverse=True):
                if not touches(state.in_flight, path) and self.copier.copy(state.number, path):
                    return path, state.number
        return None


def _alike(view: KVRead, *, above: bytes, kin: bytes, directory: bool) -> Iterator[tuple[int, bytes]]:
    """Give (ctime, path) of the things of one family in the directory *above*."""
    parent = resolve(view, above)
    if parent is None or parent.dtype != DIRECTORY_DTYPE:
        return
    for key, value in view.scan(*ino_range(ENTRY_TABLE, parent.ino)):
        entry = EntryRecord.decode(value)
        if (entry.dtype == DIRECTORY_DTYPE) == directory and family(key_name(key)) == kin:
            yield _record(view, entry.ino).ctime_ns, join(above, key_name(key))


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
                yield _record(view, entry.ino).ctime_ns, path
