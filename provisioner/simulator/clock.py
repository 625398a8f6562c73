"""The simulator's time: virtual Unix time, which passes some times as fast as the clock behind trio.

Being Unix time, it can be shown as it is, and what a client sends (RunPod's terminateAfter) can be compared with it.
Invariant: time never goes back. A scale of 60 lets a boot of four minutes pass in four seconds; a scale of 0 freezes
time, which then moves only when somebody advances it. Under trio's mock clock, sleeping costs nothing at all.
"""

from __future__ import annotations

from datetime import UTC, datetime

import trio

START_UNIX_S = 1_796_083_200.0
"""2026-12-01T00:00:00Z, where a world begins unless told otherwise, so that one seed gives one and the same world."""

FOREVER_S = 1e12


class SimClock:
    """Turn trio's clock into virtual time; must be made and used inside a trio run."""

    def __init__(self, *, scale: float = 1.0, start_unix_s: float = START_UNIX_S) -> None:
        if not scale >= 0:
            raise ValueError(f"the clock's scale is {scale}: give 0 (frozen) or a positive factor")
        self._scale = scale
        self._origin = trio.current_time()
        self._advanced_s = start_unix_s
        self._moved = trio.Event()

    def now(self) -> float:
        """Return the virtual time."""
        return self._advanced_s + (trio.current_time() - self._origin) * self._scale

    def advance(self, seconds: float) -> None:
        """Jump ahead by *seconds*, and wake whoever slept until then."""
        if not seconds >= 0:
            raise ValueError(f"time cannot move by {seconds} s: it never goes back")
        self._advanced_s += seconds
        self.poke()

    def poke(self) -> None:
        """Wake whoever dozes, because there may be something earlier to do."""
        self._moved.set()
        self._moved = trio.Event()

    async def doze_until(self, time_s: float) -> None:
        """Wait until *time_s*, until time is advanced, or until somebody pokes, whichever is first."""
        moved = self._moved
        left_s = max(0.0, time_s - self.now())
        with trio.move_on_after(left_s / self._scale if self._scale else FOREVER_S):
            await moved.wait()

    async def sleep(self, seconds: float) -> None:
        """Wait for *seconds* of virtual time."""
        await self.sleep_until(self.now() + seconds)

    async def sleep_until(self, time_s: float) -> None:
        """Wait until virtual time has reached *time_s*; return at once (after a yield) when it has."""
        await trio.lowlevel.checkpoint()
        while self.now() < time_s:
            await self.doze_until(time_s)


def rfc3339(time_s: float) -> str:
    """Return virtual *time_s* as RunPod writes times.

    >>> rfc3339(START_UNIX_S + 61.5)
    '2026-12-01T00:01:01Z'
    """
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str) -> float:
    """Return the virtual time that *text* means, or raise ValueError.

    >>> from_rfc3339("2026-12-01T00:01:01Z") - START_UNIX_S
    61.0
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
