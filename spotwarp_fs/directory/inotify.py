"""The Linux calls of inotify, which Python lacks.

Invariant: each raises OSError with the kernel's errno, or does what its name says.

    event: watch 4, mask 4, cookie 4, length 4, name (padded with zeros to length)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from enum import IntFlag
from pathlib import Path
from typing import Final, NamedTuple

_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_EVENT: Final = struct.Struct("=iIII")
READ_BYTES: Final = 64 << 10
"""What one read takes out of the queue, at most."""
_WATCHES_MAX: Final = (Path("/proc/sys/fs/inotify/max_user_watches"), Path("/proc/sys/user/max_inotify_watches"))
"""The machine's, and that of this user namespace."""


class Mask(IntFlag):
    """Events and options, as in inotify(7)."""

    MODIFY = 0x2
    ATTRIB = 0x4
    CLOSE_WRITE = 0x8
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    UNMOUNT = 0x2000
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    ONLYDIR = 0x1000000
    DONT_FOLLOW = 0x2000000
    EXCL_UNLINK = 0x4000000
    ISDIR = 0x40000000


class Event(NamedTuple):
    """One event; the mask is a plain number, since there are many."""

    watch: int
    mask: int
    name: bytes


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def create() -> int:
    """Return a new queue: a descriptor that never blocks."""
    return _check(_libc.inotify_init1(_NONBLOCK_CLOEXEC), "inotify_init1")


def add_watch(queue: int, path: bytes, mask: int) -> int:
    """Watch *path*; the number is the one that this inode has in this queue already, if it has one."""
    return _check(_libc.inotify_add_watch(queue, path, mask), "inotify_add_watch")


def remove_watch(queue: int, watch: int) -> None:
    """Forget a watch."""
    _check(_libc.inotify_rm_watch(queue, watch), "inotify_rm_watch")


def read_events(queue: int) -> Iterator[Event]:
    """Take what one read gives; raises BlockingIOError when there is nothing."""
    data = os.read(queue, READ_BYTES)
    at = 0
    while at < len(data):
        watch, mask, _cookie, length = _EVENT.unpack_from(data, at)
        start = at + _EVENT.size
        yield Event(watch, mask, data[start : start + length].rstrip(b"\0"))
        at = start + length


def watches_max() -> int | None:
    """Return how many watches one user may have, or None where the kernel does not say."""
    limits = []
    for path in _WATCHES_MAX:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits, default=None)
