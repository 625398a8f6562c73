"""Write down what files look like on this node: witnesses, and the extended attributes that could not be set.

Invariant: these are node tables; nothing here makes a change that is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import NodeTable, encode_u64, ino_key
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Witness
from spotwarp_fs.engine.workspace import Workspace

REFUSED_PREFIX: Final = NodeTable.META + b"refused xattrs "
"""M refused xattrs <ino 8> -> names, each with a NUL: the state has them, this node's filesystem does not."""


def note(
    workspace: Workspace, witnesses: Iterable[tuple[Inode, Witness]], refused: Mapping[Inode, tuple[bytes, ...]]
) -> None:
    """Write them in one step."""
    with workspace.kv.write() as txn:
        for ino, witness in witnesses:
            txn.put(ino_key(NodeTable.WITNESS, ino), witness.encode())
        for ino, names in refused.items():
            txn.put(REFUSED_PREFIX + encode_u64(ino), b"".join(name + b"\0" for name in names))


def witness_of(view: KVRead, ino: Inode) -> Witness | None:
    """Read a file's witness."""
    row = view.get(ino_key(NodeTable.WITNESS, ino))
    return Witness.decode(row) if row else None


def refused_xattrs(view: KVRead, ino: Inode) -> frozenset[bytes]:
    """Give the names of attributes that a scan must carry over: they were never set here."""
    row = view.get(REFUSED_PREFIX + encode_u64(ino))
    return frozenset(row.split(b"\0")[:-1]) if row else frozenset()
