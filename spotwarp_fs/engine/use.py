"""What data files occupy on the disk, and which inodes were used last.

Invariant: `total_bytes` is the sum of what the files themselves say they occupy, noted after each change of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from spotwarp_fs.core.ports import DataFiles
from spotwarp_fs.core.types import Inode


class Use:
    """Disk use per inode, in order of last use."""

    def __init__(self, data: DataFiles) -> None:
        self._data = data
        self._bytes: OrderedDict[Inode, int] = OrderedDict()
        self.total_bytes = 0

    def load(self) -> None:
        """Ask every data file (at start)."""
        self._bytes.clear()
        self.total_bytes = 0
        for ino in list(self._data.inodes()):
            self.note(ino)

    def note(self, ino: Inode) -> None:
        """The data file changed: ask it again. Counts as a use."""
        now = self._data.allocated_bytes(ino)
        self.total_bytes += now - self._bytes.pop(ino, 0)
        if now:
            self._bytes[ino] = now

    def touch(self, ino: Inode) -> None:
        """The data file was read."""
        if ino in self._bytes:
            self._bytes.move_to_end(ino)

    def bytes_of(self, ino: Inode) -> int:
        """What the data file of *ino* occupies."""
        return self._bytes.get(ino, 0)

    def oldest_first(self) -> Iterator[Inode]:
        """Inodes with local bytes, the one used longest ago first."""
        return iter(list(self._bytes))
