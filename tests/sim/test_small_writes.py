"""Do small writes that go the short way leave what the long way would, and do they go it only when they may?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from spotwarp_fs.core.requests import Actor, AttributeChange, Handle
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.blocks import Blocks
from spotwarp_fs.engine.cut import Cut
from spotwarp_fs.engine.session import Session
from tests.support.virtual import MANUAL
from tests.support.world import ACTOR, Node, new_store, start

USER = Actor(uid=1000, gid=1000, pid=1)


@contextmanager
def long_way() -> Iterator[list[int]]:
    """Note the offset of every write that goes the long way."""
    offsets: list[int] = []
    write = Blocks.write

    def noted(self: Blocks, ino: Inode, offset: int, *rest: object, **options: object) -> None:
        offsets.append(offset)
        write(self, ino, offset, *rest, **options)  # type: ignore[arg-type]

    with patch.object(Blocks, "write", noted):
        yield offsets


async def opened(session: Session, actor: Actor = ACTOR) -> tuple[Handle, Inode]:
    handle, node = await session.filesystem.create(ROOT_INODE, b"log", 0o644, 2, actor)
    return handle, node.ino


def figures(session: Session) -> tuple[int, int, dict[Inode, set[int]]]:
    ws = session.workspace
    return ws.files, ws.logical_bytes, {ino: set(blocks) for ino, blocks in ws.dirty.items()}


async def test_an_append_goes_the_short_way_and_the_figures_stay_right() -> None:
    store, node = new_store(), Node()
    async with start(store, node, settings=MANUAL) as session:
        handle, ino = await opened(session)
        with long_way() as offsets:
            for number in range(3 * BLOCK_BYTES // 10_000):
                await session.filesystem.write(handle, number * 10_000, b"%05d" % number * 2_000)
        # Each block's first write finds no row of it; the write before may have reached into it.
        assert len(offsets) == 3
        told = figures(session)
        session.workspace.load_counters()
        assert figures(session) == told
        found = await session.filesystem.getattr(ino)
        assert found.record.size == 3 * BLOCK_BYTES // 10_000 * 10_000
        await session.streamer.barrier()
    async with start(store, Node(), settings=MANUAL) as session:
        handle = await session.filesystem.open(ino, 0, ACTOR)
        for number in (0, 104, 105, 209, 313):
            assert await session.filesystem.read(handle, number * 10_000, 10_000) == b"%05d" % number * 2_000


@pytest.mark.history("C7")
async def test_during_a_cut_the_first_write_to_a_frozen_block_goes_the_long_way() -> None:
    async with start(new_store(), Node(), settings=MANUAL) as session:
        handle, ino = await opened(session)
        await session.filesystem.write(handle, 0, b"before")
        ws = session.workspace
        cut = ws.cut = Cut.begin(ws, begun_s=0.0, barrier=False)
        with long_way() as offsets:
            await session.filesystem.write(handle, 0, b"after!")
            await session.filesystem.write(handle, 6, b"and on")
        assert offsets == [0]
        assert cut.read(ino, next(iter(cut.frozen[ino]))) == b"before"
        assert await session.filesystem.read(handle, 0, 99) == b"after!and on"
        ws.cut = None
        cut.end()


async def test_after_a_cut_the_next_write_is_noted_for_the_one_after_it() -> None:
    store = new_store()
    async with start(store, Node(), settings=MANUAL) as session:
        handle, ino = await opened(session)
        for text in (b"first", b"second"):
            await session.filesystem.write(handle, 0, text)
            await session.filesystem.write(handle, len(text), b"!")
            await session.streamer.barrier()
    async with start(store, Node(), settings=MANUAL) as session:
        handle = await session.filesystem.open(ino, 0, ACTOR)
        assert await session.filesystem.read(handle, 0, 99) == b"second!"


async def test_a_write_beyond_the_end_and_one_that_takes_privileges_away_go_the_long_way() -> None:
    async with start(new_store(), Node(), settings=MANUAL) as session:
        handle, ino = await opened(session, USER)
        await session.filesystem.write(handle, 0, b"1")
        with long_way() as offsets:
            await session.filesystem.write(handle, 100, b"2")
            assert await session.filesystem.read(handle, 0, 101) == b"1" + bytes(99) + b"2"
            await session.filesystem.setattr(ino, AttributeChange(mode=0o4755), None, USER)
            await session.filesystem.write(handle, 50, b"3")
            await session.filesystem.write(handle, 51, b"4")
        assert offsets == [100, 50]
        assert (await session.filesystem.getattr(ino)).record.mode & 0o7777 == 0o755
