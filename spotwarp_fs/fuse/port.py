"""What the FUSE handlers ask of the engine, as one Protocol.

Invariant: nothing here names pyfuse3, so the engine implements it without knowing who calls. A method answers, or
raises Refused (an errno), Fenced, Corrupt, Unavailable or OSError; `operations.py` turns each into an errno.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from spotwarp_fs.core.requests import Actor, AttributeChange, DirectoryItem, FilesystemFigures, Handle, Node
from spotwarp_fs.core.types import Inode


class Filesystem(Protocol):
    """One workspace, as requests see it. What is `async` may wait; `remember` and `forget` never do."""

    async def lookup(self, parent: Inode, name: bytes) -> Node:
        """Find *name* in *parent*, or raise Refused(ENOENT); `.` and `..` may be asked for."""
        ...

    async def getattr(self, ino: Inode) -> Node:
        """Describe an inode."""
        ...

    async def setattr(self, ino: Inode, change: AttributeChange, handle: Handle | None, actor: Actor) -> Node:
        """Change attributes; `change.mode` holds permission bits only, never the file type."""
        ...

    async def create(self, parent: Inode, name: bytes, mode: int, flags: int, actor: Actor) -> tuple[Handle, Node]:
        """Make a regular file and open it."""
        ...

    async def open(self, ino: Inode, flags: int, actor: Actor) -> Handle:
        """Open; `flags` may hold O_TRUNC, and then this call truncates: libfuse negotiates atomic O_TRUNC."""
        ...

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """Read exactly *size* bytes unless the file ends before."""
        ...

    async def write(
        self, handle: Handle, offset: int, data: bytes, *, given_up: Callable[[], bool] | None = None
    ) -> int:
        """Write all of *data*; *given_up* tells a write that waits whether its caller is being killed (then EINTR)."""
        ...

    async def flush(self, handle: Handle, *, dying: bool = False) -> None:
        """A descriptor was closed; *dying*: by a process that a signal is ending, so the file may be torn (C12)."""
        ...

    async def fsync(self, handle: Handle, *, datasync: bool) -> None:
        """Make the file safe against power loss."""
        ...

    async def release(self, handle: Handle) -> None:
        """The last descriptor is gone."""
        ...

    async def mknod(self, parent: Inode, name: bytes, mode: int, rdev: int, actor: Actor) -> Node:
        """Make a file, fifo, socket or device; `mode` holds the file type."""
        ...

    async def mkdir(self, parent: Inode, name: bytes, mode: int, actor: Actor) -> Node:
        """Make a directory."""
        ...

    async def symlink(self, parent: Inode, name: bytes, target: bytes, actor: Actor) -> Node:
        """Make a symbolic link."""
        ...

    async def link(self, ino: Inode, new_parent: Inode, new_name: bytes) -> Node:
        """Give an inode one more name."""
        ...

    async def unlink(self, parent: Inode, name: bytes) -> None:
        """Remove a name of anything but a directory."""
        ...

    async def rmdir(self, parent: Inode, name: bytes) -> None:
        """Remove an empty directory."""
        ...

    async def rename(self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int) -> None:
        """Move a name; `flags` are those of renameat2."""
        ...

    async def readlink(self, ino: Inode) -> bytes:
        """Give a symbolic link's target."""
        ...

    async def opendir(self, ino: Inode, actor: Actor) -> Handle:
        """Open a directory for listing."""
        ...

    async def readdir(self, handle: Handle, start_id: int) -> Iterator[DirectoryItem]:
        """Give the names after *start_id*; ids stay valid while names come and go."""
        ...

    async def releasedir(self, handle: Handle) -> None:
        """Close a directory."""
        ...

    async def fsyncdir(self, handle: Handle) -> None:
        """Make a directory's names safe against power loss."""
        ...

    async def statfs(self) -> FilesystemFigures:
        """Give sizes and free space."""
        ...

    async def getxattr(self, ino: Inode, name: bytes) -> bytes:
        """Give an extended attribute, or raise Refused(ENODATA)."""
        ...

    async def setxattr(self, ino: Inode, name: bytes, value: bytes) -> None:
        """Set an extended attribute; pyfuse3 has checked XATTR_CREATE and XATTR_REPLACE already."""
        ...

    async def listxattr(self, ino: Inode) -> list[bytes]:
        """Name the extended attributes."""
        ...

    async def removexattr(self, ino: Inode, name: bytes) -> None:
        """Remove an extended attribute, or raise Refused(ENODATA)."""
        ...

    def remember(self, ino: Inode) -> None:
        """The kernel was handed an entry: one more lookup count."""
        ...

    def forget(self, pairs: list[tuple[Inode, int]]) -> None:
        """The kernel let go of that many lookup counts each."""
        ...
