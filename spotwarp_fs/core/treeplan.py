"""What a walk means, as a list of things to do, and the known tree as it is after the steps of that list.

Invariant: each step is possible after those before it; nothing that is known is lost by a rename or a new name but a
file that was replaced by another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotwarp_fs.core.walked import Found, Known, KnownEntry


@dataclass(frozen=True, slots=True)
class Rename:
    """*source*, with all below it, gets the path *target*; a file that is known there is replaced."""

    source: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class Link:
    """*target* becomes one more name of the file at *source*; a file that is known there is replaced."""

    source: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget *path*, with all below it: confirmed, and something of another type has its name."""

    path: bytes


@dataclass(slots=True)
class Plan:
    """What to do, in this order: steps, appeared, links, changed; removals when all that was read."""

    steps: list[Found | Rename | Clear] = field(default_factory=list)
    """A Found is a directory that is new. Each is possible after those before it; all belong into one transaction."""
    appeared: list[Found] = field(default_factory=list)
    """Not directories; a new inode of the workspace, which replaces the file that is known there, if any."""
    links: list[Link] = field(default_factory=list)
    changed: list[Found] = field(default_factory=list)
    """Known there, after the steps, and not `clean`: attributes, content or both. Directories too."""
    removals: list[bytes] = field(default_factory=list)
    """Missing for good; paths after the steps, topmost only."""
    pending: dict[bytes, int] = field(default_factory=dict)
    """Missing, and kept: path after the steps → number of the walk that missed it first."""
    withheld: list[bytes] = field(default_factory=list)
    """Found, and ignored until what is known there is confirmed to be gone."""

    @property
    def renames(self) -> list[tuple[bytes, bytes]]:
        """The renames among the steps."""
        return [(step.source, step.target) for step in self.steps if isinstance(step, Rename)]

    @property
    def needs_complete_walk(self) -> bool:
        """Tell whether only a complete walk can settle what is left."""
        return bool(self.pending or self.withheld)


class Places:
    """Where known things are after the steps so far; the known tree itself is not changed."""

    def __init__(self, known: Known) -> None:
        root = known.get(b"")
        assert root is not None, "a known tree has a root"
        self._root = root
        self.steps: list[Found | Rename | Clear] = []
        self.moved: dict[KnownEntry, bytes] = {}
        self.gone: set[KnownEntry] = set()
        """Cleared, or replaced by a file."""
        self.settled: set[KnownEntry] = set()
        """Found to be where the tree has them now."""
        self._placed: dict[bytes, KnownEntry | None] = {}
        """What is at a path where something else was known, or nothing; None: it is new."""
        self._new_directories: set[bytes] = set()

    def at(self, path: bytes) -> KnownEntry | None:
        """Return the known thing that is at *path* now; None: nothing, or something new."""
        names = []
        here = path
        while here and here not in self._placed:
            here, _, name = here.rpartition(b"/")
            names.append(name)
        entry = self._placed.get(here, self._root)
        for name in reversed(names):
            entry = entry.children.get(name) if entry is not None and entry.children is not None else None
            if entry is None or entry in self.gone or entry in self.moved:
                return None
        return entry

    def now(self, entry: KnownEntry) -> bytes:
        """Return where *entry* is now."""
        names = []
        at: KnownEntry | None = entry
        while at is not None and at not in self.moved:
            names.append(at.name)
            at = at.parent
        if at is None:
            names.pop()  # the root's
            return b"/".join(reversed(names))
        return b"/".join([self.moved[at], *reversed(names)])

    def has_directory(self, path: bytes) -> bool:
        """Tell whether the directory that *path* lies in is there."""
        above = path.rpartition(b"/")[0]
        if above in self._new_directories:
            return True
        entry = self.at(above)
        return entry is not None and entry.children is not None

    def is_used(self, entry: KnownEntry) -> bool:
        """Tell whether *entry* has its place, or is gone, or is in something that is gone."""
        if entry in self.settled:
            return True
        at: KnownEntry | None = entry
        while at is not None and at not in self.gone:
            at = at.parent if at not in self.moved else None
        return at is not None

    def is_new(self, path: bytes) -> bool:
        """Tell whether something new, or something moved, is at *path*."""
        return path in self._placed

    def move(self, entry: KnownEntry, target: bytes) -> None:
        """Rename; what is at *target* is gone."""
        source, replaced = self.now(entry), self.at(target)
        self.steps.append(Rename(source, target))
        if self._placed.get(source) is entry:
            self._placed[source] = None
        if replaced is not None:
            self.gone.add(replaced)
        self.moved[entry] = target
        self._placed[target] = entry

    def clear(self, entry: KnownEntry, path: bytes) -> None:
        """Forget what is at *path*."""
        self.steps.append(Clear(path))
        self.gone.add(entry)

    def make_directory(self, found: Found) -> None:
        """Put a new directory where nothing is."""
        self.steps.append(found)
        self._placed[found.path] = None
        self._new_directories.add(found.path)

    def make_file(self, path: bytes) -> None:
        """Put a new file, or a new name of one, at *path*; what is there is gone."""
        replaced = self.at(path)
        if replaced is not None:
            self.gone.add(replaced)
        self._placed[path] = None
