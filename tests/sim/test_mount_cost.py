"""Does a mount on a fresh node cost names and not bytes, an open its own block map, and a read its own blocks?"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

import pytest
import trio

from spotwarp_fs.core.frames import digest
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.ports import Lane, Stored
from spotwarp_fs.core.records import BlockState, FrameRef, FrameState, InodeRecord, block_key, inode_key
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ObjectKey, WriterEpoch
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.faults import FaultStore
from spotwarp_fs.store.memory import MemoryStore
from tests.support.virtual import MANUAL, content, create, in_virtual_time, open_
from tests.support.world import ACTOR, Node, new_store, start

NAMES = 2_000
LARGE_EVERY = 20
BLOCKS = 200
"""Of each large file: its map is larger than all names of its directory."""
SETTINGS = replace(MANUAL, rebase_manifests_max=1)


@dataclass
class Fetched:
    requests: int = 0
    bytes: int = 0


class Counting(FaultStore):
    """Counts what is read."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner, random.Random(1))
        self.fetched = Fetched()

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        found = await super().get(key, start=start, length=length, lane=lane)
        self.fetched.requests += 1
        self.fetched.bytes += len(found.body)
        return found

    def taken(self) -> Fetched:
        """What was read since this was last asked."""
        now, self.fetched = self.fetched, Fetched()
        return now


async def many_names(session: Session, blocks: int) -> None:
    """Every twentieth name is a file of so many blocks, whose frames are invented: only their records count."""
    ws = session.workspace
    for number in range(NAMES):
        handle, ino = await create(session, b"file-%05d" % number)
        await session.filesystem.release(handle)
        if number % LARGE_EVERY:
            continue
        with ws.change() as recorder:
            for block in range(blocks):
                name = digest(b"%d %d" % (number, block))
                pack = pack_id(WriterEpoch(1), name[:8])
                state = BlockState(False, FrameState.UNPUBLISHED, FrameRef(pack, 24, 900_000, BLOCK_BYTES, name))
                recorder.put(block_key(ino, BlockIndex(block)), state.encode())
            record = InodeRecord.decode(recorder.get(inode_key(ino)) or b"")
            recorder.put(inode_key(ino), replace(record, size=blocks * BLOCK_BYTES).encode())


async def based(session: Session) -> None:
    """Publish until everything lies in a base."""
    for number in range(4):
        await create(session, b"late-%d" % number)
        await session.streamer.barrier()
        await trio.sleep(1)
    assert session.streamer.head.manifest.base_number >= 2


async def mounted(blocks: int) -> tuple[Fetched, Fetched, Fetched, int]:
    """Make a workspace and mount it elsewhere; what the mount, an open and a second open fetched, and its size."""
    inner = new_store()
    async with start(inner, Node(), settings=SETTINGS) as session:
        await many_names(session, blocks)
        await based(session)
    store = Counting(inner)
    async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
        assert session.workspace.files == NAMES + 4
        mount = store.taken()
        ino = (await session.filesystem.lookup(ROOT_INODE, b"file-%05d" % (NAMES // 2))).ino
        await session.filesystem.open(ino, os.O_RDONLY, ACTOR)
        await session.maps.load(ino)
        opened = store.taken()
        await session.filesystem.open(ino, os.O_RDONLY, ACTOR)
        await session.maps.load(ino)
        return mount, opened, store.taken(), session.workspace.logical_bytes


@pytest.mark.promise("P-07")
def test_a_mount_fetches_as_much_whatever_the_files_hold() -> None:
    async def main() -> None:
        small, _, _, small_bytes = await mounted(1)
        large, opened, again, large_bytes = await mounted(BLOCKS)
        assert large_bytes == BLOCKS * small_bytes
        assert large_bytes > 19 << 30
        assert large.requests <= small.requests + 2
        assert large.bytes < 1.5 * small.bytes
        every_map_bytes = NAMES // LARGE_EVERY * BLOCKS * 56
        assert 0 < opened.bytes < every_map_bytes, "one file's map lies in a section or two"
        assert again == Fetched(), "a map is loaded once"

    in_virtual_time(main)


@pytest.mark.promise("P-07")
def test_a_read_fetches_only_the_blocks_it_needs() -> None:
    data = random.Random(3).randbytes(12 * BLOCK_BYTES)

    async def main() -> None:
        inner = new_store()
        async with start(inner, Node(), settings=MANUAL) as session:
            await create(session, b"f", data)
            await create(session, b"other", data[::-1])
            await session.streamer.barrier()
        store = Counting(inner)
        async with start(store, Node(), rng=random.Random(2), settings=MANUAL) as session:
            handle, _ = await open_(session, b"f", os.O_RDONLY)
            store.taken()
            at = 7 * BLOCK_BYTES + 4_000
            assert await session.filesystem.read(handle, at, 4_096) == data[at : at + 4_096]
            one = store.taken()
            assert BLOCK_BYTES <= one.bytes < 1.1 * BLOCK_BYTES
            assert await session.filesystem.read(handle, at + 5_000, 4_096) == data[at + 5_000 : at + 9_096]
            assert store.taken() == Fetched(), "the block is here already"
            at = 4 * BLOCK_BYTES - 100
            assert await session.filesystem.read(handle, at, 200) == data[at : at + 200]
            assert store.taken().bytes < 2.1 * BLOCK_BYTES
            assert await content(session, b"f") == data

    in_virtual_time(main)
