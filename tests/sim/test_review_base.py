"""Where the block maps lie that nobody has opened yet, when a daemon dies while the base changes."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core import sections
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.layout import pack_key
from spotwarp_fs.core.manifests import decode
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode, ObjectKey
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.memory import MemoryStore
from tests.support.sim_node import SimNode
from tests.support.sim_world import ROOT
from tests.support.virtual import MANUAL, OLD, content, create, in_virtual_time
from tests.support.world import ACTOR, Node, new_store, start

REBASING = replace(MANUAL, rebase_manifests_max=2)


class DyingStore(MemoryStore):
    """Creates the first manifest that names another base than *known*, and never answers."""

    known: FrameRef | None = None
    armed = False

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        info = await super().put_if_absent(key, body, lane=lane)
        if self.armed and "/manifests/" in key and decode(body).base != self.known:
            self.armed = False
            await trio.sleep_forever()
        return info


async def publish_until_rebased(session: Session) -> FrameRef:
    before = session.streamer.head.manifest.base
    while session.streamer.head.manifest.base == before:
        await create(session, b"more-" + os.urandom(6).hex().encode(), b"x")
        await session.streamer.barrier()
        await trio.sleep(1)
    base = session.streamer.head.manifest.base
    assert base is not None
    return base


@pytest.mark.promise("P-01")
@pytest.mark.promise("P-07")
def test_a_kill_between_the_manifest_and_the_note_of_its_base_loses_no_block_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node must not look for block maps in a base that collection has taken away.

    1. B takes over; the block map of `f` lies in base M. 2. B publishes the manifest that names base M', and is killed
    before it has noted that. 3. It starts again and serves. 4. Base M is condemned and deleted. 5. `f` is opened.
    """
    monkeypatch.setattr(sections, "INLINE_BYTES_MAX", 0)
    store = DyingStore(now=new_store()._now)

    async def main() -> None:
        async with start(store, Node(), settings=REBASING) as session:
            await create(session, b"f", OLD)
            await publish_until_rebased(session)
            store.known = await publish_until_rebased(session)
        node = SimNode("b")
        async with start(store, node, settings=REBASING) as session:
            assert session.streamer.head.manifest.base == store.known
            store.armed = True
            with trio.move_on_after(120):
                await publish_until_rebased(session)
            assert not store.armed
        async with start(store, node.restarted(), settings=MANUAL) as session:
            head = session.streamer.head.manifest
            assert head.base is not None
            assert store.known is not None
            assert head.base != store.known
            assert head.base.pack != store.known.pack
            await store.delete([ObjectKey(ROOT + pack_key(store.known.pack))])
            assert await content(session, b"f") == OLD

    in_virtual_time(main)


SLOW_GETS = FaultSchedule(slow=1.0, slow_s=5.0, methods=frozenset({Method.GET}))


async def opened_and_read(session: Session, ino: Inode) -> None:
    handle = await session.filesystem.open(ino, os.O_RDONLY, ACTOR)
    assert await session.filesystem.read(handle, 0, BLOCK_BYTES) == OLD
    await session.filesystem.release(handle)


async def truncated(session: Session, ino: Inode) -> None:
    with pytest.raises(Refused, match="does not exist"):
        await session.filesystem.setattr(ino, AttributeChange(size=BLOCK_BYTES), None, ACTOR)


@pytest.mark.promise("P-01")
@pytest.mark.promise("P-07")
@pytest.mark.parametrize("request_", [opened_and_read, truncated])
def test_a_file_that_loses_its_last_name_while_its_block_map_is_on_its_way_leaves_nothing(
    request_: Callable[[Session, Inode], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. `f` is opened, and its block map is fetched. 2. `f` is unlinked. 3. The map arrives.

    An open waits with the file in its hand, and serves it as any unlinked file. Naive: the inode is reaped at 2, and 3
    brings the records of its blocks back, under a number that nothing else knows.
    """
    monkeypatch.setattr(sections, "INLINE_BYTES_MAX", 0)
    store = new_store()

    async def main() -> None:
        async with start(store, Node(), settings=REBASING) as session:
            await create(session, b"f", OLD)
            await publish_until_rebased(session)
        network = FaultStore(store, random.Random(1))
        async with start(network, Node(), settings=MANUAL) as session:
            ino = (await session.filesystem.lookup(ROOT_INODE, b"f")).ino
            assert session.maps.needs_loading(ino)
            network.schedule = SLOW_GETS
            async with trio.open_nursery() as nursery:
                nursery.start_soon(request_, session, ino)
                await trio.sleep(1)
                await session.filesystem.unlink(ROOT_INODE, b"f")
            with session.workspace.kv.read() as view:
                assert check(view) == []

    in_virtual_time(main)
