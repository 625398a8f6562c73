"""Lay a state's tree out on this machine: bytes, holes, modes, times, links, xattrs, owners where allowed.

Invariant: a file appears under its name only when it is complete; directories get their mode and times last, because
what is put into them would change both. What this machine cannot keep is noted, never passed over in silence.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Protocol

import trio

from spotwarp_fs.cli.reading import at_path
from spotwarp_fs.core.errors import SpotwarpError, UserError
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory.applying import Applier, hard_link, write_all
from spotwarp_fs.engine.reader import Piece

FILES_AT_ONCE: Final = 16

Progress = Callable[[Mapping[str, Any]], None]


class Tree(Protocol):
    """What is copied out of; a `Reader` is one."""

    def subtree(self, ino: Inode) -> list[tuple[bytes, Node]]:
        """Give *ino* itself as `b""`, then everything below it, parents before children."""
        ...

    def xattrs(self, ino: Inode) -> list[tuple[bytes, bytes]]:
        """Give extended attributes."""
        ...

    def content(self, node: Node) -> AbstractAsyncContextManager[AsyncIterator[Piece]]:
        """Give the pieces of a file, in any order."""
        ...


class Copier:
    """Copies out of one loaded state."""

    def __init__(self, reader: Tree, workspace: str, on_progress: Progress) -> None:
        self._reader = reader
        self._workspace = workspace
        self._on_progress = on_progress
        self._applier = Applier(owners=os.geteuid() == 0)
        self._first_name: dict[Inode, bytes] = {}
        self.files = 0
        self.bytes_copied = 0
        self.total_bytes = 0
        self.left_out: Counter[str] = self._applier.left_out
        """What could not be kept, and how often."""

    async def copy_tree(self, top: Node, target: bytes, path: bytes) -> None:
        """Copy *top*, which is at *path* in the workspace, and everything below it to *target*."""
        nodes = self._reader.subtree(top.ino)
        self.total_bytes = sum(node.record.size for _, node in nodes if stat.S_ISREG(node.record.mode))
        directories: list[tuple[bytes, Node]] = []
        later: list[tuple[bytes, bytes]] = []
        others: list[tuple[bytes, Node]] = []
        for name, node in nodes:
            if stat.S_ISDIR(node.record.mode):
                place = os.path.join(target, name) if name else target
                self._make_directory(place)
                directories.append((place, node))
            else:
                others.append((name, node))
        async with trio.open_nursery() as nursery:
            slots = trio.CapacityLimiter(FILES_AT_ONCE)
            # In the order of inodes, which is that of block maps and, by and large, of packs.
            for name, node in sorted(others, key=lambda item: item[1].ino):
                place = os.path.join(target, name)
                first = self._first_name.setdefault(node.ino, place)
                if first != place:
                    later.append((first, place))
                    continue
                token = object()
                await slots.acquire_on_behalf_of(token)
                nursery.start_soon(self._copy_in_slot, node, place, join(path, name), slots, token)
        for first, place in later:
            await trio.to_thread.run_sync(hard_link, first, place, _draft_beside(place))
        for place, node in reversed(directories):
            await trio.to_thread.run_sync(self._applier.finish, place, node.record, self._reader.xattrs(node.ino))

    async def copy_one(self, node: Node, target: bytes, path: bytes) -> None:
        """Copy anything but a directory."""
        self.total_bytes = node.record.size
        await self._copy(node, target, path)

    async def _copy_in_slot(
        self, node: Node, target: bytes, path: bytes, slots: trio.CapacityLimiter, token: object
    ) -> None:
        try:
            await self._copy(node, target, path)
        finally:
            slots.release_on_behalf_of(token)

    async def _copy(self, node: Node, target: bytes, path: bytes) -> None:
        draft = _draft_beside(target)
        try:
            if stat.S_ISREG(node.record.mode):
                await self._fill(node, draft, path)
                self.files += 1
            elif not await trio.to_thread.run_sync(self._applier.make_special, node.record, draft):
                return
            await trio.to_thread.run_sync(self._applier.finish, draft, node.record, self._reader.xattrs(node.ino))
            await trio.to_thread.run_sync(os.replace, draft, target)
        except SpotwarpError as error:
            raise at_path(error, self._workspace, path) from error
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)

    async def _fill(self, node: Node, draft: bytes, path: bytes) -> None:
        """Write a file's bytes; what no piece covers stays a hole."""
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            async with self._reader.content(node) as pieces:
                async for piece in pieces:
                    await trio.to_thread.run_sync(write_all, fd, piece.data, piece.offset)
                    self.bytes_copied += len(piece.data)
                    self._report()
            os.truncate(fd, node.record.size)
        finally:
            os.close(fd)

    def _report(self) -> None:
        self._on_progress({"done_bytes": self.bytes_copied, "total_bytes": self.total_bytes})

    def _make_directory(self, place: bytes) -> None:
        try:
            os.mkdir(place, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                raise UserError(f"{os.fsdecode(place)} exists and is not a directory; remove it first") from None


def join(directory: bytes, name: bytes) -> bytes:
    """Join two relative paths, either of which may be empty."""
    return directory + b"/" + name if directory and name else directory or name


def _draft_beside(place: bytes) -> bytes:
    """Give a free name in the directory of *place*."""
    return os.path.join(os.path.dirname(place), b".spotwarp-%s.part" % os.urandom(8).hex().encode())
