"""The command as a process group: started, signalled, stopped for good, collected.

Invariant: a group is signalled only while a process of it is known to be there; descendants that left the group are
found, since `run` adopts every orphan below it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from spotwarp_fs.cli.running.terminal import Terminal
from spotwarp_fs.local.processes import descendants

JOB_CONTROL: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Become the parent of every process below that loses its own, as process 1 is by nature (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """One start of the command."""

    def __init__(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], terminal: Terminal
    ) -> None:
        """Start it; raises OSError if there is no such program."""
        self._terminal = terminal
        self._process = subprocess.Popen(command, cwd=directory, env=dict(environment), process_group=0)
        self.pid = self._process.pid
        self.code: int | None = None
        """How it ended: its exit code, or 128 and the signal it died of."""
        self.stopped = False
        """By the terminal (Ctrl-Z, or reading it in the background), and nobody has dealt with that yet."""
        if terminal.hand_over(os.getpgrp(), self.pid):
            # It may have asked for the terminal a moment too early, and been stopped for that.
            self.signal(signal.SIGCONT)

    def signal(self, number: int) -> bool:
        """Send a signal to the whole group; False if nobody is left in it."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # a program of another user: there, and not ours to signal
        return True

    def has_left(self) -> bool:
        """Is any process of the group still there?"""
        return self.signal(0)

    def kill(self, ours: frozenset[int]) -> None:
        """SIGKILL the group and whatever else descends from it; *ours* are processes of the workspace itself."""
        self.signal(signal.SIGKILL)
        for pid in descendants(os.getpid(), leave_out=ours):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def collect(self) -> dict[int, int]:
        """Collect every process that has ended, and note what became of the command; gives the others' exit codes."""
        others: dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return others
            if pid == 0:
                return others
            if pid != self.pid:
                if not os.WIFSTOPPED(status):
                    others[pid] = os.waitstatus_to_exitcode(status)
                continue
            if os.WIFSTOPPED(status):
                self.stopped = os.WSTOPSIG(status) in JOB_CONTROL
                continue
            code = os.waitstatus_to_exitcode(status)
            self._process.returncode = code
            self.code = 128 - code if code < 0 else code
            self._terminal.hand_over(self.pid, os.getpgrp())

    def pause_with_us(self) -> None:
        """Stop ourselves as the command was stopped, so that the shell has the terminal until `fg` or `bg`.

        SIGCONT then comes to us, for `resume`. An orphaned group is not stopped: nobody would ever continue it.
        """
        self.stopped = False
        if not self._terminal.there:
            return
        had_terminal = self._terminal.hand_over(self.pid, os.getpgrp())
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        if had_terminal and self._terminal.is_of(os.getpgrp()):
            self.resume()

    def resume(self) -> None:
        """Go on, in the foreground if we are in it."""
        self._terminal.hand_over(os.getpgrp(), self.pid)
        self.signal(signal.SIGCONT)
