"""How many bytes would have to be sent to save everything: an estimate that costs little, however many files there are.

Invariant: never less than what is dirty by more than the spread of file sizes beyond the first `FILES_MAX`.
"""

from __future__ import annotations

from itertools import islice

from spotwarp_fs.core.extents import valid_bytes
from spotwarp_fs.core.records import InodeRecord, inode_key
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex
from spotwarp_fs.engine.workspace import Workspace

FILES_MAX = 10_000
"""So many files are looked at; the rest counts like these."""


def dirty_bytes(workspace: Workspace) -> int:
    """Bytes written and not in the store; the last block of a file counts as far as the file goes."""
    blocks = found = files = 0
    with workspace.kv.read() as view:
        for ino, dirty in islice(workspace.dirty.items(), FILES_MAX):
            value = view.get(inode_key(ino))
            size = InodeRecord.decode(value).size if value is not None else 0
            last = BlockIndex(max(size - 1, 0) // BLOCK_BYTES)
            files += 1
            blocks += len(dirty)
            found += len(dirty) * BLOCK_BYTES - (BLOCK_BYTES - valid_bytes(size, last) if last in dirty else 0)
    if files < len(workspace.dirty):
        found += (workspace.dirty_blocks - blocks) * found // blocks
    return found
