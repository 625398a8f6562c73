"""Reach a unix socket whatever the length of its path: the kernel takes 107 bytes, home directories are longer.

Invariant: the short path works only while the block runs, and leads to the same file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DESCRIPTORS: Final = Path("/proc/self/fd")


@contextmanager
def short_path(path: str | Path) -> Iterator[str]:
    """Give a path of a few bytes to the same file, through an open descriptor of its directory (Linux)."""
    if not DESCRIPTORS.exists():
        yield str(path)
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{DESCRIPTORS}/{descriptor}/{name}"
    finally:
        os.close(descriptor)
