"""Collection against everything that happens at the same time: unpublished work, takeovers, zombies, kills."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import retention
from spotwarp_fs.core.collection import condemned_in
from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.layout import pack_key
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.reachability import PackLive
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber, PackId
from spotwarp_fs.engine.session import Session
from tests.sim.test_skeleton import in_world
from tests.support.collecting import (
    HOUR_S,
    QUIET,
    RECENT_S,
    collect_fully,
    listing,
    noise,
    packs,
    publish,
    put,
    verify_retained,
)
from tests.support.training import read_at
from tests.support.world import ACTOR, Node, new_store, start


@pytest.fixture(autouse=True)
def _short_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RECENT_S", RECENT_S)


def pack_of_file(session: Session) -> set[PackId]:
    """Packs of all frames that the live map names."""
    with session.workspace.kv.read() as view:
        states = [BlockState.decode(value) for _, value in view.scan(BLOCK_TABLE, b"c") if value]
    return {state.frame.pack for state in states if state.frame is not None}


async def _published_alone(session: Session, name: bytes, data: bytes) -> PackId:
    """Write a file that has a pack for itself, beside another that stays: nothing here looks like a wipe."""
    await put(session, b"stays", noise(99))
    await publish(session)
    others = pack_of_file(session)
    await put(session, name, data)
    await publish(session)
    (pack,) = pack_of_file(session) - others
    return pack


def condemned(session: Session) -> set[PackId]:
    with session.workspace.kv.read() as view:
        return set(condemned_in(view))


@pytest.mark.history("C9")
def test_C9_uploads_of_a_file_that_is_open_for_hours_are_not_collected() -> None:
    async def main() -> None:
        store = new_store()
        settings = replace(QUIET, early_upload_period_s=0.5, pack_linger_s=1.0)
        async with start(store, Node(), settings=settings) as session:
            handle, _ = await session.filesystem.create(ROOT_INODE, b"big.ckpt", 0o644, os.O_WRONLY, ACTOR)
            data = noise(1, 3 << 20)
            for at in range(0, len(data), 1 << 17):
                await session.filesystem.write(handle, at, data[at : at + (1 << 17)])
            await trio.sleep(20)
            uploaded = pack_of_file(session)
            assert uploaded
            assert uploaded <= (await packs(store)).keys()
            for _ in range(3):
                await trio.sleep(settings.grace_s + 1)
                assert (await session.collector.collect())["deleted_packs"] == 0
            await session.filesystem.release(handle)
            await publish(session)
            await verify_retained(session, store)
        async with start(store, Node(), settings=settings) as session:
            assert await read_at(session, b"big.ckpt") == data

    in_world(main)


@pytest.mark.history("C9")
@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_C9_a_block_that_finds_an_old_frame_keeps_it_or_does_not_find_it(when: str) -> None:
    """The last published reference to a frame goes; the same content is written again around the condemnation."""

    async def main() -> None:
        store = new_store()
        settings = replace(QUIET, early_upload_period_s=0.5)
        async with start(store, Node(), settings=settings) as session:
            old = await _published_alone(session, b"a", noise(1))
            await session.filesystem.unlink(ROOT_INODE, b"a")
            await publish(session)
            await trio.sleep(HOUR_S)
            if when == "before":
                await put(session, b"b", noise(1))
                await trio.sleep(10)
                assert old in pack_of_file(session)
            if when == "meanwhile":
                _write_during_the_sweep(session)
            await session.collector.collect()
            assert (old in condemned(session)) == (when == "after")
            if when == "after":
                await put(session, b"b", noise(1))
                await trio.sleep(30)
                assert old not in pack_of_file(session), "no writer may ever refer to a condemned pack"
            await publish(session)
            for _ in range(2):
                await trio.sleep(settings.grace_s + 1)
                await session.collector.collect()
                await publish(session)
            assert (old in await packs(store)) == (when != "after")
            await verify_retained(session, store)
        async with start(store, Node(), settings=settings) as session:
            assert await read_at(session, b"b") == noise(1)

    in_world(main)


def _write_during_the_sweep(session: Session) -> None:
    """A cut publishes the new reference between the inventory and the decision."""
    live = session.collector._reach.live

    async def slow(
        head: ManifestNumber, retained: Iterable[ManifestNumber], anchors: Iterable[ManifestNumber]
    ) -> dict[PackId, PackLive]:
        found = await live(head, retained, anchors)
        await put(session, b"b", noise(1))
        await publish(session)
        session.collector._reach.live = live  # type: ignore[method-assign]
        return found

    session.collector._reach.live = slow  # type: ignore[method-assign]


@pytest.mark.history("C10")
def test_C10_what_a_zombie_deletes_its_successor_had_agreed_to() -> None:
    async def main() -> None:
        store = new_store()
        settings = replace(QUIET, heartbeat_s=1e9, early_upload_period_s=0.5)
        async with start(store, Node(), settings=settings, rng=random.Random(1)) as zombie:
            old = await _published_alone(zombie, b"a", noise(1))
            await zombie.filesystem.unlink(ROOT_INODE, b"a")
            await publish(zombie)
            await trio.sleep(HOUR_S)
            await zombie.collector.collect()
            await publish(zombie)
            assert old in condemned(zombie)
            async with start(store, Node(), settings=settings, rng=random.Random(2)) as session:
                assert old in condemned(session)
                await put(session, b"b", noise(1))
                await publish(session)
                await trio.sleep(settings.grace_s + 1)
                with pytest.raises(SpotwarpError):
                    await zombie.collector.collect()
                assert old in await packs(store), "a zombie that looks sees its successor first"
                # One that had looked before it was stopped deletes what it had planned.
                await zombie.ports.store.delete([pack_key(old)])
                await verify_retained(session, store)
                assert await read_at(session, b"b") == noise(1)
            async with start(store, Node(), settings=settings, rng=random.Random(3)) as session:
                assert await read_at(session, b"b") == noise(1)

    in_world(main)


@pytest.mark.history("C10")
def test_C10_a_condemnation_that_was_not_published_deletes_nothing() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node, settings=QUIET) as session:
            await _published_alone(session, b"a", noise(1))
            await session.filesystem.unlink(ROOT_INODE, b"a")
            await publish(session)
            await trio.sleep(HOUR_S)
            await session.collector.collect()
            rows = condemned(session)
            assert rows
            await trio.sleep(10 * QUIET.grace_s)
            assert (await session.collector.collect())["deleted_packs"] == 0
        async with start(store, Node(), settings=QUIET) as session:
            assert not condemned(session), "the node died before the next cut"

    in_world(main)


@pytest.mark.history("C10")
def test_C10_content_whose_pack_was_deleted_is_sent_again() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            old = await _published_alone(session, b"a", noise(1))
            await session.filesystem.unlink(ROOT_INODE, b"a")
            await publish(session)
            await trio.sleep(HOUR_S)
            await collect_fully(session)
            assert old not in await packs(store)
            assert old not in condemned(session), "the row went after the pack"
            await put(session, b"b", noise(1))
            await publish(session)
            await verify_retained(session, store)
        async with start(store, Node(), settings=QUIET) as session:
            assert await read_at(session, b"b") == noise(1)

    in_world(main)


@pytest.mark.promise("P-13")
@pytest.mark.parametrize("change", ["nothing", "overwrite", "truncate", "remove"])
def test_repacking_never_brings_an_old_block_back(change: str) -> None:
    """A file changes while its frames are being copied."""

    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            for i in range(8):
                await put(session, b"f%d" % i, noise(i))
            await publish(session)
            for i in range(7):
                await put(session, b"f%d" % i, noise(50 + i))
            await publish(session)
            await trio.sleep(HOUR_S)
            store_pack = session.sealer.store_pack

            async def slow(builder: PackBuilder) -> tuple[FrameRef, ...]:
                refs = await store_pack(builder)
                session.sealer.store_pack = store_pack  # type: ignore[method-assign]
                ino = (await session.filesystem.lookup(ROOT_INODE, b"f7")).ino
                if change == "overwrite":
                    handle = await session.filesystem.open(ino, os.O_WRONLY, ACTOR)
                    await session.filesystem.write(handle, 10, b"new")
                    await session.filesystem.release(handle)
                elif change == "truncate":
                    await session.files.truncate(ino, 0)
                elif change == "remove":
                    await session.filesystem.unlink(ROOT_INODE, b"f7")
                return refs

            session.sealer.store_pack = slow  # type: ignore[method-assign]
            assert (await session.collector.collect())["repacked"] == 1
            await publish(session)
            await trio.sleep(HOUR_S)
            await collect_fully(session)
            await verify_retained(session, store)
        expected = {
            "nothing": noise(7),
            "overwrite": noise(7)[:10] + b"new" + noise(7)[13:],
            "truncate": b"",
        }
        async with start(store, Node(), settings=QUIET) as session:
            if change == "remove":
                assert b"f7" not in {item.name for item in await listing(session)}
            else:
                assert await read_at(session, b"f7") == expected[change]

    in_world(main)


@pytest.mark.promise("P-13")
@pytest.mark.parametrize("seed", [*range(6), 43, 50, 86])
def test_every_retained_state_is_whole_whatever_happens(seed: int) -> None:
    """Random writes out of few contents, cuts, collections, repacking, kills, takeovers and hours that pass."""

    async def main() -> None:
        rng = random.Random(seed)
        store, node = new_store(), Node()
        settings = replace(
            QUIET, early_upload_period_s=2.0, rebase_manifests_max=6, interval_s=20.0, heartbeat_s=60.0,
            repack_bytes_max=1 << 20,
        )  # fmt: skip
        expected: dict[bytes, bytes] = {}
        for life in range(5):
            if rng.random() < 0.5:
                node = Node()
            async with start(store, node, settings=settings, rng=random.Random(seed * 100 + life)) as session:
                for _ in range(rng.randrange(4, 14)):
                    await _step(session, rng, expected)
                    await _collect_perhaps(session, rng)
                if rng.random() < 0.7:
                    await publish(session)
                await verify_retained(session, store)
                for name, data in expected.items():
                    assert await read_at(session, name) == data
            # What was not published is lost with the node; what is left is what the next start finds.
            node = node if rng.random() < 0.5 else Node()
            async with start(store, node, settings=settings, rng=random.Random(seed * 100 + life + 50)) as session:
                expected = {item.name: await read_at(session, item.name) for item in await listing(session)}
                await publish(session)
                await verify_retained(session, store)

    in_world(main)


async def _step(session: Session, rng: random.Random, expected: dict[bytes, bytes]) -> None:
    name = b"f%d" % rng.randrange(8)
    match rng.choice(("put", "put", "put", "remove", "publish", "wait", "hour")):
        case "put":
            expected[name] = noise(rng.randrange(6), rng.choice((3_000, 60_000, 1_200_000)))
            await put(session, name, expected[name])
        case "remove" if name in expected:
            await session.filesystem.unlink(ROOT_INODE, name)
            del expected[name]
        case "publish":
            await publish(session)
        case "hour":
            await trio.sleep(HOUR_S * rng.random() * 1.5)
        case _:
            await trio.sleep(rng.random() * 60)


async def _collect_perhaps(session: Session, rng: random.Random) -> None:
    if rng.random() < 0.4:
        if rng.random() < 0.5:
            await collect_fully(session)
        else:
            await session.collector.collect()
