"""The histories of docs/HISTORIES.md that concern publishing, takeovers, zombies and restarts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import sections
from spotwarp_fs.core.errors import Conflict, Fenced, Refused, Unavailable
from spotwarp_fs.core.layout import pack_key
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.records import BlockState, block_key
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ObjectKey
from spotwarp_fs.engine.claim import ForeignHead
from spotwarp_fs.engine.groups import only_cause
from spotwarp_fs.store.faults import FaultSchedule, FaultStore
from spotwarp_fs.store.memory import MemoryStore
from tests.support.sim_node import SimNode, killed
from tests.support.sim_world import ROOT
from tests.support.virtual import MANUAL, NEW, OLD, content, create, in_virtual_time, open_, published
from tests.support.world import ACTOR, FAST, Node, new_store, start


class ScriptedStore(FaultStore):
    """Does something else than asked, once, with the next manifest that is created."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, random.Random(1), FaultSchedule())
        self.memory = inner
        self.next_manifest = ""
        self.bodies: list[bytes] = []
        self.created: Callable[[], None] = lambda: None
        """Told of each manifest that was created."""

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if "/manifests/" not in key:
            return await super().put_if_absent(key, body, lane=lane)
        self.bodies.append(body)
        what, self.next_manifest = self.next_manifest, ""
        if what == "409":
            raise Conflict("409: send it again")
        if what == "late":
            trio.lowlevel.spawn_system_task(self._late, key, body)
            raise Unavailable("no answer; it may still arrive")
        if what == "kill":
            await self.memory.put_if_absent(key, body)
            await trio.sleep_forever()
        info = await super().put_if_absent(key, body, lane=lane)
        self.created()
        if what == "lost answer":
            raise Unavailable("it was applied, and the answer was lost")
        return info

    async def _late(self, key: ObjectKey, body: bytes) -> None:
        await trio.sleep(0.15)
        await self.memory.put_if_absent(key, body)


def manifests(store: MemoryStore) -> int:
    return sum(f"{ROOT}manifests/" in key for key in store._objects)


def created(store: MemoryStore) -> int:
    return sum("/hints/" not in key for key in store._objects)


@pytest.mark.history("C16")
@pytest.mark.promise("P-03")
@pytest.mark.parametrize("what", ["lost answer", "late", "409"])
def test_C16_a_publish_whose_outcome_is_unknown_is_sent_again_as_it_was(what: str) -> None:
    async def main() -> None:
        inner = new_store()
        store = ScriptedStore(inner)
        async with start(store, Node(), settings=MANUAL) as session:
            handle, _ = await create(session, b"f", OLD)
            store.next_manifest = what
            store.bodies.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.streamer.barrier)
                await trio.sleep(0.01)
                await session.filesystem.write(handle, 0, NEW)  # must not get into a second body for this number
            assert len(set(store.bodies)) == 1
            assert session.workspace.fenced is None
            await session.streamer.barrier()
        assert await published(inner, b"f") == NEW

    in_virtual_time(main)


@pytest.mark.history("C16")
@pytest.mark.history("L1")
@pytest.mark.promise("P-01")
def test_C16_L1_a_restart_knows_its_own_manifest_and_keeps_every_deletion() -> None:
    async def main() -> None:
        inner, node = new_store(), SimNode("a")
        store = ScriptedStore(inner)
        async with start(store, node, settings=MANUAL) as session:
            await create(session, b"doomed", OLD)
            store.next_manifest = "kill"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.streamer.barrier)
                await trio.sleep(5)  # the manifest has landed, the daemon does not know it
                await session.filesystem.unlink(ROOT_INODE, b"doomed")
                await create(session, b"kept", NEW)
                nursery.cancel_scope.cancel()
        async with start(store, node.restarted(), settings=MANUAL) as session:
            assert session.workspace.fenced is None
            assert await content(session, b"kept") == NEW
            await session.streamer.barrier()
        async with start(inner, Node()) as session:
            assert await content(session, b"kept") == NEW
            with pytest.raises(Refused):
                await session.filesystem.lookup(ROOT_INODE, b"doomed")

    in_virtual_time(main)


@pytest.mark.history("C17")
@pytest.mark.promise("P-06")
def test_C17_of_two_takeovers_at_once_exactly_one_wins() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=MANUAL) as session:
            await create(session, b"f", OLD)
            await session.streamer.barrier()
        won: list[int] = []
        lost: list[BaseException] = []

        async def race(number: int) -> None:
            try:
                async with start(store, Node(), rng=random.Random(number), settings=MANUAL) as session:
                    won.append(session.publisher.head.manifest.writer_epoch)
                    await trio.sleep(10)
                    assert session.workspace.fenced is None
            except (Exception, BaseExceptionGroup) as error:
                lost.append(only_cause(error))

        async with trio.open_nursery() as nursery:
            for number in range(2, 5):
                nursery.start_soon(race, number)
        assert won == [2]
        assert [type(error) for error in lost] == [Fenced, Fenced]

    in_virtual_time(main)


