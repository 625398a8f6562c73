"""The histories of docs/HISTORIES.md about borders: of a workspace, of a request, of what an outage may cost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from spotwarp_fs.cli.stores import find_workspace
from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.manifests import encode
from spotwarp_fs.core.ports import Lane, ObjectInfo, Stored
from spotwarp_fs.core.records import EntryRecord, FrameRef, InodeRecord, block_key, entry_key, inode_key
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ManifestNumber, ObjectKey
from spotwarp_fs.engine.claim import ForeignHead
from spotwarp_fs.engine.groups import only_cause
from spotwarp_fs.engine.report import Reporter
from spotwarp_fs.store.faults import FaultStore
from spotwarp_fs.store.memory import MemoryStore
from tests.support.collecting import QUIET, collect_fully, listing, noise, publish, put, verify_retained
from tests.support.published import Published, published
from tests.support.sim_node import SimNode, SimWorkers
from tests.support.sim_world import ROOT
from tests.support.virtual import MANUAL, NEW, OLD, content, create, evict_everything, in_virtual_time
from tests.support.virtual import published as published_content
from tests.support.world import FAST, Node, SeededEntropy, new_store, start


class Watched(FaultStore):
    """Notes which keys and prefixes a node asks for, and which keys it deletes."""

    def __init__(self, inner: MemoryStore, *, may_list: bool = True) -> None:
        super().__init__(inner, random.Random(1))
        self.may_list = may_list
        self.keys: set[str] = set()
        self.deleted: set[str] = set()

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        self.keys.add(key)
        return await super().get(key, start=start, length=length, lane=lane)

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self.keys.add(key)
        return await super().head(key, lane=lane)

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self.keys.add(key)
        return await super().put(key, body, lane=lane)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        self.keys.add(key)
        return await super().put_if_absent(key, body, lane=lane)

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        self.keys.update(keys)
        self.deleted.update(keys)
        await super().delete(keys, lane=lane)

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        assert self.may_list, f"listed {prefix}"
        self.keys.add(prefix)
        async for info in super().list_objects(prefix, after=after, lane=lane):
            yield info


async def churn(store: FaultStore, rng: random.Random) -> None:
    """A life in which packs are written, condemned, repacked and deleted."""
    async with start(store, Node(), settings=QUIET, rng=rng) as session:
        await session.history.complete.wait()
        for round_ in range(4):
            for name in range(6):
                if rng.random() < 0.7:
                    await put(session, b"f%d" % name, noise(rng.randrange(100)))
            await publish(session)
            await trio.sleep(QUIET.retain_recent_s + round_)
            await collect_fully(session)
        assert await verify_retained(session, store._inner) > 0  # type: ignore[arg-type]


@pytest.mark.history("C8")
@pytest.mark.promise("P-13")
def test_C8_neither_packs_nor_collection_leave_the_workspace() -> None:
    """Two workspaces with the same contents in one store, one of them with an older writer epoch in its keys."""

    async def main() -> None:
        inner = new_store()
        async with start(inner, Node(), settings=QUIET) as session:
            for name in range(6):
                await put(session, b"f%d" % name, noise(name))
            await publish(session)
        elsewhere = layout.workspace_root("other", "fedcba9876543210")
        copies = {key.replace(ROOT, elsewhere): found for key, found in inner._objects.items()}
        inner._objects.update(copies)
        store = Watched(inner)
        for seed in range(2, 5):
            await churn(store, random.Random(seed))
        assert store.deleted, "nothing was collected"
        assert {key for key in store.keys if not key.startswith(ROOT)} == set()
        assert {key: inner._objects.get(key) for key in copies} == copies

    in_virtual_time(main)


@pytest.mark.history("H7")
def test_H7_no_number_is_ever_free_again() -> None:
    """Manifests outlive everything that is collected, so a zombie's create meets one that is there."""

    async def main() -> None:
        inner = new_store()
        store = Watched(inner)
        for seed in range(2, 5):
            await churn(store, random.Random(seed))
        assert store.deleted
        assert not [key for key in store.deleted if "/manifests/" in key]
        numbers = sorted(int(key.rpartition("/")[2]) for key in inner._objects if f"{ROOT}manifests/" in key)
        assert numbers == list(range(1, len(numbers) + 1))

    in_virtual_time(main)


