"""Every chance of a simulated world, drawn from one seed.

Invariant: each purpose has its own stream, named after it, so that one more draw in one place leaves all others as
they were, and a seed that failed once goes on to fail for the same reason.
"""

from __future__ import annotations

import random  # noqa: TID251 (a simulated world is a function of its seed)
from collections.abc import Sequence
from typing import TypeVar

from provisioner.simulator.latencies import Latency

T = TypeVar("T")


class Draws:
    """One named stream of draws; `stream` makes further ones."""

    def __init__(self, seed: int, name: str = "world") -> None:
        self.seed = seed
        self._name = name
        self._random = random.Random(f"{seed}/{name}")

    def stream(self, name: object) -> Draws:
        """Return the stream of that name below this one, always from its beginning."""
        return Draws(self.seed, f"{self._name}/{name}")

    def chance(self, probability: float) -> bool:
        """Return True with *probability*."""
        return self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        """Draw evenly from *low* to *high*."""
        return self._random.uniform(low, high)

    def whole(self, low: int, high: int) -> int:
        """Draw a whole number from *low* to *high*, both included."""
        return self._random.randint(low, high)

    def one_of(self, things: Sequence[T]) -> T:
        """Draw one of *things*."""
        return self._random.choice(things)

    def gap(self, per_hour: float) -> float:
        """Draw the seconds until the next of events that come *per_hour* times an hour, independently."""
        return self._random.expovariate(per_hour / 3600.0)

    def hex(self, digits: int) -> str:
        """Draw that many hexadecimal digits."""
        return f"{self._random.getrandbits(4 * digits):0{digits}x}"

    def latency(self, latency: Latency) -> float:
        """Draw a duration: half of the draws lie below the median, none outside the ends."""
        part = self._random.random()
        if part < 0.5:
            return latency.low + (latency.p50 - latency.low) * part * 2
        # Squared, so that the far end stays rare: the ends are plausible extremes, not typical values.
        return latency.p50 + (latency.high - latency.p50) * ((part - 0.5) * 2) ** 2
