"""Does a fresh node fetch first what the job will read first, in few requests, and without being in the way?"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace

import blake3
import pytest
import trio

from spotwarp_fs.core.paths import entry, walk
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, ino_range
from spotwarp_fs.core.status import Status
from spotwarp_fs.core.trace import TRACE_KEY, decode
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.report import Reporter
from spotwarp_fs.engine.session import Session
from tests.support.slow_store import SlowStore
from tests.support.virtual import in_virtual_time
from tests.support.world import ACTOR, FAST, Node, new_store, start

COLD = FAST
"""Nothing is fetched unasked."""
WARM = replace(FAST, warm_bytes_max=1 << 40)
KiB, MiB = 1 << 10, 1 << 20


def noise(name: bytes, size: int) -> bytes:
    return blake3.blake3(name).digest(length=size)


async def directory(session: Session, path: bytes) -> Inode:
    """Make the directories of *path* as far as they are missing."""
    ino = ROOT_INODE
    for name in filter(None, path.split(b"/")):
        with session.workspace.kv.read() as view:
            found = entry(view, ino, name)
        ino = found.ino if found else (await session.filesystem.mkdir(ino, name, 0o755, ACTOR)).ino
    return ino


async def write(session: Session, path: bytes, size: int) -> None:
    above, _, name = path.rpartition(b"/")
    parent, fs = await directory(session, above), session.filesystem
    handle, _ = await fs.create(parent, name, 0o644, os.O_WRONLY, ACTOR)
    data = noise(path, size)
    for at in range(0, size, BLOCK_BYTES):
        await fs.write(handle, at, data[at : at + BLOCK_BYTES])
    await fs.flush(handle)
    await fs.release(handle)


async def checkpoint(session: Session, step: int, size: int) -> None:
    """A complete one: the trainer's marker is written last."""
    await write(session, b"run/checkpoint-%d/model.safetensors" % step, size)
    await write(session, b"run/checkpoint-%d/trainer_state.json" % step, 100)


def inode_of(view: KVRead, path: bytes) -> Inode:
    return walk(view, path).ino


async def read(session: Session, path: bytes, pieces: Iterable[tuple[int, int]] | None = None) -> None:
    """Read a file front to back, or *pieces* of it, and compare."""
    fs = session.filesystem
    with session.workspace.kv.read() as view:
        node = walk(view, path)
    handle = await fs.open(node.ino, os.O_RDONLY, ACTOR)
    expected = noise(path, node.record.size)
    for at, size in pieces or [(at, 128 * KiB) for at in range(0, node.record.size, 128 * KiB)]:
        assert await fs.read(handle, at, size) == expected[at : at + size], (path, at)
    await fs.release(handle)


def local_blocks(session: Session, path: bytes) -> int:
    with session.workspace.kv.read() as view:
        rows = view.scan(*ino_range(BLOCK_TABLE, inode_of(view, path)))
        return sum(BlockState.decode(value).local for _, value in rows if value)


async def warmed(session: Session) -> None:
    """Return when the background has nothing more to do."""
    while session.hydrator.bytes_coming or session.warmer.part:
        await trio.sleep(0.05)


