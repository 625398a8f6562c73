"""Answer the kernel's requests: each handler asks the engine and translates, nothing more.

Invariant: no exception but FUSEError leaves a handler (pyfuse3 would end the mount), and every entry handed to the
kernel is remembered in the same step as its reply, without an await in between.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pyfuse3

from spotwarp_fs.core.errors import Corrupt, Fenced, Refused, Unavailable
from spotwarp_fs.core.requests import Handle, Node
from spotwarp_fs.core.types import Inode
from spotwarp_fs.fuse import attributes, dying
from spotwarp_fs.fuse.port import Filesystem

log = logging.getLogger(__name__)

REPORTED_MAX: Final = 256
"""Different surprises that are logged; each one only once, so that a broken disk does not fill the log."""
_ACL_NAMES: Final = frozenset({b"system.posix_acl_access", b"system.posix_acl_default"})
_reported: set[tuple[str, str, int]] = set()

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[Concatenate["Operations", P], Coroutine[Any, Any, T]]


def _only_cause(error: Exception) -> Exception:
    """Look through the groups that nurseries wrap around a single error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def errno_of(error: Exception) -> int | None:
    """Give the errno that *error* is answered with; None for what nobody foresaw."""
    match error:
        case Refused() | pyfuse3.FUSEError():
            return error.errno
        case Fenced():
            return errno.EROFS
        case Corrupt() | Unavailable():
            return errno.EIO
        case OSError():
            return error.errno or errno.EIO
    return None


