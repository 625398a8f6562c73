"""The wall clock and the system's randomness, for controllers and for nodes."""

from __future__ import annotations

import os
from datetime import UTC, datetime


class SystemClock:
    """A `core.ports.Clock`."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return datetime.now(UTC).timestamp()


class SystemEntropy:
    """A `core.ports.Entropy`."""

    def token_bytes(self, count: int) -> bytes:
        """Return *count* random bytes."""
        return os.urandom(count)
