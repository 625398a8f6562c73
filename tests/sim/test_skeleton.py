"""Does a byte that was written come back on another node?"""

from __future__ import annotations

import os

import trio
from trio.testing import MockClock

from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.engine.session import Session
from tests.support.world import ACTOR, Node, new_store, start


async def write_file(session: Session, name: bytes, data: bytes) -> None:
    handle, _ = await session.filesystem.create(ROOT_INODE, name, 0o644, os.O_WRONLY, ACTOR)
    for at in range(0, len(data), 1 << 17):
        await session.filesystem.write(handle, at, data[at : at + (1 << 17)])
    await session.filesystem.release(handle)


async def read_file(session: Session, name: bytes) -> bytes:
    node = await session.filesystem.lookup(ROOT_INODE, name)
    handle = await session.filesystem.open(node.ino, os.O_RDONLY, ACTOR)
    parts = [await session.filesystem.read(handle, at, 1 << 17) for at in range(0, node.record.size, 1 << 17)]
    await session.filesystem.release(handle)
    return b"".join(parts)


def in_world(main: object) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_a_published_file_is_read_on_an_empty_node() -> None:
    content = bytes(range(256)) * 20_000

    async def main() -> None:
        store = new_store()
        async with start(store, Node()) as session:
            await write_file(session, b"weights.bin", content)
            await session.streamer.barrier()
        async with start(store, Node()) as session:
            assert await read_file(session, b"weights.bin") == content
            assert session.packs.bytes_fetched > 0

    in_world(main)


def test_an_acknowledged_write_survives_a_kill_of_the_daemon() -> None:
    content = os.urandom(3_000_000)

    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node) as session:
            await write_file(session, b"log", content)
        async with start(store, node) as session:
            assert await read_file(session, b"log") == content
            await session.streamer.barrier()
        async with start(store, Node()) as session:
            assert await read_file(session, b"log") == content

    in_world(main)
