"""The histories of docs/HISTORIES.md that concern bytes: writes, cuts, eviction, hydration and kills of the daemon."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from tests.support.sim_node import SimNode, killed
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
    store_with,
)
from tests.support.world import ACTOR, Node, new_store, start


@pytest.mark.history("C1")
@pytest.mark.promise("P-08")
def test_C1_an_append_to_a_restored_log_keeps_what_was_there() -> None:
    async def main() -> None:
        store = await store_with(b"train.log", OLD[:700_000])
        async with start(store, Node(), settings=MANUAL) as session:
            handle, _ = await open_(session, b"train.log")
            await session.filesystem.write(handle, 700_000, b"one more line\n")
            assert await content(session, b"train.log") == OLD[:700_000] + b"one more line\n"
            await session.streamer.barrier()
        assert await published(store, b"train.log") == OLD[:700_000] + b"one more line\n"

    in_virtual_time(main)


@pytest.mark.history("C2")
@pytest.mark.parametrize("change", ["overwrite", "truncate", "recreate"])
def test_C2_a_late_answer_does_not_bring_old_bytes_back(change: str) -> None:
    async def main() -> None:
        inner = await store_with(b"f", OLD)
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(slow, Node(), settings=MANUAL) as session, trio.open_nursery() as nursery:
            handle, ino = await open_(session, b"f")
            slow.schedule = FaultSchedule(slow=1.0, slow_s=50.0, methods=frozenset({Method.GET}))
            nursery.start_soon(session.filesystem.read, handle, 0, 10)
            await trio.sleep(0.01)
            expected = NEW
            if change == "overwrite":
                await session.filesystem.write(handle, 0, NEW)
            elif change == "truncate":
                await session.filesystem.setattr(ino, AttributeChange(size=0), None, ACTOR)
                await session.filesystem.setattr(ino, AttributeChange(size=BLOCK_BYTES), None, ACTOR)
                expected = bytes(BLOCK_BYTES)
            else:
                await session.filesystem.unlink(ROOT_INODE, b"f")
                await create(session, b"f", NEW)
            await trio.sleep(100)
            slow.schedule = FaultSchedule()
            assert await content(session, b"f") == expected

    in_virtual_time(main)


@pytest.mark.history("C2")
def test_C2_a_write_after_an_eviction_is_not_punched_away() -> None:
    async def main() -> None:
        store = await store_with(b"f", OLD)
        async with start(store, Node(), settings=MANUAL) as session:
            assert await content(session, b"f") == OLD
            handle, _ = await open_(session, b"f")
            evict_everything(session)
            await session.filesystem.write(handle, 0, NEW)
            await trio.sleep(1)
            assert await content(session, b"f") == NEW

    in_virtual_time(main)


@pytest.mark.history("C3")
@pytest.mark.promise("P-01")
def test_C3_the_size_of_the_last_append_survives_a_kill() -> None:
    async def main() -> None:
        store, node = new_store(), SimNode("a")
        async with start(store, node, settings=MANUAL) as session:
            handle, _ = await create(session, b"log")
            for line in range(200):
                await session.filesystem.write(handle, 8 * line, b"%07d\n" % line)
        async with start(store, node.restarted(), settings=MANUAL) as session:
            assert await content(session, b"log") == b"".join(b"%07d\n" % line for line in range(200))

    in_virtual_time(main)


@pytest.mark.history("C5")
@pytest.mark.promise("P-03")
def test_C5_a_rename_during_a_cut_loses_neither_name() -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(slow, Node(), settings=MANUAL) as session, trio.open_nursery() as nursery:
            await create(session, b"z-tmp", OLD)
            slow.schedule = FaultSchedule(slow=1.0, slow_s=20.0)
            nursery.start_soon(session.streamer.barrier)
            await trio.sleep(0.01)
            await session.filesystem.rename(ROOT_INODE, b"z-tmp", ROOT_INODE, b"a-final", 0)
        assert await published(inner, b"z-tmp") == OLD

    in_virtual_time(main)


@pytest.mark.history("C6")
@pytest.mark.promise("P-03")
def test_C6_a_block_overwritten_after_its_early_upload_is_published_as_it_is() -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(slow, Node(), settings=EAGER) as session:
            slow.schedule = FaultSchedule(slow=1.0, slow_s=5.0)
            handle, _ = await create(session, b"f", OLD)
            await trio.sleep(0.3)  # its upload is on the way
            await session.filesystem.write(handle, 10, b"NEWER")
            await session.streamer.barrier()
        assert await published(inner, b"f") == OLD[:10] + b"NEWER" + OLD[15:]

    in_virtual_time(main)


@pytest.mark.history("C6")
@pytest.mark.promise("P-03")
def test_C6_a_block_cut_shorter_after_a_restart_is_not_given_the_frame_of_the_longer_one() -> None:
    async def main() -> None:
        inner, node = new_store(), SimNode("a")
        async with start(inner, node, settings=MANUAL) as session:
            await create(session, b"f", OLD)
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(slow, node.restarted(), settings=EAGER) as session:
            slow.schedule = FaultSchedule(slow=1.0, slow_s=5.0)
            _, ino = await open_(session, b"f")
            await trio.sleep(0.3)  # its upload is on the way; nothing wrote to the block since the start
            await session.filesystem.setattr(ino, AttributeChange(size=100), None, ACTOR)
            await trio.sleep(20)
            await session.filesystem.setattr(ino, AttributeChange(size=BLOCK_BYTES), None, ACTOR)
            await session.streamer.barrier()
        assert await published(inner, b"f") == OLD[:100] + bytes(BLOCK_BYTES - 100)

    in_virtual_time(main)


@pytest.mark.history("C7")
@pytest.mark.promise("P-03")
@pytest.mark.parametrize("change", ["unlink", "truncate to zero", "cut shorter", "overwrite", "rename over"])
def test_C7_frozen_bytes_outlive_what_destroys_them(change: str) -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        settings = replace(MANUAL, frames_in_memory_max=1)
        async with start(slow, Node(), settings=settings) as session, trio.open_nursery() as nursery:
            handle, ino = await create(session, b"ckpt", OLD + NEW + OLD)
            other, _ = await create(session, b"other", b"x")
            await session.filesystem.release(other)
            slow.schedule = FaultSchedule(slow=1.0, slow_s=20.0)
            nursery.start_soon(session.streamer.barrier)
            await trio.sleep(0.01)
            if change == "unlink":
                await session.filesystem.unlink(ROOT_INODE, b"ckpt")
                await session.filesystem.release(handle)
            elif change == "rename over":
                await session.filesystem.release(handle)
                await session.filesystem.rename(ROOT_INODE, b"other", ROOT_INODE, b"ckpt", 0)
            elif change == "overwrite":
                await session.filesystem.write(handle, 2 * BLOCK_BYTES, NEW)
            else:
                size = 0 if change == "truncate to zero" else BLOCK_BYTES + 7
                await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)
        assert await published(inner, b"ckpt") == OLD + NEW + OLD
        assert session.streamer.abandoned_cuts == 0

    in_virtual_time(main)


@pytest.mark.history("C7")
@pytest.mark.promise("P-01")
@pytest.mark.parametrize("change", [1, 2])
def test_C7_a_kill_while_the_frozen_file_moves_aside_loses_nothing(change: int) -> None:
    async def main() -> None:
        inner, node = new_store(), SimNode("a")
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        with killed(node):
            async with start(slow, node, settings=replace(MANUAL, frames_in_memory_max=1)) as session:
                _, ino = await create(session, b"f", OLD + NEW)
                slow.schedule = FaultSchedule(slow=1.0, slow_s=20.0)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.streamer.barrier)
                    await trio.sleep(0.01)
                    node.switch.countdown = change  # of the disk, whatever it is
                    await session.filesystem.setattr(ino, AttributeChange(size=0), None, ACTOR)
        async with start(inner, node.restarted(), settings=MANUAL) as session:
            assert await content(session, b"f") in (OLD + NEW, b"")

    in_virtual_time(main)


@pytest.mark.history("C14")
@pytest.mark.history("L15")
@pytest.mark.promise("P-10")
def test_C14_L15_a_file_larger_than_the_cache_is_written_evicted_and_published() -> None:
    async def main() -> None:
        store = new_store()
        settings = replace(EAGER, cache_bytes_max=6 * BLOCK_BYTES)
        blocks = [bytes([number]) * BLOCK_BYTES for number in range(1, 21)]
        async with start(store, Node(), settings=settings) as session:
            handle, _ = await create(session, b"big.pt")
            for number, block in enumerate(blocks):
                await session.filesystem.write(handle, number * BLOCK_BYTES, block)
                assert session.budget.used_bytes <= settings.cache_bytes_max
            assert session.budget.evicted_blocks > 0, "evicted while open, unpublished"
            await session.filesystem.release(handle)
            await session.streamer.barrier()
        assert await published(store, b"big.pt") == b"".join(blocks)

    in_virtual_time(main)


@pytest.mark.history("L15")
@pytest.mark.promise("P-03")
def test_L15_a_frozen_block_with_an_early_frame_is_not_evicted_under_the_cut() -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        settings = replace(EAGER, pack_bytes_target=1, frames_in_memory_max=2)
        async with start(slow, Node(), settings=settings) as session, trio.open_nursery() as nursery:
            contents = [bytes([number]) * BLOCK_BYTES for number in range(1, 6)]
            slow.schedule = FaultSchedule(slow=1.0, slow_s=3.0)
            await create(session, b"f", b"".join(contents))
            await trio.sleep(0.2)  # early uploads have begun
            nursery.start_soon(session.streamer.barrier)
            for _ in range(400):
                evict_everything(session)
                await trio.sleep(0.05)
        assert await published(inner, b"f") == b"".join(contents)

    in_virtual_time(main)


@pytest.mark.history("H3")
@pytest.mark.promise("P-01")
@pytest.mark.parametrize("site", ["commit", "pwrite"])
def test_H3_a_kill_in_an_overwrite_of_an_absent_block_leaves_old_or_new_bytes(site: str) -> None:
    async def main() -> None:
        store, node = await store_with(b"f", OLD[:1000]), SimNode("a")
        with killed(node):
            async with start(store, node, settings=MANUAL) as session:
                handle, ino = await open_(session, b"f")
                await session.filesystem.setattr(ino, AttributeChange(size=BLOCK_BYTES), None, ACTOR)
                node.switch.only, node.switch.countdown = site, 1
                await session.filesystem.write(handle, 0, NEW)
        async with start(store, node.restarted(), settings=MANUAL) as session:
            assert await content(session, b"f") == OLD[:1000] + bytes(BLOCK_BYTES - 1000)

    in_virtual_time(main)


@pytest.mark.history("H5")
def test_H5_truncated_down_and_up_again_an_absent_block_shows_zeros() -> None:
    async def main() -> None:
        store = await store_with(b"f", OLD[:700_000])
        async with start(store, Node(), settings=MANUAL) as session:
            _, ino = await open_(session, b"f")
            for size in (100_000, BLOCK_BYTES):
                await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)
            evict_everything(session)
            expected = OLD[:100_000] + bytes(BLOCK_BYTES - 100_000)
            assert await content(session, b"f") == expected
            await session.streamer.barrier()
        assert await published(store, b"f") == expected

    in_virtual_time(main)


@pytest.mark.history("H8")
@pytest.mark.promise("P-09")
def test_H8_a_spool_that_fails_gives_the_cut_up_and_never_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        inner, node = new_store(), Node()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())

        def full(*_: object) -> None:
            raise OSError(28, "no space for the spool")

        settings = replace(MANUAL, frames_in_memory_max=1)
        async with start(slow, node, settings=settings) as session, trio.open_nursery() as nursery:
            handle, _ = await create(session, b"f", OLD + OLD + OLD)
            slow.schedule = FaultSchedule(slow=1.0, slow_s=20.0)
            nursery.start_soon(session.streamer.barrier)
            await trio.sleep(0.01)
            monkeypatch.setattr(node.data, "append_aside_block", full)
            await session.filesystem.write(handle, 2 * BLOCK_BYTES, NEW)
            slow.schedule = FaultSchedule()
        assert session.streamer.abandoned_cuts == 1
        assert await published(inner, b"f") == OLD + OLD + NEW

    in_virtual_time(main)
