"""Placeholders under real leases that this process holds itself: what the keeper does, without the process.

Invariant: a lease is a lease: other processes wait in open, whoever asks for one on a file that is open gets none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.keeping import PlaceholderLate

POLL_S = 0.005


@dataclass
class InProcessLeases:
    """Holds at most *room* placeholders."""

    room: int = 1000
    recovered: Mapping[Inode, int] = field(default_factory=dict)
    refuse: bool = False
    held: dict[Inode, int] = field(default_factory=dict)
    given_up: set[Inode] = field(default_factory=set)
    writers: int = 0
    _told: set[Inode] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.held.update(self.recovered)

    async def hold(self, files: Sequence[tuple[Inode, int]]) -> set[Inode]:
        await trio.lowlevel.checkpoint()
        taken = set()
        for ino, fd in files:
            assert leases.absence(fd) is not None, "held before it is marked"
            if self.refuse or not self.room:
                continue
            try:
                leases.take(fd, leases.Kind.WRITE)
            except OSError:
                continue
            self.held[ino] = os.dup(fd)
            self.given_up.discard(ino)
            self.room -= 1
            taken.add(ino)
        return taken

    async def wanted(self) -> Inode:
        while True:
            for ino, fd in self.held.items():
                if ino not in self._told and leases.is_breaking(fd, leases.Kind.WRITE):
                    self._told.add(ino)
                    return ino
            await trio.sleep(POLL_S)

    def descriptor(self, ino: Inode) -> int:
        if ino not in self.held:
            raise PlaceholderLate(f"placeholder {ino} is not held")
        return self.held[ino]

    @contextmanager
    def writing(self, ino: Inode) -> Iterator[int]:
        yield self.descriptor(ino)

    def late(self) -> frozenset[Inode]:
        return frozenset(self.given_up)

    async def release(self, ino: Inode) -> None:
        fd = self.descriptor(ino)
        leases.clear_mark(fd)
        self._let_go(ino)
        await trio.lowlevel.checkpoint()

    def give_up(self, ino: Inode) -> None:
        """What the keeper does when the bytes did not come in time."""
        fd = self.held[ino]
        leases.mark_late(fd)
        os.ftruncate(fd, 0)
        self._let_go(ino)
        self.given_up.add(ino)

    def _let_go(self, ino: Inode) -> None:
        fd = self.held.pop(ino)
        self._told.discard(ino)
        leases.release(fd)
        os.close(fd)
        self.room += 1

    def left_behind(self) -> InProcessLeases:
        """What the next daemon finds at the keeper, which has let go what was filled."""
        for ino in [ino for ino, fd in self.held.items() if leases.absence(fd) is None]:
            self._let_go(ino)
        return InProcessLeases(self.room, dict(self.held))

    def die(self) -> None:
        """Every lease goes."""
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()
