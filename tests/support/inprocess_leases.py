"""Placeholders under real leases that this process holds itself: what the keeper does, without the process.

Invariant: a lease is a lease: other processes wait in open, whoever asks for one on a file that is open gets none.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.ownnames import MARK_XATTR
from spotwarp_fs.core.types import Inode

POLL_S = 0.005


class InodeMarks:
    """The mark names the inode, so that a copy of it is void."""

    def mark_absent(self, fd: int, session: str) -> None:
        os.setxattr(fd, MARK_XATTR, f"{os.fstat(fd).st_ino} {session}".encode())

    def clear_mark(self, fd: int) -> None:
        try:
            os.removexattr(fd, MARK_XATTR)
        except OSError:
            return

    def absence(self, place: bytes | int) -> str | None:
        try:
            value = os.getxattr(place, MARK_XATTR)
        except OSError:
            return None
        ino, _, session = value.decode().partition(" ")
        return session if int(ino) == os.stat(place).st_ino else None


@dataclass
class InProcessLeases:
    """Holds at most *room* placeholders."""

    room: int = 1000
    recovered: Mapping[Inode, int] = field(default_factory=dict)
    held: dict[Inode, int] = field(default_factory=dict)
    refuse: bool = False
    released: list[Inode] = field(default_factory=list)
    _told: set[Inode] = field(default_factory=set)

    def __post_init__(self) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        self.held.update(self.recovered)

    async def hold(self, files: Sequence[tuple[Inode, int]]) -> set[Inode]:
        await trio.lowlevel.checkpoint()
        taken = set()
        for ino, fd in files:
            if self.refuse or not self.room:
                continue
            try:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:
                continue
            self.held[ino] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
            self.room -= 1
            taken.add(ino)
        return taken

    async def wanted(self) -> Inode:
        while True:
            for ino, fd in self.held.items():
                if ino not in self._told and fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
                    self._told.add(ino)
                    return ino
            await trio.sleep(POLL_S)

    def descriptor(self, ino: Inode) -> int:
        return self.held[ino]

    async def release(self, ino: Inode) -> None:
        await trio.lowlevel.checkpoint()
        fd = self.held.pop(ino)
        self._told.discard(ino)
        InodeMarks().clear_mark(fd)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(fd)
        self.room += 1
        self.released.append(ino)

    def left_behind(self) -> InProcessLeases:
        """What the next daemon finds at the keeper."""
        return InProcessLeases(self.room, dict(self.held))

    def die(self) -> None:
        """Every lease goes."""
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()
