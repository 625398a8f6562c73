"""Decide which extended attributes an inode may have.

Invariant: every attribute that is stored can be listed and restored: the limits on one inode are below the kernel's.

`user.*`, `trusted.*` and `security.*` are kept. POSIX ACLs (`system.posix_acl_*`) are refused with EOPNOTSUPP: stored
but not enforced they would promise protection that nobody gives.
"""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from enum import IntFlag
from typing import Final

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.namespace import put_inode
from spotwarp_fs.core.paths import inode
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import XATTR_TABLE, InodeRecord, ino_range, key_name, xattr_key
from spotwarp_fs.core.requests import Node, TreeWrite
from spotwarp_fs.core.types import NAME_BYTES_MAX, XATTR_BYTES_MAX, Inode

XATTR_LIST_BYTES_MAX: Final = 65_536
"""All names of one inode, each with its NUL: what listxattr(2) can ever return."""
XATTR_TOTAL_BYTES_MAX: Final = 262_144
"""All names and values of one inode."""
NAMESPACES: Final = (b"user.", b"trusted.", b"security.")


class XattrFlags(IntFlag):
    """Flags of setxattr(2)."""

    NONE = 0
    CREATE = 1
    REPLACE = 2


def get_xattr(tree: KVRead, ino: Inode, name: bytes) -> bytes:
    """Return the value of *name*, or refuse with ENODATA."""
    _check_name(name)
    inode(tree, ino)
    return _existing(tree, ino, name)


def list_xattrs(tree: KVRead, ino: Inode) -> list[bytes]:
    """Return the names of all attributes of *ino*, in order."""
    inode(tree, ino)
    return [name for name, _ in attributes_of(tree, ino)]


def attributes_of(tree: KVRead, ino: Inode) -> list[tuple[bytes, bytes]]:
    """Return all attributes of *ino* with their values."""
    return [(key_name(key), value) for key, value in tree.scan(*ino_range(XATTR_TABLE, ino))]


def set_xattr(tree: TreeWrite, ino: Inode, name: bytes, value: bytes, flags: int, now_ns: int) -> Node:
    """Set *name*; CREATE refuses with EEXIST if it is there, REPLACE with ENODATA if it is not."""
    _check_name(name)
    record = inode(tree, ino)
    _check_bearer(record, name)
    if not 0 <= flags <= XattrFlags.CREATE | XattrFlags.REPLACE:
        raise Refused(errno.EINVAL, f"setxattr flags {flags:#x} are not supported")
    present = tree.get(xattr_key(ino, name)) is not None
    if present and flags & XattrFlags.CREATE:
        raise Refused(errno.EEXIST, f"inode {ino} already has the attribute {name!r}")
    if not present and flags & XattrFlags.REPLACE:
        raise Refused(errno.ENODATA, f"inode {ino} has no attribute {name!r}")
    _check_room(tree, ino, name, value)
    tree.put(xattr_key(ino, name), value)
    return put_inode(tree, ino, replace(record, ctime_ns=now_ns))


def remove_xattr(tree: TreeWrite, ino: Inode, name: bytes, now_ns: int) -> Node:
    """Remove *name*, or refuse with ENODATA."""
    _check_name(name)
    record = inode(tree, ino)
    _check_bearer(record, name)
    _existing(tree, ino, name)
    tree.delete(xattr_key(ino, name))
    return put_inode(tree, ino, replace(record, ctime_ns=now_ns))


def _existing(tree: KVRead, ino: Inode, name: bytes) -> bytes:
    value = tree.get(xattr_key(ino, name))
    if value is None:
        raise Refused(errno.ENODATA, f"inode {ino} has no attribute {name!r}")
    return value


def _check_name(name: bytes) -> None:
    if not name or len(name) > NAME_BYTES_MAX:
        raise Refused(errno.ERANGE, f"attribute name has {len(name)} bytes, 1 to {NAME_BYTES_MAX} are allowed")
    if not name.startswith(NAMESPACES):
        raise Refused(errno.EOPNOTSUPP, f"attributes such as {name!r} are not kept")
    if name in NAMESPACES:
        raise Refused(errno.EINVAL, f"attribute name {name!r} is a prefix only")


def _check_bearer(record: InodeRecord, name: bytes) -> None:
    # Anybody may write to a device or a world-writable symlink; Linux lets nobody leave user data there.
    if name.startswith(b"user.") and not (stat.S_ISREG(record.mode) or stat.S_ISDIR(record.mode)):
        raise Refused(errno.EPERM, "user attributes are for files and directories only")


def _check_room(tree: KVRead, ino: Inode, name: bytes, value: bytes) -> None:
    if len(value) > XATTR_BYTES_MAX:
        raise Refused(errno.E2BIG, f"value has {len(value)} bytes, at most {XATTR_BYTES_MAX} are allowed")
    others = [(other, kept) for other, kept in attributes_of(tree, ino) if other != name]
    listed = len(name) + 1 + sum(len(other) + 1 for other, _ in others)
    total = len(name) + len(value) + sum(len(other) + len(kept) for other, kept in others)
    if listed > XATTR_LIST_BYTES_MAX or total > XATTR_TOTAL_BYTES_MAX:
        raise Refused(
            errno.ENOSPC, f"attributes of inode {ino} would take {total} bytes, at most {XATTR_TOTAL_BYTES_MAX} fit"
        )
