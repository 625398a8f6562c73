"""Is what was fsynced there after a power loss, on the real engine? Histories one by one, then seeded worlds.

`SPOTWARP_SEED=17 pytest tests/sim/test_power_loss.py -k one_seed` runs a single world.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
import trio

from spotwarp_fs.core.errors import Fenced, Refused, Unavailable
from spotwarp_fs.core.journal import Changes
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Work
from spotwarp_fs.core.records import BLOCK_TABLE, ino_range
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, ObjectKey
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.local.memory import MemoryJournal, MemoryKV
from spotwarp_fs.local.workers import InlineWorkers
from spotwarp_fs.store.faults import FaultSchedule, FaultStore
from spotwarp_fs.store.memory import MemoryStore
from tests.support.power_plants import PLANTS, planted
from tests.support.power_world import OUTAGE, PowerJournal, PowerNode, contents, run_power_world
from tests.support.virtual import (
    EAGER,
    MANUAL,
    NEW,
    OLD,
    content,
    create,
    evict_everything,
    in_virtual_time,
    open_,
    published,
)
from tests.support.world import ACTOR, new_store, start

T = TypeVar("T")
History = Callable[[], Awaitable[None]]
pytestmark = [pytest.mark.promise("P-02"), pytest.mark.history("C4")]

CHUNK = 25
FAST_SEEDS = 200


@asynccontextmanager
async def until_killed(
    store: ObjectStore, node: PowerNode, settings: EngineSettings, workers: InlineWorkers | None = None
) -> AsyncIterator[Session]:
    with trio.CancelScope() as scope:
        entropy = random.Random(len(node.journal._stream) + len(list(node.data.inodes())))
        async with start(store, node, settings=settings, workers=workers, rng=entropy) as session:
            yield session
            scope.cancel()
            await trio.lowlevel.checkpoint()


async def after_power_loss(store: MemoryStore, node: PowerNode, name: bytes = b"f") -> set[bytes | None]:
    """Give the contents that *name* may have, by which pages were lost; None when it is not there."""
    found: set[bytes | None] = set()
    for seed in range(4):
        journal = PowerJournal(bytes(node.journal._stream))
        twin = PowerNode(MemoryKV(), node.data.copied().power_loss(random.Random(seed)), journal)
        found_store = new_store()
        found_store._objects.update(store._objects)
        async with until_killed(found_store, twin, MANUAL) as session:
            names = await contents(session)
            found.add(names[name][1] if name in names else None)
    return found


async def fsync(session: Session, name: bytes) -> None:
    handle, _ = await open_(session, name)
    await session.filesystem.fsync(handle, datasync=False)
    await session.filesystem.release(handle)


async def truncate(session: Session, name: bytes, size: int) -> None:
    ino = (await session.filesystem.lookup(ROOT_INODE, name)).ino
    await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)


async def a_truncation_told_once() -> None:
    """F is truncated, written and fsynced; then another file is fsynced."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, MANUAL) as session:
        handle, _ = await create(session, b"f", OLD)
        await truncate(session, b"f", 0)
        await session.filesystem.write(handle, 0, NEW)
        await fsync(session, b"f")
        await create(session, b"g", OLD)
        await fsync(session, b"g")
    assert await after_power_loss(store, node) == {NEW}


