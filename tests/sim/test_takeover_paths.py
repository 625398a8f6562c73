"""The ways of a takeover beside the usual one: a writer that goes on, a wish, a kill in between, late closes, pins."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import retention
from spotwarp_fs.core.errors import Fenced, Refused, UserError
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber, ObjectKey
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.states import AtTime, Latest, Named, Numbered, Quiescent, StateWish
from tests.sim.test_skeleton import in_world
from tests.sim.test_takeover_checkpoints import live_equals_published
from tests.support.collecting import HOUR_S, QUIET, RECENT_S, collect_fully, listing, noise, publish, put
from tests.support.published import published
from tests.support.training import Trainer, newest_checkpoint, read_at
from tests.support.world import ACTOR, FAST, Node, new_store, start


class SlowStore:
    """A store that is far away: every request takes a while."""

    def __init__(self, inner: ObjectStore, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def __getattr__(self, name: str) -> object:
        call = getattr(self._inner, name)
        if name in ("url", "list_objects"):
            return call

        async def slow(*arguments: object, **options: object) -> object:
            await trio.sleep(self._seconds)
            return await call(*arguments, **options)

        return slow


class CutOff:
    """A store that is gone for ever from the moment that a manifest was created after *after* requests."""

    def __init__(self, inner: ObjectStore, manifests: int) -> None:
        self._inner = inner
        self._left = manifests

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        info = await self._inner.put_if_absent(key, body, lane=lane)
        if "/manifests/" in key:
            self._left -= 1
            if not self._left:
                await trio.sleep_forever()
        return info


@pytest.mark.history("C17")
@pytest.mark.parametrize("latency_s", [0.02, 0.15, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_C17_a_takeover_converges_while_the_old_writer_publishes_all_the_time(seed: int, latency_s: float) -> None:
    settings = replace(FAST, interval_s=0.2, rebase_manifests_max=10)

    async def main() -> None:
        store, rng = new_store(), random.Random(seed)
        async with start(store, Node(), settings=settings, rng=rng) as old, trio.open_nursery() as nursery:
            trainer = Trainer(old, rng)
            nursery.start_soon(_until_read_only, trainer)
            nursery.start_soon(_busy, old)
            await trio.sleep(10)
            slow = SlowStore(store, latency_s)
            async with start(slow, Node(), settings=settings, rng=random.Random(seed + 50)) as session:  # type: ignore[arg-type]
                await live_equals_published(session, store)
                found = await newest_checkpoint(session)
                assert found is not None or not trainer.safe
                with trio.fail_after(30):
                    await old.fenced.wait()
                await publish(session)
            nursery.cancel_scope.cancel()

    in_world(main)


async def _until_read_only(trainer: Trainer) -> None:
    with suppress(Refused):
        await trainer.run()


async def _busy(session: Session) -> None:
    """Something to publish at any time."""
    handle, _ = await session.filesystem.create(ROOT_INODE, b"busy.log", 0o644, os.O_WRONLY, ACTOR)
    with suppress(Refused):
        for at in range(10_000):
            await session.filesystem.write(handle, at, b"x")
            await trio.sleep(0.05)


@pytest.mark.history("C17")
def test_C17_of_two_takeovers_of_one_head_one_wins_and_the_other_leaves() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node()) as session:
            await put(session, b"a", b"x")
            await publish(session)
        outcomes: list[str] = []

        async def race(seed: int) -> None:
            try:
                async with start(SlowStore(store, 0.1), Node(), rng=random.Random(seed)):  # type: ignore[arg-type]
                    outcomes.append("won")
                    await trio.sleep(5)
            except* Fenced:
                outcomes.append("lost")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(race, 10)
            nursery.start_soon(race, 11)
        assert sorted(outcomes) == ["lost", "won"]

    in_world(main)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_between_the_takeover_and_its_local_half_changes_nothing(seed: int) -> None:
    """The takeover manifest is published and the node dies before its own map follows; the cache is used again."""
    settings = replace(FAST, interval_s=0.5, atomic_max_age_s=random.Random(seed).choice((3.0, 900.0)))

    async def main() -> None:
        store, node, rng = new_store(), Node(), random.Random(seed)
        with trio.move_on_after(8 + seed):
            async with start(store, Node(), settings=settings, rng=rng) as session:
                trainer = Trainer(session, rng)
                await trainer.run()
        with trio.move_on_after(30):
            async with start(CutOff(store, 1), node, settings=settings, rng=random.Random(seed + 1)):  # type: ignore[arg-type]
                raise AssertionError("the takeover was answered")
        async with start(store, node, settings=settings, rng=random.Random(seed + 2)) as session:
            await live_equals_published(session, store)
            assert await newest_checkpoint(session) is not None or not trainer.safe
            await put(session, b"more", noise(3))
            await publish(session)
        async with start(store, Node(), settings=settings, rng=random.Random(seed + 3)) as session:
            assert await read_at(session, b"more") == noise(3)

    in_world(main)


@pytest.mark.promise("P-18")
@pytest.mark.history("L13")
def test_every_takeover_from_a_foreign_head_pins_it_but_only_the_newest_three() -> None:
    async def main() -> None:
        store, heads = new_store(), []
        for life in range(6):
            async with start(store, Node(), rng=random.Random(life)) as session:
                with session.workspace.kv.read() as view:
                    pins = retention.pins_in(view)
                assert sorted(pins) == heads[-3:]
                await put(session, b"f%d" % life, noise(life))
                heads.append(await publish(session))
        node = Node()
        for _ in range(2):
            async with start(store, node, rng=random.Random(9)) as session:
                with session.workspace.kv.read() as view:
                    pins = retention.pins_in(view)
        assert sorted(pins) == heads[-3:], "a restart of one's own pins nothing"

    in_world(main)


@pytest.mark.history("C11")
def test_C11_a_cut_waits_a_moment_for_a_close_that_is_on_its_way() -> None:
    async def main() -> None:
        async with start(new_store(), Node()) as session:
            handle, _ = await session.filesystem.create(ROOT_INODE, b"model.pt", 0o644, os.O_WRONLY, ACTOR)
            await session.filesystem.write(handle, 0, b"x" * 1000)
            await session.filesystem.flush(handle)

            async def release_soon() -> None:
                await trio.sleep(0.6)
                await session.filesystem.release(handle)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(release_soon)
                await publish(session)
                assert session.streamer.head.manifest.quiescent
            handle = await session.filesystem.open(
                (await session.filesystem.lookup(ROOT_INODE, b"model.pt")).ino, 1, ACTOR
            )
            await session.filesystem.write(handle, 0, b"y" * 1000)
            await session.filesystem.flush(handle)
            before = trio.current_time()
            await publish(session)
            assert [item.path for item in session.streamer.head.manifest.in_flight] == [b"model.pt"]
            assert trio.current_time() - before <= 2.0, "a child process may hold the file for ever"

    in_world(main)


@pytest.mark.history("L3")
@pytest.mark.parametrize("wish", ["number", "name", "time", "quiescent"])
def test_L3_going_back_is_the_next_manifest_and_keeps_names(wish: str) -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            for i in range(5):
                await put(session, b"f%d" % i, noise(i, 1_200_000))
            number = await session.snapshots.create(b"good")
            made_s = session.streamer.head.manifest.created_s
            await trio.sleep(5)
            await put(session, b"f1", noise(11))
            await session.filesystem.unlink(ROOT_INODE, b"f2")
            await put(session, b"new", noise(12))
            handle, _ = await session.filesystem.create(ROOT_INODE, b"open.pt", 0o644, os.O_WRONLY, ACTOR)
            await session.filesystem.write(handle, 0, b"half")
            head = await publish(session)
        wishes: dict[str, StateWish] = {
            "number": Numbered(ManifestNumber(number)),
            "name": Named(b"good"),
            "time": AtTime(made_s + 1),
            "quiescent": Quiescent(),
        }
        node = Node()
        async with start(store, node, settings=QUIET, at=wishes[wish], rng=random.Random(2)) as session:
            manifest = session.publisher.head.manifest
            assert manifest.number == head + 1
            await live_equals_published(session, store)
            for i in range(5):
                assert await read_at(session, b"f%d" % i) == noise(i, 1_200_000)
            assert {item.name for item in await listing(session)} == {b"f%d" % i for i in range(5)}
            assert [s.name for s in await session.snapshots.list()] == [b"good"]
            with session.workspace.kv.read() as view:
                assert head in retention.pins_in(view)
            await put(session, b"later", b"1")
            await publish(session)
        async with start(
            store, node, settings=QUIET, at=Numbered(ManifestNumber(head)), rng=random.Random(3)
        ) as session:
            assert await read_at(session, b"new") == noise(12)
            assert [item.torn for item in session.publisher.head.manifest.in_flight] == [True]
            await publish(session)
            assert [item.path for item in session.streamer.head.manifest.in_flight] == [b"open.pt"], "torn it stays"

    in_world(main)


@pytest.mark.history("L3")
def test_L3_a_state_whose_packs_are_condemned_or_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "RECENT_S", RECENT_S)

    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            await put(session, b"stays", noise(9))
            await publish(session)
            await put(session, b"a", noise(1))
            number = await publish(session)
            await put(session, b"a", noise(2))
            await publish(session)
            await trio.sleep(HOUR_S)
            await session.collector.collect()
            await publish(session)
        for round_ in range(2):
            with pytest.raises(BaseExceptionGroup) as caught:
                async with start(store, Node(), settings=QUIET, at=Numbered(ManifestNumber(number))):
                    raise AssertionError("mounted")
            assert caught.group_contains(UserError, match="no longer kept")
            async with start(store, Node(), settings=QUIET, at=Latest(), rng=random.Random(round_ + 5)) as session:
                assert await read_at(session, b"a") == noise(2)
                await collect_fully(session)
        async with published(store) as looking:
            await looking.verify((await looking.head()).manifest.number)

    in_world(main)


def test_going_back_refuses_a_cache_with_unpublished_changes() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node, settings=QUIET) as session:
            await put(session, b"a", b"1")
            number = await publish(session)
            await put(session, b"b", b"2")
        with pytest.raises(BaseExceptionGroup) as caught:
            async with start(store, node, settings=QUIET, at=Numbered(ManifestNumber(number))):
                raise AssertionError("mounted")
        assert caught.group_contains(UserError, match="not published")
        async with start(store, node, settings=QUIET) as session:
            assert await read_at(session, b"b") == b"2"

    in_world(main)


@pytest.mark.history("L12")
def test_L12_a_takeover_does_not_go_back_behind_an_answered_barrier() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=QUIET) as session:
            await put(session, b"notes.txt", b"1")
            quiet = await publish(session)
            handle, _ = await session.filesystem.create(ROOT_INODE, b"m.pt", 0o644, os.O_WRONLY, ACTOR)
            await session.filesystem.write(handle, 0, b"half")
            await put(session, b"notes.txt", b"2")
            number = await publish(session)
            assert not session.streamer.head.manifest.quiescent
        async with start(store, Node(), settings=QUIET, rng=random.Random(2)) as session:
            assert await read_at(session, b"notes.txt") == b"2"
            report = session.publisher.head.manifest.takeover
            assert report is not None
            assert report["served"] == number > quiet
            assert [item["path"] for item in report["left_out"]] == ["m.pt"]
            assert session.claimed.left_out[0].endswith(f"spotwarp cp test:m.pt DEST --at {number}")

    in_world(main)
