"""Watch over the command: forward signals, stop it when it must end, start it anew when its files died under it.

Invariant: one thread decides; it returns only when the command and everything left in its group is gone (or could not
be killed), so that what is published afterwards is the end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from spotwarp_fs.cli.running.child import Child
from spotwarp_fs.cli.running.command import NoCommand
from spotwarp_fs.cli.running.ending import SHORT_S
from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.cli.running.outside import INSIDE_WITHIN_S, SAMPLE_PERIOD_S, Outside
from spotwarp_fs.cli.running.saying import say
from spotwarp_fs.cli.running.signals import FORWARDED, Bell
from spotwarp_fs.cli.running.watch import Back, Died, Lost, TakenOver, serving, wait_for_end, wait_for_successor
from spotwarp_fs.core.errors import ExitCode, SpotwarpError
from spotwarp_fs.local.processes import chars_written, descendants, files_written

STOP_GRACE_S: Final = 10.0
"""Between SIGTERM and SIGKILL, where no deadline says otherwise."""
KILLED_WITHIN_S: Final = 5.0
"""So long a process may take to vanish after SIGKILL; one that hangs in the kernel is left."""
RESTARTS_MAX: Final = 5
"""In a row: a daemon that dies again and again is not helped by another start of the command."""
ROW_S: Final = 600.0
"""A command that ran this long ends the row."""
TICK_S: Final = 1.0
SWEEP_TICK_S: Final = 0.05


class Stop(Enum):
    """Why the command must end, and is not started again."""

    ASKED = "asked"
    TAKEN_OVER = "taken over"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended."""

    code: int
    """The command's own exit code, or the one of what went wrong."""
    fenced: bool = False
    deadline_s: float | None = None
    """Until when what is left is to be published (monotonic), if somebody asked for the end."""


