"""How long things take at each provider: the table `latencies.json`, whose rows name their sources.

Seconds throughout. Another table of the same form may be given, for what has been measured since.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("latencies.json")


@dataclass(frozen=True, slots=True)
class Latency:
    """The ends of a plausible range and the value of a median run."""

    low: float
    p50: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.p50 <= self.high:
            raise ValueError(f"latency {self.low} / {self.p50} / {self.high}: want 0 <= low <= p50 <= high")


class Latencies:
    """The table, by provider and name."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table

    @classmethod
    def load(cls, path: Path = SHIPPED) -> Latencies:
        """Read the table at *path*."""
        return cls(json.loads(path.read_text()))

    def of(self, provider: str, name: str) -> Latency:
        """Return one row, or raise KeyError."""
        row = self._table[provider][name]
        return Latency(float(row["low"]), float(row["p50"]), float(row["high"]))

    def interval(self, endpoint: str) -> float:
        """Return Vast's minimum interval for *endpoint* (providers.md 1.6), or 0 where none is known."""
        return float(self._table["vast"]["rate_min_interval"].get(endpoint, 0.0))

    def per_minute(self, provider: str, name: str) -> int:
        """Return how many requests a minute *provider* takes for *name*."""
        group = "rate_min_interval" if provider == "vast" else "rate_per_minute"
        return int(self._table[provider][group][name])
