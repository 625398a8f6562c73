"""Turn inode records into what the kernel caches, and the kernel's wishes into attribute changes.

Invariant: SpotWarp is the only writer of what the kernel caches, so every answer, a "no such file" too, stays valid for
an hour; whoever changes the tree beside the kernel goes through the mountpoint.
"""

from __future__ import annotations

import stat
from typing import Final

import pyfuse3

from spotwarp_fs.core.requests import Actor, AttributeChange, FilesystemFigures, Node
from spotwarp_fs.core.types import NAME_BYTES_MAX

CACHED_FOR_S: Final = 3600
IO_BYTES: Final = 128 << 10
"""`st_blksize`. libc and Python size their buffers by it: what a killed trainer had not flushed is lost, so not 1 MiB;
but each request costs some 50 µs, so not 4 KiB either. At 128 KiB requests are no longer the limit."""
PAGE_BYTES: Final = 4096
SECTOR_BYTES: Final = 512


def entry(node: Node) -> pyfuse3.EntryAttributes:
    """Describe *node* to the kernel; times before 1970 and after 2038 keep every nanosecond."""
    record = node.record
    answer = pyfuse3.EntryAttributes()
    answer.st_ino = node.ino
    answer.entry_timeout = answer.attr_timeout = CACHED_FOR_S
    answer.st_mode = record.mode
    answer.st_nlink = record.nlink
    answer.st_uid = record.uid
    answer.st_gid = record.gid
    answer.st_rdev = record.rdev
    answer.st_size = record.size
    answer.st_blksize = IO_BYTES
    # Blocks count whole in the record; a file's last one, or its only small one, occupies no more than the file has.
    occupied = min(record.allocated, -(-record.size // PAGE_BYTES) * PAGE_BYTES)
    answer.st_blocks = -(-occupied // SECTOR_BYTES)
    answer.st_atime_ns = record.atime_ns
    answer.st_mtime_ns = record.mtime_ns
    answer.st_ctime_ns = record.ctime_ns
    return answer


def no_entry() -> pyfuse3.EntryAttributes:
    """Say "no such name" so that the kernel remembers it: inode 0 with a timeout."""
    answer = pyfuse3.EntryAttributes()
    answer.st_ino = pyfuse3.InodeT(0)
    answer.entry_timeout = CACHED_FOR_S
    return answer


def change(wanted: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> AttributeChange:
    """Read out of a SETATTR request what it changes."""
    return AttributeChange(
        mode=stat.S_IMODE(wanted.st_mode) if fields.update_mode else None,
        uid=wanted.st_uid if fields.update_uid else None,
        gid=wanted.st_gid if fields.update_gid else None,
        size=wanted.st_size if fields.update_size else None,
        atime_ns=wanted.st_atime_ns if fields.update_atime else None,
        mtime_ns=wanted.st_mtime_ns if fields.update_mtime else None,
        ctime_ns=wanted.st_ctime_ns if fields.update_ctime else None,
    )


def actor(ctx: pyfuse3.RequestContext) -> Actor:
    """Say who asks."""
    return Actor(ctx.uid, ctx.gid, ctx.pid, ctx.umask)


def figures(known: FilesystemFigures) -> pyfuse3.StatvfsData:
    """Answer `statfs`."""
    answer = pyfuse3.StatvfsData()
    answer.f_bsize = answer.f_frsize = known.block_bytes
    answer.f_blocks = known.total_bytes // known.block_bytes
    answer.f_bfree = answer.f_bavail = known.free_bytes // known.block_bytes
    answer.f_files = known.inodes
    answer.f_ffree = answer.f_favail = known.inodes_free
    answer.f_namemax = NAME_BYTES_MAX
    return answer
