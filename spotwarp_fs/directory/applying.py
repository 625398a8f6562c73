"""Give a file its attributes: owner, extended attributes, mode and times, as far as this machine can.

Invariant: what cannot be kept is counted, never passed over in silence, and set-user-id bits never come without their
owner. An error that says that the disk or the directory is unusable is raised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from spotwarp_fs.core.records import InodeRecord

PRIVILEGED_BITS: Final = stat.S_ISUID | stat.S_ISGID
OWN_XATTRS: Final = b"user.spotwarp."
"""Marks of this program on this node; no state has them."""
NOT_HERE: Final = frozenset({
    errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENAMETOOLONG, errno.EILSEQ,
    errno.ENOSYS,
})  # fmt: skip
"""What a filesystem or this user cannot make; anything else (a full or broken disk) is no reason to go on."""


class Applier:
    """Applies attributes; a file is given by its path or by a descriptor."""

    def __init__(self, *, owners: bool) -> None:
        self._owners = owners
        self.left_out: Counter[str] = Counter()
        """What could not be kept, and how often."""

    def make_special(self, record: InodeRecord, draft: bytes) -> bool:
        """Make a symlink, fifo, socket or device; False if this user may not."""
        if stat.S_ISLNK(record.mode):
            os.symlink(record.target, draft)
            return True
        if (stat.S_ISCHR(record.mode) or stat.S_ISBLK(record.mode)) and os.geteuid() != 0:
            self.left_out["devices, which only root can make"] += 1
            return False
        try:
            os.mknod(draft, stat.S_IFMT(record.mode) | 0o600, record.rdev)
        except OSError as error:
            self.left_out[f"fifos, sockets or devices ({error.strerror})"] += 1
            return False
        return True

    def finish(
        self, place: bytes | int, record: InodeRecord, xattrs: Sequence[tuple[bytes, bytes]]
    ) -> tuple[bytes, ...]:
        """Set everything, in the order in which none undoes another; gives the names of xattrs that were refused."""
        mode = stat.S_IMODE(record.mode)
        if not self._set_owner(place, record):
            mode &= ~PRIVILEGED_BITS
        refused = self._set_xattrs(place, xattrs)
        if not stat.S_ISLNK(record.mode):
            os.chmod(place, mode)
        self.set_times(place, record.atime_ns, record.mtime_ns)
        return refused

    def _set_owner(self, place: bytes | int, record: InodeRecord) -> bool:
        """Tell whether the owner is as recorded now."""
        if not self._owners:
            return False
        status = os.stat(place) if isinstance(place, int) else os.lstat(place)
        if (status.st_uid, status.st_gid) == (record.uid, record.gid):
            return True
        try:
            if isinstance(place, int):
                os.chown(place, record.uid, record.gid)
            else:
                os.chown(place, record.uid, record.gid, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
            self.left_out[f"owners ({error.strerror})"] += 1
            return False
        return True

    def _set_xattrs(self, place: bytes | int, xattrs: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
        refused = []
        for name, value in xattrs:
            if name.startswith(OWN_XATTRS):
                continue
            try:
                if isinstance(place, int):
                    os.setxattr(place, name, value)
                else:
                    os.setxattr(place, name, value, follow_symlinks=False)
            except (OSError, AttributeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "this system has none here"
                self.left_out[f"extended attributes ({reason})"] += 1
                refused.append(name)
        return tuple(refused)

    def set_times(self, place: bytes | int, atime_ns: int, mtime_ns: int) -> None:
        """Set both times to the nanosecond."""
        try:
            if isinstance(place, int):
                os.utime(place, ns=(atime_ns, mtime_ns))
            else:
                os.utime(place, ns=(atime_ns, mtime_ns), follow_symlinks=False)
        except (OSError, OverflowError, NotImplementedError) as error:
            self.left_out[f"times ({error})"] += 1


def hard_link(first: bytes, place: bytes, draft: bytes) -> None:
    """Make *place* another name of *first*, replacing what is there in one step; *draft* is a free name beside it."""
    os.link(first, draft, follow_symlinks=False)
    os.replace(draft, place)
    # Two names of one inode: rename(2) does nothing then, and the draft would stay.
    with suppress(FileNotFoundError):
        os.unlink(draft)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of *data* at *offset*."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
