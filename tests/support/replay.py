"""Run a program on a real directory and on the reference side by side, and compare both after each call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.calls import Call, Marker, settle
from tests.support.reference import Reference, Windows, diff
from tests.support.syscalls import observe, perform


def replay(
    program: list[Call],
    root: Path,
    *,
    privileged: bool,
    tick_ns: int = 20_000_000,
    on_marker: Callable[[Marker], Path] | None = None,
) -> Reference:
    """Fail at the first call after which *root*, empty at the start, is not what the reference says.

    *on_marker* does what a marker asks for and returns where the filesystem is mounted from then on.
    """
    clock = Windows(tick_ns)
    start_ns = time.time_ns()
    root.chmod(0o755)
    os.utime(root)
    clock.note(start_ns, time.time_ns())
    reference = Reference(now_ns=start_ns, uid=os.geteuid(), gid=os.getegid(), privileged=privileged)
    for drawn in program:
        call = settle(drawn, reference)
        if isinstance(call, Marker):
            root = on_marker(call) if on_marker else root
        else:
            start_ns = time.time_ns()
            outcome = perform(root, call)
            clock.note(start_ns, time.time_ns())
            assert outcome == reference.apply(call, start_ns), call
        assert diff(reference.snapshot(), observe(root), clock) == [], call
    return reference
