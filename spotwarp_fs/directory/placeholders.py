"""What restoring needs of whoever holds placeholders under write leases (`keeping.Keeper` is one).

Invariant: a file is a placeholder only while it is held: no lease, no placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from spotwarp_fs.core.types import Inode


class Placeholders(Protocol):
    """Files whose open waits until their bytes are here."""

    @property
    def recovered(self) -> Mapping[Inode, int]:
        """Placeholders that an earlier daemon left with the keeper, with their descriptors."""
        ...

    @property
    def room(self) -> int:
        """How many more may be held."""
        ...

    async def hold(self, files: Sequence[tuple[Inode, int]]) -> set[Inode]:
        """Take files, each with a descriptor open for reading and writing; returns those that are under a lease now.

        The descriptors stay the caller's: what is held is a duplicate.
        """
        ...

    async def wanted(self) -> Inode:
        """Return the next placeholder that somebody waits for in `open`."""
        ...

    def descriptor(self, ino: Inode) -> int:
        """Give the one description through which a placeholder may be filled: another open would break its lease."""
        ...

    async def release(self, ino: Inode) -> None:
        """Let go: the bytes are here. The mark is cleared, then the lease."""
        ...


class Marks(Protocol):
    """The mark on a placeholder's inode; the module `leases` is this."""

    def mark_absent(self, fd: int, session: str) -> None:
        """Mark the file as a placeholder of *session*, or raise OSError."""
        ...

    def clear_mark(self, fd: int) -> None:
        """Take the mark away, if there is one."""
        ...

    def absence(self, place: bytes | int) -> str | None:
        """Tell which session left the file as a placeholder; None when it is none (a mark on a copy is void)."""
        ...
