"""Recognise how a file is read: in order, or header first and then somewhere in it.

Invariant: per inode, not per handle (several readers of one file are one stream), and bounded: the files read longest
ago are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from spotwarp_fs.core.types import BlockIndex, Inode

STREAMS_MAX = 1024
FIRST_WINDOW_BLOCKS = 4
STRAY_BLOCKS = 4
"""The kernel's own readahead may come out of order by so much."""


@dataclass(slots=True)
class Stream:
    """Where a file was read last, and how far ahead of that it is being fetched."""

    following: int
    """The block after the last one read."""
    window: int
    ahead: int
    """The first block not asked for yet."""
    only_header: bool
    """Nothing but its beginning was read so far."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What should be fetched without being asked for."""

    ahead: range = range(0)
    whole: bool = False
    """Header, then a jump: whoever reads so wants most of it (safetensors, HDF5)."""


NOTHING = Advice()


class Streams:
    """The files that were read lately."""

    def __init__(self, window_max: int, step: int) -> None:
        self._window_max = window_max
        self._step = step
        self._streams: OrderedDict[Inode, Stream] = OrderedDict()

    def note(self, ino: Inode, first: BlockIndex, last: BlockIndex) -> Advice:
        """A read touched the blocks *first* to *last*: say what to fetch ahead of the next one."""
        stream = self._streams.get(ino)
        if stream is not None and stream.following - STRAY_BLOCKS <= first and last < stream.following:
            return NOTHING
        if stream is None:
            stream = self._streams[ino] = self._begin(first, last)
            if len(self._streams) > STREAMS_MAX:
                self._streams.popitem(last=False)
        elif stream.following - STRAY_BLOCKS <= first <= stream.following + STRAY_BLOCKS:
            stream.window = min(max(FIRST_WINDOW_BLOCKS, stream.window * 2), self._window_max)
            stream.following = last + 1
        else:
            whole = stream.only_header
            self._streams[ino] = self._begin(first, last)
            self._streams.move_to_end(ino)
            if whole and first:
                return Advice(whole=True)
            stream = self._streams[ino]
        self._streams.move_to_end(ino)
        return self._advice(stream)

    def _begin(self, first: BlockIndex, last: BlockIndex) -> Stream:
        window = 0 if first else min(FIRST_WINDOW_BLOCKS, self._window_max)
        return Stream(last + 1, window, last + 1, only_header=not first)

    def _advice(self, stream: Stream) -> Advice:
        start, stop = max(stream.ahead, stream.following), stream.following + stream.window
        if stop - start < min(self._step, stream.window) or stop <= start:
            return NOTHING
        stream.ahead = stop
        return Advice(range(start, stop))

    def declined(self, ino: Inode, ahead: range) -> None:
        """Nothing was fetched of *ahead*: ask again at the next read."""
        stream = self._streams.get(ino)
        if stream is not None:
            stream.ahead = min(stream.ahead, ahead.start)
