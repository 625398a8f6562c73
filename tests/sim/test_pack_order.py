"""Do the blocks of one file lie together and in order, so that few requests bring it back?"""

from __future__ import annotations

import os
import random
from itertools import pairwise

import trio

from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, ino_range
from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.local.workers import InlineWorkers
from tests.sim.test_skeleton import in_world, write_file
from tests.support.world import Node, new_store, start


class UnevenWorkers(InlineWorkers):
    """Encoding takes now longer, now less: later blocks are done first."""

    def __init__(self) -> None:
        self._rng = random.Random(3)

    async def run(self, work, call, *arguments):  # type: ignore[no-untyped-def]
        if work is Work.CPU:
            await trio.sleep(self._rng.random() / 100)
        return await super().run(work, call, *arguments)


def test_frames_keep_the_order_of_the_file() -> None:
    async def main() -> None:
        async with start(new_store(), Node()) as session:
            session.workspace.workers = UnevenWorkers()
            await write_file(session, b"weights.bin", os.urandom(24 << 20))
            await session.streamer.barrier()
            ino = (await session.filesystem.lookup(ROOT_INODE, b"weights.bin")).ino
            with session.workspace.kv.read() as view:
                rows = view.scan(*ino_range(BLOCK_TABLE, ino))
                frames = [BlockState.decode(value).frame for _, value in rows]
            places = [(frame.pack, frame.offset) for frame in frames if frame is not None]
            follows = sum(before[0] == after[0] and before[1] < after[1] for before, after in pairwise(places))
            assert len(places) == 24
            assert follows >= len(places) - 1 - len({pack for pack, _ in places})

    in_world(main)
