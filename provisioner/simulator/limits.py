"""The providers' rate limits: Vast's minimum interval per endpoint and key, RunPod v2's windows per key.

Sources: providers.md 1.6 and 2.3. All in virtual time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from provisioner.simulator.latencies import Latencies

CREATE_PENALTY_S = 12.0
"""How long a create that came too early keeps the next one out (providers.md 1.6)."""

# Our names of endpoints to the rows of latencies.json; what has no row there has the documented interval here.
VAST_ROWS = {"create": "create", "show": "show", "list": "list", "destroy": "destroy", "bid": "bid"}
VAST_INTERVALS = {"stop": 1.0, "start": 1.0, "label": 1.0, "reboot": 1.0, "logs": 1.5, "execute": 1.5, "launch": 5.0}


class Intervals:
    """Vast: a request is refused if it follows the last accepted one of its endpoint and key too soon."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._free_at: dict[tuple[str, str], float] = {}
        self._searches: dict[str, deque[float]] = {}

    def threshold(self, endpoint: str) -> float:
        """Return the minimum interval of *endpoint* in seconds, 0 where there is none."""
        if endpoint in VAST_ROWS:
            return self._latencies.interval(VAST_ROWS[endpoint])
        return VAST_INTERVALS.get(endpoint, 0.0)

    def accept(self, endpoint: str, key: str, now: float) -> bool:
        """Count a request, or return False if it comes too early."""
        if endpoint == "search":
            return self._accept_search(key, now)
        slot = (endpoint, key)
        if now < self._free_at.get(slot, 0.0):
            if endpoint == "create":
                self._free_at[slot] = now + CREATE_PENALTY_S
            return False
        self._free_at[slot] = now + self.threshold(endpoint)
        return True

    def _accept_search(self, key: str, now: float) -> bool:
        recent = self._searches.setdefault(key, deque())
        while recent and recent[0] <= now - 60.0:
            recent.popleft()
        if len(recent) >= self._latencies.per_minute("vast", "search_per_minute"):
            return False
        recent.append(now)
        return True


@dataclass(frozen=True, slots=True)
class Window:
    """One of RunPod's quotas."""

    name: str
    quota: int
    seconds: int


class Windows:
    """RunPod v2: fixed windows of a minute, an hour and a day, told in headers on every answer."""

    def __init__(self, latencies: Latencies) -> None:
        per_minute = latencies.per_minute("runpod", "v2")
        self._windows = (Window("minute", per_minute, 60), Window("hour", 3000, 3600), Window("day", 50_000, 86_400))
        self._counts: dict[tuple[str, str, int], int] = {}

    def accept(self, key: str, now: float) -> int | None:
        """Count a request and return None, or return the whole seconds to wait."""
        for window in self._windows:
            if self._left(window, key, now) <= 0:
                return self._resets_in(window, now)
        for window in self._windows:
            slot = (window.name, key, int(now // window.seconds))
            self._counts[slot] = self._counts.get(slot, 0) + 1
        return None

    def headers(self, key: str, now: float) -> dict[str, str]:
        """Return the two headers of the IETF draft, as documented."""
        state = [f'"{w.name}";r={self._left(w, key, now)};t={self._resets_in(w, now)}' for w in self._windows]
        policy = [f'"{w.name}";q={w.quota};w={w.seconds}' for w in self._windows]
        return {"RateLimit": ", ".join(state), "RateLimit-Policy": ", ".join(policy)}

    def _left(self, window: Window, key: str, now: float) -> int:
        return window.quota - self._counts.get((window.name, key, int(now // window.seconds)), 0)

    def _resets_in(self, window: Window, now: float) -> int:
        return int(window.seconds - now % window.seconds) + 1