@pytest.mark.history("C17")
@pytest.mark.promise("P-06")
def test_C17_a_takeover_follows_a_writer_that_publishes_meanwhile() -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(inner, Node(), settings=MANUAL) as old, trio.open_nursery() as nursery:
            handle, _ = await create(old, b"f", OLD)
            await old.streamer.barrier()
            taken = trio.Event()

            async def take_over() -> None:
                async with start(slow, Node(), rng=random.Random(2), settings=MANUAL) as session:
                    assert await content(session, b"f") == NEW
                    await create(session, b"g", OLD)
                    await session.streamer.barrier()
                taken.set()

            slow.schedule = FaultSchedule(slow=1.0, slow_s=20.0)
            nursery.start_soon(take_over)
            await trio.sleep(5)
            await old.filesystem.write(handle, 0, NEW)
            await old.streamer.barrier()
            slow.schedule = FaultSchedule()
            await taken.wait()
        assert await published(inner, b"f") == NEW
        assert await published(inner, b"g") == OLD

    in_virtual_time(main)


@pytest.mark.history("L11")
@pytest.mark.history("C15")
@pytest.mark.promise("P-06")
def test_C15_L11_a_node_that_comes_back_with_its_old_cache_serves_nothing_of_it() -> None:
    async def main() -> None:
        store, node = new_store(), SimNode("a")
        async with start(store, node, settings=MANUAL) as session:
            _, before = await create(session, b"a.pt", OLD)
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            _, after = await create(session, b"b.py", NEW)
            await session.streamer.barrier()
            assert before >> 40 != after >> 40, "an inode number is never given twice"
        with pytest.raises(ExceptionGroup) as refused:
            async with start(store, node.restarted(), settings=MANUAL):
                pytest.fail("it serves")
        assert isinstance(only_cause(refused.value), ForeignHead)
        assert await published(store, b"b.py") == NEW

    in_virtual_time(main)


@pytest.mark.history("H2")
@pytest.mark.promise("P-06")
def test_H2_whoever_waits_for_room_or_for_a_manifest_is_answered_when_the_session_is_fenced() -> None:
    async def main() -> None:
        inner = new_store()
        cut_off = FaultStore(inner, random.Random(1), FaultSchedule())
        settings = replace(FAST, cache_bytes_max=3 * BLOCK_BYTES, write_wait_max_s=1e6)
        answers: list[type[BaseException]] = []
        async with start(cut_off, Node(), settings=settings) as session, trio.open_nursery() as nursery:
            handle, _ = await create(session, b"f", OLD)
            cut_off.partitioned = True

            async def write() -> None:
                try:
                    for number in range(1, 9):
                        await session.filesystem.write(handle, number * BLOCK_BYTES, OLD)
                except Refused as error:
                    answers.append(type(error))

            async def sync() -> None:
                try:
                    await session.streamer.barrier()
                except Fenced as error:
                    answers.append(type(error))

            nursery.start_soon(write)
            nursery.start_soon(sync)
            await trio.sleep(5)
            async with start(inner, Node(), rng=random.Random(2)):
                cut_off.partitioned = False
                await trio.sleep(60)
            assert session.workspace.fenced is not None
            assert sorted(kind.__name__ for kind in answers) == ["Fenced", "Refused"]

    in_virtual_time(main)


@pytest.mark.history("H11")
@pytest.mark.promise("P-08")
def test_H11_a_damaged_frame_is_an_error_and_saving_the_bytes_again_heals_them() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=MANUAL) as session:
            _, ino = await create(session, b"f", OLD)
            await session.streamer.barrier()
            with session.workspace.kv.read() as view:
                frame = BlockState.decode(view.get(block_key(ino, BlockIndex(0))) or b"").frame
        assert frame is not None
        pack = f"{ROOT}{pack_key(frame.pack)}"
        body = bytearray(store._objects[pack].body)
        body[frame.offset + frame.stored_bytes - 1] ^= 1
        store._objects[pack] = replace(store._objects[pack], body=bytes(body))
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            with pytest.raises(Refused) as refused:
                await content(session, b"f")
            assert refused.value.errno == 5
            await create(session, b"again", OLD)
            await session.streamer.barrier()
        assert await published(store, b"again") == OLD

    in_virtual_time(main)


