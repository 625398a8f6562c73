"""Whose fetch is next: what somebody waits for, then everything else.

Invariant: nothing of the background begins while a demand waits, and the background never holds all places, so that a
demand seldom waits for bytes that nobody asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import trio


class Rank(Enum):
    """Why something is fetched."""

    DEMAND = "demand"
    BACKGROUND = "background"


@dataclass(slots=True, eq=False)
class Turn:
    """One fetch, waiting or admitted."""

    rank: Rank
    admitted: trio.Event = field(default_factory=trio.Event)
    counts_as: Rank | None = None
    """The rank whose place it holds, once admitted."""


class Turns:
    """A number of places, a quarter of which is kept for demand."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._background_free = max(1, places - max(1, places // 4))
        self._waiting: dict[Rank, deque[Turn]] = {Rank.DEMAND: deque(), Rank.BACKGROUND: deque()}

    def line_up(self, rank: Rank) -> Turn:
        """Join the line of *rank*; wait for `admitted`, and call `leave` in any case."""
        turn = Turn(rank)
        self._waiting[rank].append(turn)
        self._admit()
        return turn

    def promote(self, turn: Turn) -> None:
        """Somebody waits for it now: it comes before the whole background."""
        if turn.rank is Rank.DEMAND:
            return
        turn.rank = Rank.DEMAND
        if turn.counts_as is None:
            self._waiting[Rank.BACKGROUND].remove(turn)
            self._waiting[Rank.DEMAND].append(turn)
            self._admit()

    def leave(self, turn: Turn) -> None:
        """Give the place, or the place in the line, back."""
        if turn.counts_as is None:
            self._waiting[turn.rank].remove(turn)
            return
        self._free += 1
        self._background_free += turn.counts_as is Rank.BACKGROUND
        self._admit()

    def _admit(self) -> None:
        demand, background = self._waiting[Rank.DEMAND], self._waiting[Rank.BACKGROUND]
        while self._free and (demand or (background and self._background_free)):
            turn = demand.popleft() if demand else background.popleft()
            turn.counts_as = turn.rank
            self._free -= 1
            self._background_free -= turn.rank is Rank.BACKGROUND
            turn.admitted.set()
