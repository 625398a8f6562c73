"""Decide what a rename does: move a name, replace what was there, or exchange two names.

Invariant: whatever the flags ask for happens as one change or is refused with nothing changed; a flag that is not
understood is refused, never ignored.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass
from enum import IntFlag

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.namespace import (
    check_alive,
    check_empty,
    check_name,
    delete_entry,
    drop_link,
    put_entry,
    put_inode,
    touch_directory,
)
from spotwarp_fs.core.paths import directory, entry, existing_entry, inode, is_within
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.requests import Node, TreeWrite
from spotwarp_fs.core.types import Inode


class RenameFlags(IntFlag):
    """Flags of renameat2(2) that are obeyed."""

    NONE = 0
    NOREPLACE = 1
    EXCHANGE = 2


@dataclass(frozen=True, slots=True)
class RenameOutcome:
    """What a rename moved, and what it did to the inode that had the new name before.

    At most one of the last two is set. *replaced* is an inode that lost this name, and its last one if its nlink is 0;
    *exchanged* now has the old name.
    """

    moved: Node
    replaced: Node | None = None
    exchanged: Node | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """A name in a directory, and what it leads to."""

    parent: Inode
    name: bytes
    node: Node

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.node.record.mode)


def rename(
    tree: TreeWrite, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes, flags: int, now_ns: int
) -> RenameOutcome:
    """Move *name* to *new_name*, or exchange both with EXCHANGE.

    Two names of one inode are left as they are, which is what POSIX wants. Errors come in Linux's order.
    """
    wanted = _checked_flags(flags)
    source, target = _find(tree, parent, name, new_parent, new_name)
    if wanted is RenameFlags.NOREPLACE and target is not None:
        raise Refused(errno.EEXIST, f"directory {new_parent} already has an entry {new_name!r}")
    if wanted is RenameFlags.EXCHANGE and target is None:
        raise Refused(errno.ENOENT, f"directory {new_parent} has no entry {new_name!r}")
    _check_no_cycle(tree, source, target, new_parent, exchange=wanted is RenameFlags.EXCHANGE)
    if target is not None and target.node.ino == source.node.ino:
        return RenameOutcome(source.node)
    if wanted is RenameFlags.EXCHANGE:
        assert target is not None
        return _exchange(tree, source, target, now_ns)
    if target is not None:
        _check_replaceable(tree, source, target)
    return _move(tree, source, target, new_parent, new_name, now_ns)


def _checked_flags(flags: int) -> RenameFlags:
    if flags not in (RenameFlags.NONE, RenameFlags.NOREPLACE, RenameFlags.EXCHANGE):
        raise Refused(errno.EINVAL, f"rename flags {flags:#x} are not supported")
    return RenameFlags(flags)


def _find(tree: KVRead, parent: Inode, name: bytes, new_parent: Inode, new_name: bytes) -> tuple[_Place, _Place | None]:
    directory(tree, parent)
    new_holder = directory(tree, new_parent)
    for checked in (name, new_name):
        if checked in (b".", b".."):
            raise Refused(errno.EBUSY, f"{checked!r} can't be renamed")
        check_name(checked)
    found = existing_entry(tree, parent, name)
    source = _Place(parent, name, Node(found.ino, inode(tree, found.ino)))
    check_alive(new_parent, new_holder)
    there = entry(tree, new_parent, new_name)
    if there is None:
        return source, None
    return source, _Place(new_parent, new_name, Node(there.ino, inode(tree, there.ino)))


def _check_no_cycle(tree: KVRead, source: _Place, target: _Place | None, new_parent: Inode, *, exchange: bool) -> None:
    """Refuse to move a directory below itself, and to put anything in the place of a directory that holds it."""
    if source.parent == new_parent:
        return
    if source.is_directory and is_within(tree, new_parent, source.node.ino):
        raise Refused(errno.EINVAL, f"directory {source.node.ino} can't be moved below itself")
    if target is not None and target.is_directory and is_within(tree, source.parent, target.node.ino):
        raise Refused(errno.EINVAL if exchange else errno.ENOTEMPTY, f"directory {target.node.ino} holds the source")


def _check_replaceable(tree: KVRead, source: _Place, target: _Place) -> None:
    if not target.is_directory:
        if source.is_directory:
            raise Refused(errno.ENOTDIR, f"a directory can't replace inode {target.node.ino}, which is none")
        return
    if not source.is_directory:
        raise Refused(errno.EISDIR, f"inode {target.node.ino} is a directory")
    check_empty(tree, target.node.ino)


def _move(
    tree: TreeWrite, source: _Place, target: _Place | None, new_parent: Inode, new_name: bytes, now_ns: int
) -> RenameOutcome:
    replaced = None
    removed_directories = 0
    if target is not None:
        delete_entry(tree, new_parent, new_name, target.node.ino)
        replaced = drop_link(tree, target.node.ino, now_ns)
        removed_directories = int(target.is_directory)
    moved_directories = int(source.is_directory)
    delete_entry(tree, source.parent, source.name, source.node.ino)
    put_entry(tree, new_parent, new_name, source.node)
    if source.parent == new_parent:
        touch_directory(tree, new_parent, now_ns, subdirectories=-removed_directories)
    else:
        touch_directory(tree, source.parent, now_ns, subdirectories=-moved_directories)
        touch_directory(tree, new_parent, now_ns, subdirectories=moved_directories - removed_directories)
    return RenameOutcome(_renamed(tree, source, now_ns), replaced)


def _exchange(tree: TreeWrite, source: _Place, target: _Place, now_ns: int) -> RenameOutcome:
    delete_entry(tree, source.parent, source.name, source.node.ino)
    delete_entry(tree, target.parent, target.name, target.node.ino)
    put_entry(tree, source.parent, source.name, target.node)
    put_entry(tree, target.parent, target.name, source.node)
    gained = int(target.is_directory) - int(source.is_directory)
    touch_directory(tree, source.parent, now_ns, subdirectories=gained)
    touch_directory(tree, target.parent, now_ns, subdirectories=-gained)
    return RenameOutcome(_renamed(tree, source, now_ns), exchanged=_renamed(tree, target, now_ns))


def _renamed(tree: TreeWrite, place: _Place, now_ns: int) -> Node:
    # Read again: the directory may just have been touched as a parent.
    record = inode(tree, place.node.ino) if place.is_directory else place.node.record
    return put_inode(tree, place.node.ino, record.with_links(record.nlink, record.mtime_ns, now_ns))
