"""Wait until the lease of the workspace's last writer has ended, then take over.

Invariant: a writer that shows new signs of life is waited for anew, as long as it lives: only `--takeover` fences a
node that works. Nothing is decided here: whether the workspace is free is for the claim to say.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from spotwarp_fs.cli.running.forms import Form
from spotwarp_fs.cli.running.saying import Line, say
from spotwarp_fs.core.errors import ExitCode, NotFound, SpotwarpError, UserError
from spotwarp_fs.core.units import format_duration

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import MountReport
    from spotwarp_fs.cli.sources import LoadedSettings
    from spotwarp_fs.engine.heartbeat import Beat

LOOK_PERIOD_S: Final = 5.0
"""Between two looks at the lease: it may be given back at any time."""
TICK_S: Final = 1.0
LINE_PERIOD_S: Final = 15.0
MARGIN_S: Final = 0.5
"""The age that was read is of a moment ago."""


def open_when_free(form: Form, loaded: LoadedSettings, name: str, *, takeover: bool, wait: bool) -> MountReport:
    """Serve the workspace, once nobody else does; raises UserError (LIVE_WRITER) at once unless it may *wait*."""
    while True:
        try:
            return form.open(takeover=takeover)
        except UserError as error:
            if error.exit_code != ExitCode.LIVE_WRITER or not wait:
                raise
            beat = lease_of(loaded, name)
            if _is_local(error):
                raise
            _wait_out(loaded, name, beat)
            threading.Event().wait(MARGIN_S)


def _is_local(error: UserError) -> bool:
    """A cache directory in use by another mount of this machine: no lease ends that."""
    return "cache directory" in str(error)


def lease_of(loaded: LoadedSettings, name: str) -> Beat | None:
    """Read the workspace's lease; None when nobody holds it."""
    from spotwarp_fs.cli.stores import find_workspace, open_store_of
    from spotwarp_fs.engine.heartbeat import read_beat
    from spotwarp_fs.local.system import SystemEntropy

    async def look() -> Beat | None:
        store = open_store_of(loaded.settings)
        try:
            _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
            return await read_beat(scoped)
        except NotFound:
            return None
        finally:
            await store.aclose()

    return trio.run(look)


def _wait_out(loaded: LoadedSettings, name: str, beat: Beat | None) -> None:
    """Count down to the end of the lease; returns when it has ended or was given back."""
    line = Line(LINE_PERIOD_S)
    holder, renewed = beat, False
    try:
        while holder is not None and (left_s := left_of(holder)) > 0:
            end_s = time.monotonic() + min(left_s, LOOK_PERIOD_S)
            while (rest_s := end_s - time.monotonic()) > 0:
                ends_s = left_s - min(left_s, LOOK_PERIOD_S) + rest_s
                line.show(_describe(name, holder, ends_s), time.monotonic())
                threading.Event().wait(min(TICK_S, rest_s))
            try:
                found = lease_of(loaded, name)
            except SpotwarpError as error:  # the store does not answer now: the countdown goes on without it
                line.end()
                say(f"the lease cannot be read: {error}")
                found = replace(holder, age_s=holder.age_s + min(left_s, LOOK_PERIOD_S))
            if found is not None and found.age_s < holder.age_s and not renewed:
                renewed = True
                line.end()
                say(f"{found.writer.host} still writes to {name}: waiting until it stops (--takeover does not wait)")
            holder = found
    finally:
        line.end()


def left_of(beat: Beat) -> float:
    """Return how long a lease lasts without another heartbeat, in seconds."""
    from spotwarp_fs.engine.settings import EngineSettings

    return EngineSettings().lease_s - beat.age_s + MARGIN_S


def _describe(name: str, beat: Beat, left_s: float) -> str:
    writer = beat.writer
    return (
        f"{name} was last written by {writer.host} (pid {writer.pid}, {writer.mountpoint}); taking over in "
        f"{format_duration(left_s)} unless it shows a sign of life"
    )
