"""Keep a service's rate limits by waiting, on trio's clock, so that virtual time works as well.

A gate lets at most *count* requests begin in any *seconds*; a minimum interval is a gate of one. Invariant: waiters
pass in the order in which they came, and nobody passes before `closed_until_s`.
"""

from __future__ import annotations

import math
from collections import deque

import trio


class Gate:
    """One limit, shared by all calls that count against it."""

    def __init__(self, count: int, seconds: float, *, penalty_s: float | None = None) -> None:
        assert count > 0
        assert seconds >= 0
        self.seconds = seconds
        self.penalty_s = seconds if penalty_s is None else penalty_s
        """How long a request that came too early keeps the next one out, where the service does not say."""
        self._count = count
        self._passes_s: deque[float] = deque(maxlen=count)
        self._closed_until_s = -math.inf

    async def enter(self, wait_s_max: float = math.inf) -> bool:
        """Wait for a turn and take it, or return False at once when it is further off than *wait_s_max*."""
        now_s = trio.current_time()
        turn_s = self._next_s(now_s)
        if turn_s - now_s > wait_s_max:
            await trio.lowlevel.checkpoint()
            return False
        # The turn is taken before waiting, so that the next one who asks queues behind.
        self._passes_s.append(turn_s)
        await trio.sleep_until(turn_s)
        while (closed_s := self._closed_until_s) > trio.current_time():
            if closed_s - now_s > wait_s_max:
                return False
            await trio.sleep_until(closed_s)
        return True

    def close_for(self, seconds: float) -> None:
        """Let nobody pass for *seconds*: the service asked for it."""
        self._closed_until_s = max(self._closed_until_s, trio.current_time() + seconds)

    def _next_s(self, now_s: float) -> float:
        full = len(self._passes_s) == self._count
        earliest_s = self._passes_s[0] + self.seconds if full else now_s
        # A later pass than the last one keeps the order even when the gate was closed in between.
        last_s = self._passes_s[-1] if self._passes_s else now_s
        return max(now_s, earliest_s, last_s, self._closed_until_s)
