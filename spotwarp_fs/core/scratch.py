"""Keep what is scratch apart from what is published, entry by entry (C18).

An entry is scratch if its directory is, or if a glob matches its path; an inode is scratch if it has names and all of
them are. Invariant: table S has a row exactly for each scratch inode, and table T exactly for each scratch entry of a
directory that is not, so nobody who reads needs a path. The value of S says what the store may know of the inode:

    S <ino> -> 0     made as scratch: no state ever had it
    S <ino> -> seq   it was published before; a manifest whose change seq is not below this no longer has it
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from spotwarp_fs.core import paths
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    INODE_TABLE,
    XATTR_TABLE,
    EntryRecord,
    InodeRecord,
    NodeTable,
    decode_u64,
    entry_key,
    ino_key,
    ino_range,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.types import ChangeSeq, Inode

DERIVED_KEY: Final = NodeTable.SCRATCH
"""Shorter than any row of the table: the globs that its rows were derived with."""
FIRST_ROW: Final = NodeTable.SCRATCH + b"\0"
MADE_SO: Final = ChangeSeq(0)
DIRECTORY_DTYPE: Final = stat.S_IFDIR >> 12
_OF_INODE: Final = frozenset({INODE_TABLE, XATTR_TABLE, BLOCK_TABLE, NodeTable.IN_FLIGHT})
_FILTERED: Final = _OF_INODE | {ENTRY_TABLE, NodeTable.NAMES}


def is_scratch(view: KVRead, ino: Inode) -> bool:
    """Tell whether *ino* has names and all of them are scratch."""
    return view.get(ino_key(NodeTable.SCRATCH, ino)) is not None


def scratch_name_key(parent: Inode, name: bytes) -> bytes:
    """Key of an entry in table T."""
    return ino_key(NodeTable.SCRATCH_NAMES, parent) + name


def is_scratch_name(view: KVRead, parent: Inode, name: bytes) -> bool:
    """Tell whether the entry *name* of *parent* is scratch."""
    return is_scratch(view, parent) or view.get(scratch_name_key(parent, name)) is not None


def is_unseen(view: KVRead, ino: Inode, published: ChangeSeq) -> bool:
    """Tell whether *ino* is scratch and the manifest at change seq *published* does not have it."""
    since = view.get(ino_key(NodeTable.SCRATCH, ino))
    return since is not None and decode_u64(since) <= published


def scratch_paths(view: KVRead) -> Iterator[bytes]:
    """Give the path of each scratch entry that does not lie in a scratch directory."""
    for key, _ in view.scan(*table_range(NodeTable.SCRATCH_NAMES)):
        above = paths.path_of(view, key_ino(key))
        if above is not None:
            yield join(above, key_name(key))


def join(path: bytes, name: bytes) -> bytes:
    """One step down; the root's path is empty."""
    return path + b"/" + name if path else name


def published(view: KVRead) -> KVRead:
    """Show *view* as it is published: without what is scratch, and with the link counts that are left."""
    for start, stop in ((FIRST_ROW, table_range(NodeTable.SCRATCH)[1]), table_range(NodeTable.SCRATCH_NAMES)):
        if next(iter(view.scan(start, stop)), None) is not None:
            return _Published(view)
    return view


class _Published:
    """A view that hides what is scratch."""

    __slots__ = ("_view",)

    def __init__(self, view: KVRead) -> None:
        self._view = view

    def get(self, key: bytes) -> bytes | None:
        """Return the value of *key* as it is published, or None."""
        value = self._view.get(key)
        return value if value is None or key[:1] not in _FILTERED else self._shown(key, value)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order (to the end when None)."""
        for key, value in self._view.scan(start, stop):
            shown = value if key[:1] not in _FILTERED else self._shown(key, value)
            if shown is not None:
                yield key, shown

    def _shown(self, key: bytes, value: bytes) -> bytes | None:
        view, table, ino = self._view, key[:1], key_ino(key)
        if table == ENTRY_TABLE:
            return None if is_scratch_name(view, ino, key_name(key)) else value
        if table == NodeTable.NAMES:
            return None if is_scratch_name(view, Inode(decode_u64(key, 9)), key[17:]) else value
        if is_scratch(view, ino):
            return None
        return _with_published_links(view, ino, value) if table == INODE_TABLE else value


def _with_published_links(view: KVRead, ino: Inode, value: bytes) -> bytes:
    record = InodeRecord.decode(value)
    if stat.S_ISDIR(record.mode):
        hidden = sum(_leads_to_directory(view, key) for key, _ in view.scan(*ino_range(NodeTable.SCRATCH_NAMES, ino)))
    elif record.nlink > 1:
        hidden = sum(is_scratch_name(view, parent, name) for parent, name in paths.names(view, ino))
    else:
        return value
    return replace(record, nlink=record.nlink - hidden).encode() if hidden else value


def _leads_to_directory(view: KVRead, key: bytes) -> bool:
    value = view.get(entry_key(key_ino(key), key_name(key)))
    return value is not None and EntryRecord.decode(value).dtype == DIRECTORY_DTYPE
