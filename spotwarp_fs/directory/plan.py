"""What a state's tree consists of, in the shape in which it is laid out: directories, and things with all their names.

Invariant: an inode appears once, whatever its names; what belongs to this program (`.spotwarp`) is no part of it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from spotwarp_fs.core import paths, xattrs
from spotwarp_fs.core.ownnames import OWN_NAME
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.scratch import join, published
from spotwarp_fs.core.types import ROOT_INODE, Inode


@dataclass(slots=True)
class Thing:
    """Anything with a record; a directory has one path."""

    ino: Inode
    record: InodeRecord
    xattrs: list[tuple[bytes, bytes]]
    paths: list[bytes] = field(default_factory=list)

    @property
    def is_file(self) -> bool:
        """A regular file: it has bytes."""
        return stat.S_ISREG(self.record.mode)


@dataclass(slots=True)
class Plan:
    """A whole tree; paths are relative to the root, which is `b""`."""

    directories: list[Thing] = field(default_factory=list)
    """Parents before children, the root first."""
    things: dict[Inode, Thing] = field(default_factory=dict)
    """Everything else."""
    names: dict[bytes, set[bytes]] = field(default_factory=dict)
    """What each directory holds."""
    not_laid_out: list[bytes] = field(default_factory=list)
    """Names that mean something else here."""

    def files(self) -> list[Thing]:
        """Regular files, in the order of inodes: by and large that of packs."""
        return [self.things[ino] for ino in sorted(self.things) if self.things[ino].is_file]


def make_plan(snapshot: KVRead) -> Plan:
    """Read the tree out of the map (blocking)."""
    view, plan = published(snapshot), Plan()
    for path, node in paths.subtree(view, ROOT_INODE):
        if path == OWN_NAME or path.startswith(OWN_NAME + b"/"):
            plan.not_laid_out.append(path)
            continue
        if path:
            above, _, name = path.rpartition(b"/")
            plan.names[above].add(name)
        thing = plan.things.get(node.ino)
        if thing is None:
            thing = Thing(node.ino, node.record, xattrs.attributes_of(view, node.ino))
        thing.paths.append(path)
        if stat.S_ISDIR(node.record.mode):
            plan.directories.append(thing)
            plan.names[path] = set()
        else:
            plan.things[node.ino] = thing
    return plan


def make_thing(view: KVRead, ino: Inode) -> Thing:
    """Read one inode out of the map, with the names that it has now."""
    found = []
    for parent, name in paths.each_name(view, ino):
        above = paths.path_of(view, parent)
        if above is not None:
            found.append(join(above, name))
    return Thing(ino, paths.inode(view, ino), xattrs.attributes_of(view, ino), found)


def place_of(root: bytes, path: bytes) -> bytes:
    """Give the real path of *path*."""
    return os.path.join(root, path) if path else root
