"""Publish what is left when the command has ended, give up sooner when asked, and work out the exit code.

Invariant: the command's own exit code is returned, unless it says success and its work was not saved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.cli.running.saying import Line, say
from spotwarp_fs.cli.running.signals import Bell
from spotwarp_fs.core.errors import ExitCode, SpotwarpError
from spotwarp_fs.core.units import format_size

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import UmountReport

LINE_PERIOD_S: Final = 10.0
LOOK_S: Final = 0.5
SHORT_S: Final = 5.0
"""What is left of the time for publishing after the second request to stop."""
TIME_MIN_S: Final = 2.0
SILENCE_S: Final = 60.0
"""A daemon that has not answered so long after its deadline is given up."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How publishing ended."""

    report: UmountReport | None
    problem: SpotwarpError | None = None


def publish_rest(form: Form, bell: Bell, *, deadline_s: float, notice_s: float, complete: bool) -> Ended:
    """Publish and stop serving until *deadline_s* (monotonic). A request to stop leaves *notice_s*, a second 5 s."""
    shown: dict[str, Any] = {}

    def close() -> Ended:
        try:
            left_s = max(TIME_MIN_S, deadline_s - time.monotonic())
            return Ended(form.close(timeout_s=left_s, on_progress=shown.update, complete=complete))
        except SpotwarpError as error:
            return Ended(None, error)

    bell.in_background(close)
    line, asked = Line(LINE_PERIOD_S), 0
    started_s = time.monotonic()
    try:
        while True:
            signals, reports = bell.wait(LOOK_S)
            for report in reports:
                if isinstance(report, Ended):
                    return report
            for _ in [number for number in signals if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]:
                asked += 1
                deadline_s = min(deadline_s, time.monotonic() + (notice_s if asked == 1 else SHORT_S))
                line.end()
                say(f"asked to stop: giving up publishing in {max(0.0, deadline_s - time.monotonic()):.0f} s at most")
                _shorten(form, bell, deadline_s)
            now_s = time.monotonic()
            if now_s > deadline_s + SILENCE_S:
                return Ended(None, SpotwarpError(f"the daemon of {form.path} did not end"))
            if now_s - started_s > LOOK_S:
                line.show(_describe(shown), now_s)
    finally:
        line.end()


def _shorten(form: Form, bell: Bell, deadline_s: float) -> None:
    """Ask for a sooner end; who asked first gets the answer."""

    def drain() -> None:
        arguments = {"timeout_s": max(TIME_MIN_S, deadline_s - time.monotonic()), "force": True}
        try:
            form.call("drain", arguments, silence_max_s=SILENCE_S)
        except SpotwarpError:
            return  # it has ended meanwhile

    bell.in_background(drain)


def _describe(shown: Mapping[str, Any]) -> str:
    done, total = shown.get("done_bytes"), shown.get("total_bytes")
    figures = f": {format_size(done)} of {format_size(total)}" if done is not None and total else ""
    return f"{shown.get('phase') or 'publishing'}{figures}"


def exit_code(code: int, ended: Ended, *, fenced: bool) -> int:
    """Say how it ended, and return the exit code for a command that ended with *code*."""
    report = ended.report
    if report is None:
        say(f"error: what was left is not known to be saved: {ended.problem}")
        return ExitCode.FENCED if fenced else code or ExitCode.NOT_SAVED
    if report.saved and not fenced:
        say(f"saved at manifest {report.manifest}" if report.manifest is not None else "nothing was left to save")
        return code
    if fenced or report.fenced:
        say("another node has the workspace now; `spotwarp salvage list` shows what was not published here")
    if not report.saved:
        say(f"error: {format_size(report.dirty_bytes)} could not be saved" + "".join(f"; {one}" for one in report.left))
    if fenced or report.fenced:
        return ExitCode.FENCED
    say("it is still in the cache of this node: run again here to go on with it")
    return code or ExitCode.NOT_SAVED
