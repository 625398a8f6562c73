"""Does a start that waits for its permit follow the head through outages, and is one permit worth one claim?"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio

from spotwarp_fs.core.errors import Fenced, UserError
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.types import ManifestNumber, WriterEpoch
from spotwarp_fs.engine.node_note import RentedNode, node_of
from spotwarp_fs.engine.publish import find_head
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.scoped import Scoped
from tests.support.command_line import write
from tests.support.world import WORKSPACE_ID, Node, new_store, start


class Given:
    """A permit that the test gives."""

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = epoch
        self.prefetched_numbers: list[ManifestNumber | None] = []
        self.ready = trio.Event()

    def prefetched(self, number: ManifestNumber | None) -> None:
        self.prefetched_numbers.append(number)
        self.ready.set()

    def granted(self) -> WriterEpoch | None:
        return None if self.epoch is None else WriterEpoch(self.epoch)


async def head_of(store: MemoryStore) -> tuple[int, int, dict[str, str]]:
    found = await find_head(Scoped(store, workspace_root("test", WORKSPACE_ID)))
    assert found is not None
    manifest = found[0].manifest
    return manifest.number, manifest.writer_epoch, node_of(manifest)


async def claimed(store: MemoryStore, permit: Given, name: str, won: list[str], seed: int) -> None:
    """Claim, look whether everything is there, and go."""
    try:
        async with start(
            store, Node(), permit=permit, node_note=RentedNode(name, ""), rng=random.Random(seed)
        ) as session:
            won.append(name)
            assert session.workspace.files == 1
    except* Fenced:
        won.append(f"not {name}")


@pytest.mark.parametrize("rounds", range(5))
async def test_of_many_with_the_same_permit_one_wins(autojump_clock: object, rounds: int) -> None:
    store = new_store()
    async with start(store, Node()) as session:
        await write(session, "weights", b"w" * 1000)
        await session.streamer.barrier()
    before = await head_of(store)
    permits, won = [Given() for _ in range(4)], list[str]()
    async with trio.open_nursery() as nursery:
        for number, permit in enumerate(permits):
            nursery.start_soon(claimed, store, permit, f"n{number}", won, 10 * rounds + number)
        for permit in permits:
            await permit.ready.wait()
        await trio.sleep(60)
        assert await head_of(store) == before, "whoever waits publishes nothing"
        for permit in permits:
            permit.epoch = before[1] + 1
    winners = [name for name in won if not name.startswith("not")]
    assert len(winners) == 1
    assert len(won) == 4
    assert (await head_of(store))[1:] == (before[1] + 1, {"intent": winners[0], "instance": ""})


async def test_who_waits_follows_a_living_writer_and_serves_its_newest_state(autojump_clock: object) -> None:
    store, permit = new_store(), Given()
    names: list[Sequence[str]] = []

    async def wait() -> None:
        async with start(store, Node(), permit=permit, rng=random.Random(2)) as session:
            assert session.workspace.files == 31
            names.append(["served"])

    async with trio.open_nursery() as nursery, start(store, Node()) as session:
        await write(session, "first", b"1")
        await session.streamer.barrier()
        nursery.start_soon(wait)
        await permit.ready.wait()
        for number in range(30):
            await write(session, f"file{number}", b"x" * number)
            await session.streamer.barrier()
            await trio.sleep(0.7)
        permit.epoch = (await head_of(store))[1] + 1
        await session.fenced.wait()
    assert names


async def test_a_permit_for_what_is_taken_writes_nothing(autojump_clock: object) -> None:
    store = new_store()
    async with start(store, Node()) as session:
        await write(session, "weights", b"w")
        await session.streamer.barrier()
    before = await head_of(store)
    with pytest.RaisesGroup(Fenced, flatten_subgroups=True):
        async with start(store, Node(), permit=Given(before[1])):
            pass
    assert await head_of(store) == before


async def test_a_permit_is_given_for_a_workspace_that_another_node_has_just_made(autojump_clock: object) -> None:
    store, permit, won = new_store(), Given(), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(claimed, store, permit, "late", won, 3)
        await permit.ready.wait()
        assert permit.prefetched_numbers == [None]
        async with start(store, Node(), permit=Given(1)) as session:
            await write(session, "weights", b"w")
            await session.streamer.barrier()
        await trio.sleep(5)
        permit.epoch = 2
    assert won == ["late"]
    assert (await head_of(store))[1] == 2


async def test_the_note_goes_with_the_session_that_has_it(autojump_clock: object) -> None:
    store = new_store()
    node = Node()
    async with start(store, node, permit=Given(1), node_note=RentedNode("a-1", "i-1")) as session:
        await write(session, "weights", b"w")
        await session.streamer.barrier()
    assert (await head_of(store))[2] == {"intent": "a-1", "instance": "i-1"}
    async with start(store, node, rng=random.Random(5)) as session:
        assert (await head_of(store))[2] == {}, "an own restart that is nobody's node drops it at once"


def test_what_is_no_permit_raises() -> None:
    class Wrong(Given):
        def granted(self) -> WriterEpoch | None:
            raise UserError("no permit")

    async def main() -> None:
        async with start(new_store(), Node(), permit=Wrong()):
            pass

    with pytest.RaisesGroup(UserError, flatten_subgroups=True):
        trio.run(main)
