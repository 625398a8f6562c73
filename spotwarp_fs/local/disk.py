"""Small calls on files that several adapters need: whole writes, syncs, free space."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_all(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of *data* at *offset*; a single `pwrite` may stop short of it."""
    written = os.pwrite(fd, data, offset) if data else 0
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)


def fdatasync(fd: int) -> None:
    """Put contents and length on disk."""
    # macOS has no fdatasync in Python.
    if sys.platform == "linux":
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def sync_directory(path: str | Path) -> None:
    """Put the names in a directory on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_free_bytes(path: Path) -> int:
    """Return what an unprivileged process may still write on the filesystem of *path*."""
    figures = os.statvfs(path)
    return figures.f_bavail * figures.f_frsize
