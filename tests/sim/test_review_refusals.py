"""A store that refuses in a way that trying again does not cure (no such bucket): an outage like any other."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import trio

from spotwarp_fs.core.errors import StoreRefused
from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.store.memory import MemoryStore
from tests.support.sim_node import SimNode
from tests.support.virtual import NEW, OLD, content, create, evict_everything, in_virtual_time, published
from tests.support.world import ACTOR, FAST, new_store, start


class BucketlessStore(MemoryStore):
    """Says for a while that its bucket does not exist, as some stores do when a bill is late."""

    gone = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("put", "put_if_absent", "put_if_match", "get", "head", "delete"):
            return found

        async def refused(*arguments: Any, **options: Any) -> Any:
            if self.gone:
                await trio.lowlevel.checkpoint()
                raise StoreRefused("404 NoSuchBucket")
            return await found(*arguments, **options)

        return refused


@pytest.mark.promise("P-09")
@pytest.mark.parametrize("restart", [False, True])
def test_a_bucket_that_is_away_for_a_while_ends_no_mount(restart: bool) -> None:
    """1. The store says "no such bucket". 2. Heartbeat, early upload, cut, rebase and a read ahead all hear it. 3. The
    job goes on (also after a restart of the daemon). 4. The bucket is there again: all of it is published."""
    store, node = BucketlessStore(now=new_store()._now), SimNode("a")
    settings = replace(FAST, cold_after_s=0.0, rebase_manifests_max=1, read_wait_max_s=20.0)

    async def main() -> None:
        async with start(store, node, settings=settings) as session:
            await create(session, b"cold", OLD)
            await session.streamer.barrier()
            await create(session, b"f", OLD)
            await session.streamer.barrier()
            evict_everything(session)
            store.gone = True
            await create(session, b"g", NEW)
            cold = await session.filesystem.lookup(ROOT_INODE, b"cold")
            reader = await session.filesystem.open(cold.ino, os.O_RDONLY, ACTOR)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read_or_eio, session, reader)
                await trio.sleep(60)
            assert session.workspace.fenced is None
            if not restart:
                store.gone = False
                with trio.fail_after(60):
                    await session.streamer.barrier()
                assert await content(session, b"cold") == OLD
        if restart:
            async with start(store, node.restarted(), settings=settings) as session:
                assert await content(session, b"g") == NEW
                await create(session, b"h", NEW)
                await trio.sleep(60)
                store.gone = False
                with trio.fail_after(60):
                    await session.streamer.barrier()
            assert await published(store, b"h") == NEW
        assert await published(store, b"g") == NEW

    in_virtual_time(main)


async def _read_or_eio(session: Any, handle: Any) -> None:
    with pytest.raises(Exception, match="did not arrive"):
        await session.filesystem.read(handle, 0, 4096)
