"""What a fenced writer had not published: is all of it set aside, exactly, and nothing of it visible?"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from spotwarp_fs.core.errors import NotFound
from spotwarp_fs.core.layout import pack_of, workspace_root
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, FrameState, table_range
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import ROOT_INODE, ObjectKey
from spotwarp_fs.engine.reader import ReadPorts
from spotwarp_fs.engine.salvage import Outcome, salvaged_bases
from spotwarp_fs.engine.salvaged import (
    Salvaged,
    drop_stored,
    open_kept,
    open_stored,
    rebuild_kept,
    stored_salvages,
)
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV
from spotwarp_fs.local.workers import InlineWorkers
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.scoped import Scoped
from tests.support.command_line import mkdir, write
from tests.support.published import published
from tests.support.world import ACTOR, FAST, WORKSPACE_ID, Node, SeededEntropy, VirtualWall, new_store, start

pytestmark = [pytest.mark.history("H15"), pytest.mark.promise("P-06")]

MIB = 1 << 20


def scoped(store: MemoryStore) -> Scoped:
    return Scoped(store, workspace_root("test", WORKSPACE_ID))


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def looking(node: Node | None = None) -> Workspace:
    node = node or Node()
    return Workspace(
        node.kv, node.data, wall=VirtualWall(), entropy=SeededEntropy(random.Random(5)), workers=InlineWorkers(),
        policies=Policies.build(), settings=FAST,
    )  # fmt: skip


async def bytes_of(salvaged: Salvaged, path: bytes) -> bytes:
    node = salvaged.reader.walk(path)
    content = bytearray(node.record.size)
    async with salvaged.reader.content(node) as pieces:
        async for piece in pieces:
            content[piece.offset : piece.offset + len(piece.data)] = piece.data
    return bytes(content)


async def salvage_in(store: MemoryStore) -> Salvaged:
    (found,) = await stored_salvages(scoped(store))
    return await open_stored(ReadPorts(scoped(store), looking), found)


@asynccontextmanager
async def fenced(
    store: MemoryStore, node: Node, old_store: FaultStore | None = None
) -> AsyncIterator[tuple[Session, Session]]:
    """An old writer with `kept` and `changed` published and much unpublished, and the new one that takes over."""
    async with start(old_store or store, node, rng=random.Random(1)) as old:
        await write(old, "kept", noise(1, 2 * MIB + 5))
        await write(old, "changed", noise(2, 3 * MIB))
        await write(old, "removed", b"soon gone")
        await old.streamer.barrier()
        old.streamer.only_when_asked = True
        await overwrite(old, "changed", noise(3, MIB), at=MIB)
        await write(old, "fresh", noise(4, 2 * MIB + 77))
        await write(old, "zeros", bytes(2 * MIB))
        directory = await mkdir(old, "run")
        await write(old, "run/model.bin", noise(5, 1000))
        await old.filesystem.setxattr(directory, b"user.step", b"7")
        await old.filesystem.unlink(ROOT_INODE, b"removed")
        async with start(store, Node(), rng=random.Random(2)) as new:
            yield old, new


async def overwrite(session: Session, name: str, data: bytes, *, at: int) -> None:
    node = await session.filesystem.lookup(ROOT_INODE, name.encode())
    handle = await session.filesystem.open(node.ino, os.O_WRONLY, ACTOR)
    await session.filesystem.write(handle, at, data)
    await session.filesystem.release(handle)


CHANGED = noise(2, MIB) + noise(3, MIB) + noise(2, 3 * MIB)[2 * MIB :]


async def check_whole(salvaged: Salvaged) -> None:
    assert await bytes_of(salvaged, b"changed") == CHANGED
    assert await bytes_of(salvaged, b"fresh") == noise(4, 2 * MIB + 77)
    assert await bytes_of(salvaged, b"zeros") == bytes(2 * MIB)
    assert await bytes_of(salvaged, b"run/model.bin") == noise(5, 1000)
    assert await bytes_of(salvaged, b"kept") == noise(1, 2 * MIB + 5)
    assert salvaged.reader.xattrs(salvaged.reader.walk(b"run").ino) == [(b"user.step", b"7")]
    assert salvaged.concerned.whole == {b"changed", b"fresh", b"zeros", b"run", b"run/model.bin"}
    assert salvaged.concerned.removed == (b"removed",)


async def test_everything_unpublished_is_set_aside_and_nothing_of_it_is_visible(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = new_store()
    async with fenced(store, Node()) as (old, new):
        with trio.fail_after(60):
            await old.salvager.finished.wait()
        assert old.salvager.progress.outcome is Outcome.SAVED
        assert old.salvager.progress.done_bytes == old.salvager.progress.total_bytes
        number = await new.streamer.barrier()
        drained = await old.drain(trio.current_time() + 1)
        assert not drained.saved
        assert drained.salvage in drained.reason
        assert await salvaged_bases(scoped(store)) == {old.streamer.head.manifest.number}
        await check_whole(await salvage_in(store))
        async with published(store) as seen:
            rows = await seen.rows(number)
            await seen.verify(number)
        own = {key async for key in packs_below(store, "salvage/")}
        named = {FrameRef.decode(value).pack for key, value in rows.items() if key[:1] == BLOCK_TABLE}
        assert own
        assert not own & named
        assert not any(key.endswith((b"fresh", b"model.bin", b"zeros")) for key in rows)
        assert any(key.endswith(b"removed") for key in rows)


async def packs_below(store: MemoryStore, prefix: str) -> AsyncIterator[str]:
    async for info in scoped(store).list_objects(prefix):
        pack = pack_of(info.key)
        if pack is not None:
            yield pack


async def test_frames_that_no_manifest_names_are_copied_even_when_the_node_has_evicted_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A collector deletes packs that nothing names: the salvage must not need them."""
    store, node = new_store(), Node()
    async with fenced(store, node) as (old, _):
        # Two hours of early upload later, in which no cut came.
        while old.workspace.dirty_blocks:
            assert old.workspace.fenced is None
            await trio.sleep(0.1)
        old.budget.evict(1 << 40)
        with node.kv.read() as view:
            states = [BlockState.decode(v) for _, v in view.scan(*table_range(BLOCK_TABLE)) if v]
        unnamed = {s.frame.pack for s in states if s.state is FrameState.UNPUBLISHED and s.frame is not None}
        assert unnamed
        assert not any(state.local for state in states)
        with trio.fail_after(60):
            await old.salvager.finished.wait()
        assert old.salvager.progress.outcome is Outcome.SAVED
        keys = [info.key async for info in scoped(store).list_objects("packs/")]
        await scoped(store).delete([ObjectKey(key) for key in keys if pack_of(key) in unnamed])
        await check_whole(await salvage_in(store))