@pytest.mark.history("H7")
def test_H7_a_workspace_made_again_is_another_one() -> None:
    async def main() -> None:
        store = new_store()
        entropy = SeededEntropy(random.Random(1))
        first, old = await find_workspace(store, "test", create=True, entropy=entropy)
        assert (await find_workspace(store, "test", create=True, entropy=entropy))[0] == first
        for key in list(store._objects):
            del store._objects[key]
        second, new = await find_workspace(store, "test", create=True, entropy=entropy)
        assert second != first
        await old.put_if_absent(layout.manifest_key(ManifestNumber(58)), b"by a zombie of the old one")
        assert [info.key async for info in new.list_objects("")] == []

    in_virtual_time(main)


@pytest.mark.history("H7")
def test_H7_a_manifest_that_does_not_name_its_parent_is_not_served() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=MANUAL) as session:
            await create(session, b"f", OLD)
            await session.streamer.barrier()
            head = session.streamer.head
        impostor = replace(head.manifest, number=ManifestNumber(head.manifest.number + 1), parent_digest="0" * 64)
        key = ObjectKey(ROOT + layout.manifest_key(impostor.number))
        await store.put_if_absent(key, encode(impostor))
        with pytest.raises(ExceptionGroup) as refused:
            async with start(store, Node(), rng=random.Random(2)):
                pytest.fail("it serves")
        assert isinstance(only_cause(refused.value), Corrupt)

    in_virtual_time(main)


@pytest.mark.history("L2")
def test_L2_a_fresh_node_finds_its_metadata_without_a_listing_and_after_every_repack() -> None:
    async def main() -> None:
        inner = new_store()
        for seed in range(2, 5):
            await churn(Watched(inner), random.Random(seed))
        async with published(inner) as looking:
            manifest = (await looking.head()).manifest
            rows = await looking.rows(manifest.number)
        store = Watched(inner, may_list=False)
        settings = replace(QUIET, heartbeat_s=1e9)
        async with start(store, Node(), settings=settings, rng=random.Random(9)) as session:
            with session.workspace.kv.read() as view:
                entries = {key for key, _ in view.scan(b"e", b"f")}
        assert entries == {key for key in rows if key[:1] == b"e"}
        locators = [ref for ref in (manifest.base, manifest.changes) if ref is not None]
        packs = {layout.pack_key(ref.pack) for ref in locators}
        assert packs <= {key.removeprefix(ROOT) for key in store.keys}
        assert not {f"{ROOT}{key}" for key in packs} & store.deleted

    in_virtual_time(main)


EDGE = BLOCK_BYTES - 100


def filled(number: int) -> bytes:
    """What request *number* writes across the edge of two blocks; its length tells the number too."""
    return bytes([number]) * (200 + number)


