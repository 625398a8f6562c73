"""What the directory form last saw of a file, and what a new look at it means (C19).

A *witness* is node-local, one per inode of the workspace: the `stat` of the real file at the moment when its content
and attributes were taken into the map, or laid out from it. Invariants: a file whose witness is not *trusted* is read
again; one whose bytes are *absent* (a placeholder) is never read, whatever its `stat` says; an attribute that the node
shows as it was when it was laid out keeps the value of the workspace, also where that could not be applied (owner).

    value of table W: dev 8, ino 8, mode 4, nlink 4, uid 4, gid 4, rdev 8, size 8, mtime ns 8, ctime ns 8,
                      flags 1, tries 1
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from enum import Enum, IntFlag
from typing import Final

from spotwarp_fs.core.records import InodeRecord

SETTLED_AFTER_NS: Final = 2_000_000_000
"""A change in the same tick of a coarse clock as the read shows in no `stat`: so old the last change must be."""

StatResult = os.stat_result
"""What `os.lstat` gives: a value, nothing here asks for one."""
_WITNESS = struct.Struct(">QQIIIIQQqqBB")


class Seen(IntFlag):
    """What is known of a file besides its `stat`."""

    NOTHING = 0
    TRUSTED = 1
    """Its content was read while nobody could change it, and long enough after its last change."""
    ABSENT = 2
    """A placeholder: its bytes are in the store only."""
    LATE = 4
    """A placeholder that timed out: its content is published, and not what the file holds."""
    FUZZY = 8
    """It never settled: what is published of it may never have been its content at one moment."""


@dataclass(frozen=True, slots=True)
class Witness:
    """One look at a file."""

    dev: int
    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    mtime_ns: int
    ctime_ns: int
    seen: Seen = Seen.NOTHING
    tries: int = 0
    """How often it was read in vain since it last settled."""

    @classmethod
    def of(cls, status: StatResult, seen: Seen = Seen.NOTHING, tries: int = 0) -> Witness:
        """Take a look."""
        return cls(
            status.st_dev, status.st_ino, status.st_mode, status.st_nlink, status.st_uid, status.st_gid,
            status.st_rdev, status.st_size, status.st_mtime_ns, status.st_ctime_ns, seen, tries,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Pack into the value of table W."""
        return _WITNESS.pack(
            self.dev, self.ino, self.mode, self.nlink, self.uid, self.gid, self.rdev, self.size,
            self.mtime_ns, self.ctime_ns, int(self.seen), min(self.tries, 255),
        )  # fmt: skip

    @classmethod
    def decode(cls, value: bytes) -> Witness:
        """Unpack a value of table W."""
        dev, ino, mode, nlink, uid, gid, rdev, size, mtime_ns, ctime_ns, seen, tries = _WITNESS.unpack(value)
        return cls(dev, ino, mode, nlink, uid, gid, rdev, size, mtime_ns, ctime_ns, Seen(seen), tries)

    @property
    def absent(self) -> bool:
        """Return whether the real file's bytes do not count."""
        return bool(self.seen & (Seen.ABSENT | Seen.LATE))

    def same_file(self, status: StatResult) -> bool:
        """Tell whether this is the inode that was seen (numbers come again: only together with `unchanged`)."""
        return self.ino == status.st_ino and self.dev == status.st_dev

    def unchanged(self, status: StatResult) -> bool:
        """Tell whether no `stat` shows a change of content or attributes since the look."""
        return (
            self.ctime_ns == status.st_ctime_ns
            and self.ino == status.st_ino
            and self.size == status.st_size
            and self.mtime_ns == status.st_mtime_ns
            and self.mode == status.st_mode
            and self.dev == status.st_dev
        )

    def seen_again(self, status: StatResult, seen: Seen) -> Witness:
        """Another look at it; the mtime of what is absent stays the one that it was laid out with."""
        now = Witness.of(status, seen)
        return replace(now, mtime_ns=self.mtime_ns) if self.absent else now

    def with_seen(self, seen: Seen) -> Witness:
        """The same look, of which something else is known."""
        return replace(self, seen=seen)


class Look(Enum):
    """What a new `stat` says about a regular file that has a witness."""

    CLEAN = "clean"
    """Nothing to do."""
    READ = "read"
    """Its content must be read."""
    ABSENT = "absent"
    """A placeholder: its record is carried over."""
    WRITTEN = "written"
    """A placeholder that is no longer what was laid out: it is the user's file now."""


def look(witness: Witness | None, status: StatResult) -> Look:
    """Decide what to do with a regular file."""
    if witness is None:
        return Look.READ
    if witness.absent:
        return Look.ABSENT if witness.same_file(status) and witness.size == status.st_size else Look.WRITTEN
    return Look.CLEAN if witness.seen & Seen.TRUSTED and witness.unchanged(status) else Look.READ


def is_settled(status: StatResult, now_ns: int) -> bool:
    """Tell whether a read that begins now can be trusted, as far as clocks go (C19 c).

    A change "in the future", by a clock that was set back, is not trusted either.
    """
    return now_ns - status.st_ctime_ns >= SETTLED_AFTER_NS


def merged(record: InodeRecord, before: Witness | None, status: StatResult) -> InodeRecord:
    """Take over the attributes that changed on this node; the others keep the workspace's value (M-i).

    Size and `allocated` are the caller's. Without a witness the file is this node's own, and so is every attribute. A
    ctime alone is no change: filling a placeholder moves it, and so does a new name. While it is filled, its mtime
    is that of the filling.
    """
    if before is None:
        return replace(
            record, mode=status.st_mode, uid=status.st_uid, gid=status.st_gid, rdev=status.st_rdev,
            mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns,
        )  # fmt: skip
    updated = replace(
        record,
        mode=record.mode if before.mode == status.st_mode else status.st_mode,
        uid=record.uid if before.uid == status.st_uid else status.st_uid,
        gid=record.gid if before.gid == status.st_gid else status.st_gid,
        rdev=record.rdev if before.rdev == status.st_rdev else status.st_rdev,
        mtime_ns=record.mtime_ns if before.absent or before.mtime_ns == status.st_mtime_ns else status.st_mtime_ns,
    )
    same = updated == record and before.size == status.st_size
    return record if same else replace(updated, ctime_ns=status.st_ctime_ns)