class Supervising:
    """The loop around one command, from its first start to its end."""

    def __init__(
        self,
        form: Form,
        bell: Bell,
        start: Callable[[bool], Child],
        greet: Callable[[], None],
        outside: Outside,
        *,
        notice_s: float,
    ) -> None:
        """*start* starts the command, and is told whether it was started before; *greet* meets each daemon first."""
        self._form = form
        self._bell = bell
        self._start = start
        self._greet = greet
        self._outside = outside
        self._notice_s = notice_s
        self._stop: Stop | None = None
        self._deadline_s: float | None = None
        self._kill_at_s: float | None = None
        self._given_up_s: float | None = None
        """When a group that was killed is taken for gone."""
        self._daemon_pid = 0
        self._waiting_for_daemon = False
        self._again = False
        """The command is to be started anew when it has ended."""
        self._looked = False
        self._restarts = 0
        self._serving: frozenset[int] = frozenset()
        """Supervisor and daemon, which we adopt as everything below us."""
        self._serving_codes: dict[int, int] = {}
        self._inside = self._bytes_inside()
        self._begin(again=False)
        self._first_start_s = self._started_s

    def run(self) -> Outcome:
        """Watch until the end."""
        while True:
            signals, reports = self._bell.wait(self._pause_s())
            for number in signals:
                self._on_signal(number)
            ended = self._child.collect()
            self._serving_codes |= {pid: code for pid, code in ended.items() if pid in self._serving}
            for report in reports:
                self._on_report(report)
            if self._child.stopped:
                self._child.pause_with_us()
            self._look_at_the_clock()
            outcome = self._after_end()
            if outcome is not None:
                return outcome

    def _begin(self, *, again: bool) -> None:
        self._again, self._looked = False, False
        self._kill_at_s = self._given_up_s = None
        if not self._daemon_pid:
            self._meet(serving(self._form))
        self._child = self._start(again)
        self._started_s = self._sample_at_s = time.monotonic()

    def _meet(self, pid: int) -> None:
        """From now on this daemon serves."""
        form, self._daemon_pid, self._serving = self._form, pid, self._form.processes()
        self._greet()
        self._bell.in_background(lambda: wait_for_end(form, pid))

    def _pause_s(self) -> float:
        sweeping = self._child.code is not None and not self._waiting_for_daemon
        soonest = min(self._kill_at_s or float("inf"), self._sample_at_s)
        return min(SWEEP_TICK_S if sweeping else TICK_S, max(0.0, soonest - time.monotonic()))

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCONT:
            self._child.resume()
        elif self._stop is not None and number in (signal.SIGTERM, signal.SIGINT):
            self._hurry()
        elif number in FORWARDED:
            self._child.signal(number)
            if number == signal.SIGTERM:
                self._asked()

    def _asked(self) -> None:
        """An eviction notice, or `docker stop`: the command has half of the time to save, publishing has the rest."""
        now_s = time.monotonic()
        self._stop = Stop.ASKED
        self._deadline_s, self._kill_at_s = now_s + self._notice_s, now_s + self._notice_s / 2
        self._child.signal(signal.SIGCONT)
        say(f"asked to stop: the command has {self._notice_s / 2:.0f} s to end, then what is left is published")
        self._bell.in_background(self._sync)

    def _sync(self) -> None:
        """Get on the way what was written so far, while the command saves the rest."""
        try:
            self._form.call("sync", {"timeout_s": self._notice_s / 2})
        except SpotwarpError:
            return  # the drain says what is not saved

    def _hurry(self) -> None:
        now_s = time.monotonic()
        say("asked to stop again: the command is killed")
        self._kill_at_s = now_s
        self._deadline_s = min(self._deadline_s or now_s + SHORT_S, now_s + SHORT_S)

    def _end_command(self) -> None:
        self._child.signal(signal.SIGTERM)
        self._child.signal(signal.SIGCONT)
        self._kill_at_s = time.monotonic() + STOP_GRACE_S

    def _on_report(self, report: Any) -> None:
        match report:
            case TakenOver(reason):
                self._on_takeover(reason)
            case Died(pid) if pid == self._daemon_pid and not self._waiting_for_daemon:
                self._on_death()
            case Back(pid):
                self._on_return(pid)
            case Lost(reason):
                self._on_loss(reason)

    def _on_takeover(self, reason: str) -> None:
        if self._stop is Stop.TAKEN_OVER:
            return
        say(f"error: another node took the workspace over, and the command is stopped here: {reason}")
        self._stop, self._waiting_for_daemon = Stop.TAKEN_OVER, False
        if self._child.code is None:
            self._end_command()

    def _on_death(self) -> None:
        """P-01: what was written is safe, what was open is not."""
        say("the daemon of the workspace died; waiting until it is back")
        self._waiting_for_daemon = True
        form, pid = self._form, self._daemon_pid
        self._bell.in_background(lambda: wait_for_successor(form, pid))

    def _on_return(self, pid: int) -> None:
        self._waiting_for_daemon = False
        self._meet(pid)
        ended_well = self._child.code == 0
        if self._stop is None and self._form.files_die_with_daemon and not ended_well:
            self._again = True
            if self._child.code is None:
                say("the daemon is back; the command's open files are not, so it is stopped and started again")
                self._end_command()

    def _on_loss(self, reason: str) -> None:
        self._waiting_for_daemon = False
        if ExitCode.FENCED in self._serving_codes.values():
            self._on_takeover("found out when the daemon was started again")
            return
        say(f"error: the workspace is not served any more: {reason}")
        self._stop = self._stop or Stop.LOST
        if self._child.code is None:
            self._end_command()

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s, self._given_up_s = None, now_s + KILLED_WITHIN_S
            if self._stop is None and not self._again:
                self._child.signal(signal.SIGKILL)  # what a command that has ended by itself left in its group
            else:
                self._child.kill(self._form.processes())
        if now_s >= self._sample_at_s and self._child.code is None:
            self._sample_at_s = now_s + SAMPLE_PERIOD_S
            self._sample(now_s)

    def _sample(self, now_s: float) -> None:
        below = descendants(os.getpid(), leave_out=self._form.processes())
        written = {pid: chars_written(pid) for pid in below}
        for warning in self._outside.look([file for pid in below for file in files_written(pid)], written):
            say(warning)
        if self._inside is not None and now_s - self._first_start_s >= INSIDE_WITHIN_S:
            if self._bytes_inside() == self._inside:
                say(self._outside.nothing_inside())
            self._inside = None

    def _bytes_inside(self) -> tuple[int, int] | None:
        """What was written to the workspace so far, as this daemon counts; None if nobody knows."""
        try:
            status = self._form.call("status", silence_max_s=STOP_GRACE_S)
            return int(status["daemon_pid"]), int(status["totals"]["bytes_written"])
        except (SpotwarpError, KeyError):
            return None

    def _after_end(self) -> Outcome | None:
        """What follows the command's end; None as long as there is something to wait for."""
        code = self._child.code
        if code is None:
            return None
        if self._stop is None and not self._again and not self._looked:
            self._looked = True
            self._look_why()
        if not self._swept() or (self._waiting_for_daemon and not self._is_late()):
            return None
        if self._again and self._stop is None and self._start_again():
            return None
        if self._stop is Stop.TAKEN_OVER:
            return Outcome(ExitCode.FENCED, fenced=True, deadline_s=self._deadline_s)
        if self._stop is Stop.LOST:
            code = ExitCode.FAILED
        return Outcome(code, deadline_s=self._deadline_s)

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _look_why(self) -> None:
        """A command may fail because its files died, or turned read-only, before anybody told us."""
        try:
            status = self._form.call("status", silence_max_s=STOP_GRACE_S)
        except SpotwarpError:
            status = {}
        if status.get("fenced"):
            self._on_takeover("found out when the command had ended")
        elif status.get("daemon_pid") != self._daemon_pid and not self._waiting_for_daemon:
            self._on_death()

    def _swept(self) -> bool:
        """End what the command left in its process group; True when nothing is there any more."""
        if not self._child.has_left():
            return True
        if self._given_up_s is not None:
            return time.monotonic() >= self._given_up_s
        if self._kill_at_s is None:
            self._end_command()
        return False

    def _start_again(self) -> bool:
        now_s = time.monotonic()
        self._restarts = 1 if now_s - self._started_s > ROW_S else self._restarts + 1
        if self._restarts > RESTARTS_MAX:
            say(f"error: the daemon died {self._restarts} times in a row; the command is not started again")
            self._stop = Stop.LOST
            return False
        say(f"starting the command again ({self._restarts} of at most {RESTARTS_MAX} times in a row)")
        try:
            self._begin(again=True)
        except NoCommand as error:
            say(f"error: the command is not started again: {error}")
            self._stop = Stop.LOST
            return False
        return True
