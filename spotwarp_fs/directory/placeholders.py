"""What restoring needs of whoever holds placeholders under write leases (`keeping.Keeper` is one).

Invariant: a file is a placeholder only while it is held: no lease, no placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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
        """Take marked files, each with a descriptor open for reading and writing; returns those under a lease now.

        The descriptors stay the caller's: what is held is a duplicate. What is not returned must not get its name.
        """
        ...

    async def wanted(self) -> Inode:
        """Return the next placeholder that somebody waits for in `open`."""
        ...

    def descriptor(self, ino: Inode) -> int:
        """Give the one description through which a placeholder may be filled, or raise PlaceholderLate."""
        ...

    def writing(self, ino: Inode) -> AbstractContextManager[int]:
        """Lend the descriptor for one write: the file is not given up while the block runs. Raises PlaceholderLate."""
        ...

    def late(self) -> frozenset[Inode]:
        """Give those whose bytes did not come in time: they are empty, marked so, and under no lease."""
        ...

    async def release(self, ino: Inode) -> None:
        """Let go: the bytes are here. The mark is cleared, then the lease."""
        ...