async def test_after_the_fence_nothing_is_evicted_that_only_an_unnamed_pack_holds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store, node = new_store(), Node()
    async with fenced(store, node) as (old, _):
        while old.workspace.dirty_blocks:
            await trio.sleep(0.1)
        await old.fenced.wait()
        old.budget.evict(1 << 40)
        with node.kv.read() as view:
            states = [BlockState.decode(v) for _, v in view.scan(*table_range(BLOCK_TABLE)) if v]
        assert {s.local for s in states if s.state is FrameState.UNPUBLISHED} == {True}
        assert {s.local for s in states if s.state is FrameState.PUBLISHED} == {False}


async def test_an_outage_is_waited_out_and_an_umount_says_how_far_it_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = new_store()
    faulty = FaultStore(store, random.Random(3))
    async with fenced(store, Node(), faulty) as (old, _):
        await old.fenced.wait()
        faulty.partitioned = True
        drained = await old.drain(trio.current_time() + 30)
        assert not drained.saved
        assert drained.salvage == ""
        assert "in the cache of this node" in drained.reason
        await trio.sleep(600)
        assert old.salvager.progress.outcome is Outcome.UNDER_WAY
        faulty.partitioned = False
        with trio.fail_after(60):
            await old.salvager.finished.wait()
        await check_whole(await salvage_in(store))


