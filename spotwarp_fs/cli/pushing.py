"""Bring a workspace's tree to what a directory holds, through the same requests that a mount makes.

Invariant: every byte of the directory is read and compared by digest, never by size and time alone; blocks that the
state has already are neither written nor sent. Nothing is published until the caller asks for a barrier.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from spotwarp_fs.cli.scanning import Found, Scan
from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Refused, UserError
from spotwarp_fs.core.frames import digest, holds, is_zero
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, InodeRecord, ino_range, key_block
from spotwarp_fs.core.requests import Actor, AttributeChange, Node
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.core.xattrs import NAMESPACES, attributes_of
from spotwarp_fs.engine.session import Session

READS_MAX: Final = 3
"""A file that changes while it is read is read again so often."""
UNKEPT_XATTRS: Final = (b"security.selinux", b"security.ima", b"security.evm")
"""Labels that belong to the machine, not to the file."""

Progress = Callable[[Mapping[str, Any]], None]
SourceId = tuple[int, int]


class Pusher:
    """Works on one session."""

    def __init__(self, session: Session, scan: Scan, on_progress: Progress) -> None:
        self._session = session
        self._filesystem = session.filesystem
        self._maps = session.maps
        self._scan = scan
        self._on_progress = on_progress
        self._actor = Actor(os.getuid(), os.getgid(), os.getpid())
        self._inodes: dict[bytes, Inode] = {b"": ROOT_INODE}
        self._linked: dict[SourceId, Inode] = {}
        self._claimed: set[Inode] = set()
        self.bytes_read = 0
        self.unsettled: list[bytes] = []
        """Files that changed in the middle of each read."""

    async def run(self) -> None:
        """Make the tree what the directory holds."""
        before = self._present()
        kept = {entry.path: stat.S_IFMT(entry.status.st_mode) for entry in self._scan.entries}
        gone = [
            (path, node) for path, node in before.items() if path and kept.get(path) != stat.S_IFMT(node.record.mode)
        ]
        for ino in sorted(node.ino for _, node in gone if stat.S_ISREG(node.record.mode)):
            # What was renamed is known by its digests then, and is not sent again.
            await self._maps.load(ino)
        for path, node in reversed(gone):
            await self._remove(before, path, node)
            del before[path]
        directories = [entry for entry in self._scan.entries if stat.S_ISDIR(entry.status.st_mode)]
        others = [entry for entry in self._scan.entries if not stat.S_ISDIR(entry.status.st_mode)]
        for entry in directories:
            await self._directory(entry, before.get(entry.path))
        # In the order of inodes, which is that of the block maps in the store.
        for entry in sorted(others, key=lambda other: before[other.path].ino if other.path in before else 1 << 64):
            await self._bring(entry, before.get(entry.path))
        for entry in reversed(directories):
            await self._attributes(self._inodes[entry.path], entry.status, self._source(entry.path))
        await self._attributes(ROOT_INODE, self._scan.top, self._scan.root)

    def _present(self) -> dict[bytes, Node]:
        with self._session.workspace.kv.read() as view:
            return dict(paths.subtree(view, ROOT_INODE))

    def _source(self, path: bytes) -> bytes:
        return os.path.join(self._scan.root, path)

    def _place(self, path: bytes) -> tuple[Inode, bytes]:
        directory, name = os.path.split(path)
        return self._inodes[directory], name

    async def _remove(self, before: Mapping[bytes, Node], path: bytes, node: Node) -> None:
        directory, name = os.path.split(path)
        parent = before[directory].ino
        if stat.S_ISDIR(node.record.mode):
            await self._filesystem.rmdir(parent, name)
        else:
            await self._filesystem.unlink(parent, name)

    async def _directory(self, entry: Found, present: Node | None) -> None:
        parent, name = self._place(entry.path)
        if present is None:
            present = await self._filesystem.mkdir(parent, name, 0o700, self._actor)
        self._inodes[entry.path] = present.ino

    async def _bring(self, entry: Found, present: Node | None) -> None:
        """Bring anything but a directory; what stands at its path already is of the same type."""
        mode = entry.status.st_mode
        parent, name = self._place(entry.path)
        source = (entry.status.st_dev, entry.status.st_ino)
        if entry.status.st_nlink > 1 and source in self._linked:
            await self._link(self._linked[source], parent, name, present)
            return
        if present is not None and (present.ino in self._claimed or not _may_stay(entry, present.record, self._source)):
            await self._filesystem.unlink(parent, name)
            present = None
        if stat.S_ISREG(mode):
            ino = await self._file(entry, parent, name, present)
        else:
            ino = (present or await self._special(entry, parent, name)).ino
            await self._attributes(ino, entry.status, self._source(entry.path))
        self._claimed.add(ino)
        self._linked[source] = ino

    async def _link(self, ino: Inode, parent: Inode, name: bytes, present: Node | None) -> None:
        if present is not None and present.ino == ino:
            return
        if present is not None:
            await self._filesystem.unlink(parent, name)
        await self._filesystem.link(ino, parent, name)

    async def _special(self, entry: Found, parent: Inode, name: bytes) -> Node:
        mode = entry.status.st_mode
        if stat.S_ISLNK(mode):
            return await self._filesystem.symlink(parent, name, os.readlink(self._source(entry.path)), self._actor)
        return await self._filesystem.mknod(parent, name, mode, entry.status.st_rdev, self._actor)

    async def _file(self, entry: Found, parent: Inode, name: bytes, present: Node | None) -> Inode:
        """Bring a file's bytes, again if it changed in the meantime."""
        if present is None:
            handle, node = await self._filesystem.create(parent, name, 0o600, os.O_RDWR, self._actor)
        else:
            node = present
            handle = await self._filesystem.open(node.ino, os.O_RDWR, self._actor)
        try:
            fd = os.open(self._source(entry.path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"{os.fsdecode(error.filename)} cannot be read: {error.strerror}; nothing was pushed"
            ) from error
        try:
            for _ in range(READS_MAX):
                status = os.fstat(fd)
                await self._content(fd, status.st_size, node.ino, handle)
                if _version(os.fstat(fd)) == _version(status):
                    break
            else:
                self.unsettled.append(entry.path)
        finally:
            os.close(fd)
            await self._filesystem.release(handle)
        await self._attributes(node.ino, status, self._source(entry.path))
        return node.ino

    async def _content(self, fd: int, size: int, ino: Inode, handle: Any) -> None:
        """Write the blocks that differ from what the state has; holes stay holes."""
        if self._record(ino).size > size:
            await self._filesystem.setattr(ino, AttributeChange(size=size), handle, self._actor)
        frames = self._frames(ino)
        for block in range(-(-size // BLOCK_BYTES)):
            start = block * BLOCK_BYTES
            length = min(BLOCK_BYTES, size - start)
            data = await trio.to_thread.run_sync(_changed_bytes, fd, start, length, frames.get(block))
            if data is not None:
                await self._filesystem.write(handle, start, data)
            self.bytes_read += length
            self._on_progress({"done_bytes": self.bytes_read, "total_bytes": self._scan.logical_bytes})
        if self._record(ino).size != size:
            await self._filesystem.setattr(ino, AttributeChange(size=size), handle, self._actor)

    def _record(self, ino: Inode) -> InodeRecord:
        with self._session.workspace.kv.read() as view:
            return paths.inode(view, ino)

    def _frames(self, ino: Inode) -> dict[int, BlockState]:
        with self._session.workspace.kv.read() as view:
            rows = view.scan(*ino_range(BLOCK_TABLE, ino))
            return {key_block(key): BlockState.decode(value) for key, value in rows if value}

    async def _attributes(self, ino: Inode, status: os.stat_result, source: bytes) -> None:
        """Set what differs; access times alone are no difference, since reading the directory changes them."""
        await self._xattrs(ino, source)
        record = self._record(ino)
        wanted = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns)
        if wanted != (stat.S_IMODE(record.mode), record.uid, record.gid, record.mtime_ns):
            mode, uid, gid, mtime_ns = wanted
            change = AttributeChange(
                mode=None if stat.S_ISLNK(record.mode) else mode,
                uid=uid,
                gid=gid,
                atime_ns=status.st_atime_ns,
                mtime_ns=mtime_ns,
            )
            await self._filesystem.setattr(ino, change, None, self._actor)

    async def _xattrs(self, ino: Inode, source: bytes) -> None:
        wanted = _source_xattrs(source)
        with self._session.workspace.kv.read() as view:
            present = dict(attributes_of(view, ino))
        for name in present.keys() - wanted.keys():
            await self._filesystem.removexattr(ino, name)
        for name, value in wanted.items():
            if present.get(name) != value:
                try:
                    await self._filesystem.setxattr(ino, name, value)
                except Refused as error:
                    raise UserError(f"{os.fsdecode(source)}: attribute {name!r} cannot be kept: {error}") from error


def _may_stay(entry: Found, record: InodeRecord, source: Callable[[bytes], bytes]) -> bool:
    """Tell whether a symlink or device at the entry's path is what the entry is; a file always may."""
    if stat.S_ISLNK(record.mode):
        return os.readlink(source(entry.path)) == record.target
    return stat.S_ISREG(record.mode) or entry.status.st_rdev == record.rdev


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed_bytes(fd: int, start: int, length: int, state: BlockState | None) -> bytes | None:
    """Read a block (blocking); None when the state has just this content, or when both have none."""
    data = _read(fd, start, length)
    if is_zero(data):
        return None if state is None else data
    if state is not None and state.frame is not None and holds(state.frame, data, digest(data)):
        return None
    return data


def _read(fd: int, start: int, length: int) -> bytes:
    """Read *length* bytes; a file that became shorter meanwhile ends in zeros, and is read again."""
    parts = b""
    while len(parts) < length:
        more = os.pread(fd, length - len(parts), start + len(parts))
        if not more:
            break
        parts += more
    return parts.ljust(length, b"\0")


def _source_xattrs(source: bytes) -> dict[bytes, bytes]:
    if not hasattr(os, "listxattr"):
        return {}
    try:
        names = [os.fsencode(name) for name in os.listxattr(source, follow_symlinks=False)]
        return {
            name: os.getxattr(source, name, follow_symlinks=False)
            for name in names
            if name.startswith(NAMESPACES) and name not in UNKEPT_XATTRS
        }
    except OSError:
        return {}
