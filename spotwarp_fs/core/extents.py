"""Half-open byte ranges of a file, and how they fall on blocks.

Invariant: pieces and blocks come in file order and cover an extent exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `[start, stop)` of a file."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, (self.start, self.stop)

    @property
    def length(self) -> int:
        """Bytes in the extent."""
        return self.stop - self.start


def blocks_of(extent: Extent) -> range:
    """Indexes of the blocks that *extent* touches.

    >>> list(blocks_of(Extent(1_048_570, 1_048_580)))
    [0, 1]
    """
    if extent.start == extent.stop:
        return range(0)
    return range(extent.start // BLOCK_BYTES, (extent.stop - 1) // BLOCK_BYTES + 1)


def pieces_per_block(extent: Extent) -> Iterator[tuple[BlockIndex, Extent]]:
    """Cut *extent* at block edges, in file order.

    >>> [(i, p.start, p.stop) for i, p in pieces_per_block(Extent(1_048_570, 1_048_580))]
    [(0, 1048570, 1048576), (1, 1048576, 1048580)]
    """
    for index in blocks_of(extent):
        start = max(extent.start, index * BLOCK_BYTES)
        stop = min(extent.stop, (index + 1) * BLOCK_BYTES)
        yield BlockIndex(index), Extent(start, stop)


def valid_bytes(size: int, block: BlockIndex) -> int:
    """Bytes of *block* that lie inside a file of *size* bytes."""
    return max(0, min(BLOCK_BYTES, size - block * BLOCK_BYTES))