@pytest.mark.parametrize("seed", range(4))
async def test_lost_answers_and_storms_do_not_harm_it(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    store = new_store()
    faulty = FaultStore(store, random.Random(seed))
    async with fenced(store, Node(), faulty) as (old, _):
        faulty.schedule = FaultSchedule(fail_before=0.2, lose_answer=0.2)
        with trio.fail_after(3600):
            await old.salvager.finished.wait()
        assert old.salvager.progress.outcome is Outcome.SAVED
        await check_whole(await salvage_in(store))


async def test_with_nothing_unpublished_nothing_is_written_and_the_drain_counts_as_saved(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = new_store()
    async with start(store, Node(), rng=random.Random(1)) as old:
        await write(old, "f", b"all of it is published")
        await old.streamer.barrier()
        async with start(store, Node(), rng=random.Random(2)):
            drained = await old.drain(trio.current_time() + 60)
            await old.fenced.wait()
            drained = await old.drain(trio.current_time() + 60)
    assert drained.saved
    assert drained.unsaved_bytes == 0
    assert not [info async for info in scoped(store).list_objects("salvage/")]


async def test_a_change_of_attributes_alone_is_work_too(autojump_clock: trio.testing.MockClock) -> None:
    store = new_store()
    async with start(store, Node(), rng=random.Random(1)) as old:
        ino = await write(old, "f", noise(9, 3000))
        await old.streamer.barrier()
        old.streamer.only_when_asked = True
        await old.filesystem.setattr(ino, AttributeChange(size=100, mode=0o600), None, ACTOR)
        async with start(store, Node(), rng=random.Random(2)):
            await old.salvager.finished.wait()
    salvaged = await salvage_in(store)
    assert await bytes_of(salvaged, b"f") == noise(9, 3000)[:100]
    assert salvaged.reader.walk(b"f").record.mode & 0o777 == 0o600


async def test_one_that_was_cut_short_says_so_and_can_be_dropped(autojump_clock: trio.testing.MockClock) -> None:
    store = new_store()
    faulty = FaultStore(store, random.Random(3))
    async with fenced(store, Node(), faulty) as (old, _):
        faulty.schedule = FaultSchedule(slow=1.0, slow_s=10.0, methods=frozenset({Method.PUT_IF_ABSENT}))
        while not await stored_salvages(scoped(store)):
            await trio.sleep(0.05)
        faulty.partitioned = True
        await trio.sleep(5)
        assert old.salvager.progress.outcome is Outcome.UNDER_WAY
    (found,) = await stored_salvages(scoped(store))
    assert await salvaged_bases(scoped(store)) == {found.state.number if found.state else 0}
    with pytest.raises(NotFound, match="cut short"):
        await open_stored(ReadPorts(scoped(store), looking), found)
    await drop_stored(scoped(store), found.place)
    assert not [info async for info in scoped(store).list_objects("salvage/")]


async def test_the_cache_of_a_dead_writer_gives_the_same(autojump_clock: trio.testing.MockClock) -> None:
    """Killed, and taken over elsewhere: what its node kept is enough, with evicted parts from the store."""
    store, node = new_store(), Node()
    async with fenced(store, node) as (old, new):
        old.budget.evict(1 << 40)
        kept = Node(node.kv.reopened(), node.data.restarted())
        await new.streamer.barrier()
    await check_whole(open_kept(ReadPorts(scoped(store), lambda: looking(kept))))
    with pytest.raises(NotFound):
        open_kept(ReadPorts(scoped(store), lambda: looking(Node(MemoryKV(), MemoryDataFiles()))))


async def test_after_a_power_loss_the_journal_gives_what_was_fsynced(autojump_clock: trio.testing.MockClock) -> None:
    store, node = new_store(), Node()
    async with start(store, node, rng=random.Random(1)) as old:
        await write(old, "kept", b"published")
        await old.streamer.barrier()
        old.streamer.only_when_asked = True
        node_of = await old.filesystem.lookup(ROOT_INODE, b"kept")
        handle = await old.filesystem.open(node_of.ino, os.O_WRONLY, ACTOR)
        await old.filesystem.write(handle, 0, b"fsynced, but not published")
        await old.filesystem.fsync(handle, datasync=False)
        async with start(store, Node(), rng=random.Random(2)) as new:
            await new.streamer.barrier()
            kept = Node(MemoryKV(), node.data.power_loss(random.Random(7)), node.journal)
    ports = ReadPorts(scoped(store), lambda: looking(kept))
    await rebuild_kept(ports, kept.journal)
    salvaged = open_kept(ports)
    assert salvaged.concerned.whole == {b"kept"}
    assert await bytes_of(salvaged, b"kept") == b"fsynced, but not published"