async def b_a_restart_in_between() -> None:
    """F is truncated, written and fsynced; the daemon is killed; then another file is fsynced."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, MANUAL) as session:
        handle, _ = await create(session, b"f", OLD)
        await truncate(session, b"f", 0)
        await session.filesystem.write(handle, 0, NEW)
        await fsync(session, b"f")
    node = node.killed()
    async with until_killed(store, node, MANUAL) as session:
        await create(session, b"g", OLD)
        await fsync(session, b"g")
    assert await after_power_loss(store, node) == {NEW}


class StuckJournal(InlineWorkers):
    """The disk writes what is appended, and does not say so."""

    stuck = False

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        if self.stuck and getattr(call, "__func__", None) is MemoryJournal.append:
            call(*arguments)
            await trio.sleep_forever()
        return await super().run(work, call, *arguments)


async def c_truncated_while_the_journal_is_written() -> None:
    """F is truncated after its fsync has looked at the map, and before the fsync returns."""
    store, node, workers = new_store(), PowerNode(), StuckJournal()
    async with until_killed(store, node, MANUAL, workers) as session:
        await create(session, b"f", OLD)
        workers.stuck = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fsync, session, b"f")
            await trio.sleep(0.1)
            await truncate(session, b"f", 0)
            nursery.cancel_scope.cancel()
    assert await after_power_loss(store, node) <= {OLD, b""}


async def c_evicted_after_a_restart() -> None:
    """F is fsynced; the daemon is killed; the next one uploads F and evicts it."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, MANUAL) as session:
        await create(session, b"f", OLD)
        await fsync(session, b"f")
    node = node.killed()
    async with until_killed(store, node, EAGER) as session:
        await trio.sleep(2)
        evict_everything(session)
    assert await after_power_loss(store, node) == {OLD}


class LastAnswerLost(FaultStore):
    """The next manifest arrives, and nothing is heard of the store from then on."""

    armed = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        info = await super().put_if_absent(key, body, lane=lane)
        if self.armed and "manifest" in key:
            self.partitioned = True
            raise Unavailable("answer lost")
        return info


async def d_a_truncation_before_an_open_cut() -> None:
    """F, rewritten, is in a cut whose answer is lost; it is written again, and another file is fsynced."""
    inner, node = new_store(), PowerNode()
    store = LastAnswerLost(inner, random.Random(1))
    async with until_killed(store, node, MANUAL) as session:
        handle, _ = await create(session, b"f", OLD)
        await create(session, b"g", OLD)
        await session.streamer.barrier()
        await truncate(session, b"f", 0)
        await session.filesystem.write(handle, 0, NEW)
        async with trio.open_nursery() as nursery:
            store.armed = True
            nursery.start_soon(session.streamer.barrier)
            await _until(lambda: store.partitioned)
            await session.filesystem.write(handle, 0, OLD)
            await fsync(session, b"g")
            nursery.cancel_scope.cancel()
    assert await after_power_loss(inner, node) == {NEW}


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await trio.sleep(0.0005)


async def e_truncated() -> None:
    """F is fsynced, then truncated, and nobody waits for anything."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, MANUAL) as session:
        await create(session, b"f", OLD)
        await fsync(session, b"f")
        await truncate(session, b"f", 0)
    assert await after_power_loss(store, node) == {OLD}


async def e_truncated_under_a_cut() -> None:
    """F is fsynced and frozen, then opened with O_TRUNC in an outage."""
    inner, node = new_store(), PowerNode()
    store = FaultStore(inner, random.Random(1), FaultSchedule())
    async with until_killed(store, node, MANUAL) as session:
        await create(session, b"f", OLD)
        await fsync(session, b"f")
        store.schedule = OUTAGE
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.streamer.barrier)
            await _until(lambda: session.workspace.cut is not None)
            await open_(session, b"f", os.O_RDWR | os.O_TRUNC)
            nursery.cancel_scope.cancel()
    assert await after_power_loss(inner, node) == {OLD}


async def e_removed() -> None:
    """F is fsynced, then another file takes its name."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, MANUAL) as session:
        handle, _ = await create(session, b"f", OLD)
        await fsync(session, b"f")
        await session.filesystem.release(handle)
        await create(session, b"f.new", NEW)
        await session.filesystem.rename(ROOT_INODE, b"f.new", ROOT_INODE, b"f", 0)
    assert await after_power_loss(store, node) == {OLD}


