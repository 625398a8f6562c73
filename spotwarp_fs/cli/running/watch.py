"""Learn at once that the workspace was taken over, or that its daemon died: threads that wait, and report.

Invariant: each thread makes one report and ends; it names the daemon that it was about.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.cli.client import DaemonGone
from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.core.errors import SpotwarpError

PAUSE_S: Final = 0.3
BACK_WITHIN_S: Final = 300.0
"""A daemon that is started again has the workspace back in about a second; after a power loss it rebuilds its map."""
LOOK_SILENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another writer has the workspace."""

    reason: str


@dataclass(frozen=True, slots=True)
class Died:
    """This daemon serves no more."""

    daemon_pid: int


@dataclass(frozen=True, slots=True)
class Back:
    """This daemon serves now."""

    daemon_pid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody serves the workspace, and nobody will."""

    reason: str


def wait_for_end(form: Form, daemon_pid: int) -> TakenOver | Died:
    """Return when the workspace is taken over, or the daemon is gone."""
    while True:
        try:
            said = form.call("wait-fenced", {"daemon_pid": daemon_pid})
        except DaemonGone:
            if form.daemon_pid() != daemon_pid:
                return Died(daemon_pid)
        except SpotwarpError:
            pass  # a daemon that is ending answers anything; the next look tells
        else:
            return TakenOver(str(said["reason"])) if said["fenced"] else Died(daemon_pid)
        threading.Event().wait(PAUSE_S)


def wait_for_successor(form: Form, daemon_pid: int) -> Back | Lost:
    """Return when another daemon than *daemon_pid* serves, or when nobody is left to start one."""
    end_s = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < end_s:
        tended = form.is_tended()
        found = serving(form)
        if found not in (0, daemon_pid):
            return Back(found)
        if not tended and form.daemon_pid() == 0:
            return Lost("its daemon and its supervisor are gone")
        threading.Event().wait(PAUSE_S)
    return Lost(f"its daemon died and was not back within {BACK_WITHIN_S:.0f} s")


def serving(form: Form) -> int:
    """Return the daemon that answers now; 0 if none does."""
    try:
        return int(form.call("status", silence_max_s=LOOK_SILENCE_S)["daemon_pid"])
    except SpotwarpError:
        return 0
