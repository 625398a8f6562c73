"""Decide modes, owners and times: what a new entry inherits, what `setattr` changes, what a write takes away.

Invariant: the kernel (`default_permissions`) has already decided *whether* the caller may; only the outcome is decided
here. An inode's type never changes, and every time fits a signed 64-bit count of nanoseconds.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from typing import Final

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.paths import inode
from spotwarp_fs.core.records import InodeRecord, inode_key
from spotwarp_fs.core.requests import Actor, AttributeChange, Node, TreeWrite
from spotwarp_fs.core.types import FILE_BYTES_MAX, Inode

TIME_NS_MAX: Final = (1 << 63) - 1
PERMISSION_BITS: Final = 0o7777
KNOWN_TYPES: Final = frozenset(
    {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK}
)


def dtype(mode: int) -> int:
    """Return the `d_type` that an entry of an inode with *mode* carries."""
    return stat.S_IFMT(mode) >> 12


def mode_of_new(parent: InodeRecord, mode: int) -> int:
    """Return the mode of a new entry of *parent*, as ext4 does: directories take setgid from their parent only."""
    if stat.S_ISDIR(mode):
        return (mode & ~(stat.S_ISUID | stat.S_ISGID)) | (parent.mode & stat.S_ISGID)
    if stat.S_ISLNK(mode):
        return stat.S_IFLNK | 0o777
    return mode if stat.S_IFMT(mode) else mode | stat.S_IFREG


def gid_of_new(parent: InodeRecord, actor: Actor) -> int:
    """Return the group of a new entry of *parent*: the directory's own if that is setgid."""
    return parent.gid if parent.mode & stat.S_ISGID else actor.gid


def without_privileges(mode: int) -> int:
    """Return *mode* as a write or a change of owner leaves it: no setuid, and no setgid that grants anything.

    Setgid without group execution is not a privilege (it once meant mandatory locking), so Linux keeps it.
    """
    if stat.S_ISDIR(mode):
        return mode
    lost = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
    return mode & ~lost


def clamped_time(time_ns: int) -> int:
    """Return the nearest time that a record can hold, as ext4 does with a year that it can't."""
    return max(-TIME_NS_MAX, min(time_ns, TIME_NS_MAX))


def changed(record: InodeRecord, change: AttributeChange, now_ns: int) -> InodeRecord:
    """Return *record* with everything of *change* but its size applied."""
    mode = record.mode
    if change.mode is not None:
        mode = stat.S_IFMT(mode) | (change.mode & PERMISSION_BITS)
    if change.uid is not None or change.gid is not None:
        mode = without_privileges(mode)
    return replace(
        record,
        mode=mode,
        uid=record.uid if change.uid is None else change.uid,
        gid=record.gid if change.gid is None else change.gid,
        atime_ns=record.atime_ns if change.atime_ns is None else clamped_time(change.atime_ns),
        mtime_ns=record.mtime_ns if change.mtime_ns is None else clamped_time(change.mtime_ns),
        ctime_ns=now_ns if change.ctime_ns is None else clamped_time(change.ctime_ns),
    )


def set_attributes(tree: TreeWrite, ino: Inode, change: AttributeChange, now_ns: int) -> Node:
    """Apply everything of *change* but its size, which needs the blocks: see `resized`.

    When a request carries both, resize first: an explicit mtime must win over the one that a new size brings.
    """
    record = changed(inode(tree, ino), change, now_ns)
    tree.put(inode_key(ino), record.encode())
    return Node(ino, record)


def resized(record: InodeRecord, size: int, allocated: int, now_ns: int) -> InodeRecord:
    """Return *record* after its content changed to *size* bytes; refuses with EFBIG what no block index reaches."""
    if size > FILE_BYTES_MAX:
        raise Refused(errno.EFBIG, f"size {size} is above the largest file size {FILE_BYTES_MAX}")
    return replace(record, size=size, allocated=allocated, mtime_ns=now_ns, ctime_ns=now_ns)
