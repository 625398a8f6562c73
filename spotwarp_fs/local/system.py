"""The machine's clock, randomness and disk figures, behind the core's ports."""

from __future__ import annotations

import os
import time
from pathlib import Path


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


def disk_free_bytes(path: Path) -> int:
    """Return what an unprivileged process may still write on the filesystem of *path*."""
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize


def disk_total_bytes(path: Path) -> int:
    """Return the size of the filesystem of *path*."""
    figures = os.statvfs(path)
    return figures.f_blocks * figures.f_frsize
