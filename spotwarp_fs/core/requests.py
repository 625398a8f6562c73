"""The nouns of a filesystem request, free of any FUSE library.

Invariant: these are values; nothing here decides or changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.types import Inode

Handle = NewType("Handle", int)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks: the calling thread's ids as the kernel gives them."""

    uid: int
    gid: int
    pid: int
    umask: int = 0

    @property
    def keeps_privileges(self) -> bool:
        """Whether what this caller writes stays set-user-id: Linux asks for CAP_FSETID, a request tells the user."""
        return self.uid == 0


@dataclass(frozen=True, slots=True)
class Node:
    """An inode with its number."""

    ino: Inode
    record: InodeRecord


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """What `setattr` is to change; None leaves a field alone. `None` for ctime means "now"."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class DirectoryItem:
    """One name of a listing, and the id that continues after it."""

    name: bytes
    node: Node
    next_id: int


@dataclass(frozen=True, slots=True)
class FilesystemFigures:
    """What `statfs` tells, in bytes: the usable budget of the node, not the size of the bucket."""

    block_bytes: int
    total_bytes: int
    free_bytes: int
    inodes: int
    inodes_free: int


class TreeWrite(KVRead, Protocol):
    """What the namespace rules need of a transaction; `core.changes.Recorder` is one."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of a published table (noted for the next cut)."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove a key of a published table (noted for the next cut)."""
        ...

    def put_local(self, key: bytes, value: bytes) -> None:
        """Set a key of a node table."""
        ...

    def delete_local(self, key: bytes) -> bool:
        """Remove a key of a node table."""
        ...
