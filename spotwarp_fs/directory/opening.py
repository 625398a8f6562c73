"""Open a directory somewhere below another one, however deep, and never through a symlink at its end.

Invariant: on any error nothing stays open.
"""

from __future__ import annotations

import os
from typing import Final

OPEN_PATH_BYTES: Final = 3_500
"""A longer path is opened piece by piece: Linux takes 4,095 bytes at a time."""
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STEP: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(root: int, path: bytes) -> int:
    """Open the directory at *path* below the open directory *root*, for listing.

    A directory above it may have become a symlink just now: whether it is the right one, the caller finds out.
    """
    at, rest = root, path or b"."
    try:
        while len(rest) > OPEN_PATH_BYTES:
            cut = rest.rfind(b"/", 0, OPEN_PATH_BYTES)
            step = os.open(rest[:cut], STEP, dir_fd=at)
            if at != root:
                os.close(at)
            at, rest = step, rest[cut + 1 :]
        return os.open(rest, DIRECTORY, dir_fd=at)
    finally:
        if at != root:
            os.close(at)