def _report(request: str, error: Exception) -> None:
    """Log an error once per place where it arises, with its traceback if nobody foresaw it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = (request, type(error).__name__, trace.tb_lineno if trace is not None else 0)
    if place in _reported or len(_reported) >= REPORTED_MAX:
        return
    _reported.add(place)
    if errno_of(error) is None:
        log.error("request failed request=%s error=%s answer=EIO", request, type(error).__name__, exc_info=error)
    else:
        log.warning("request failed request=%s error=%s message=%s", request, type(error).__name__, error)


def gate(handler: Handler[P, T]) -> Handler[P, T]:
    """Turn whatever *handler* raises into an errno; trio's Cancelled passes."""

    @functools.wraps(handler)
    async def guarded(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as raised:
            error = _only_cause(raised)
            if not isinstance(error, Refused):
                _report(handler.__name__, error)
            raise pyfuse3.FUSEError(errno_of(error) or errno.EIO) from None

    return guarded


class Operations(pyfuse3.Operations):
    """The handlers of one mount.

    `xattrs=False` answers ENOSYS to all of them: the kernel then saves one request per write and never asks again.
    """

    supports_dot_lookup = True
    enable_acl = False

    def __init__(self, fs: Filesystem, *, xattrs: bool = True, writeback_cache: bool = False) -> None:
        super().__init__()
        self.enable_writeback_cache = writeback_cache
        self._fs = fs
        self._xattrs = xattrs
        self._writers: dict[int, int] = {}
        """Process that opened each handle that can write."""

    def _entry(self, node: Node) -> pyfuse3.EntryAttributes:
        """Describe *node* and count it as known to the kernel."""
        answer = attributes.entry(node)
        self._fs.remember(node.ino)
        return answer

    def _opened(self, handle: Handle, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            process = dying.thread_group(ctx.pid)
            if process is not None:
                self._writers[handle] = process
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=True)

    @gate
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Find a name; a missing one is answered so that the kernel remembers it."""
        try:
            return self._entry(await self._fs.lookup(Inode(parent_inode), name))
        except Refused as error:
            if error.errno != errno.ENOENT:
                raise
            return attributes.no_entry()

    async def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        """Take the kernel's lookup counts back; an error here has nobody to go to."""
        try:
            self._fs.forget([(Inode(ino), count) for ino, count in inode_list])
        except Exception as error:
            _report("forget", error)

    @gate
    async def getattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        """Describe an inode."""
        return attributes.entry(await self._fs.getattr(Inode(inode)))

    @gate
    async def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Change attributes."""
        handle = None if fh is None else Handle(fh)
        wanted = attributes.change(attr, fields)
        return attributes.entry(await self._fs.setattr(Inode(inode), wanted, handle, attributes.actor(ctx)))

    @gate
    async def create(
        self, parent_inode: pyfuse3.InodeT, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        """Make a file and open it."""
        handle, node = await self._fs.create(Inode(parent_inode), name, mode, flags, attributes.actor(ctx))
        return self._opened(handle, flags, ctx), self._entry(node)

    @gate
    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        """Open; the page cache stays, for nobody else writes the file."""
        return self._opened(await self._fs.open(Inode(inode), flags, attributes.actor(ctx)), flags, ctx)

    @gate
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        """Read."""
        return await self._fs.read(Handle(fh), off, size)

    @gate
    async def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        """Write; a wait in it ends early when the process that opened the file is being killed (H2)."""
        process = self._writers.get(fh)
        given_up = None if process is None else functools.partial(dying.being_killed, process)
        return await self._fs.write(Handle(fh), off, buf, given_up=given_up)

    @gate
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        """Tell a close from the death of the process that opened the file."""
        process = self._writers.get(fh)
        await self._fs.flush(Handle(fh), dying=process is not None and dying.dying_of_signal(process))

    @gate
    async def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        """Make a file safe against power loss."""
        await self._fs.fsync(Handle(fh), datasync=datasync)

    @gate
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        """Close a file for good."""
        self._writers.pop(fh, None)
        await self._fs.release(Handle(fh))

    @gate
    async def mknod(
        self, parent_inode: pyfuse3.InodeT, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a file, fifo, socket or device node."""
        return self._entry(await self._fs.mknod(Inode(parent_inode), name, mode, rdev, attributes.actor(ctx)))

    @gate
    async def mkdir(
        self, parent_inode: pyfuse3.InodeT, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a directory."""
        return self._entry(await self._fs.mkdir(Inode(parent_inode), name, mode, attributes.actor(ctx)))

    @gate
    async def symlink(
        self, parent_inode: pyfuse3.InodeT, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        """Make a symbolic link."""
        return self._entry(await self._fs.symlink(Inode(parent_inode), name, target, attributes.actor(ctx)))

    @gate
    async def link(
        self,
        inode: pyfuse3.InodeT,
        new_parent_inode: pyfuse3.InodeT,
        new_name: bytes,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        """Give an inode one more name."""
        return self._entry(await self._fs.link(Inode(inode), Inode(new_parent_inode), new_name))

    @gate
    async def unlink(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a name."""
        await self._fs.unlink(Inode(parent_inode), name)

    @gate
    async def rmdir(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        await self._fs.rmdir(Inode(parent_inode), name)

    @gate
    async def rename(
        self,
        parent_inode_old: pyfuse3.InodeT,
        name_old: bytes,
        parent_inode_new: pyfuse3.InodeT,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """Move a name."""
        await self._fs.rename(Inode(parent_inode_old), name_old, Inode(parent_inode_new), name_new, flags)

    @gate
    async def readlink(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> bytes:
        """Give a link's target."""
        return await self._fs.readlink(Inode(inode))

    @gate
    async def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        """Open a directory."""
        return pyfuse3.FileHandleT(await self._fs.opendir(Inode(inode), attributes.actor(ctx)))

    @gate
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Fill the kernel's buffer with names; each one that went in is known to the kernel from here on."""
        for item in await self._fs.readdir(Handle(fh), start_id):
            if not pyfuse3.readdir_reply(token, item.name, attributes.entry(item.node), item.next_id):
                return
            if item.name not in (b".", b".."):
                self._fs.remember(item.node.ino)

    @gate
    async def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        """Close a directory."""
        await self._fs.releasedir(Handle(fh))

    @gate
    async def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:
        """Make a directory's names safe against power loss."""
        await self._fs.fsyncdir(Handle(fh))

    @gate
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Give sizes and free space."""
        return attributes.figures(await self._fs.statfs())

    def _check_xattrs(self) -> None:
        if not self._xattrs:
            raise pyfuse3.FUSEError(errno.ENOSYS)

    @gate
    async def getxattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Give an extended attribute."""
        self._check_xattrs()
        return await self._fs.getxattr(Inode(inode), name)

    @gate
    async def setxattr(self, inode: pyfuse3.InodeT, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Set an extended attribute; an ACL that nobody would enforce is refused rather than kept."""
        self._check_xattrs()
        if name in _ACL_NAMES:
            raise pyfuse3.FUSEError(errno.EOPNOTSUPP)
        await self._fs.setxattr(Inode(inode), name, value)

    @gate
    async def listxattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        """Name the extended attributes."""
        self._check_xattrs()
        return await self._fs.listxattr(Inode(inode))

    @gate
    async def removexattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an extended attribute."""
        self._check_xattrs()
        await self._fs.removexattr(Inode(inode), name)
