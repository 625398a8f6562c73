"""Whose the terminal is: the command's while it runs, ours before and after, the shell's while all of it is stopped.

Invariant: the terminal is taken only by whom it belongs to already; a `run` in the background never takes it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Terminal:
    """The controlling terminal, if there is one."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            self._fd = -1

    @property
    def there(self) -> bool:
        """Is there one?"""
        return self._fd >= 0

    def is_of(self, group: int) -> bool:
        """Does the terminal belong to the process group *group* now?"""
        try:
            return self._fd >= 0 and os.tcgetpgrp(self._fd) == group
        except OSError:
            return False

    def hand_over(self, source: int, target: int) -> bool:
        """Give the terminal from group *source* to group *target*; False if it was not *source*'s."""
        if not self.is_of(source):
            return False
        with _terminal_output_allowed(), suppress(OSError):
            os.tcsetpgrp(self._fd, target)
            return True
        return False


@contextmanager
def _terminal_output_allowed() -> Iterator[None]:
    """A group that does not have the terminal is stopped when it moves it, unless SIGTTOU is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
