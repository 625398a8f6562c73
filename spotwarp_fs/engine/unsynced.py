"""Blocks whose fdatasync failed: their bytes are not believed until they are written again (H10).

Linux reports a failed write-back once and then calls the pages clean, so what the file holds may be neither the old nor
the new bytes. Invariant: a file is here exactly while a byte that was only local at the failed sync has neither been
written again nor been cut off; a block that is here is never sealed.
"""

from __future__ import annotations

from collections.abc import Iterable

from spotwarp_fs.core.extents import Extent, valid_bytes
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode


class Unsynced:
    """What has to be written again, by file and block."""

    def __init__(self) -> None:
        self._files: dict[Inode, dict[BlockIndex, list[Extent]]] = {}
        self._reasons: dict[Inode, str] = {}

    def __contains__(self, ino: Inode) -> bool:
        return ino in self._files

    def has_block(self, ino: Inode, block: BlockIndex) -> bool:
        """Return whether the local bytes of a block may be something that nobody wrote."""
        return block in self._files.get(ino, ())

    def reason(self, ino: Inode) -> str | None:
        """What happened to the file, or None."""
        return self._reasons.get(ino)

    def failed(self, ino: Inode, reason: str, blocks: Iterable[BlockIndex], size: int) -> None:
        """The sync of a file failed while these of its blocks were only here."""
        file = self._files.setdefault(ino, {})
        for block in blocks:
            start = block * BLOCK_BYTES
            length = valid_bytes(size, block)
            if length > 0:
                file[block] = [Extent(start, start + length)]
        self._reasons[ino] = reason

    def written(self, ino: Inode, extent: Extent) -> bool:
        """Bytes were written again; True if nothing of the file is in doubt any more."""
        file = self._files.get(ino)
        if file is None:
            return False
        for block in [block for block, left in file.items() if any(_meet(piece, extent) for piece in left)]:
            file[block] = [rest for piece in file[block] for rest in _without(piece, extent)]
        return self._settle(ino)

    def cut(self, ino: Inode, size: int) -> bool:
        """The file ends at *size* now (0: or is gone); True if nothing of it is in doubt any more."""
        return ino in self._files and self.written(ino, Extent(size, 1 << 62))

    def _settle(self, ino: Inode) -> bool:
        left = {block: pieces for block, pieces in self._files[ino].items() if pieces}
        if left:
            self._files[ino] = left
            return False
        del self._files[ino], self._reasons[ino]
        return True


def _meet(one: Extent, other: Extent) -> bool:
    return one.start < other.stop and other.start < one.stop


def _without(piece: Extent, gone: Extent) -> list[Extent]:
    """What of *piece* lies outside *gone*."""
    before = Extent(piece.start, min(piece.stop, gone.start)) if piece.start < gone.start else None
    after = Extent(max(piece.start, gone.stop), piece.stop) if piece.stop > gone.stop else None
    return [rest for rest in (before, after) if rest is not None]
