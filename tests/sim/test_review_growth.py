"""What must not grow while the store is away."""

from __future__ import annotations

from pathlib import Path

import trio

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.types import BLOCK_BYTES, ObjectKey
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.store.memory import MemoryStore
from tests.support.virtual import MANUAL, NEW, OLD, create, in_virtual_time, published
from tests.support.world import Node, new_store, start

FILES = 400
ROUNDS = 5


class DeafStore(MemoryStore):
    """Takes no packs for a while."""

    deaf = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if self.deaf and "/packs/" in key:
            raise Unavailable("no answer")
        return await super().put_if_absent(key, body, lane=lane)


def test_the_map_does_not_grow_with_every_request_while_a_cut_waits_for_the_store(tmp_path: Path) -> None:
    """LMDB reuses no page that an open snapshot may still see.

    1. The store goes away. 2. A cut begins and waits for it. 3. The job goes on, a hundred requests a second. 4. Each
    commit takes ten pages that are not given back before the cut ends: 60 kB per request, the disk full in an hour.
    """
    store = DeafStore(now=new_store()._now)
    kv = LmdbKV(tmp_path / "map")

    async def main() -> None:
        async with start(store, Node(kv=kv), settings=MANUAL) as session:  # type: ignore[arg-type]
            handles = [(await create(session, b"f%d" % i, b"x" * 100))[0] for i in range(FILES)]
            await session.streamer.barrier()
            store.deaf = True
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.streamer.barrier)
                await session.filesystem.write(handles[0], 0, OLD[:BLOCK_BYTES])
                await trio.sleep(5)
                assert session.workspace.cut is not None
                before = kv.used_bytes()
                for turn in range(ROUNDS):
                    for handle in handles:
                        await session.filesystem.write(handle, 0, bytes([turn]) * 100)
                assert kv.used_bytes() - before < FILES * ROUNDS * 1000
                await session.filesystem.write(handles[0], 0, NEW)
                store.deaf = False
            await session.streamer.barrier()
        assert await published(store, b"f0") == NEW

    in_virtual_time(main)
    kv.close()
