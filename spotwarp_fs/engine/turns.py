"""Whose fetch is next: what somebody waits for, then everything else.

Invariant: nothing of the background begins while a demand waits, and the background never holds all places, so that a
demand seldom waits for bytes that nobody asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.ports import Lane


@dataclass(slots=True, eq=False)
class Turn:
    """One fetch, waiting or admitted."""

    lane: Lane
    admitted: trio.Event = field(default_factory=trio.Event)
    counts_as: Lane | None = None
    """The lane whose place it holds, once admitted."""


class Turns:
    """A number of places, a quarter of which is kept for demand."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._background_free = max(1, places - max(1, places // 4))
        self._waiting: dict[Lane, deque[Turn]] = {Lane.DEMAND: deque(), Lane.BULK: deque()}

    def line_up(self, lane: Lane) -> Turn:
        """Join the line of *lane*; wait for `admitted`, and call `leave` in any case."""
        turn = Turn(lane)
        self._waiting[lane].append(turn)
        self._admit()
        return turn

    def promote(self, turn: Turn) -> None:
        """Somebody waits for it now: it comes before the whole background."""
        if turn.lane is Lane.DEMAND:
            return
        turn.lane = Lane.DEMAND
        if turn.counts_as is None:
            self._waiting[Lane.BULK].remove(turn)
            self._waiting[Lane.DEMAND].append(turn)
            self._admit()

    def leave(self, turn: Turn) -> None:
        """Give the place, or the place in the line, back."""
        if turn.counts_as is None:
            self._waiting[turn.lane].remove(turn)
            return
        self._free += 1
        self._background_free += turn.counts_as is Lane.BULK
        self._admit()

    def _admit(self) -> None:
        demand, background = self._waiting[Lane.DEMAND], self._waiting[Lane.BULK]
        while self._free and (demand or (background and self._background_free)):
            turn = demand.popleft() if demand else background.popleft()
            turn.counts_as = turn.lane
            self._free -= 1
            self._background_free -= turn.lane is Lane.BULK
            turn.admitted.set()
