"""What a full cache does to those who read, and to everybody else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import trio

from spotwarp_fs.core.errors import Fenced
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex
from spotwarp_fs.engine.budget import FUTILE_SHARE
from spotwarp_fs.store.faults import FaultSchedule, FaultStore
from tests.support.virtual import MANUAL, NEW, OLD, content, create, in_virtual_time, open_, published, store_with
from tests.support.world import Node, new_store, start


@pytest.mark.promise("P-06")
@pytest.mark.promise("P-10")
def test_a_fenced_mount_whose_cache_is_full_of_unpublished_bytes_still_reads() -> None:
    """1. The cache is full of what no manifest has. 2. Another node takes over: nothing of it may be evicted any more.
    3. A read of what lies in the store is served from memory; read-only means that writes are refused."""

    async def main() -> None:
        store = new_store()
        async with start(store, Node()) as session:
            await create(session, b"remote", OLD)
            await session.streamer.barrier()
        small = replace(MANUAL, cache_bytes_max=12 * BLOCK_BYTES)
        async with start(store, Node(), settings=small) as session:
            for number in range(6):
                await create(session, b"%d" % number, NEW)
            session.workspace.settings = replace(small, cache_bytes_max=6 * BLOCK_BYTES)
            await session.fence(Fenced("session x took the workspace over"))
            assert session.budget.evict(BLOCK_BYTES) == 0
            with trio.fail_after(30):
                assert await content(session, b"remote") == OLD

    in_virtual_time(main)


@pytest.mark.promise("P-09")
def test_a_look_for_room_that_found_nothing_is_not_repeated_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. In an outage the cache is full of dirty blocks, a hundred thousand of them. 2. Ten writers wait for room, and
    each looks through all of these five times a second: local reads wait for minutes."""

    async def main() -> None:
        async with start(new_store(), Node(), settings=replace(MANUAL, cache_bytes_max=8 * BLOCK_BYTES)) as session:
            for number in range(6):
                await create(session, b"%d" % number, NEW)
            now_s, looks, budget = [100.0], [0], session.budget

            def slow_look(ino: object) -> list[list[object]]:
                looks[0] += 1
                now_s[0] += 0.5 / 6
                return []

            monkeypatch.setattr(budget, "_evictable", slow_look)
            monkeypatch.setattr(trio, "current_time", lambda: now_s[0])
            for _ in range(100):
                assert budget.evict(BLOCK_BYTES) == 0
                now_s[0] += 0.01
            assert looks[0] == 6
            now_s[0] += 0.5 * FUTILE_SHARE
            budget.evict(BLOCK_BYTES)
            assert looks[0] == 12
            monkeypatch.undo()

    in_virtual_time(main)


class SlowGets(FaultStore):
    """Each block takes a while, and not the same while."""

    async def get(self, *arguments: Any, **options: Any) -> Any:
        await trio.sleep(self._rng.uniform(0.2, 0.6))
        return await super().get(*arguments, **options)


@pytest.mark.promise("P-10")
@pytest.mark.parametrize("local", [False, True], ids=["both absent", "one absent"])
@pytest.mark.parametrize("doing", ["read", "write"])
def test_a_request_that_needs_two_blocks_gets_both_in_a_full_cache(doing: str, local: bool) -> None:
    """1. The cache is full. 2. A request touches two blocks. 3. The first arrives, and is evicted before the second
    does; the second is evicted while the first is fetched again; and so on, for ever."""

    async def main() -> None:
        inner = await store_with(b"f", OLD + OLD)
        store = SlowGets(inner, random.Random(3), FaultSchedule())
        tiny = replace(MANUAL, cache_bytes_max=4 * BLOCK_BYTES, hydrate_gap_bytes=0, hydrate_run_blocks=1)
        async with start(store, Node(), settings=tiny) as session:
            handle, ino = await open_(session, b"f")
            if local:
                await session.hydrator.demand(ino, [BlockIndex(0)])
            with trio.fail_after(20):
                if doing == "read":
                    assert (
                        await session.filesystem.read(handle, BLOCK_BYTES - 50, 100)
                        == (OLD + OLD)[BLOCK_BYTES - 50 :][:100]
                    )
                else:
                    await session.filesystem.write(handle, BLOCK_BYTES - 50, b"x" * 100)
            if doing == "write":
                await session.streamer.barrier()
                await session.filesystem.release(handle)
        if doing == "write":
            assert (await published(inner, b"f"))[BLOCK_BYTES - 52 : BLOCK_BYTES + 52] == OLD[:2] + b"x" * 100 + OLD[
                2:4
            ]

    in_virtual_time(main)
