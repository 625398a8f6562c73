"""What will happen, in order of time; ties keep the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable

PLANNED_MAX = 1_000_000
"""More than a day of a big market; beyond it, something plans without end."""


class Agenda:
    """A heap of planned events, and the present time as the last event or request left it."""

    def __init__(self, start_s: float) -> None:
        self.now = start_s
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Plan *act* for *time_s*, or for now if that has passed."""
        assert len(self._planned) < PLANNED_MAX, f"{PLANNED_MAX} events are planned: something plans without end"
        self._count += 1
        heapq.heappush(self._planned, (max(time_s, self.now), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Plan *act* for *seconds* from now."""
        self.at(self.now + seconds, act)

    def next_at(self) -> float | None:
        """Return when the next event is due, or None if none is planned."""
        return self._planned[0][0] if self._planned else None

    def run_until(self, time_s: float) -> None:
        """Let everything happen that is due by *time_s*, each event at its own time."""
        while self._planned and self._planned[0][0] <= time_s:
            self.now, _, act = heapq.heappop(self._planned)
            act()
        self.now = max(self.now, time_s)
