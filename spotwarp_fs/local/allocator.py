"""Make glibc keep what blocks are read into and encoded in, instead of asking the kernel for it each time.

Invariant: a wish, not a need: where there is no glibc, nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
BUFFER_BYTES_MAX: Final = 32 << 20
"""The largest value that glibc takes."""
TRIM_BYTES: Final = 64 << 20
ARENAS: Final = 2


def keep_memory_together() -> None:
    """Few arenas, and buffers up to 32 MiB on the heap: fresh pages for each block halve the speed of encoding."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, BUFFER_BYTES_MAX)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
