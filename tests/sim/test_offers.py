"""Frames for bytes that the map does not have yet (the directory form): shared, held, let go, given up."""

from __future__ import annotations

import pytest
import trio

from spotwarp_fs.core.frames import digest
from spotwarp_fs.engine.jobs import Offer
from spotwarp_fs.engine.session import Session
from tests.support.virtual import MANUAL, NEW, OLD, create, in_virtual_time
from tests.support.world import Node, new_store, start


async def offered(session: Session, *contents: bytes) -> list[Offer]:
    offers = [await session.sealer.offer(raw, digest(raw)) for raw in contents]
    assert await session.sealer.answered(offers)
    return offers


def test_equal_offers_and_known_blocks_share_a_frame() -> None:
    async def main() -> None:
        async with start(new_store(), Node(), settings=MANUAL) as session:
            await create(session, b"f", OLD)
            await session.streamer.barrier()
            sent = session.sealer.bytes_sealed
            one, two, three = await offered(session, NEW, NEW, OLD)
            assert one.frame == two.frame
            assert three.frame is not None
            assert three.frame.digest == digest(OLD)
            assert session.sealer.frames_deduplicated >= 1
            assert session.sealer.bytes_sealed - sent < 2 * len(NEW)

    in_virtual_time(main)


@pytest.mark.promise("P-13")
@pytest.mark.history("C9")
def test_C9_a_frame_that_is_on_its_way_into_the_map_is_held_across_cuts_and_collections() -> None:
    """1. A large file is read for an hour; its first frames are in the store. 2. Other changes are published meanwhile.

    3. The collector looks: nothing names the packs. Naive: they are condemned, and the file then refers to them.
    """

    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=MANUAL) as session:
            (offer,) = await offered(session, NEW)
            assert offer.frame is not None
            pack = offer.frame.pack
            for number in range(2):
                await create(session, b"other%d" % number, OLD)
                await session.streamer.barrier()
                await trio.sleep(2 * session.workspace.settings.grace_s)
                await session.collector.collect()
            assert pack in session.sealer.unnamed
            assert any(str(pack) in key for key in store._objects), "the pack is still there"
            session.sealer.let_go([offer])
            for number in range(2, 5):
                await create(session, b"other%d" % number, OLD)
                await session.streamer.barrier()
                await trio.sleep(2 * session.workspace.settings.grace_s)
                await session.collector.collect()
            assert not any(str(pack) in key for key in store._objects), "nobody wants it any more"

    in_virtual_time(main)


def test_what_is_not_wanted_any_more_holds_nothing() -> None:
    async def main() -> None:
        async with start(new_store(), Node(), settings=MANUAL) as session:
            offer = await session.sealer.offer(NEW, digest(NEW))
            session.sealer.let_go([offer])
            with trio.fail_after(60):
                await offer.done.wait()
            assert offer.frame is None
            assert not session.sealer._held

    in_virtual_time(main)
