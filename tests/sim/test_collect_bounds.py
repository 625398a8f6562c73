"""Does collection free what nothing needs, and only that?"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import retention
from spotwarp_fs.core.errors import Corrupt, UserError
from spotwarp_fs.core.layout import SALVAGE_PREFIX, pin_key
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber, ObjectKey
from spotwarp_fs.engine.reader import PIN_FRESH_S
from spotwarp_fs.store.memory import MemoryStore
from tests.sim.test_skeleton import in_world
from tests.support.collecting import (
    HOUR_S,
    QUIET,
    RECENT_S,
    collect_fully,
    data_bytes,
    noise,
    packs,
    publish,
    put,
    reached_bytes,
    scoped,
    verify_retained,
)
from tests.support.published import published
from tests.support.training import read_at
from tests.support.world import WALL_S, Node, new_store, start


@pytest.fixture(autouse=True)
def _short_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RECENT_S", RECENT_S)


@pytest.mark.promise("P-13")
def test_after_churn_the_store_holds_little_more_than_what_lives() -> None:
    async def main() -> None:
        store, rng = new_store(), random.Random(5)
        async with start(store, Node(), settings=QUIET) as session:
            for round_ in range(12):
                for i in range(10):
                    if round_ == 0 or rng.random() < 0.5:
                        await put(session, b"f%d" % i, noise(round_ * 100 + i))
                await publish(session)
            before = await data_bytes(store)
            for _ in range(3):
                await trio.sleep(HOUR_S)
                await collect_fully(session)
            await trio.sleep(HOUR_S)
            await collect_fully(session)
            live = await reached_bytes(store, session.streamer.head.manifest.number)
            after = await data_bytes(store)
            assert before > 3 * live
            assert after <= 1.3 * live + 20_000, (after, live)
            await verify_retained(session, store)
            figures = await session.collector.collect(dry_run=True)
            assert figures["condemned_packs"] == 0
            assert figures["stored_bytes"] == sum((await packs(store)).values())
        async with start(store, Node(), settings=QUIET) as session:
            for i in range(10):
                assert len(await read_at(session, b"f%d" % i)) == 60_000

    in_world(main)


def test_a_dry_run_changes_nothing() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            await put(session, b"a", noise(1))
            await publish(session)
            await put(session, b"a", noise(2))
            await publish(session)
            await trio.sleep(HOUR_S)
            head, stored = session.streamer.head, await packs(store)
            figures = await session.collector.collect(dry_run=True)
            assert figures["condemned_packs"] >= 1
            await publish(session)
            assert (session.streamer.head, await packs(store)) == (head, stored)

    in_world(main)


@pytest.mark.promise("P-13")
@pytest.mark.history("H6", "L14")
def test_a_pinned_reader_keeps_its_state_and_a_broken_pin_stops_everything() -> None:
    async def main() -> None:
        store = new_store()
        pin = pin_key("0123abcd")
        async with start(store, Node(), settings=QUIET) as session:
            await put(session, b"a", noise(1))
            number = await publish(session)
            await put(session, b"a", noise(2))
            await publish(session)
            await trio.sleep(HOUR_S)
            await scoped(store).put(pin, json.dumps({"number": number}).encode())
            await collect_fully(session)
            async with published(store) as looking:
                assert await looking.verify(number) == 1
            await scoped(store).put(pin, b"{")
            with pytest.raises(Corrupt, match="pins"):
                await session.collector.collect()
            await trio.sleep(PIN_FRESH_S + 10)  # nobody refreshed it
            assert (await collect_fully(session))["deleted"] >= 1
            await verify_retained(session, store)

    in_world(main)


@pytest.mark.history("H14", "L14")
def test_salvage_in_the_store_keeps_its_state_until_it_is_dropped() -> None:
    async def main() -> None:
        store = new_store()
        place = f"{SALVAGE_PREFIX}00000001-node/"
        async with start(store, Node(), settings=QUIET) as session:
            await put(session, b"a", noise(1))
            number = await publish(session)
            await put(session, b"a", noise(2))
            await publish(session)
            await scoped(store).put(ObjectKey(place + "changes"), b"...")
            await trio.sleep(HOUR_S)
            with pytest.raises(Corrupt, match="salvage"):
                await session.collector.collect()
            await scoped(store).put(ObjectKey(place + "state"), json.dumps({"number": number}).encode())
            await collect_fully(session)
            async with published(store) as looking:
                assert await looking.verify(number) == 1
            await scoped(store).delete([ObjectKey(place + "state"), ObjectKey(place + "changes")])
            assert (await collect_fully(session))["deleted"] >= 1

    in_world(main)


@pytest.mark.history("H12")
def test_a_named_state_stays_whole_and_is_not_repacked() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            for i in range(10):
                await put(session, b"f%d" % i, noise(i))
            number = await session.snapshots.create(b"before")
            for i in range(9):
                await put(session, b"f%d" % i, noise(100 + i))
            await publish(session)
            for _ in range(2):
                await trio.sleep(HOUR_S)
                assert (await collect_fully(session))["repacked"] == 0
            async with published(store) as looking:
                assert await looking.verify(number) == 10
            assert [s.number for s in await session.snapshots.list()] == [number]
            with pytest.raises(UserError, match="already"):
                await session.snapshots.create(b"before")
            await session.snapshots.delete(b"before")
            for _ in range(3):
                await trio.sleep(HOUR_S)
                await collect_fully(session)
            live = await reached_bytes(store, session.streamer.head.manifest.number)
            assert await data_bytes(store) <= 1.3 * live + 20_000
            await verify_retained(session, store)

    in_world(main)


def test_a_clock_that_is_wrong_collects_nothing() -> None:
    async def main() -> None:
        store = MemoryStore(now=lambda: WALL_S - 400 + trio.current_time())
        async with start(store, Node(), settings=QUIET) as session:
            with pytest.raises(UserError, match="clock"):
                await session.collector.collect()

    in_world(main)


def test_collections_run_by_themselves() -> None:
    async def main() -> None:
        store = new_store()
        settings = replace(QUIET, collect_first_s=300.0, collect_period_s=600.0, interval_s=30.0)
        async with start(store, Node(), settings=settings) as session:
            for round_ in range(5):
                await put(session, b"a", noise(round_))
                await publish(session)
            stored = await data_bytes(store)
            await trio.sleep(1900.0)
            assert await data_bytes(store) < stored / 3
            assert not session.workspace.reports

    in_world(main)


@pytest.mark.promise("P-18")
def test_a_cut_that_loses_most_of_the_workspace_pins_its_predecessor() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            for i in range(20):
                await put(session, b"f%d" % i, noise(i))
            number = await publish(session)
            for i in range(18):
                await session.filesystem.unlink(ROOT_INODE, b"f%d" % i)
            await publish(session)
            with session.workspace.kv.read() as view:
                assert set(retention.pins_in(view)) == {number}
            async with published(store) as looking:
                rows = await looking.rows(session.streamer.head.manifest.number)
                assert any(key.startswith(b"rpin") for key in rows), "the manifest that wipes says it itself"
            await trio.sleep(HOUR_S)
            await collect_fully(session)
            async with published(store) as looking:
                assert await looking.verify(number) == 20
            with session.workspace.kv.read() as view:
                left_s = retention.pins_in(view)[ManifestNumber(number)] - session.publisher.server_now_s()
                assert 6.9 * 86_400 < left_s <= 7 * 86_400

    in_world(main)
