"""Delete a dead node's disk, the closed-off directories below its mounts included.

What lies below a workspace's mount is closed while the mount stands (immutable, or mode 0), so that nothing is written
there by mistake; a node that was killed leaves it so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

# linux/fs.h: attributes of an inode, as `lsattr` shows them.
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_IMMUTABLE: Final = 0x10
_FLAGS: Final = struct.Struct("l")


def delete_tree(directory: Path) -> None:
    """Delete *directory* and everything below; raises OSError for what cannot be deleted."""

    def opened(function: Callable[..., Any], path: str, _error: object) -> None:
        # What is to be deleted may itself be closed, or the directory that it is in.
        for closed in (os.path.dirname(path), path):
            _open(closed)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    shutil.rmtree(directory, onerror=opened)


def _open(path: str) -> None:
    """Take the immutable flag and mode 0 from a directory, as far as that is allowed here."""
    if os.path.islink(path):
        return
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = bytearray(_FLAGS.size)
            fcntl.ioctl(descriptor, _GET_FLAGS, flags)
            (found,) = _FLAGS.unpack(flags)
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(found & ~_IMMUTABLE))
        finally:
            os.close(descriptor)
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