@pytest.mark.history("H19")
def test_H19_a_pack_that_meets_its_own_first_try_is_done() -> None:
    async def main() -> None:
        inner = new_store()
        lossy = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(lossy, Node(), settings=MANUAL) as session:
            await create(session, b"f", OLD)
            before = created(inner)
            lossy.schedule = FaultSchedule(lose_answer=0.5)
            await session.streamer.barrier()
            assert lossy.counts["lose_answer"] > 0
            assert created(inner) == before + 3, "one pack of data, one of metadata, one manifest"
        assert await published(inner, b"f") == OLD

    in_virtual_time(main)


@pytest.mark.history("H4")
@pytest.mark.promise("P-03")
@pytest.mark.parametrize("commits", range(1, 14, 2))
def test_H4_a_kill_between_the_steps_of_a_confirmation_loses_no_block(
    commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        inner, node = new_store(), SimNode("a")
        store = ScriptedStore(inner)
        monkeypatch.setattr("spotwarp_fs.engine.stream.ROWS_PER_STEP", 1)
        with killed(node):
            async with start(store, node, settings=MANUAL) as session:
                handle, _ = await create(session, b"f", OLD + OLD)
                await session.streamer.barrier()
                await session.filesystem.release(handle)
                handle, _ = await open_(session, b"f", os.O_RDWR | os.O_TRUNC)
                for block in range(4):
                    await session.filesystem.write(handle, block * BLOCK_BYTES, NEW)
                store.created = lambda: setattr(node.switch, "countdown", commits)
                await session.streamer.barrier()
                await session.filesystem.unlink(ROOT_INODE, b"f")  # at the latest
        store.created = lambda: None
        async with start(store, node.restarted(), settings=MANUAL) as session:
            await create(session, b"more")
            await session.streamer.barrier()
        assert await published(inner, b"f") == NEW * 4

    in_virtual_time(main)


@pytest.mark.history("H4")
@pytest.mark.promise("P-03")
@pytest.mark.promise("P-07")
def test_H4_blocks_that_lie_only_in_the_base_are_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = new_store()
        monkeypatch.setattr(sections, "INLINE_BYTES_MAX", 0)
        async with start(store, Node(), settings=replace(MANUAL, rebase_manifests_max=1)) as session:
            await create(session, b"f", OLD + OLD)
            for number in range(8):
                await create(session, b"%d" % number)
                await session.streamer.barrier()
                await trio.sleep(1)
            assert session.streamer.head.manifest.base is not None
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            ino = (await session.filesystem.lookup(ROOT_INODE, b"f")).ino
            for size in (0, 2 * BLOCK_BYTES):
                await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)
            await session.streamer.barrier()
        assert await published(store, b"f") == bytes(2 * BLOCK_BYTES)

    in_virtual_time(main)


@pytest.mark.history("H10")
@pytest.mark.promise("P-02")
def test_H10_an_fsync_and_a_barrier_join_only_what_has_not_begun() -> None:
    async def main() -> None:
        inner = new_store()
        slow = FaultStore(inner, random.Random(1), FaultSchedule())
        async with start(slow, Node(), settings=MANUAL) as session, trio.open_nursery() as nursery:
            handle, _ = await create(session, b"f", OLD)
            slow.schedule = FaultSchedule(slow=1.0, slow_s=5.0)
            nursery.start_soon(session.streamer.barrier)
            await trio.sleep(0.01)
            await session.filesystem.write(handle, 0, NEW)
            number = await session.streamer.barrier()
            assert number == manifests(inner)
        assert await published(inner, b"f") == NEW

    in_virtual_time(main)


@pytest.mark.history("M-d")
def test_Md_nothing_is_published_while_nothing_changes() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node()) as session:
            await create(session, b"f", OLD)
            await session.streamer.barrier()
            before = manifests(store)
            assert await content(session, b"f") == OLD
            await trio.sleep(100)
            assert manifests(store) == before

    in_virtual_time(main)


@pytest.mark.history("M-c")
def test_Mc_an_unlinked_open_file_is_not_published_and_gone_after_a_kill() -> None:
    async def main() -> None:
        store, node = new_store(), SimNode("a")
        async with start(store, node, settings=MANUAL) as session:
            _, ino = await create(session, b"f", OLD)
            await session.filesystem.setxattr(ino, b"user.a", b"1")
            await session.streamer.barrier()
            await session.filesystem.unlink(ROOT_INODE, b"f")
            await session.streamer.barrier()
        async with start(store, Node(), rng=random.Random(3), settings=MANUAL) as session:
            with session.workspace.kv.read() as view:
                for table in (b"i", b"x", b"b"):
                    assert [key for key, _ in view.scan(table + ino.to_bytes(8), table + (ino + 1).to_bytes(8))] == []

    in_virtual_time(main)
