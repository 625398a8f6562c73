"""Does a change ask for its cut as soon as its path says, and does the cut then take everything (C18, S8)?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core.policies import Policies
from spotwarp_fs.engine.session import Session
from tests.sim.test_scratch import Shell, play
from tests.support.world import FAST, Node, new_store, start

POLICIES = Policies.build(intervals={"logs": 2.0, "*.db": 100.0})
SETTINGS = replace(FAST, interval_s=30.0)


async def published_after(session: Session) -> float:
    """Seconds of trio's clock until the next manifest."""
    number, begun = session.streamer.head.manifest.number, trio.current_time()
    while session.streamer.head.manifest.number == number:
        await trio.sleep(0.1)
    return trio.current_time() - begun


async def prepared(session: Session) -> Shell:
    shell = Shell(session)
    await shell.mkdirs(b"logs/deep")
    await shell.mkdirs(b"runs")
    for path in (b"logs/deep/out", b"model", b"x.db", b"x.db-wal"):
        await shell.write(path, b"first")
    await session.streamer.barrier()
    return shell


def test_each_path_has_its_own_interval() -> None:
    async def main() -> None:
        async with start(new_store(), Node(), settings=SETTINGS, policies=POLICIES) as session:
            shell = await prepared(session)
            await shell.write(b"model", b"second")
            assert 29 < await published_after(session) < 33
            await shell.write(b"logs/deep/out", b"second")
            assert 1.5 < await published_after(session) < 4
            await shell.write(b"x.db", b"second")
            assert 95 < await published_after(session) < 105

    play(main)


@pytest.mark.history("C18")
def test_the_most_urgent_change_takes_the_others_along() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=SETTINGS, policies=POLICIES) as session:
            shell = await prepared(session)
            await shell.write(b"x.db", b"later")
            await trio.sleep(10)
            await shell.write(b"x.db-wal", b"later")
            await shell.write(b"logs/deep/out", b"later")
            assert await published_after(session) < 4
        async with start(store, Node()) as session:
            for path in (b"x.db", b"x.db-wal", b"logs/deep/out"):
                assert await Shell(session).read(path) == b"later"

    play(main)


def test_a_file_that_is_moved_has_the_interval_of_its_new_place() -> None:
    async def main() -> None:
        async with start(new_store(), Node(), settings=SETTINGS, policies=POLICIES) as session:
            shell = await prepared(session)
            await shell.rename(b"logs", b"runs/old")
            await session.streamer.barrier()
            await shell.write(b"runs/old/deep/out", b"second")
            assert 29 < await published_after(session) < 33

    play(main)
