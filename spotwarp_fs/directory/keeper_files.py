"""Which placeholders a keeper holds, who waits for them, and when each is given up; no sockets, no loop.

Invariants: a file with a mark of absence and a size is let go by nobody but the kernel; a file whose lease the kernel
has taken away is never emptied, because it may be somebody's by then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.directory import keeper_wire, leases

log = logging.getLogger("keeper")

LATE_MARGIN_S: Final = 5.0
"""How long before the kernel's own limit a file is given up: marking and emptying must be over by then."""
STOP_FILLING_S: Final = 2.0
"""How long before that the daemon is asked to stop writing to it."""
RETRY_S: Final = 1.0
DESCRIPTORS_RESERVED: Final = 64
LATE_TOLD_MAX: Final = 10_000
BREAK_SIGNAL: Final = signal.SIGRTMIN + 4


def late_limit_s(break_time_s: float) -> float:
    """Return how long after its break began a placeholder is given up."""
    if break_time_s <= 0:  # the kernel waits for ever; openers should not
        break_time_s = leases.BREAK_TIME_DEFAULT_S
    return max(break_time_s - LATE_MARGIN_S, break_time_s / 2)


@dataclass(slots=True)
class Held:
    """A placeholder under lease. `broke_s`: when somebody began to wait for it; `asked`: the daemon is to stop."""

    fd: int
    broke_s: float | None = None
    asked: bool = False


class Leases:
    """The placeholders that this process holds, and what becomes of each; knows nothing of sockets."""

    def __init__(self, late_after_s: float) -> None:
        self.late_after_s = late_after_s
        self.files: dict[int, Held] = {}
        self.late: dict[int, None] = {}
        self._by_fd: dict[int, int] = {}
        self._breaking: set[int] = set()
        self._limit = keeper_wire.raise_descriptor_limit() - DESCRIPTORS_RESERVED

    @property
    def room(self) -> int:
        """How many more may be held: the descriptor ration."""
        return max(0, self._limit - len(self.files))

    @property
    def waited_for(self) -> list[int]:
        """The idents that somebody waits for, the longest waiting first."""
        return sorted(self._breaking, key=lambda ident: self.files[ident].broke_s or 0)

    def add(self, ident: int, fd: int, waited_s: float) -> bool:
        """Take *fd* and a lease on it, or close it. *waited_s*: how long somebody may have waited if it has broken."""
        known = self.files.get(ident)
        if known is not None or self.room == 0 or not self._lease(fd):
            again = known is not None and os.path.sameopenfile(known.fd, fd)
            os.close(fd)
            return again
        self.files[ident] = Held(fd)
        self._by_fd[fd] = ident
        self.late.pop(ident, None)
        self._look(ident, time.monotonic() - waited_s)
        return True

    def _lease(self, fd: int) -> bool:
        try:
            if not _marked(fd):
                return False
            fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
            leases.take(fd, leases.Kind.WRITE, signal_number=BREAK_SIGNAL)
        except OSError:
            # Refused, also when it came from a keeper that died: somebody waits, or it is another user's by now.
            return leases.is_leased(fd)
        return True

    def let_go(self, ident: int) -> None:
        """End the lease of *ident*, if held, and close at once: who executes the file must find no writer."""
        held = self.files.pop(ident, None)
        if held is None:
            return
        del self._by_fd[held.fd]
        self._breaking.discard(ident)
        leases.release(held.fd)
        os.close(held.fd)

    def broken(self, fd: int | None) -> list[int]:
        """Return who is newly waited for: *fd*, or whoever it is if the kernel means a number of another process."""
        now = time.monotonic()
        told = self._by_fd.get(fd) if fd is not None else None
        if told is not None and self._look(told, now):
            return [told]
        return [ident for ident in list(self.files) if self._look(ident, now)]

    def _look(self, ident: int, since_s: float) -> bool:
        held = self.files[ident]
        if held.broke_s is not None or not leases.is_breaking(held.fd, leases.Kind.WRITE):
            return False
        held.broke_s = since_s
        self._breaking.add(ident)
        return True

    def to_stop(self, now: float) -> list[int]:
        """Return those that are to be filled no more, each once."""
        found = [i for i in self._breaking if not self.files[i].asked and now >= self._deadline(i) - self._stopping_s]
        for ident in found:
            self.files[ident].asked = True
        return found

    def overdue(self, now: float) -> list[int]:
        """Return those that are to be given up."""
        return [ident for ident in self._breaking if now >= self._deadline(ident)]

    def next_deadline(self) -> float | None:
        """Return when `to_stop` or `overdue` may have something new."""
        return min(
            (self._deadline(i) - (0 if self.files[i].asked else self._stopping_s) for i in self._breaking), default=None
        )

    def _deadline(self, ident: int) -> float:
        return (self.files[ident].broke_s or 0) + self.late_after_s

    @property
    def _stopping_s(self) -> float:
        return min(STOP_FILLING_S, self.late_after_s / 4)

    def ask_again(self) -> None:
        """Begin anew with `to_stop`, for another daemon."""
        for ident in self._breaking:
            self.files[ident].asked = False

    def give_up(self, ident: int) -> bool:
        """Mark *ident* late, empty it and let it go; False if it was filled already or has to be tried again."""
        held = self.files.get(ident)
        if held is None:
            return False
        try:
            filled = not _marked(held.fd)
            if not leases.is_leased(held.fd):
                log.error("lost ident=%d reason=the kernel ended its lease", ident)
            elif not filled:
                _mark_late(ident, held.fd)
                os.ftruncate(held.fd, 0)
        except OSError as error:
            log.error("cannot empty ident=%d error=%s", ident, error)
            held.broke_s = time.monotonic() - self.late_after_s + RETRY_S
            return False
        self.let_go(ident)
        if not filled:
            self._note_late(ident)
        return not filled

    def _note_late(self, ident: int) -> None:
        """Remember it for a daemon to come; the mark remembers it for good."""
        self.late[ident] = None
        while len(self.late) > LATE_TOLD_MAX:
            del self.late[next(iter(self.late))]


def _marked(fd: int) -> bool:
    """Say whether the file is absent; a mark that cannot be read is one."""
    try:
        return leases.absence(fd) is not None
    except OSError:
        return True


def _mark_late(ident: int, fd: int) -> None:
    try:
        leases.mark_late(fd)
    except OSError as error:  # no room for it, say; the old mark stays, and at size 0 it says the same
        log.error("cannot mark ident=%d error=%s", ident, error)
