"""Giving disk space back inside a file: `fallocate(PUNCH_HOLE)`, which Python has no name for."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Any, Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2


def _find_fallocate() -> Any:
    """Return libc's function with 64-bit offsets, or None (macOS)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("fallocate64", "fallocate"):
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            function.restype = ctypes.c_int
            return function
    return None


_fallocate: Final = _find_fallocate()


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Make `[offset, offset + length)` a hole and keep the size; raises OSError (EOPNOTSUPP: cannot be done)."""
    if _fallocate is None:
        raise OSError(errno.EOPNOTSUPP, "this system cannot punch holes into files")
    while _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def probe_punching(directory: Path) -> None:
    """Raise OSError when files in *directory* cannot have holes punched: nothing could ever be evicted there."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"x" * 65_536)
        file.flush()
        punch_hole(file.fileno(), 0, 65_536)
        if os.pread(file.fileno(), 65_536, 0) != bytes(65_536):
            raise OSError(errno.EOPNOTSUPP, "a punched hole did not read as zeros")
