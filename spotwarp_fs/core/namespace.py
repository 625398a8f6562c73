"""Decide what creating, linking and removing a name does to the tree.

Invariant: after each call, tables e and N say the same, and every link count is right: the number of names of a file,
2 + subdirectories of a directory, 0 for what has lost its last name and is in ORPHANS until `reap` (see
`core/treecheck.py`, which checks just this). A refused request has changed nothing.
"""

from __future__ import annotations

import errno
import stat
from typing import Final

from spotwarp_fs.core.attributes import KNOWN_TYPES, clamped_time, dtype, gid_of_new, mode_of_new
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.paths import directory, entry, existing_entry, inode, is_empty
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    XATTR_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    entry_key,
    ino_key,
    ino_range,
    inode_key,
    key_ino,
    name_key,
    table_range,
)
from spotwarp_fs.core.requests import Actor, Node, TreeWrite
from spotwarp_fs.core.types import ROOT_INODE, SYMLINK_BYTES_MAX, Inode

LINKS_MAX: Final = 65_000
"""Names that one file may have, as on ext4. Subdirectories are not limited: datasets have more classes than that."""


def make_root(tree: TreeWrite, actor: Actor, now_ns: int) -> Node:
    """Create the root directory of an empty tree."""
    assert tree.get(inode_key(ROOT_INODE)) is None, "the tree already has a root"
    record = InodeRecord(
        stat.S_IFDIR | 0o755, 2, actor.uid, actor.gid, 0, atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns
    )
    return put_inode(tree, ROOT_INODE, record)


def create(
    tree: TreeWrite,
    parent: Inode,
    name: bytes,
    mode: int,
    actor: Actor,
    ino: Inode,
    now_ns: int,
    *,
    rdev: int = 0,
    target: bytes = b"",
) -> Node:
    """Create inode *ino* at *name*: file, directory, symlink (to *target*), fifo, socket or device, by *mode*.

    *mode* comes from the kernel with the umask applied; no type at all means a regular file, as for mknod(2).
    """
    holder = check_new_name(tree, parent, name)
    mode = mode_of_new(holder, mode)
    _check_kind(mode, target)
    assert tree.get(inode_key(ino)) is None, f"inode number {ino} was given before"
    now_ns = clamped_time(now_ns)
    is_directory = stat.S_ISDIR(mode)
    record = InodeRecord(
        mode, 2 if is_directory else 1, actor.uid, gid_of_new(holder, actor), len(target),
        rdev=rdev if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0,
        atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns, target=target,
    )  # fmt: skip
    put_entry(tree, parent, name, Node(ino, record))
    touch_directory(tree, parent, now_ns, subdirectories=int(is_directory))
    return put_inode(tree, ino, record)


def link(tree: TreeWrite, ino: Inode, parent: Inode, name: bytes, now_ns: int) -> Node:
    """Give *ino* one more name; refuses directories (EPERM), the unlinked (ENOENT) and one name too many (EMLINK)."""
    check_new_name(tree, parent, name)
    record = inode(tree, ino)
    if stat.S_ISDIR(record.mode):
        raise Refused(errno.EPERM, f"inode {ino} is a directory, which has one name only")
    if record.nlink == 0:
        raise Refused(errno.ENOENT, f"inode {ino} has lost its last name")
    if record.nlink >= LINKS_MAX:
        raise Refused(errno.EMLINK, f"inode {ino} has {record.nlink} names, at most {LINKS_MAX} are allowed")
    record = record.with_links(record.nlink + 1, record.mtime_ns, now_ns)
    put_entry(tree, parent, name, Node(ino, record))
    touch_directory(tree, parent, now_ns)
    return put_inode(tree, ino, record)


def unlink(tree: TreeWrite, parent: Inode, name: bytes, now_ns: int) -> Node:
    """Remove a name of anything but a directory; with nlink 0 in the result, the last name went (see ORPHANS)."""
    directory(tree, parent)
    ino = existing_entry(tree, parent, name).ino
    if stat.S_ISDIR(inode(tree, ino).mode):
        raise Refused(errno.EISDIR, f"inode {ino} is a directory")
    delete_entry(tree, parent, name, ino)
    touch_directory(tree, parent, now_ns)
    return drop_link(tree, ino, now_ns)


def rmdir(tree: TreeWrite, parent: Inode, name: bytes, now_ns: int) -> Node:
    """Remove an empty directory; its inode stays, without a name, for whoever has it open."""
    directory(tree, parent)
    ino = existing_entry(tree, parent, name).ino
    directory(tree, ino)
    check_empty(tree, ino)
    delete_entry(tree, parent, name, ino)
    touch_directory(tree, parent, now_ns, subdirectories=-1)
    return drop_link(tree, ino, now_ns)


