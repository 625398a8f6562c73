"""A full disk refuses one commit or one write: what was acknowledged stays, and publishing goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.core.requests import AttributeChange, Handle
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.session import Session
from tests.support.full_disk import Faults, FullData, FullKV
from tests.support.virtual import MANUAL, NEW, OLD, content, create, evict_everything, in_virtual_time, open_, published
from tests.support.world import ACTOR, FAST, Node, new_store, start

Change = Callable[[Session, Handle, Inode], Awaitable[object]]


async def overwrite(session: Session, handle: Handle, ino: Inode) -> None:
    await session.filesystem.write(handle, 0, NEW[:1000])


async def overwrite_and_append(session: Session, handle: Handle, ino: Inode) -> None:
    await session.filesystem.write(handle, 2 * BLOCK_BYTES - 500, NEW[:1000])


async def truncate(session: Session, handle: Handle, ino: Inode) -> None:
    await session.filesystem.setattr(ino, AttributeChange(size=BLOCK_BYTES // 2), None, ACTOR)


async def truncate_to_nothing(session: Session, handle: Handle, ino: Inode) -> None:
    await session.filesystem.setattr(ino, AttributeChange(size=0), None, ACTOR)


async def unlink(session: Session, handle: Handle, ino: Inode) -> None:
    await session.filesystem.release(handle)
    await session.filesystem.unlink(ROOT_INODE, b"f")


async def make(session: Session, handle: Handle, ino: Inode) -> None:
    await create(session, b"g", NEW)


CHANGES: list[Change] = [overwrite, overwrite_and_append, truncate, truncate_to_nothing, unlink, make]


@pytest.mark.promise("P-01")
@pytest.mark.promise("P-09")
@pytest.mark.parametrize("dirty", [True, False], ids=["dirty", "clean"])
@pytest.mark.parametrize("fault", ["commit 0", "commit 1", "commit 2", "commit 3", "pwrite 0"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_one_refusal_of_the_disk_ends_no_publishing(change: Change, fault: str, dirty: bool) -> None:
    """1. A request meets ENOSPC between two of its commits. 2. Space comes back. 3. The next cut must have a frame for
    every block that the map calls dirty; what a node takes over is what this one shows."""
    what, count = fault.split()

    async def main() -> None:
        store, faults = new_store(), Faults()
        node = Node(kv=FullKV(faults), data=FullData(faults))
        async with start(store, node, settings=MANUAL) as session:
            handle, ino = await create(session, b"f", OLD + OLD)
            if not dirty:
                await session.streamer.barrier()
            faults.left[what] = int(count)
            with suppress(OSError):
                await change(session, handle, ino)
            faults.left.clear()
            if change is unlink:
                await session.filesystem.symlink(ROOT_INODE, b"other", b"f", ACTOR)
                await session.filesystem.unlink(ROOT_INODE, b"other")
            with trio.fail_after(60):
                await session.streamer.barrier()
            names = await names_of(session)
            shown = {name: await content(session, name) for name in names}
            assert session.workspace.oldest_unpublished_s is None
            # And it goes on as if nothing had been.
            if b"f" in names:
                again, _ = await open_(session, b"f")
                await session.filesystem.write(again, 10, NEW[:10])
                shown[b"f"] = shown[b"f"][:10].ljust(10, b"\0") + NEW[:10] + shown[b"f"][20:]
                assert await content(session, b"f") == shown[b"f"]
                with trio.fail_after(60):
                    await session.streamer.barrier()
            evict_everything(session)
            for name, data in shown.items():
                assert await content(session, name) == data
            assert not session.workspace.dirty
        for name, data in shown.items():
            assert await published(store, name) == data

    in_virtual_time(main)


async def names_of(session: Session) -> list[bytes]:
    handle = await session.filesystem.opendir(ROOT_INODE, ACTOR)
    found = [item.name for item in await session.filesystem.readdir(handle, 0)]
    await session.filesystem.releasedir(handle)
    return found


@pytest.mark.promise("P-09")
@pytest.mark.promise("P-10")
@pytest.mark.parametrize("what", ["commit", "punch"])
def test_a_disk_that_stays_full_for_a_while_ends_no_mount(what: str) -> None:
    """A task of the daemon that meets ENOSPC must not take the mount, and every open file in it, along.

    1. Somebody else fills the disk. 2. Acknowledged packs, eviction, cuts and journals all meet ENOSPC for a minute.
    3. Reads and the mount go on. 4. There is room again: everything is published.
    """

    async def main() -> None:
        store, faults = new_store(), Faults()
        node = Node(kv=FullKV(faults), data=FullData(faults))
        small = replace(FAST, cache_bytes_max=4 * BLOCK_BYTES, cold_after_s=0.0, early_upload_period_s=0.05)
        async with start(store, node, settings=small) as session:
            handle, _ = await create(session, b"f", OLD + OLD)
            zeros, _ = await create(session, b"zeros", bytes(BLOCK_BYTES))
            await session.streamer.barrier()
            await session.filesystem.write(handle, 0, NEW)
            await session.filesystem.write(zeros, 0, b"x")
            await session.filesystem.write(zeros, 0, b"\0")
            faults.stays, faults.left[what] = True, 0
            await trio.sleep(60)
            assert faults.met > 0
            faults.left.clear()
            with trio.fail_after(60):
                await session.streamer.barrier()
            assert await content(session, b"f") == NEW + OLD
        assert await published(store, b"f") == NEW + OLD
        assert await published(store, b"zeros") == bytes(BLOCK_BYTES)

    in_virtual_time(main)
