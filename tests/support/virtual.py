"""Small helpers of the histories: one session after the other on memory, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio
from trio.testing import MockClock

from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Handle
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.memory import MemoryStore
from tests.support.world import ACTOR, FAST, Node, new_store, start

OLD, NEW = b"old " * (BLOCK_BYTES // 4), b"new " * (BLOCK_BYTES // 4)
MANUAL = replace(FAST, interval_s=1e6, cold_after_s=1e6, heartbeat_s=1e6)
"""Nothing is uploaded or published but what the test asks for."""
EAGER = replace(MANUAL, cold_after_s=0.0, early_upload_period_s=0.05, pack_linger_s=0.05)
"""Dirty blocks go up at once; nothing is published."""


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


async def create(session: Session, name: bytes, data: bytes = b"") -> tuple[Handle, Inode]:
    handle, node = await session.filesystem.create(ROOT_INODE, name, 0o644, os.O_RDWR, ACTOR)
    if data:
        await session.filesystem.write(handle, 0, data)
    return handle, node.ino


async def open_(session: Session, name: bytes, flags: int = os.O_RDWR) -> tuple[Handle, Inode]:
    node = await session.filesystem.lookup(ROOT_INODE, name)
    return await session.filesystem.open(node.ino, flags, ACTOR), node.ino


async def content(session: Session, name: bytes) -> bytes:
    handle, ino = await open_(session, name, os.O_RDONLY)
    size = (await session.filesystem.getattr(ino)).record.size
    parts = [await session.filesystem.read(handle, at, BLOCK_BYTES) for at in range(0, size, BLOCK_BYTES)]
    await session.filesystem.release(handle)
    return b"".join(parts)


async def published(store: ObjectStore, name: bytes) -> bytes:
    """What another node gets."""
    async with start(store, Node()) as session:
        return await content(session, name)


async def store_with(name: bytes, data: bytes) -> MemoryStore:
    store = new_store()
    async with start(store, Node()) as session:
        await create(session, name, data)
        await session.streamer.barrier()
    return store


def evict_everything(session: Session) -> None:
    session.budget.evict(1 << 60)
