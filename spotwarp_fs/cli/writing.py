"""A short writer session without a mount: claim, change, publish once, release.

Invariant: it refuses while another writer shows signs of life, unless told to take over; it publishes only when asked,
so that no state holds half of what it does; and its temporary directory goes with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from spotwarp_fs.cli import output
from spotwarp_fs.cli.mounts import is_alive
from spotwarp_fs.cli.reading import MAP_BYTES
from spotwarp_fs.cli.stores import find_workspace, open_plain_store, open_store_of
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.heartbeat import Writer, live_writer, read_beat
from spotwarp_fs.engine.publish import find_head
from spotwarp_fs.engine.session import Session, SessionPorts, serve
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.states import Latest
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.disk import disk_free_bytes
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.memory import MemoryJournal
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.local.workers import ThreadWorkers

if TYPE_CHECKING:
    from spotwarp_fs.cli.settings import Settings

CACHE_BYTES = 2 << 30
GOODBYE_S = 5.0
PATIENCE_S = 7 * 86_400.0
"""A tool waits for a slow store for as long as its user does."""


@dataclass(frozen=True, slots=True)
class WriterWish:
    """What a short session is for."""

    workspace: str
    doing: str
    """Stands where a mount has its mountpoint, in the refusal that somebody else gets to see meanwhile."""
    create: bool = False
    takeover: bool = False
    policies: Policies | None = None
    """By default those of the settings."""


class _Disk:
    def __init__(self, path: Path) -> None:
        self._path = path

    def free_bytes(self) -> int:
        return disk_free_bytes(self._path)


@asynccontextmanager
async def writing(settings: Settings, wish: WriterWish) -> AsyncIterator[Session]:
    """Claim the workspace and serve it to the body, which changes it and asks for a barrier.

    Raises UserError (LIVE_WRITER), Fenced when another writer takes over meanwhile, NotFound, Unsupported.
    """
    store = open_store_of(settings)
    directory = _temporary_directory(settings.state_dir)
    try:
        await check_fit(settings)
        workspace_id, scoped = await find_workspace(store, wish.workspace, create=wish.create, entropy=SystemEntropy())
        if not wish.takeover:
            await refuse_live_writer(scoped)
        kv = LmdbKV(directory / "map")
        try:
            workspace = Workspace(
                kv,
                SparseDataFiles(directory),
                wall=SystemWall(),
                entropy=SystemEntropy(),
                workers=ThreadWorkers(),
                policies=wish.policies or settings.policies(),
                settings=_limits(settings),
            )
            async with _serving(workspace, scoped, workspace_id, wish, directory) as session:
                yield session
        finally:
            kv.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        await store.aclose()


@asynccontextmanager
async def _serving(
    workspace: Workspace, store: ObjectStore, workspace_id: str, wish: WriterWish, directory: Path
) -> AsyncIterator[Session]:
    journal = MemoryJournal()
    actor = Actor(os.getuid(), os.getgid(), os.getpid())
    maps: list[LmdbKV] = []

    def fresh_map() -> LmdbKV:
        maps.append(LmdbKV(directory / f"older-{len(maps)}", map_bytes=MAP_BYTES))
        return maps[-1]

    claim = Claim(
        workspace,
        store,
        workspace_id=workspace_id,
        actor=actor,
        takeover=wish.takeover,
        journal=journal,
        fresh_map=fresh_map,
        workspace_name=wish.workspace,
        # A tool works on the head as it is; going back to something whole is for whoever mounts.
        at=Latest(),
    )
    writer = Writer(socket.gethostname(), os.getpid(), wish.doing, SystemWall().now_ns() / 1e9)
    ports = SessionPorts(workspace, store, workspace_id, journal, _Disk(directory), writer)
    async with serve(ports, claim) as session:
        session.streamer.only_when_asked = True
        await session.heartbeat.beat()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raise_when_fenced, session)
            try:
                yield session
            finally:
                nursery.cancel_scope.cancel()
                with trio.move_on_after(GOODBYE_S, shield=True):
                    # A failed command leaves too: the next writer need not wait for the lease to end.
                    await session.heartbeat.release()


async def _raise_when_fenced(session: Session) -> None:
    await session.fenced.wait()
    assert session.workspace.fenced is not None
    raise session.workspace.fenced


def _limits(settings: Settings) -> EngineSettings:
    return EngineSettings(
        cold_after_s=0.0,
        cache_bytes_max=CACHE_BYTES,
        sections_cached=32,
        write_wait_max_s=PATIENCE_S,
        packs_in_flight_max=settings.upload_threads,
    )


async def refuse_live_writer(store: ObjectStore) -> None:
    """Raise UserError (LIVE_WRITER) while the head's writer shows signs of life."""
    beat = await read_beat(store)
    found = await find_head(store)
    lease_s = EngineSettings().lease_s
    if beat is None or found is None or beat.age_s >= lease_s:
        return
    if beat.writer_epoch == found[0].manifest.writer_epoch:
        raise live_writer(beat, lease_s)


async def check_fit(settings: Settings) -> None:
    """Raise Unsupported for a store that ignores conditions (P-16), unless the user has taken that on himself."""
    from spotwarp_fs.store.probe import probe

    if settings.unsafe_single_writer:
        output.warn("the store is not probed: two writers would destroy each other's work (unsafe_single_writer)")
        return
    store = open_plain_store(settings)
    try:
        report = await probe(store, SystemEntropy(), wall=SystemWall())
        for line in report.warnings:
            output.warn(f"{store.url} {line}")
    finally:
        await store.aclose()


def _temporary_directory(state_dir: Path) -> Path:
    """Make a directory for this process, and clear those of processes that are gone."""
    parent = state_dir / "tmp"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in parent.glob("session-*-*"):
            pid = left.name.split("-")[1]
            if pid.isdecimal() and not is_alive(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"session-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise UserError(f"{parent} cannot be used: {error.strerror}", ExitCode.CACHE) from error
