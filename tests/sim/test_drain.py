"""Does a drain with little time save what nearly was saved, and never say more than it knows?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core.collection import condemned_key, condemned_row
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, ManifestNumber, ObjectKey, WriterEpoch
from spotwarp_fs.engine.workspace import Draining
from spotwarp_fs.store.memory import MemoryStore
from tests.support.overload import Uplink
from tests.support.virtual import MANUAL, NEW, OLD, content, create, in_virtual_time, published
from tests.support.world import Node, new_store, start

LINK_BYTES_PER_S = 100_000.0
FIRST, SECOND = random.Random(1).randbytes(2 * BLOCK_BYTES), random.Random(2).randbytes(12 * BLOCK_BYTES)
FIRST_S = len(FIRST) / LINK_BYTES_PER_S
SETTINGS = replace(MANUAL, interval_s=1.0)


class SilentAtTheEnd(Uplink):
    """The next manifest arrives, and nothing is heard of the store after that."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, 1e9)
        self.armed = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        info = await super().put_if_absent(key, body, lane=lane)
        if self.armed and "/manifests/" in key:
            self.dead = True
            await trio.sleep_forever()
        return info


@pytest.mark.promise("P-12")
@pytest.mark.history("H9")
def test_H9_the_cut_that_nearly_was_saved_is_finished_first() -> None:
    async def main() -> None:
        store = new_store()
        async with start(Uplink(store, LINK_BYTES_PER_S), Node(), settings=SETTINGS) as session:
            await create(session, b"first", FIRST)
            await trio.sleep(1 + FIRST_S / 2)
            assert session.workspace.cut is not None, "the first cut is on its way"
            await create(session, b"second", SECOND)
            drained = await session.drain(trio.current_time() + FIRST_S)
            assert not drained.saved
            assert drained.unsaved_bytes >= len(SECOND)
            assert drained.unsaved_changes > 0
            assert drained.reason == "the deadline came first"
            head = session.streamer.head.manifest.number
            assert drained.number == head
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            assert await content(session, b"first") == FIRST
            with pytest.raises(Refused):
                await session.filesystem.lookup(ROOT_INODE, b"second")

    in_virtual_time(main)


@pytest.mark.promise("P-12")
@pytest.mark.history("H9")
def test_H9_then_the_newest_that_fits() -> None:
    async def main() -> None:
        store = new_store()
        async with start(Uplink(store, LINK_BYTES_PER_S), Node(), settings=SETTINGS) as session:
            await create(session, b"first", FIRST)
            await trio.sleep(1 + FIRST_S / 2)
            await create(session, b"superseded", SECOND)
            await session.filesystem.unlink(ROOT_INODE, b"superseded")
            await create(session, b"newest", NEW)
            drained = await session.drain(trio.current_time() + 3 * FIRST_S)
            assert drained.saved
            assert drained.number == session.streamer.head.manifest.number
        assert await published(store, b"first") == FIRST
        assert await published(store, b"newest") == NEW

    in_virtual_time(main)


@pytest.mark.promise("P-12")
def test_writes_are_accepted_until_the_deadline_and_are_not_said_to_be_saved() -> None:
    async def main() -> None:
        store = new_store()
        async with start(Uplink(store, LINK_BYTES_PER_S), Node(), settings=MANUAL) as session:
            await create(session, b"first", FIRST)
            deadline_s = trio.current_time() + FIRST_S + 5
            async with trio.open_nursery() as nursery:

                async def write_on() -> None:
                    await trio.sleep(FIRST_S / 2)
                    await create(session, b"meanwhile", NEW)

                nursery.start_soon(write_on)
                drained = await session.drain(deadline_s)
            assert not drained.saved
            assert drained.reason == "more was written meanwhile"
            assert drained.unsaved_bytes >= len(NEW)
            assert (await session.drain(deadline_s)).saved, "and there was time for it"
        assert await published(store, b"meanwhile") == NEW

    in_virtual_time(main)


@pytest.mark.promise("P-12")
def test_the_collector_changes_nothing_between_the_last_cut_of_a_drain_and_its_answer() -> None:
    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=MANUAL) as session:
            await create(session, b"f", NEW)
            refused, row = list[Draining](), condemned_row(ManifestNumber(1), 0.0)
            pack = pack_id(WriterEpoch(1), bytes(8))

            def keep_books(*_: object) -> None:
                try:
                    session.collector._put_rows(lambda _: {condemned_key(pack): row})
                except Draining as error:
                    refused.append(error)

            session.streamer.on_published.append(keep_books)
            drained = await session.drain(trio.current_time() + 60)
            assert drained.saved, drained.reason
            assert len(refused) == 1
            keep_books()
            assert len(refused) == 1, "the drain is over"
            assert session.workspace.oldest_unpublished_s is not None
        assert await published(store, b"f") == NEW

    in_virtual_time(main)


@pytest.mark.promise("P-12")
def test_a_drain_in_an_outage_is_saved_if_nothing_was_left_to_save() -> None:
    async def main() -> None:
        uplink = SilentAtTheEnd(new_store())
        async with start(uplink, Node(), settings=SETTINGS) as session:
            await create(session, b"f", NEW)
            await trio.sleep(60)
            assert session.workspace.oldest_unpublished_s is None
            uplink.dead = True
            drained = await session.drain(trio.current_time() + 20)
            assert drained.saved, drained.reason
            assert drained.number == session.streamer.head.manifest.number
            await create(session, b"g", NEW)
            assert not (await session.drain(trio.current_time() + 20)).saved

    in_virtual_time(main)


@pytest.mark.promise("P-12")
def test_an_outcome_that_is_unknown_at_the_deadline_is_not_saved() -> None:
    async def main() -> None:
        store = new_store()
        uplink = SilentAtTheEnd(store)
        async with start(uplink, Node(), settings=MANUAL) as session:
            await create(session, b"f", OLD)
            uplink.armed = True
            drained = await session.drain(trio.current_time() + 20)
            assert not drained.saved
            assert drained.unsaved_changes > 0
            assert drained.unsaved_bytes > 0, "what is uploaded and not named is not saved"
        assert await published(store, b"f") == OLD, "it was published all the same"

    in_virtual_time(main)
