"""Read the tree: what a directory holds, what an inode is called, where a path leads.

Invariant: nothing here changes the tree, and nothing depends on recursion depth: a path may be thousands of names deep.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from typing import Final

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    ENTRY_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    backward_name,
    entry_key,
    ino_range,
    inode_key,
    key_name,
)
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.types import NAME_BYTES_MAX, ROOT_INODE, Inode

SYMLINKS_MAX: Final = 40
"""Symlinks that one path may lead through, as Linux counts them."""


def inode(tree: KVRead, ino: Inode) -> InodeRecord:
    """Return the record of *ino*, or refuse with ESTALE, which makes the kernel look the name up again."""
    value = tree.get(inode_key(ino))
    if value is None:
        raise Refused(errno.ESTALE, f"inode {ino} does not exist")
    return InodeRecord.decode(value)


def directory(tree: KVRead, ino: Inode) -> InodeRecord:
    """Return the record of *ino*, or refuse with ENOTDIR when it is anything but a directory."""
    record = inode(tree, ino)
    if not stat.S_ISDIR(record.mode):
        raise Refused(errno.ENOTDIR, f"inode {ino} is not a directory")
    return record


def entry(tree: KVRead, parent: Inode, name: bytes) -> EntryRecord | None:
    """Return where *name* leads, or None; refuses with ENAMETOOLONG what can never be a name."""
    if len(name) > NAME_BYTES_MAX:
        raise Refused(errno.ENAMETOOLONG, f"name has {len(name)} bytes, at most {NAME_BYTES_MAX} are allowed")
    value = tree.get(entry_key(parent, name))
    return None if value is None else EntryRecord.decode(value)


def existing_entry(tree: KVRead, parent: Inode, name: bytes) -> EntryRecord:
    """Return where *name* leads, or refuse with ENOENT."""
    found = entry(tree, parent, name)
    if found is None:
        raise Refused(errno.ENOENT, f"inode {parent} has no entry {name!r}")
    return found


def lookup(tree: KVRead, parent: Inode, name: bytes) -> Node:
    """Find *name* in *parent*; `.` and `..` are names too (an NFS server and pyfuse3 both ask for them)."""
    record = directory(tree, parent)
    if name == b".":
        return Node(parent, record)
    ino = parent_of(tree, parent) if name == b".." else existing_entry(tree, parent, name).ino
    return Node(ino, inode(tree, ino))


def children(tree: KVRead, ino: Inode) -> list[tuple[bytes, EntryRecord]]:
    """Return every entry of directory *ino*, ordered by name."""
    return [(key_name(key), EntryRecord.decode(value)) for key, value in tree.scan(*ino_range(ENTRY_TABLE, ino))]


def is_empty(tree: KVRead, ino: Inode) -> bool:
    """Tell whether directory *ino* has no entry."""
    return next(iter(tree.scan(*ino_range(ENTRY_TABLE, ino))), None) is None


def names(tree: KVRead, ino: Inode) -> list[tuple[Inode, bytes]]:
    """Return every (parent, name) that leads to *ino*: none for the root and for an unlinked inode."""
    return list(each_name(tree, ino))


def each_name(tree: KVRead, ino: Inode) -> Iterator[tuple[Inode, bytes]]:
    """Give them one by one: a file may have thousands. Nothing may be changed meanwhile."""
    return (backward_name(key) for key, _ in tree.scan(*ino_range(NodeTable.NAMES, ino)))


def parent_of(tree: KVRead, ino: Inode) -> Inode:
    """Return the directory that holds directory *ino* (the root holds itself), or refuse with ENOENT if removed."""
    if ino == ROOT_INODE:
        return ROOT_INODE
    for key, _ in tree.scan(*ino_range(NodeTable.NAMES, ino)):
        return backward_name(key)[0]
    raise Refused(errno.ENOENT, f"inode {ino} has no name any more")


def path_of(tree: KVRead, ino: Inode) -> bytes | None:
    """Return one path of *ino* from the root (`b""` for the root itself), or None once it has no name."""
    parts: list[bytes] = []
    while ino != ROOT_INODE:
        found = names(tree, ino)
        if not found:
            return None
        ino, name = found[0]
        parts.append(name)
    return b"/".join(reversed(parts))


def is_within(tree: KVRead, ino: Inode, ancestor: Inode) -> bool:
    """Tell whether directory *ino* is *ancestor* or lies somewhere below it."""
    while ino != ancestor:
        if ino == ROOT_INODE:
            return False
        ino = parent_of(tree, ino)
    return True


def walk(tree: KVRead, path: bytes, *, follow: bool = False) -> Node:
    """Find the inode at *path* from the root; symlinks on the way are followed, the last one only with *follow*.

    An absolute symlink starts again at the workspace's root. Needs no node table, so it works on any loaded manifest.
    """
    trail = [ROOT_INODE]
    pending = path.split(b"/")[::-1]
    symlinks = 0
    while pending:
        name = pending.pop()
        if name in (b"", b"."):
            continue
        if name == b"..":
            del trail[max(1, len(trail) - 1) :]
            continue
        node = lookup(tree, trail[-1], name)
        if stat.S_ISLNK(node.record.mode) and (follow or any(pending)):
            symlinks += 1
            if symlinks > SYMLINKS_MAX:
                raise Refused(errno.ELOOP, f"{path!r} leads through more than {SYMLINKS_MAX} symlinks")
            if node.record.target.startswith(b"/"):
                del trail[1:]
            pending.extend(node.record.target.split(b"/")[::-1])
            continue
        trail.append(node.ino)
    return Node(trail[-1], inode(tree, trail[-1]))


def subtree(tree: KVRead, ino: Inode) -> Iterator[tuple[bytes, Node]]:
    """Give *ino* itself as `b""`, then everything below it as (relative path, node), parents before children."""
    pending = [(b"", ino)]
    while pending:
        path, current = pending.pop()
        record = inode(tree, current)
        yield path, Node(current, record)
        if stat.S_ISDIR(record.mode):
            prefix = path + b"/" if path else b""
            pending.extend((prefix + name, found.ino) for name, found in reversed(children(tree, current)))
