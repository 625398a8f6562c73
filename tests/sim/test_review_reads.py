"""A read that is under way while its file is cut short."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, Inode
from spotwarp_fs.engine.workspace import Generations
from spotwarp_fs.local.memory import MemoryDataFiles
from tests.support.virtual import MANUAL, OLD, content, create, in_virtual_time, open_, store_with
from tests.support.world import ACTOR, Node, new_store, start

T = TypeVar("T")


class SlowDisk:
    """Worker threads whose reads of the disk take a second."""

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        await (trio.sleep(1) if work is Work.DISK else trio.lowlevel.checkpoint())
        return call(*arguments)


class ColdPages(MemoryDataFiles):
    """Nothing is in the page cache."""

    def pread_cached(self, ino: object, offset: int, length: int) -> bytes | None:
        return None


@pytest.mark.history("C2")
@pytest.mark.promise("P-08")
@pytest.mark.parametrize("size", [0, BLOCK_BYTES // 2])
def test_a_read_that_meets_a_truncation_gives_no_zeros(size: int) -> None:
    """1. Blocks of `f` came from the store; this session never wrote them. 2. A read of block 1 goes to a thread.

    3. `f` is cut short, and its data file with it. 4. The thread finds nothing there, and the file never held that.
    """

    async def main() -> None:
        store = await store_with(b"f", OLD + OLD)
        async with start(store, Node(data=ColdPages()), settings=MANUAL, workers=SlowDisk()) as session:
            assert await content(session, b"f") == OLD + OLD
            handle, ino = await open_(session, b"f")
            found: list[bytes] = []

            async def read() -> None:
                found.append(await session.filesystem.read(handle, BLOCK_BYTES, 4096))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.sleep(0.5)
                await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)
            assert found[0] in (b"", OLD[:4096])

    in_virtual_time(main)


def test_generations_never_come_back_and_are_bounded() -> None:
    """1. A run of weeks writes, truncates and removes millions of blocks. 2. What is remembered of each goes."""
    generations = Generations(entries_max=100)
    one, seen = (Inode(1), BlockIndex(0)), set[int]()
    for number in range(1000):
        before = generations.of(*one)
        generations.raise_for(Inode(number % 7 + 2), BlockIndex(number))
        if number % 3 == 0:
            generations.raise_for_all(Inode(number % 7 + 2), BlockIndex(5))
        if number % 10 == 0:
            generations.raise_for(*one)
            assert generations.of(*one) != before
        if generations.of(*one) != before:
            assert generations.of(*one) not in seen
            seen.add(generations.of(*one))
    assert sum(map(len, generations._of.values())) + len(generations._of_rest) <= 101 + 7

    async def main() -> None:
        async with start(new_store(), Node(), settings=MANUAL) as session:
            for _ in range(20):
                handle, _ino = await create(session, b"f", OLD)
                await session.filesystem.unlink(ROOT_INODE, b"f")
                await session.filesystem.release(handle)
            await session.streamer.barrier()
            assert not session.workspace.generations._of
            assert session.workspace.generations._entries == 0

    in_virtual_time(main)