def fetched_twice(store: SlowStore) -> list[tuple[str, int]]:
    """Bytes of packs that more than one request asked for (gaps that are fetched along are small)."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for get in store.data_gets:
        seen.setdefault(get.key, []).append((get.start, get.start + get.length))
    return [
        (key, start)
        for key, ranges in seen.items()
        for (_, stop), (start, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False)
        if start < stop
    ]


async def environment(session: Session, count: int, size: int = 8 * KiB) -> list[bytes]:
    paths = [b"env/lib%d/module%d.py" % (at % 20, at) for at in range(count)]
    for path in paths:
        await write(session, path, size)
    return paths


def test_a_thousand_small_files_come_in_a_handful_of_requests() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            paths = await environment(session, 1000)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=WARM) as session:
            await warmed(session)
            assert len(store.data_gets) <= 12
            asked = len(store.data_gets)
            for path in paths:
                await read(session, path)
            assert len(store.data_gets) == asked
            assert not fetched_twice(store)

    in_virtual_time(main)


def test_status_says_how_far_the_background_is_and_who_waits() -> None:
    async def main() -> None:
        inner = new_store()
        async with start(inner, Node(), settings=COLD) as session:
            await environment(session, 10)
            await checkpoint(session, 100, 20 * MiB)
            await session.streamer.barrier()
        slow = SlowStore(inner)
        async with start(slow, Node(), settings=WARM) as session:
            reporter = Reporter(session, workspace_name="w", store_url="memory:")
            seen: list[Status] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, session, b"run/checkpoint-100/model.safetensors")
                while session.hydrator.bytes_coming or session.warmer.part:
                    seen.append(await reporter.status())
                    await trio.sleep(0.002)
            last = (await reporter.status()).hydration
            assert last is not None
            assert last.part == ""
            assert last.fetched_bytes == last.wanted_bytes >= 10 * 8 * KiB
            assert last.fetched_files == last.wanted_files >= 10
            assert any(status.readers_waiting == 1 for status in seen), "while the checkpoint is read"
            known = [each.hydration for each in seen if each.hydration]
            assert any(each.fetched_bytes < each.wanted_bytes for each in known), "on its way"
            assert all(each.fetched_bytes <= each.wanted_bytes for each in known)
        async with start(inner, Node(), settings=COLD) as session:
            status = await Reporter(session, workspace_name="w", store_url="memory:").status()
            assert status.hydration is not None, "a takeover that may fetch nothing ahead says so"
            assert status.hydration.wanted_bytes == 0

    in_virtual_time(main)


@pytest.mark.promise("P-07")
def test_mounting_waits_for_no_data_and_a_read_comes_before_the_background() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=20e6)
        async with start(store, Node(), settings=COLD) as session:
            await environment(session, 50)
            await checkpoint(session, 100, 96 * MiB)
            await session.streamer.barrier()
            await write(session, b"data.raw", 3 * MiB)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=WARM) as session:
            assert not store.data_gets
            while session.hydrator.bytes_coming < 40 * MiB:
                await trio.sleep(0.01)
            begun, background = trio.current_time(), len(store.data_gets)
            await read(session, b"data.raw", [(0, 4 * KiB)])
            first = store.data_gets[background]
            assert pack_owners(session, [b"data.raw"]).keys() == {first.key.rpartition("/")[2]}
            assert first.begun_s == begun

    in_virtual_time(main)


def test_no_background_begins_while_demands_wait_for_a_turn() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=20e6)
        settings = replace(WARM, hydrate_parallel_max=4, readahead_blocks_max=1)
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 100 * MiB)
            await session.streamer.barrier()
            for at in range(12):
                await write(session, b"data%d.raw" % at, MiB)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=settings) as session:
            await trio.sleep(0.1)
            before = len(store.data_gets)
            async with trio.open_nursery() as nursery:
                for at in range(12):
                    nursery.start_soon(read, session, b"data%d.raw" % at, [(0, 100)])
            packs = [get.key.rpartition("/")[2] for get in store.data_gets[before:]]
            assert set(packs[:12]) <= pack_owners(session, [b"data%d.raw" % at for at in range(12)]).keys()
            assert len(packs) >= 12

    in_virtual_time(main)


def test_a_read_of_what_the_background_has_in_its_line_makes_that_come_first() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=20e6)
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 96 * MiB)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=replace(WARM, hydrate_parallel_max=4)) as session:
            await trio.sleep(0.1)
            begun = trio.current_time()
            await read(session, b"run/checkpoint-100/model.safetensors", [(80 * MiB, 100)])
            # At most the runs under way share the link with it, not the 80 MiB before it.
            assert trio.current_time() - begun < 4
            await warmed(session)
            assert not fetched_twice(store)
            assert local_blocks(session, b"run/checkpoint-100/model.safetensors") == 96

    in_virtual_time(main)


def test_the_order_is_trace_then_small_files_then_the_newest_checkpoint_and_no_more() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            await environment(session, 40)
            await session.streamer.barrier()
            await checkpoint(session, 100, 20 * MiB)
            await session.streamer.barrier()
            await checkpoint(session, 200, 20 * MiB)
            await session.streamer.barrier()
            await write(session, b"tokens.raw", 40 * MiB)
            await session.streamer.barrier()
        async with start(store, Node(), settings=COLD) as session:
            await read(session, b"tokens.raw", [(30 * MiB, 2 * MiB)])
            await write(session, b"log", 10)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=WARM) as session:
            await warmed(session)
            owners = pack_owners(
                session, [b"tokens.raw", b"env/lib0/module0.py", b"run/checkpoint-200/model.safetensors"]
            )
            packs = [get.key.rpartition("/")[2] for get in store.data_gets]
            order = list(dict.fromkeys(owners[pack] for pack in packs if pack in owners))
            assert order == ["tokens.raw", "env/lib0/module0.py", "run/checkpoint-200/model.safetensors"]
            assert local_blocks(session, b"tokens.raw") == 2
            assert local_blocks(session, b"run/checkpoint-100/model.safetensors") == 0
            assert local_blocks(session, b"run/checkpoint-200/model.safetensors") == 20
            assert not fetched_twice(store)
        async with start(store, Node(), settings=replace(WARM, hydrate_all=True)) as session:
            await warmed(session)
            assert local_blocks(session, b"tokens.raw") == 40
            assert local_blocks(session, b"run/checkpoint-100/model.safetensors") == 20

    in_virtual_time(main)


def pack_owners(session: Session, paths: list[bytes]) -> dict[str, str]:
    owners: dict[str, str] = {}
    with session.workspace.kv.read() as view:
        for path in paths:
            for _, value in view.scan(*ino_range(BLOCK_TABLE, inode_of(view, path))):
                frame = BlockState.decode(value).frame
                assert frame is not None
                owners[frame.pack] = path.decode()
    return owners


def test_the_trace_goes_from_takeover_to_takeover_though_the_checkpoints_have_other_names() -> None:
    """The job reads the middle of the newest checkpoint; each of three nodes has another one."""

    async def main() -> None:
        store = SlowStore(new_store())
        pieces = [(0, 100), (5 * MiB, 2 * MiB)]
        settings = replace(FAST, whole_files_max=0, readahead_blocks_max=1)
        warm = replace(settings, warm_bytes_max=10 * MiB, warm_file_bytes_max=0)
        for step, chosen in ((900, settings), (1000, settings), (1100, warm), (1200, warm)):
            async with start(store, Node(), settings=chosen) as session:
                if step > 900:
                    await warmed(session)
                    store.forget()
                    await read(session, model(step - 100), pieces)
                    assert bool(store.data_gets) == (chosen is settings)
                    await trio.sleep(settings.trace_s)
                await write(session, model(step), 16 * MiB)
                await trio.sleep(70)  # now it counts as complete
                await session.streamer.barrier()
                with session.workspace.kv.read() as view:
                    entries = decode(view.get(TRACE_KEY))
                if step > 900:
                    assert [item.role for item in entries] == [b"run/\0checkpoint-#/\0global_step#/model.raw"]
                    assert entries[0].extents == ((0, 1), (5, 2))

    in_virtual_time(main)


def model(step: int) -> bytes:
    return b"run/checkpoint-%d/global_step%d/model.raw" % (step, step)


@pytest.mark.promise("P-10")
@pytest.mark.parametrize("budget_blocks", [24, 64])
def test_the_background_stays_inside_the_budget_and_evicts_nothing(budget_blocks: int) -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 100 * MiB)
            await session.streamer.barrier()
        settings = replace(WARM, cache_bytes_max=budget_blocks * MiB, hydrate_run_blocks=2)
        async with start(store, Node(), settings=settings) as session:
            await warmed(session)
            await trio.sleep(5)
            assert session.budget.used_bytes <= 0.8 * budget_blocks * MiB
            assert session.budget.evicted_blocks == 0
            assert (session.budget.used_bytes > 0.4 * budget_blocks * MiB) == (budget_blocks == 64)

    in_virtual_time(main)


def test_the_byte_limit_holds() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 100 * MiB)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=replace(WARM, warm_bytes_max=20 * MiB)) as session:
            await warmed(session)
            assert 10 * MiB < sum(get.length for get in store.data_gets) <= 21 * MiB

    in_virtual_time(main)


def test_an_outage_pauses_the_background_and_it_goes_on_afterwards() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=20e6)
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 100 * MiB)
            await session.streamer.barrier()
        async with start(store, Node(), settings=replace(WARM, hydrate_parallel_max=4)) as session:
            await trio.sleep(0.5)
            store.away = True
            await trio.sleep(10)
            here = local_blocks(session, b"run/checkpoint-100/model.safetensors")
            await trio.sleep(50)
            assert local_blocks(session, b"run/checkpoint-100/model.safetensors") == here < 100
            store.away = False
            await trio.sleep(60)
            assert local_blocks(session, b"run/checkpoint-100/model.safetensors") == 100

    in_virtual_time(main)


def test_what_was_read_is_no_reason_to_publish() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            await environment(session, 10)
            await session.filesystem.mkdir(ROOT_INODE, b".cache", 0o755, ACTOR)
            await session.streamer.barrier()
        async with start(store, Node(), settings=WARM) as session:
            await directory(session, b".cache/pip")
            await trio.sleep(10)
            number = session.streamer.head.manifest.number
            await read(session, b"env/lib0/module0.py")
            await trio.sleep(1000)
            assert session.streamer.head.manifest.number == number
            await write(session, b".cache/pip/wheel", 100)  # scratch: cut, but never published
            await trio.sleep(10)
            assert session.streamer.head.manifest.number == number
            await write(session, b"log", 100)
            await trio.sleep(10)
            assert session.streamer.head.manifest.number == number + 1
        async with start(store, Node(), settings=COLD) as session:
            with session.workspace.kv.read() as view:
                assert [item.role for item in decode(view.get(TRACE_KEY))] == [b"env/lib0/module0.py"]

    in_virtual_time(main)


def test_a_restart_on_the_same_node_fetches_nothing() -> None:
    async def main() -> None:
        store, node = SlowStore(new_store()), Node()
        async with start(store, node, settings=COLD) as session:
            await environment(session, 10)
            await session.streamer.barrier()
            session.budget.evict(1 << 60)
        store.forget()
        async with start(store, node, settings=WARM) as session:
            await trio.sleep(10)
            assert not store.data_gets
            await read(session, b"env/lib0/module0.py")

    in_virtual_time(main)


def test_a_fenced_session_fetches_nothing_more() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=1e6)
        async with start(store, Node(), settings=COLD) as session:
            await checkpoint(session, 100, 96 * MiB)
            await session.streamer.barrier()
        async with start(store, Node(), settings=replace(WARM, hydrate_parallel_max=2, hydrate_run_blocks=1)) as zombie:
            await trio.sleep(1)
            async with start(store, Node(), settings=COLD, rng=random.Random(2)):
                await trio.sleep(10)
                assert zombie.workspace.fenced is not None
                await trio.sleep(20)
                asked = len(store.data_gets)
                await trio.sleep(60)
                assert len(store.data_gets) == asked
                assert local_blocks(zombie, b"run/checkpoint-100/model.safetensors") < 90

    in_virtual_time(main)


def test_a_damaged_frame_in_a_group_costs_only_its_own_file() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            paths = await environment(session, 64)
            await session.streamer.barrier()
            with session.workspace.kv.read() as view:
                value = next(view.scan(*ino_range(BLOCK_TABLE, inode_of(view, paths[30]))))[1]
        frame = BlockState.decode(value).frame
        assert frame is not None
        key = next(key for key in store.inner._objects if key.endswith(frame.pack))
        held = store.inner._objects[key]
        body = bytearray(held.body)
        body[frame.offset + frame.stored_bytes // 2] ^= 1
        store.inner._objects[key] = replace(held, body=bytes(body))
        async with start(store, Node(), settings=WARM) as session:
            await warmed(session)
            assert [path for path in paths if local_blocks(session, path) == 0] == [paths[30]]
            # Nobody was told EIO for what was fetched unasked: the one who reads it asks again.
            store.inner._objects[key] = held
            await read(session, paths[30])

    in_virtual_time(main)


def test_a_cold_file_read_in_order_keeps_many_requests_in_flight() -> None:
    async def main() -> None:
        store = SlowStore(new_store(), bytes_per_s=1e9)
        async with start(store, Node(), settings=COLD) as session:
            await write(session, b"tokens.raw", 256 * MiB)
            await session.streamer.barrier()
        store.forget()
        async with start(store, Node(), settings=COLD) as session:
            begun = trio.current_time()
            await read(session, b"tokens.raw")
            assert store.in_flight_max >= 8
            assert len(store.data_gets) < 60
            assert not fetched_twice(store)
            # One after the other, 256 blocks would take 5 s of latency alone.
            assert trio.current_time() - begun < 1

    in_virtual_time(main)


def test_header_then_a_jump_brings_the_whole_of_an_atomic_file_only() -> None:
    async def main() -> None:
        store = SlowStore(new_store())
        async with start(store, Node(), settings=COLD) as session:
            await write(session, b"model.safetensors", 64 * MiB)
            await write(session, b"tokens.raw", 64 * MiB)
            await session.streamer.barrier()
        async with start(store, Node(), settings=COLD) as session:
            for name in (b"model.safetensors", b"tokens.raw"):
                await read(session, name, [(0, 4096), (40 * MiB, 4096)])
            await trio.sleep(20)
            assert local_blocks(session, b"model.safetensors") == 64
            assert local_blocks(session, b"tokens.raw") < 10

    in_virtual_time(main)