async def e_evicted() -> None:
    """F is fsynced, uploaded and evicted, all before the next manifest."""
    store, node = new_store(), PowerNode()
    async with until_killed(store, node, EAGER) as session:
        await create(session, b"f", OLD)
        await fsync(session, b"f")
        await trio.sleep(2)
        evict_everything(session)
        assert session.budget.evicted_blocks == 0
        await trio.sleep(1)
        evict_everything(session)
        assert session.budget.evicted_blocks == 1, "a block that was fsynced leaves the cache before it is published"
        await truncate(session, b"f", BLOCK_BYTES // 2)
        await truncate(session, b"f", BLOCK_BYTES)
    assert await after_power_loss(store, node) == {OLD}


HISTORIES: dict[str, list[History]] = {
    "truncations told again": [a_truncation_told_once],
    "start at the head": [b_a_restart_in_between],
    "what is coming does not count": [c_truncated_while_the_journal_is_written],
    "a restart knows no claims": [c_evicted_after_a_restart],
    "no parts": [d_a_truncation_before_an_open_cut],
    "destroyed at once": [e_truncated, e_truncated_under_a_cut, e_removed],
    "evicted at once": [e_evicted],
}
ALL = [(plant, history) for plant, histories in HISTORIES.items() for history in histories]


@pytest.mark.history("L4")
@pytest.mark.parametrize("history", [history for _, history in ALL], ids=lambda history: history.__name__)
def test_L4_nothing_that_was_fsynced_goes_before_the_journal_says_so(history: History) -> None:
    in_virtual_time(history)


@pytest.mark.parametrize(("plant", "history"), ALL, ids=lambda value: getattr(value, "__name__", ""))
def test_a_careless_journal_is_found_out(plant: str, history: History) -> None:
    with planted(plant), pytest.raises((AssertionError, BaseExceptionGroup)):
        in_virtual_time(history)


def test_every_plant_is_looked_for() -> None:
    assert set(PLANTS) == set(HISTORIES)


@pytest.mark.history("L4")
def test_L4_zeros_that_a_truncation_leaves_go_without_what_lay_behind_them() -> None:
    data = bytes(BLOCK_BYTES // 2) + NEW[:100]

    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with until_killed(store, node, replace(EAGER, journal_linger_s=1e9)) as session:
            handle, _ = await create(session, b"f", data)
            await session.filesystem.release(handle)
            await fsync(session, b"f")
            await truncate(session, b"f", BLOCK_BYTES // 2)
            await trio.sleep(2)
            assert not session.workspace.dirty_blocks, "what is left are zeros, and need no frame"
        assert await after_power_loss(store, node) <= {data, data[: BLOCK_BYTES // 2]}, "before or after, no mixture"

    in_virtual_time(main)


@pytest.mark.history("C4")
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_C4_a_block_that_became_zeros_is_counted_as_the_journal_has_it(killed: bool) -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with until_killed(store, node, EAGER) as session:
            handle, ino = await create(session, b"f", OLD)
            await session.filesystem.write(handle, 0, bytes(len(OLD)))
            await fsync(session, b"f")
            await trio.sleep(2)
            assert not session.workspace.dirty_blocks
            if not killed:
                await session.filesystem.setattr(ino, AttributeChange(mode=0o600), None, ACTOR)
                await create(session, b"g", OLD)
                await fsync(session, b"g")
        if killed:
            node = node.killed()
            async with until_killed(store, node, EAGER) as session:
                ino = (await session.filesystem.lookup(ROOT_INODE, b"f")).ino
                await session.filesystem.setattr(ino, AttributeChange(mode=0o600), None, ACTOR)
                await create(session, b"g", OLD)
                await fsync(session, b"g")
        journal = PowerJournal(bytes(node.journal._stream))
        twin = PowerNode(MemoryKV(), node.data.copied().power_loss(random.Random(1)), journal)
        async with until_killed(store, twin, MANUAL) as session:
            found = await session.filesystem.lookup(ROOT_INODE, b"f")
            with session.workspace.kv.read() as view:
                held = sum(1 for _, value in view.scan(*ino_range(BLOCK_TABLE, found.ino)) if value)
            assert found.record.allocated == held * BLOCK_BYTES
            await session.streamer.barrier()
            assert (await contents(session))[b"f"][1] == bytes(len(OLD))

    in_virtual_time(main)


FAILED_ONCE = {
    2018: "a block of zeros was journalled as here, and its inode as without it: no cut could be sealed any more",
    2209: "giving zeros back also took what a truncation had left behind them, and the journal vouched for",
}


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_seed_that_failed_once(seed: int) -> None:
    run_power_world(seed)


@pytest.mark.parametrize("chunk", range(0, FAST_SEEDS, CHUNK))
def test_worlds_that_lose_power(chunk: int) -> None:
    for seed in range(chunk, chunk + CHUNK):
        run_power_world(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(1_000, 3_000, 100))
def test_more_worlds_that_lose_power(chunk: int) -> None:
    for seed in range(chunk, chunk + 100):
        run_power_world(seed)


@pytest.mark.skipif("SPOTWARP_SEED" not in os.environ, reason="SPOTWARP_SEED names the world to run")
def test_one_seed() -> None:
    run_power_world(int(os.environ["SPOTWARP_SEED"]))


@pytest.mark.history("H10")
def test_H10_a_failed_fsync_fails_until_everything_in_doubt_is_written_again() -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with start(store, node, settings=MANUAL) as session:
            handle, ino = await create(session, b"f", OLD + OLD[:1000])
            node.data.sync_errors.add(ino)
            for _ in range(2):
                with pytest.raises(Refused) as failed:
                    await session.filesystem.fsync(handle, datasync=False)
                assert failed.value.errno == 5
            await session.filesystem.write(handle, 0, NEW)
            await session.filesystem.write(handle, BLOCK_BYTES, NEW[:999])
            with pytest.raises(Refused):
                await session.filesystem.flush(handle)
            with trio.move_on_after(5) as waiting:
                await session.streamer.barrier()
            assert waiting.cancelled_caught, "a block that may be damaged was published from the disk"
            await session.filesystem.write(handle, BLOCK_BYTES + 999, NEW[:1])
            await session.filesystem.flush(handle)
            await session.filesystem.fsync(handle, datasync=False)
            await session.streamer.barrier()
        assert await published(store, b"f") == NEW + NEW[:999] + NEW[:1]

    in_virtual_time(main)


@pytest.mark.history("H10")
def test_H10_a_failed_fsync_brings_what_the_store_has_back_from_there() -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with start(store, node, settings=MANUAL) as session:
            handle, ino = await create(session, b"f", OLD + OLD)
            await session.streamer.barrier()
            await session.filesystem.write(handle, BLOCK_BYTES, NEW)
            node.data.sync_errors.add(ino)
            with pytest.raises(Refused):
                await session.filesystem.fsync(handle, datasync=False)
            node.data.pwrite(ino, 0, NEW)  # the page that was lost
            assert await content(session, b"f") == OLD + NEW
            await truncate(session, b"f", BLOCK_BYTES)
            await session.filesystem.fsync(handle, datasync=False)

    in_virtual_time(main)


def test_a_journal_that_failed_once_is_written_anew_by_the_next_fsync() -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with until_killed(store, node, MANUAL) as session:
            await create(session, b"f", OLD)
            await create(session, b"g", OLD)
            await fsync(session, b"f")
            node.journal.sync_error = True
            with pytest.raises(Refused):
                await fsync(session, b"g")
            await fsync(session, b"g")
        assert await after_power_loss(store, node, b"f") == {OLD}
        assert await after_power_loss(store, node, b"g") == {OLD}

    in_virtual_time(main)


def test_a_long_outage_does_not_make_a_long_journal() -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with until_killed(store, node, replace(MANUAL, journal_bytes_max=2_000)) as session:
            handle, _ = await create(session, b"f")
            for number in range(100):
                await session.filesystem.write(handle, 0, OLD[: 100 + number])
                await session.filesystem.fsync(handle, datasync=False)
            assert node.journal.size_bytes < 4_000
            assert sum(isinstance(record, Changes) for record in node.journal.records()) < 20
        assert await after_power_loss(store, node) == {OLD[:199]}

    in_virtual_time(main)


@pytest.mark.history("C13")
@pytest.mark.history("L10")
def test_C13_a_remote_fsync_waits_for_the_cut_and_not_for_the_close() -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with start(store, node, settings=replace(MANUAL, fsync_remote=True)) as session:
            handle, ino = await create(session, b"model.distcp", OLD)
            with trio.fail_after(30):
                await session.filesystem.fsync(handle, datasync=False)
            head = session.streamer.head.manifest
            assert [item.ino for item in head.in_flight] == [ino], "half a file does not count as written"
            await session.filesystem.write(handle, 0, NEW)
            drained = await session.drain(trio.current_time() + 30)
            assert drained.saved
            await session.filesystem.write(handle, 0, OLD)
            await session.filesystem.fsync(handle, datasync=False)
            session.workspace.stopping = True
            with pytest.raises(Refused) as ended:
                await session.filesystem.fsync(handle, datasync=False)
            assert ended.value.errno == 5

    in_virtual_time(main)


@pytest.mark.history("H2")
@pytest.mark.parametrize("remote", [False, True])
def test_H2_an_fsync_after_the_fence_promises_only_what_was_published(remote: bool) -> None:
    async def main() -> None:
        store, node = new_store(), PowerNode()
        async with start(store, node, settings=replace(MANUAL, fsync_remote=remote)) as session:
            old, _ = await create(session, b"old", OLD)
            await session.streamer.barrier()
            new, _ = await create(session, b"new", OLD)
            root = await session.filesystem.opendir(ROOT_INODE, ACTOR)
            await session.fence(Fenced("somebody else"))
            await session.filesystem.fsync(old, datasync=False)
            for refused in (session.filesystem.fsync(new, datasync=False), session.filesystem.fsyncdir(root)):
                with pytest.raises(Refused) as error:
                    await refused
                assert error.value.errno == 30

    in_virtual_time(main)


@pytest.mark.parametrize("how", ["rename", "link"])
def test_the_new_name_of_a_remotely_fsynced_file_is_published_when_the_call_returns(how: str) -> None:
    """1. A table is written under a temporary name and fsynced. 2. It is renamed, and nobody syncs the directory.

    3. The node is lost at once. Naive: the bytes are on the other node, under a name that nobody reads.
    """

    async def main() -> None:
        store = new_store()
        async with until_killed(store, PowerNode(), replace(MANUAL, fsync_remote=True)) as session:
            handle, ino = await create(session, b".table.tmp", OLD)
            await session.filesystem.fsync(handle, datasync=False)
            if how == "rename":
                await session.filesystem.rename(ROOT_INODE, b".table.tmp", ROOT_INODE, b"table.csv", 0)
            else:
                await session.filesystem.link(ino, ROOT_INODE, b"table.csv")
        assert await published(store, b"table.csv") == OLD

    in_virtual_time(main)


@pytest.mark.promise("P-09")
def test_a_rename_after_a_remote_fsync_ends_in_an_outage_and_one_of_other_files_waits_for_nothing() -> None:
    async def main() -> None:
        store = FaultStore(new_store(), random.Random(1))
        settings = replace(MANUAL, fsync_remote=True)
        async with start(store, PowerNode(), settings=settings, rng=random.Random(2)) as session:
            for name in (b"synced", b"written again", b"never synced"):
                handle, _ = await create(session, name, OLD)
                if name != b"never synced":
                    await session.filesystem.fsync(handle, datasync=False)
                if name == b"written again":
                    await session.filesystem.write(handle, 0, NEW)
            store.partitioned = True
            for name, waits_s in ((b"never synced", 0.0), (b"written again", 0.0), (b"synced", 10.0)):
                began = trio.current_time()
                await session.filesystem.rename(ROOT_INODE, name, ROOT_INODE, b"new " + name, 0)
                assert trio.current_time() - began == pytest.approx(waits_s, abs=0.1), name
                assert await content(session, b"new " + name) == (NEW if name == b"written again" else OLD)
            store.partitioned = False

    in_virtual_time(main)
