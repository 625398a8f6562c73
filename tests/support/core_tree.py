"""Carry the calls of a program out with the namespace rules alone, on a map in memory; there are no file bytes here."""

from __future__ import annotations

import stat
from collections.abc import Callable

from spotwarp_fs.core import attributes, namespace, paths, xattrs
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.rename import rename
from spotwarp_fs.core.requests import Actor, AttributeChange, Node, TreeWrite
from spotwarp_fs.core.types import ROOT_INODE, Inode
from tests.support import calls
from tests.support.calls import Call
from tests.support.reference import Facts, Snapshot

ROOT_USER = Actor(0, 0, 1)


class CoreTree:
    """A tree that only `core/namespace.py` and its neighbours ever change."""

    def __init__(self, tree: TreeWrite, *, now_ns: int) -> None:
        self.tree = tree
        self.now_ns = now_ns
        self._next = 1 << 40
        namespace.make_root(tree, ROOT_USER, now_ns)

    def perform(self, call: Call, now_ns: int) -> int:
        """Carry *call* out, or return the errno that it is refused with."""
        self.now_ns = now_ns
        try:
            _ACTIONS.get(type(call), lambda _core, _call: None)(self, call)
        except Refused as refusal:
            return refusal.errno
        return 0

    def snapshot(self) -> Snapshot:
        found = sorted(paths.subtree(self.tree, ROOT_INODE))
        first: dict[Inode, bytes] = {}
        for path, node in found:
            first.setdefault(node.ino, path)
        return {path: self._facts(node, first[node.ino]) for path, node in found}

    def _facts(self, node: Node, same_as: bytes) -> Facts:
        record = node.record
        return Facts(
            record.mode, record.nlink, record.uid, record.gid, record.size, record.target, record.rdev, same_as,
            tuple(xattrs.attributes_of(self.tree, node.ino)),
            record.atime_ns, record.mtime_ns, record.ctime_ns, content=None, ino=node.ino,
        )  # fmt: skip

    def _place(self, path: bytes) -> tuple[Inode, bytes]:
        above, _, name = path.rpartition(b"/")
        return paths.walk(self.tree, above).ino, name

    def _at(self, path: bytes) -> Node:
        parent, name = self._place(path)
        return paths.lookup(self.tree, parent, name) if name else paths.walk(self.tree, b"")

    def _create(self, path: bytes, mode: int, *, rdev: int = 0, target: bytes = b"") -> Node:
        self._next += 1
        parent, name = self._place(path)
        return namespace.create(
            self.tree, parent, name, mode, ROOT_USER, Inode(self._next), self.now_ns, rdev=rdev, target=target
        )

    def _open(self, path: bytes) -> Node:
        """What the kernel does before it asks a filesystem for a write: only a file can be written to."""
        node = self._at(path)
        kind = calls.kind_of(node.record.mode)
        if kind in calls.NOT_OPENABLE:
            raise Refused(calls.NOT_OPENABLE[kind])
        return node

    def _resize(self, ino: Inode, size: int) -> None:
        record = attributes.resized(paths.inode(self.tree, ino), size, size, self.now_ns)
        namespace.put_inode(self.tree, ino, record)

    def mkdir(self, call: calls.Mkdir) -> None:
        self._create(call.path, stat.S_IFDIR | call.mode)

    def create(self, call: calls.Create) -> None:
        self._create(call.path, stat.S_IFREG | call.mode)

    def mknod(self, call: calls.Mknod) -> None:
        self._create(call.path, call.mode, rdev=call.rdev)

    def symlink(self, call: calls.Symlink) -> None:
        self._create(call.path, stat.S_IFLNK | 0o777, target=call.target)

    def link(self, call: calls.Link) -> None:
        namespace.link(self.tree, self._at(call.source).ino, *self._place(call.path), self.now_ns)

    def unlink(self, call: calls.Unlink) -> None:
        namespace.unlink(self.tree, *self._place(call.path), self.now_ns)

    def rmdir(self, call: calls.Rmdir) -> None:
        namespace.rmdir(self.tree, *self._place(call.path), self.now_ns)

    def rename(self, call: calls.Rename) -> None:
        rename(self.tree, *self._place(call.source), *self._place(call.path), call.flags, self.now_ns)

    def write(self, call: calls.Write) -> None:
        node = self._open(call.path)
        self._resize(node.ino, max(node.record.size, call.offset + call.length))

    def append(self, call: calls.Append) -> None:
        node = self._open(call.path)
        self._resize(node.ino, node.record.size + call.length)

    def save(self, call: calls.Save) -> None:
        parent, name = self._place(call.path)
        paths.directory(self.tree, parent)
        if paths.entry(self.tree, parent, name) is None:
            self._create(call.path, stat.S_IFREG | call.mode)
        self._resize(self._open(call.path).ino, call.length)

    def truncate(self, call: calls.Truncate) -> None:
        self._resize(self._open(call.path).ino, call.size)

    def _change(self, path: bytes, change: AttributeChange) -> None:
        attributes.set_attributes(self.tree, self._at(path).ino, change, self.now_ns)

    def chmod(self, call: calls.Chmod) -> None:
        self._change(call.path, AttributeChange(mode=call.mode))

    def chown(self, call: calls.Chown) -> None:
        self._change(call.path, AttributeChange(uid=call.uid, gid=call.gid))

    def utimens(self, call: calls.Utimens) -> None:
        self._change(call.path, AttributeChange(atime_ns=call.atime_ns, mtime_ns=call.mtime_ns))

    def set_xattr(self, call: calls.SetXattr) -> None:
        xattrs.set_xattr(self.tree, self._at(call.path).ino, call.name, call.value, call.flags, self.now_ns)

    def remove_xattr(self, call: calls.RemoveXattr) -> None:
        xattrs.remove_xattr(self.tree, self._at(call.path).ino, call.name, self.now_ns)

    def write_unlinked(self, call: calls.WriteUnlinked) -> None:
        node = self._open(call.path)
        namespace.unlink(self.tree, *self._place(call.path), self.now_ns)
        self._resize(node.ino, max(node.record.size, call.length))

    def fsync(self, call: calls.Fsync) -> None:
        self._at(call.path)


_ACTIONS: dict[type, Callable[[CoreTree, Call], None]] = {
    calls.Mkdir: CoreTree.mkdir,
    calls.Create: CoreTree.create,
    calls.Mknod: CoreTree.mknod,
    calls.Symlink: CoreTree.symlink,
    calls.Link: CoreTree.link,
    calls.Unlink: CoreTree.unlink,
    calls.Rmdir: CoreTree.rmdir,
    calls.Rename: CoreTree.rename,
    calls.Write: CoreTree.write,
    calls.Append: CoreTree.append,
    calls.Save: CoreTree.save,
    calls.Truncate: CoreTree.truncate,
    calls.Chmod: CoreTree.chmod,
    calls.Chown: CoreTree.chown,
    calls.Utimens: CoreTree.utimens,
    calls.SetXattr: CoreTree.set_xattr,
    calls.RemoveXattr: CoreTree.remove_xattr,
    calls.WriteUnlinked: CoreTree.write_unlinked,
    calls.Fsync: CoreTree.fsync,
}
