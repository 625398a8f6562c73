"""Is a read served when the cache is full of what cannot be evicted (H18)?"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core.errors import Refused, Unavailable
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.requests import Handle
from spotwarp_fs.core.types import ROOT_INODE, ObjectKey
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.memory import MemoryStore
from tests.sim.test_skeleton import in_world, read_file, write_file
from tests.support.world import ACTOR, FAST, Node, start

MiB = 1 << 20


class NoUploads(MemoryStore):
    """Reads go on, packs are not taken."""

    closed = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if self.closed:
            await trio.lowlevel.checkpoint()
            raise Unavailable("uploads fail")
        return await super().put_if_absent(key, body, lane=lane)


async def fill(session: Session, handle: Handle) -> None:
    for at in range(0, 64 * MiB, MiB):
        await session.filesystem.write(handle, at, os.urandom(MiB))


@pytest.mark.history("H18")
@pytest.mark.promise("P-10")
def test_H18_a_read_is_served_from_memory_when_nothing_can_be_evicted() -> None:
    content = os.urandom(3 * MiB + 123)
    settings = replace(FAST, cache_bytes_max=24 * MiB, write_wait_max_s=2.0)

    async def main() -> None:
        store = NoUploads()
        async with start(store, Node(), settings=settings) as session:
            await write_file(session, b"old", content)
            await session.streamer.barrier()
        async with start(store, Node(), settings=settings) as session:
            store.closed = True
            handle, _ = await session.filesystem.create(ROOT_INODE, b"big", 0o644, os.O_WRONLY, ACTOR)
            with pytest.raises(Refused, match="cache is full"):
                await fill(session, handle)
            before = session.budget.used_bytes
            assert await read_file(session, b"old") == content
            assert session.budget.used_bytes <= before + MiB

    in_world(main)
