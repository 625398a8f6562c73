"""How many bulk requests a store gets at a time, and how soon a refused one is sent again.

Invariant: every refusal for load halves the number in flight and pauses new ones; every success raises it a little, so
the refused share of requests falls while the store is busy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from spotwarp_fs.core.ports import Entropy
from spotwarp_fs.store.limits import Throttled

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 1.0
RISE_PER_ROUND: Final = 0.25


class AdaptiveLimit:
    """Additive increase, multiplicative decrease."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = float(most)
        self._running = 0
        self._pause_s = PAUSE_FIRST_S
        self._closed_until_s = float("-inf")
        self._parked = trio.lowlevel.ParkingLot()

    @property
    def allowed(self) -> int:
        """Requests that may be in flight now."""
        return int(self._allowed)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place, and learn from how the request in it ends."""
        await self._enter()
        try:
            yield
        except Throttled:
            self._throttled()
            raise
        else:
            self._succeeded()
        finally:
            self._running -= 1
            self._parked.unpark()

    async def _enter(self) -> None:
        try:
            while self._running >= self.allowed or trio.current_time() < self._closed_until_s:
                if self._running >= self.allowed:
                    await self._parked.park()
                else:
                    await trio.sleep_until(self._closed_until_s)
        except trio.Cancelled:
            self._parked.unpark()  # the wake-up may have been the only one that others get
            raise
        self._running += 1

    def _succeeded(self) -> None:
        self._allowed = min(self._most, self._allowed + RISE_PER_ROUND / self._allowed)
        self._pause_s = PAUSE_FIRST_S
        self._parked.unpark()

    def _throttled(self) -> None:
        now_s = trio.current_time()
        if now_s < self._closed_until_s:
            return  # the answers to one burst count once
        self._allowed = max(1.0, self._allowed / 2)
        self._closed_until_s = now_s + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, self._pause_s * 2)


class Backoff:
    """Pauses that double up to a limit, each drawn between half and all of its length."""

    def __init__(self, entropy: Entropy, *, first_s: float, most_s: float) -> None:
        self._entropy = entropy
        self._next_s = first_s
        self._most_s = most_s

    def pause_s(self, *, at_least_s: float = 0.0) -> float:
        """Draw the next pause."""
        full_s = max(self._next_s, at_least_s)
        self._next_s = min(self._most_s, self._next_s * 2)
        share = int.from_bytes(self._entropy.token_bytes(4), "big") / 2**32
        return full_s * (0.5 + share / 2)
