"""Helpers for worlds in which packs are collected: files by name, time that passes, and what the store holds."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import trio

from spotwarp_fs.core.layout import PACKS_PREFIX, pack_of, workspace_root
from spotwarp_fs.core.packs import read_index
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.records import BLOCK_TABLE, FrameRef
from spotwarp_fs.core.types import ROOT_INODE, ObjectKey, PackId
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.scoped import Scoped
from tests.support.published import published
from tests.support.world import ACTOR, FAST, WORKSPACE_ID

RECENT_S = 120.0
"""Stands for the hour in which every state stays, so that worlds need not simulate hours second by second."""
SLOW_TASKS = replace(
    FAST, heartbeat_s=60.0, early_upload_period_s=5.0, cold_after_s=1.0, pack_linger_s=20.0, collect_first_s=1e12,
    grace_s=30.0, retain_recent_s=RECENT_S,
)  # fmt: skip
"""For worlds in which hours pass: nothing runs by itself but cuts."""
QUIET = replace(SLOW_TASKS, interval_s=1e12)
"""Cuts at barriers only."""
HOUR_S = RECENT_S + 10.0


def noise(seed: int, size: int = 60_000) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


async def put(session: Session, name: bytes, data: bytes) -> None:
    """Write a file in place of what had the name."""
    if any(item.name == name for item in await listing(session)):
        await session.filesystem.unlink(ROOT_INODE, name)
    handle, _ = await session.filesystem.create(ROOT_INODE, name, 0o644, os.O_WRONLY, ACTOR)
    for at in range(0, len(data), 1 << 17):
        await session.filesystem.write(handle, at, data[at : at + (1 << 17)])
    await session.filesystem.release(handle)


async def listing(session: Session) -> list:  # type: ignore[type-arg]
    handle = await session.filesystem.opendir(ROOT_INODE, ACTOR)
    found = list(await session.filesystem.readdir(handle, 0))
    await session.filesystem.releasedir(handle)
    return found


async def publish(session: Session) -> int:
    """Publish everything."""
    return await session.streamer.barrier()


async def collect_fully(session: Session) -> dict[str, int]:
    """Condemn, publish, let the grace pass, delete."""
    first = await session.collector.collect()
    await publish(session)
    await trio.sleep(session.workspace.settings.grace_s + 1)
    second = await session.collector.collect()
    await publish(session)
    return {"condemned": first["condemned_packs"], "deleted": second["deleted_packs"], "repacked": first["repacked"]}


def scoped(store: ObjectStore) -> Scoped:
    return Scoped(store, workspace_root("test", WORKSPACE_ID))


async def packs(store: ObjectStore) -> dict[PackId, int]:
    """What the store holds."""
    found = {}
    async for info in scoped(store).list_objects(PACKS_PREFIX):
        pack = pack_of(info.key)
        assert pack is not None
        found[pack] = info.size_bytes
    return found


async def data_bytes(store: ObjectStore) -> int:
    """Bytes of packs that hold data frames (metadata frames are recognised by nobody but roots: they are small)."""
    total = 0
    for pack in await packs(store):
        body = (await scoped(store).get(ObjectKey(f"{PACKS_PREFIX}{pack[9:11]}/{pack}"))).body
        if any(ref.raw_bytes >= 50_000 for ref in read_index(body)):
            total += len(body)
    return total


async def reached_bytes(store: ObjectStore, number: int) -> int:
    """Stored bytes of the distinct frames of a state."""
    async with published(store) as looking:
        rows = await looking.rows(number)
    refs = {value for key, value in rows.items() if key[:1] == BLOCK_TABLE}
    return sum(FrameRef.decode(ref).stored_bytes for ref in refs)


async def verify_retained(session: Session, store: ObjectStore) -> int:
    """Every state that has to stay can be read to the last frame; returns how many frames that were."""
    await session.history.complete.wait()
    with session.workspace.kv.read() as view:
        keep = session.history.retained(view)
    frames = 0
    async with published(store) as looking:
        for number in sorted(keep):
            frames += await looking.verify(number)
    return frames
