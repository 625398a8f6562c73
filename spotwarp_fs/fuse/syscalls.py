"""The few Linux calls that Python lacks: mount, umount2 and the inode flags of chattr.

Invariant: each raises OSError with the kernel's errno and does nothing else.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
from typing import Final

_MNT_FORCE: Final = 1
_MNT_DETACH: Final = 2
_FS_IOC_GETFLAGS: Final = 0x80086601
_FS_IOC_SETFLAGS: Final = 0x40086602
_FS_IMMUTABLE_FL: Final = 0x10

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str) -> None:
    """Mount a filesystem of *kind* without options."""
    _check(_libc.mount(source.encode(), os.fsencode(target), kind.encode(), 0, None), target)


def unmount(target: str, *, lazy: bool = False, force: bool = False) -> None:
    """Take the topmost mount off *target*.

    *lazy*: at once, and whoever is inside keeps what it has open. *force*: a FUSE connection is aborted first, so that
    every request that waits for its daemon fails.
    """
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH * lazy | _MNT_FORCE * force), target)


def is_immutable(descriptor: int) -> bool:
    """Tell whether `chattr +i` is in force."""
    return bool(_flags(descriptor) & _FS_IMMUTABLE_FL)


def set_immutable(descriptor: int, *, immutable: bool) -> None:
    """Do what `chattr +i` and `chattr -i` do."""
    flags = _flags(descriptor)
    wanted = flags | _FS_IMMUTABLE_FL if immutable else flags & ~_FS_IMMUTABLE_FL
    fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, array.array("l", [wanted]))


def _flags(descriptor: int) -> int:
    flags = array.array("l", [0])
    fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, flags, True)
    return flags[0]
