"""The machine's clock and randomness, behind the core's ports."""

from __future__ import annotations

import os
import time


class SystemWall:
    """`core.ports.Wall`: the machine's wall clock."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()


class SystemEntropy:
    """`core.ports.Entropy`: the kernel's random bytes."""

    def token_bytes(self, count: int) -> bytes:
        """Return *count* random bytes."""
        return os.urandom(count)