async def file_bytes(looking: Published, number: int, name: bytes) -> bytes:
    """Read a file of a published state, frame by frame."""
    rows = await looking.rows(number)
    ino = EntryRecord.decode(rows[entry_key(ROOT_INODE, name)]).ino
    size = InodeRecord.decode(rows[inode_key(ino)]).size
    blocks = []
    for block in range(-(-size // BLOCK_BYTES)):
        ref = FrameRef.decode(rows[block_key(ino, BlockIndex(block))])
        found = await looking.store.get(layout.pack_key(ref.pack), start=ref.offset, length=ref.stored_bytes)
        blocks.append(open_frame(ref, found.body).ljust(BLOCK_BYTES, b"\0"))
    return b"".join(blocks)[:size]


@pytest.mark.history("H17")
@pytest.mark.promise("P-03")
@pytest.mark.parametrize("seed", range(6))
def test_H17_a_cut_never_falls_into_a_request(seed: int) -> None:
    """One request changes two blocks and the size, often waiting for a block to come back; cuts come all the time."""

    async def main() -> None:
        rng = random.Random(seed)
        store = new_store()
        settings = replace(MANUAL, cold_after_s=0.0, early_upload_period_s=0.02)
        async with start(store, Node(), settings=settings, rng=rng, workers=SimWorkers(rng)) as session:
            handle, _ = await create(session, b"f", bytes(EDGE - 1) + b"x")
            await session.filesystem.write(handle, EDGE, filled(1))

            async def cut_all_the_time() -> None:
                while True:
                    await session.streamer.barrier()
                    await trio.sleep(rng.random() * 0.005)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut_all_the_time)
                for number in range(2, 40):
                    await session.filesystem.write(handle, EDGE, filled(number))
                    await trio.sleep(rng.random() * 0.2)
                    if rng.random() < 0.6:
                        evict_everything(session)
                nursery.cancel_scope.cancel()
            await session.streamer.barrier()
            newest = session.streamer.head.manifest.number
            evicted = session.budget.evicted_blocks
        seen = []
        async with published(store) as looking:
            for number in range(2, newest + 1):
                tail = (await file_bytes(looking, number, b"f"))[EDGE:]
                assert tail == filled(tail[0]), f"manifest {number} has a part of request {tail[0]} or {tail[-1]}"
                seen.append(tail[0])
        assert seen == sorted(seen)
        assert seen[-1] == 39
        assert len(set(seen)) > 10
        assert evicted > 0

    trio_run._r.seed(seed)
    with patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.history("H20")
@pytest.mark.promise("P-09")
@pytest.mark.promise("P-10")
def test_H20_in_an_outage_only_need_evicts_and_the_least_recently_used_first() -> None:
    async def main() -> None:
        inner = new_store()
        async with start(inner, Node()) as session:
            for number in range(40):
                await create(session, b"%d" % number, noise(number, BLOCK_BYTES))
            await session.streamer.barrier()
        store = FaultStore(inner, random.Random(1))
        settings = replace(FAST, cache_bytes_max=41 * BLOCK_BYTES, readahead_blocks_max=0, evict_low_share=0.9)
        async with start(store, Node(), rng=random.Random(2), settings=settings) as session:
            used = [*range(20, 36), 1, 0]
            for number in used[:12]:
                assert await content(session, b"%d" % number) == noise(number, BLOCK_BYTES)
            store.partitioned = True
            await trio.sleep(30)
            assert not session.health.reachable, "an idle node learns of the outage by its heartbeat"
            here = session.budget.used_bytes
            session.workspace.settings = replace(settings, cache_bytes_max=here + BLOCK_BYTES // 2)
            session.budget._ws.settings = session.workspace.settings
            await trio.sleep(60)
            assert session.budget.tight
            assert (session.budget.used_bytes, session.budget.evicted_blocks) == (here, 0), "nobody needs the room"
            await create(session, b"new", NEW)
            assert 0 < session.budget.evicted_blocks <= 4, "as much as the write needs"
            for number in used[6:12]:
                assert await content(session, b"%d" % number) == noise(number, BLOCK_BYTES), "the newest are here"

    in_virtual_time(main)


@pytest.mark.history("M-h")
@pytest.mark.promise("P-07")
@pytest.mark.parametrize(
    "settings",
    [
        replace(FAST, rebase_manifests_max=20),
        replace(FAST, rebase_manifests_max=10_000, rebase_bytes_min=20_000, rebase_share=0.5),
    ],
    ids=["by number", "by size"],
)
def test_Mh_a_mount_reads_few_change_sets_however_many_there_were(settings: object) -> None:
    async def main() -> None:
        store = Watched(new_store())
        async with start(store, Node(), settings=settings) as session:  # type: ignore[arg-type]
            lengths = []
            for number in range(150):
                for name in range(5):
                    await create(session, b"%d-%d" % (number, name), b"x" * 100)
                await session.streamer.barrier()
                await trio.sleep(0.5)
                manifest = session.streamer.head.manifest
                lengths.append(manifest.number - manifest.base_number)
        store.keys.clear()
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            assert session.workspace.files == 750
            read = {key for key in store.keys if "/manifests/" in key}
        assert max(lengths) < 100
        assert len(read) < 100 + 20, "the chain after the base, and the search for the head"

    in_virtual_time(main)


@pytest.mark.history("M-l")
@pytest.mark.history("C13")
@pytest.mark.promise("P-02")
def test_Ml_a_small_remote_fsync_waits_for_everything_and_status_says_how_much() -> None:
    async def main() -> None:
        store = new_store()
        network = FaultStore(store, random.Random(1))
        async with start(network, Node(), settings=replace(MANUAL, fsync_remote=True)) as session:
            reports = Reporter(session, workspace_name="w", store_url="memory://")
            await create(session, b"large", noise(1, 5 * BLOCK_BYTES))
            handle, _ = await create(session, b"small.pt", NEW[:4096])
            network.partitioned = True
            synced = trio.Event()

            async def sync() -> None:
                await session.filesystem.fsync(handle, datasync=False)
                synced.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sync)
                await trio.sleep(40)
                assert not synced.is_set()
                status = await reports.status()
                assert status.dirty_bytes == 5 * BLOCK_BYTES + 4096
                assert status.rpo_seconds >= 40
                assert not status.store_reachable
                network.partitioned = False
            assert synced.is_set(), "it waits for publishing, never for a close"
        async with start(store, Node(), rng=random.Random(2)) as session:
            assert await content(session, b"large") == noise(1, 5 * BLOCK_BYTES)

    in_virtual_time(main)


@pytest.mark.history("M-o")
@pytest.mark.promise("P-06")
def test_Mo_a_cloned_image_is_another_writer() -> None:
    """Every start is a session of its own, so the clone of a cache is told that somebody else goes on from it."""

    async def main() -> None:
        store, node = new_store(), SimNode("a")
        async with start(store, node, rng=random.SystemRandom()) as session:
            before = session.streamer.head.manifest.session
            await create(session, b"f", OLD)
            await session.streamer.barrier()
        original, clone = node.restarted(), node.restarted()
        async with start(store, original, rng=random.SystemRandom()) as session:
            assert session.streamer.head.manifest.session != before
            with pytest.raises(ExceptionGroup) as refused:
                async with start(store, clone, rng=random.SystemRandom()):
                    pytest.fail("it goes on from a state that is not its own any more")
            assert isinstance(only_cause(refused.value), ForeignHead)
            await create(session, b"g", NEW)
            await session.streamer.barrier()
            assert session.workspace.fenced is None
        assert await published_content(store, b"g") == NEW

    in_virtual_time(main)


class NeverSent(FaultStore):
    """The next manifest is not sent before the node is killed."""

    hold = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if self.hold and "/manifests/" in key:
            await trio.sleep_forever()
        return await super().put_if_absent(key, body, lane=lane)


@pytest.mark.history("C16")
@pytest.mark.promise("P-01")
@pytest.mark.promise("P-03")
def test_C16_a_kill_between_the_packs_and_the_manifest_loses_no_change() -> None:
    async def main() -> None:
        inner, node = new_store(), SimNode("a")
        store = NeverSent(inner, random.Random(1))
        async with start(store, node, settings=MANUAL) as session:
            await create(session, b"doomed", OLD)
            await session.streamer.barrier()
            await session.filesystem.unlink(ROOT_INODE, b"doomed")
            await create(session, b"kept", NEW)
            store.hold = True
            with trio.move_on_after(30):
                await session.streamer.barrier()
        async with start(inner, node.restarted(), settings=MANUAL) as session:
            assert await content(session, b"kept") == NEW
            await session.streamer.barrier()
        async with start(inner, Node(), rng=random.Random(2), settings=MANUAL) as session:
            assert await content(session, b"kept") == NEW
            assert [item.name for item in await listing(session)] == [b"kept"]

    in_virtual_time(main)