def reap(tree: TreeWrite, ino: Inode) -> None:
    """Forget an inode without a name: record, xattrs and its row in ORPHANS.

    Its block records are the caller's (`Recorder.drop_blocks`, one range row instead of a row for each block: H4).
    """
    assert inode(tree, ino).nlink == 0, f"inode {ino} still has a name"
    for key, _ in list(tree.scan(*ino_range(XATTR_TABLE, ino))):
        tree.delete(key)
    tree.delete(inode_key(ino))
    tree.delete_local(ino_key(NodeTable.ORPHANS, ino))


def orphans(tree: KVRead) -> list[Inode]:
    """Return every inode that has lost its last name and was not reaped (at a start: all of them are to be, M-c)."""
    return [key_ino(key) for key, _ in tree.scan(*table_range(NodeTable.ORPHANS))]


def check_name(name: bytes) -> None:
    """Refuse what no entry may be called, except its length, which `entry` checks at every lookup."""
    if name in (b".", b".."):
        raise Refused(errno.EEXIST, f"{name!r} is in every directory")
    if not name:
        raise Refused(errno.ENOENT, "empty name")
    if b"/" in name or b"\0" in name:
        raise Refused(errno.EINVAL, f"name {name!r} holds a slash or a NUL")


def check_alive(parent: Inode, record: InodeRecord) -> None:
    """Refuse to put anything into a directory that was removed while somebody still stands in it."""
    if record.nlink == 0:
        raise Refused(errno.ENOENT, f"directory {parent} was removed")


def check_new_name(tree: KVRead, parent: Inode, name: bytes) -> InodeRecord:
    """Return the record of *parent*, in which *name* is free, or refuse."""
    record = directory(tree, parent)
    check_alive(parent, record)
    check_name(name)
    if entry(tree, parent, name) is not None:
        raise Refused(errno.EEXIST, f"directory {parent} already has an entry {name!r}")
    return record


def check_empty(tree: KVRead, ino: Inode) -> None:
    """Refuse with ENOTEMPTY while directory *ino* has entries."""
    if not is_empty(tree, ino):
        raise Refused(errno.ENOTEMPTY, f"directory {ino} is not empty")


def _check_kind(mode: int, target: bytes) -> None:
    if stat.S_IFMT(mode) not in KNOWN_TYPES:
        raise Refused(errno.EINVAL, f"mode {mode:o} is of no known type")
    if not stat.S_ISLNK(mode):
        assert not target, "only a symlink has a target"
    elif not target:
        raise Refused(errno.ENOENT, "empty symlink target")
    elif len(target) > SYMLINK_BYTES_MAX:
        raise Refused(
            errno.ENAMETOOLONG, f"symlink target has {len(target)} bytes, at most {SYMLINK_BYTES_MAX} are allowed"
        )


def put_inode(tree: TreeWrite, ino: Inode, record: InodeRecord) -> Node:
    """Write the record of *ino*."""
    tree.put(inode_key(ino), record.encode())
    return Node(ino, record)


def put_entry(tree: TreeWrite, parent: Inode, name: bytes, node: Node) -> None:
    """Let *name* lead to *node*, in tables e and N."""
    tree.put(entry_key(parent, name), EntryRecord(node.ino, dtype(node.record.mode)).encode())
    tree.put_local(name_key(node.ino, parent, name), b"")


def delete_entry(tree: TreeWrite, parent: Inode, name: bytes, ino: Inode) -> None:
    """Remove *name*, which leads to *ino*, from tables e and N."""
    tree.delete(entry_key(parent, name))
    tree.delete_local(name_key(ino, parent, name))


def touch_directory(tree: TreeWrite, ino: Inode, now_ns: int, *, subdirectories: int = 0) -> None:
    """Note that the entries of directory *ino* changed, and how many of its subdirectories came or went."""
    record = inode(tree, ino)
    put_inode(tree, ino, record.with_links(record.nlink + subdirectories, now_ns, now_ns))


def drop_link(tree: TreeWrite, ino: Inode, now_ns: int) -> Node:
    """Count one name less; an inode without any goes to ORPHANS (a directory has but one name)."""
    record = inode(tree, ino)
    assert record.nlink > 0, f"inode {ino} has no name to lose"
    nlink = 0 if stat.S_ISDIR(record.mode) else record.nlink - 1
    if nlink == 0:
        tree.put_local(ino_key(NodeTable.ORPHANS, ino), b"")
    return put_inode(tree, ino, record.with_links(nlink, record.mtime_ns, now_ns))
