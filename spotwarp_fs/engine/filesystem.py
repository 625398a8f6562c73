"""Answer filesystem requests: prepare (may wait), then one step, then the reply.

Invariant: no step has an await; every change of the namespace is one transaction (R: metadata is committed before the
reply). What happens to bytes is in `files.py` and `blocks.py`, what names mean in `core/namespace.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

from spotwarp_fs.core import inflight, namespace, paths, xattrs
from spotwarp_fs.core.attributes import set_attributes
from spotwarp_fs.core.border import Border
from spotwarp_fs.core.changes import Recorder
from spotwarp_fs.core.inflight import Mark
from spotwarp_fs.core.records import NodeTable, entry_key, ino_key, inode_key
from spotwarp_fs.core.rename import rename
from spotwarp_fs.core.requests import Actor, AttributeChange, DirectoryItem, FilesystemFigures, Handle, Node
from spotwarp_fs.core.types import Inode
from spotwarp_fs.engine.blocks import LOADED
from spotwarp_fs.engine.files import Files
from spotwarp_fs.engine.workspace import Workspace

INODES_TOTAL = 1 << 40


class Filesystem:
    """One workspace, as requests see it (`fuse/port.py` is what the kernel's side expects)."""

    def __init__(self, workspace: Workspace, files: Files) -> None:
        self._ws = workspace
        self._files = files
        self._listings: dict[Handle, list[tuple[bytes, Inode]]] = {}
        self._directories: dict[Handle, Inode] = {}
        self.open = files.open
        self.read = files.read
        self.write = files.write
        self.flush = files.flush
        self.fsync = files.fsync
        self.release = files.release
        self.remember = files.remember
        self.forget = files.forget

    async def lookup(self, parent: Inode, name: bytes) -> Node:
        """Find *name* in *parent*."""
        with self._ws.kv.read() as view:
            return paths.lookup(view, parent, name)

    async def getattr(self, ino: Inode) -> Node:
        """Describe an inode."""
        with self._ws.kv.read() as view:
            return Node(ino, paths.inode(view, ino))

    async def setattr(self, ino: Inode, change: AttributeChange, handle: Handle | None, actor: Actor) -> Node:
        """Change attributes; a new size first, so that an explicit mtime wins."""
        self._ws.check_writable()
        if change.size is not None:
            await self._files.truncate(ino, change.size, keeps_privileges=actor.keeps_privileges)
        with self._ws.change() as recorder:
            return set_attributes(recorder, ino, change, self._ws.wall.now_ns())

    async def create(self, parent: Inode, name: bytes, mode: int, flags: int, actor: Actor) -> tuple[Handle, Node]:
        """Make a regular file and open it; one that is open for writing is in flight until it is released.

        Its first write may be behind the next cut, and an empty file is not what the program makes (P-05).
        """
        mark = inflight.on_write(None, self._ws.wall.now_ns()) if flags & os.O_ACCMODE != os.O_RDONLY else None
        node = self._make(parent, name, stat.S_IFREG | stat.S_IMODE(mode), actor, mark=mark)
        return self._files.opened(node.ino, flags, actor), node

    async def mknod(self, parent: Inode, name: bytes, mode: int, rdev: int, actor: Actor) -> Node:
        """Make a file, fifo, socket or device."""
        return self._make(parent, name, mode, actor, rdev=rdev)

    async def mkdir(self, parent: Inode, name: bytes, mode: int, actor: Actor) -> Node:
        """Make a directory."""
        return self._make(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), actor)

    async def symlink(self, parent: Inode, name: bytes, target: bytes, actor: Actor) -> Node:
        """Make a symbolic link."""
        return self._make(parent, name, stat.S_IFLNK | 0o777, actor, target=target)

    def _make(
        self,
        parent: Inode,
        name: bytes,
        mode: int,
        actor: Actor,
        *,
        rdev: int = 0,
        target: bytes = b"",
        mark: Mark | None = None,
    ) -> Node:
        ws = self._ws
        ws.check_writable()
        ino = ws.new_inode()
        with ws.change() as recorder:
            node = namespace.create(
                recorder, parent, name, mode, actor, ino, ws.wall.now_ns(), rdev=rdev, target=target
            )
            if stat.S_ISREG(node.record.mode):
                recorder.put_local(ino_key(NodeTable.UNLOADED, ino), LOADED)
            if mark is not None:
                recorder.put_local(ino_key(NodeTable.IN_FLIGHT, ino), mark.encode())
            self._border(recorder).made(parent, name, ino)
        self._files.made(ino, mark)
        return node

    def _border(self, recorder: Recorder) -> Border:
        return Border(recorder, self._ws.policies.scratch)

    async def link(self, ino: Inode, new_parent: Inode, new_name: bytes) -> Node:
        """Give an inode one more name."""
        ws = self._ws
        ws.check_writable()
        ws.intervals.name_changed(ino, directory=False)
        with ws.change() as recorder:
            node = namespace.link(recorder, ino, new_parent, new_name, ws.wall.now_ns())
            self._border(recorder).linked(new_parent, new_name, ino)
        await self._files.sync_new_name(ino)
        return node

    async def unlink(self, parent: Inode, name: bytes) -> None:
        """Remove a name; removing never waits for budget."""
        self._remove(namespace.unlink, parent, name)

    async def rmdir(self, parent: Inode, name: bytes) -> None:
        """Remove an empty directory."""
        self._remove(namespace.rmdir, parent, name)

    def _remove(self, rule: Callable[[Recorder, Inode, bytes, int], Node], parent: Inode, name: bytes) -> None:
        ws = self._ws
        ws.check_writable()
        with ws.change() as recorder:
            node = rule(recorder, parent, name, ws.wall.now_ns())
            self._border(recorder).unlinked(parent, name, node)
        ws.intervals.name_changed(node.ino, directory=False)
        self._files.lost_name(node)

    async def rename(self, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int) -> None:
        """Move a name."""
        ws = self._ws
        ws.check_writable()
        with ws.change() as recorder:
            outcome = rename(recorder, parent, name, new_parent, new_name, flags, ws.wall.now_ns())
            self._border(recorder).renamed((parent, name), (new_parent, new_name), outcome)
        for node in (outcome.moved, outcome.replaced, outcome.exchanged):
            if node is not None:
                ws.intervals.name_changed(node.ino, directory=stat.S_ISDIR(node.record.mode))
        if outcome.replaced is not None:
            self._files.lost_name(outcome.replaced)
        await self._files.sync_new_name(outcome.moved.ino)
        if outcome.exchanged is not None:
            await self._files.sync_new_name(outcome.exchanged.ino)

    async def readlink(self, ino: Inode) -> bytes:
        """Give a symbolic link's target."""
        with self._ws.kv.read() as view:
            return paths.inode(view, ino).target

    async def opendir(self, ino: Inode, actor: Actor) -> Handle:
        """Open a directory for listing."""
        with self._ws.kv.read() as view:
            paths.directory(view, ino)
        handle = self._files.new_handle()
        self._directories[handle] = ino
        self._files.pin(ino)
        return handle

    async def readdir(self, handle: Handle, start_id: int) -> Iterator[DirectoryItem]:
        """Give the names after *start_id*: a listing is taken at its beginning and stays stable after that."""
        ino = self._directories[handle]
        if start_id == 0 or handle not in self._listings:
            with self._ws.kv.read() as view:
                self._listings[handle] = [(name, entry.ino) for name, entry in paths.children(view, ino)]
        return self._items(ino, self._listings[handle], start_id)

    def _items(self, parent: Inode, listing: list[tuple[bytes, Inode]], start_id: int) -> Iterator[DirectoryItem]:
        with self._ws.kv.read() as view:
            for at in range(start_id, len(listing)):
                name, ino = listing[at]
                value = view.get(entry_key(parent, name))
                if value is None or int.from_bytes(value[:8]) != ino:
                    continue
                yield DirectoryItem(name, Node(ino, paths.inode(view, ino)), at + 1)

    async def releasedir(self, handle: Handle) -> None:
        """Close a directory."""
        self._listings.pop(handle, None)
        self._files.unpin(self._directories.pop(handle))

    async def fsyncdir(self, handle: Handle) -> None:
        """Make a directory's names safe against power loss."""
        await self._files.sync_names(self._directories[handle])

    async def statfs(self) -> FilesystemFigures:
        """Tell the usable budget of this node."""
        total, free = self._files.budget_figures()
        inodes = self._ws.files + self._ws.directories
        return FilesystemFigures(4096, total, free, INODES_TOTAL, INODES_TOTAL - inodes)

    async def getxattr(self, ino: Inode, name: bytes) -> bytes:
        """Give an extended attribute."""
        with self._ws.kv.read() as view:
            return xattrs.get_xattr(view, ino, name)

    async def listxattr(self, ino: Inode) -> list[bytes]:
        """Name the extended attributes."""
        with self._ws.kv.read() as view:
            return xattrs.list_xattrs(view, ino)

    async def setxattr(self, ino: Inode, name: bytes, value: bytes) -> None:
        """Set an extended attribute."""
        self._ws.check_writable()
        with self._ws.change() as recorder:
            xattrs.set_xattr(recorder, ino, name, value, 0, self._ws.wall.now_ns())

    async def removexattr(self, ino: Inode, name: bytes) -> None:
        """Remove an extended attribute."""
        self._ws.check_writable()
        with self._ws.change() as recorder:
            xattrs.remove_xattr(recorder, ino, name, self._ws.wall.now_ns())

    def make_root(self, actor: Actor) -> None:
        """Create the root of an empty workspace."""
        with self._ws.change() as recorder:
            namespace.make_root(recorder, actor, self._ws.wall.now_ns())

    def reap_orphans(self) -> None:
        """At start: what was unlinked and open when the last daemon died is gone (M-c)."""
        with self._ws.kv.read() as view:
            left = namespace.orphans(view)
        for ino in left:
            self._files.reap(ino)
        with self._ws.kv.read() as view:
            known = [ino for ino in self._ws.data.inodes() if view.get(inode_key(ino)) is None]
        for ino in known:
            self._files.remove_data(ino)
