"""In which order absent files come: what the last job read, small ones, the newest complete checkpoint, the rest.

Invariant: every absent file is in exactly one part.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.core import paths
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import inode_key
from spotwarp_fs.core.types import ROOT_INODE, Inode
from spotwarp_fs.engine.newest import newest_checkpoint
from spotwarp_fs.engine.warm import traced_files

_NUMBER: Final = re.compile(rb"[0-9]")
_SHARD: Final = re.compile(rb"[0-9]+[-_.]of[-_.][0-9]+")
"""One of several parts of a whole, not one of several in time."""


@dataclass(frozen=True, slots=True)
class Order:
    """Parts, first things first."""

    traced: tuple[Inode, ...]
    """What the last start read, by the roles that files have now."""
    checkpoint: tuple[Inode, ...]
    """The newest complete checkpoint."""
    plain: tuple[Inode, ...]
    """What belongs to no checkpoint, the smallest first."""
    older: tuple[Inode, ...]
    """Older checkpoints, the newest first: fetched only if somebody asks."""


def order(view: KVRead, policies: Policies, unsafe: set[Inode], sizes: dict[Inode, int]) -> Order:
    """Put the files of *sizes* in order; *unsafe* are in flight in the head."""
    left = dict(sizes)

    def take(wanted: Iterable[Inode]) -> tuple[Inode, ...]:
        return tuple(ino for ino in wanted if left.pop(ino, None) is not None)

    traced = take(traced_files(view, policies))
    checkpoint = take(checkpoint_inodes(view, policies, unsafe))
    atomic = {ino for ino in left if is_of_checkpoint(view, policies, ino)}
    plain = take(sorted((ino for ino in left if ino not in atomic), key=lambda ino: left[ino]))
    older = take(sorted(left, reverse=True))
    return Order(traced, checkpoint, plain, older)


def checkpoint_inodes(view: KVRead, policies: Policies, unsafe: Collection[int]) -> list[Inode]:
    """Return the files of the newest complete checkpoint."""
    newest = newest_checkpoint(view, policies, unsafe)
    if newest is None:
        return []
    nodes = paths.subtree(view, newest.ino)
    return [node.ino for _, node in nodes if stat.S_ISREG(node.record.mode)]


def is_numbered(name: bytes) -> bool:
    """Tell whether a name is one of a series in time."""
    return _NUMBER.search(name) is not None and _SHARD.search(name) is None


def is_of_checkpoint(view: KVRead, policies: Policies, ino: Inode) -> bool:
    """Tell whether a file is one of a series of checkpoints: numbered, or in a directory that is one."""
    place = next(paths.each_name(view, ino), None)
    if place is None:
        return False
    parent, name = place
    return (policies.is_atomic(name) and is_numbered(name)) or is_in_checkpoint(view, policies, parent, name)


def is_in_checkpoint(view: KVRead, policies: Policies, parent: Inode, name: bytes) -> bool:
    """Tell whether a directory above the entry *name* of *parent* is a checkpoint."""
    while parent != ROOT_INODE and view.get(inode_key(parent)) is not None:
        above = next(paths.each_name(view, parent), None)
        if above is None:
            return False
        parent, name = above
        if policies.is_atomic_dir(name):
            return True
    return False
