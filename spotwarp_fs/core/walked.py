"""What a walk over a plain directory brought back, and what of the known tree is compared with it.

Invariant: paths are bytes relative to the root, without a leading slash; `b""` is the root itself.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, StatResult, Witness

CONTROL_DIRECTORY: Final = b".spotwarp"
"""At the root, and never part of the workspace."""
_CONTENT_STANDS: Final = Seen.TRUSTED | Seen.ABSENT | Seen.LATE


@dataclass(frozen=True, slots=True)
class Found:
    """Something that needs attention: it is new, or not what was last seen of it, or not settled yet."""

    path: bytes
    status: StatResult


@dataclass(frozen=True, slots=True)
class Walked:
    """One walk."""

    found: list[Found] = field(default_factory=list)
    """Parents before children, and otherwise in the order in which they were looked at."""
    vanished: list[bytes] = field(default_factory=list)
    """Known paths where nothing is, or a thing of another type, or another directory; topmost only."""
    complete: bool = True
    """Every directory was listed, but for those that only root may read."""
    unreadable: list[tuple[bytes, str]] = field(default_factory=list)
    """What could not be looked at, and why; nothing is known to have happened there."""
    other_filesystems: list[bytes] = field(default_factory=list)
    """Mount points inside: not entered."""
    directories: frozenset[bytes] | None = None
    """Which directories were asked for; None: all."""


class KnownEntry(Protocol):
    """What was last seen at one path."""

    @property
    def ino(self) -> Inode:
        """Inode number in the workspace."""
        ...

    @property
    def witness(self) -> Witness | None:
        """The last look, if there was one."""
        ...

    @property
    def children(self) -> Mapping[bytes, KnownEntry] | None:
        """By name; None: not a directory."""
        ...

    @property
    def parent(self) -> KnownEntry | None:
        """The directory that holds it; None: the root."""
        ...

    @property
    def name(self) -> bytes:
        """The last part of its path."""
        ...


class Known(Protocol):
    """The known tree, as far as a walk is compared with it."""

    def get(self, path: bytes) -> KnownEntry | None:
        """Return what is known at *path*."""
        ...

    def entries_by_identity(self, dev: int, ino: int) -> Sequence[KnownEntry]:
        """Return what was last seen with these numbers of the real filesystem."""
        ...

    def entries_by_inode(self, ino: Inode) -> Sequence[KnownEntry]:
        """Return every name of an inode of the workspace."""
        ...


def is_clean(witness: Witness | None, status: StatResult) -> bool:
    """Tell whether there is nothing to do about a path that is still where it was."""
    if witness is None or not witness.unchanged(status):
        return False
    return not stat.S_ISREG(status.st_mode) or bool(witness.seen & _CONTENT_STANDS)


def same_type(witness: Witness | None, status: StatResult) -> bool:
    """Tell whether the thing that is there now is of the known type."""
    return witness is None or stat.S_IFMT(witness.mode) == stat.S_IFMT(status.st_mode)


def join(path: bytes, name: bytes) -> bytes:
    """One step down."""
    return path + b"/" + name if path else name


def path_of(entry: KnownEntry) -> bytes:
    """Return where *entry* is known to be."""
    names = []
    while entry.parent is not None:
        names.append(entry.name)
        entry = entry.parent
    return b"/".join(reversed(names))


def is_at_or_below(path: bytes, above: bytes) -> bool:
    """Tell whether *path* is *above* or lies somewhere below it."""
    return path == above or not above or path.startswith(above + b"/")
