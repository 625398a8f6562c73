"""Run a program on a real directory and on the reference side by side, and compare both after each call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.calls import Call, Marker, settle
from tests.support.reference import Clock, Reference, diff
from tests.support.syscalls import observe, perform

CLOCK_REALTIME_COARSE = 5
"""Linux's number; Python has no name for it."""


class Windows(Clock):
    """The reference's "now" is a stamp that stands for the whole time which a call took.

    A window opens at the kernel's coarse clock, from which file times are taken: it lags behind the wall clock, by as
    much as a busy machine delays its timer ticks.
    """

    def __init__(self) -> None:
        self._windows_ns: dict[int, tuple[int, int]] = {}
        self._last = 0

    @contextmanager
    def call(self) -> Iterator[int]:
        """Give the stamp for the calls made inside."""
        start_ns = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
        stamp = self._last = max(start_ns, self._last + 1)
        yield stamp
        self._windows_ns[stamp] = start_ns, time.time_ns()

    def same(self, expected_ns: int, seen_ns: int) -> bool:
        if expected_ns not in self._windows_ns:
            return expected_ns == seen_ns
        start_ns, stop_ns = self._windows_ns[expected_ns]
        return start_ns <= seen_ns <= stop_ns


def replay(
    program: list[Call], root: Path, *, privileged: bool, on_marker: Callable[[Marker], Path] | None = None
) -> Reference:
    """Fail at the first call after which *root*, empty at the start, is not what the reference says.

    *on_marker* does what a marker asks for and returns where the filesystem is mounted from then on.
    """
    clock = Windows()
    with clock.call() as stamp:
        root.chmod(0o755)
        os.utime(root)
    reference = Reference(now_ns=stamp, uid=os.geteuid(), gid=os.getegid(), privileged=privileged)
    for drawn in program:
        call = settle(drawn, reference)
        if isinstance(call, Marker):
            root = on_marker(call) if on_marker else root
        else:
            with clock.call() as stamp:
                outcome = perform(root, call)
            assert outcome == reference.apply(call, stamp), call
        differences = diff(reference.snapshot(), observe(root), clock)
        assert not differences, "\n".join([f"after {call}:", *differences])
    return reference
