"""Does a program that resumes from the newest name always find a complete checkpoint on a fresh node?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import retention
from spotwarp_fs.core.records import BlockState
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.store.memory import MemoryStore
from tests.sim.test_skeleton import in_world
from tests.support.published import published
from tests.support.training import Trainer, names, newest_checkpoint, read_at
from tests.support.world import FAST, Node, new_store, start

SETTINGS = replace(FAST, interval_s=1.0, rebase_manifests_max=12)


async def train_and_die(store: MemoryStore, seed: int, *, seconds: float, settings: EngineSettings) -> Trainer:
    rng = random.Random(seed)
    trainer = None
    with trio.move_on_after(seconds):
        async with start(store, Node(), rng=rng, settings=settings) as session:
            trainer = Trainer(session, rng)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trainer.run)
                while rng.random() < 0.3:
                    await trio.sleep(rng.random() * seconds)
                    await session.streamer.barrier()
    assert trainer is not None
    return trainer


async def live_equals_published(session: Session, store: MemoryStore) -> None:
    """The map that the node serves from is the state that its takeover published."""
    head = session.publisher.head.manifest
    with session.workspace.kv.read() as view:
        problems = check(view)
        live = {key: value for key, value in view.scan(b"a", b"{")}
    assert not problems
    async with published(store) as looking:
        rows = await looking.rows(head.number)
    tree = {key: value for key, value in live.items() if key[:1] != b"b"}
    assert tree == {key: value for key, value in rows.items() if key[:1] != b"b"}
    for key, value in live.items():
        if key[:1] == b"b" and value:
            frame = BlockState.decode(value).frame
            assert frame is not None
            assert rows[key] == frame.encode()
    ws = session.workspace
    assert (head.files, head.directories, head.logical_bytes) == (ws.files, ws.directories, ws.logical_bytes)


async def check_report(session: Session, store: MemoryStore) -> None:
    """What the takeover says it left out is what was half done in the head, and nothing of it is served half done."""
    head = session.publisher.head.manifest
    assert head.takeover is not None
    told = {item["path"]: item for item in head.takeover["left_out"]}
    async with published(store) as looking:
        before = (await looking.manifest(head.takeover["from_number"])).manifest
        listed = {item.path.decode() for item in before.in_flight}
        outermost = {path for path in listed if not any(path.startswith(other + "/") for other in listed)}
        assert outermost <= told.keys(), (outermost, told)
        for path, item in told.items():
            there = (await looking.manifest(item["at"])).manifest
            assert path in {half.path.decode() for half in there.in_flight}
            if item["source"] is not None:
                source = (await looking.manifest(item["source"])).manifest
                assert not retention.touches(source.in_flight, path.encode())
    assert head.in_flight == ()
    for path in told:
        assert any(path in line for line in session.claimed.left_out)


@pytest.mark.promise("P-05")
@pytest.mark.history("C11", "C12")
@pytest.mark.parametrize("max_age_s", [900.0, 3.0])
@pytest.mark.parametrize("seed", range(16))
def test_the_newest_name_is_a_complete_checkpoint_whenever_the_node_is_lost(seed: int, max_age_s: float) -> None:
    seconds = 2.0 + random.Random(seed).random() * 45.0
    settings = replace(SETTINGS, atomic_max_age_s=max_age_s)

    async def main() -> None:
        store = new_store()
        trainer = await train_and_die(store, seed, seconds=seconds, settings=settings)
        async with start(store, Node(), settings=settings, rng=random.Random(seed + 1)) as session:
            await live_equals_published(session, store)
            await check_report(session, store)
            found = await newest_checkpoint(session)
            if trainer.safe:
                assert found is not None, f"{sorted(trainer.safe)} were published whole"
            if found is not None:
                log = await read_at(session, b"train.log")
                assert b"".join(b"step %d\n" % int(line.split()[1]) for line in log.splitlines()) == log
            await trio.sleep(5)
            await session.streamer.barrier()
        async with start(store, Node(), settings=settings, rng=random.Random(seed + 2)) as session:
            assert await newest_checkpoint(session) == found
            assert "train.log" in await names(session) or found is None

    in_world(main)
