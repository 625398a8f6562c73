"""The numbers and names that everything else is written in (the glossary, as types).

Invariant: two integers that must never be mixed up have two types here.
"""

from __future__ import annotations

from typing import Final, NewType

Inode = NewType("Inode", int)
BlockIndex = NewType("BlockIndex", int)
ByteOffset = NewType("ByteOffset", int)
WriterEpoch = NewType("WriterEpoch", int)
ManifestNumber = NewType("ManifestNumber", int)
ChangeSeq = NewType("ChangeSeq", int)
"""Position in the workspace's history of changes: raised by every recorded change, never reused."""
Generation = NewType("Generation", int)
"""Raised on the event loop before every `pwrite` to a block; lives in memory only."""
ObjectKey = NewType("ObjectKey", str)
"""Key of a store object, relative to the store's prefix: `[a-z0-9/._-]` only."""
PackId = NewType("PackId", str)
"""`<writer epoch, 8 hex>-<random, 16 hex>`."""

ROOT_INODE: Final = Inode(1)
BLOCK_BYTES: Final = 1 << 20
NAME_BYTES_MAX: Final = 255
SYMLINK_BYTES_MAX: Final = 4095
XATTR_BYTES_MAX: Final = 65_536
FILE_BYTES_MAX: Final = (1 << 32) * BLOCK_BYTES - 1
"""Block indexes are 32 bits wide: 4 PiB."""
INODE_EPOCH_SHIFT: Final = 40
"""Inode numbers are `writer epoch << 40 | counter`, so that no two writers ever give the same one."""


def pack_epoch(pack: PackId) -> WriterEpoch:
    """Read the writer epoch out of a pack's name."""
    return WriterEpoch(int(pack[:8], 16))
