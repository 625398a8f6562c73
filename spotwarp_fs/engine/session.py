"""A writer's session: claim the workspace, load it, serve it, drain it, release it.

Invariant: every start publishes a takeover manifest before its first pack (during an outage: later); nothing is
served before the takeover's parent is loaded, except by a cache whose own head it is; a session that was fenced
publishes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from spotwarp_fs.core.errors import Fenced, SpotwarpError, StoreRefused, Unavailable
from spotwarp_fs.core.journal import JournalLog
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine import node_note, place
from spotwarp_fs.engine.blockmaps import BlockMaps
from spotwarp_fs.engine.blocks import Blocks
from spotwarp_fs.engine.budget import Budget, Disk
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.claimed import Claimed
from spotwarp_fs.engine.collect import Collector, keep_books
from spotwarp_fs.engine.dirty import dirty_bytes
from spotwarp_fs.engine.durability import Durability
from spotwarp_fs.engine.files import Files
from spotwarp_fs.engine.filesystem import Filesystem
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.heartbeat import Heartbeat, Writer
from spotwarp_fs.engine.history import History
from spotwarp_fs.engine.hydrate import Hydrator
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Publisher
from spotwarp_fs.engine.rebase import Rebaser
from spotwarp_fs.engine.salvage import Outcome, Salvager
from spotwarp_fs.engine.scratch import Gatherer, settle
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.snapshots import Snapshots
from spotwarp_fs.engine.stream import Streamer
from spotwarp_fs.engine.tracing import trace_reads
from spotwarp_fs.engine.warm import Warmer
from spotwarp_fs.engine.workspace import Workspace

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionPorts:
    """What a session is made of."""

    workspace: Workspace
    store: ObjectStore
    """Scoped to the workspace's own prefix."""
    workspace_id: str
    journal: JournalLog
    disk: Disk
    writer: Writer
    relatime: bool = False


@dataclass(slots=True)
class Drained:
    """How a drain ended."""

    saved: bool
    number: ManifestNumber
    unsaved_bytes: int = 0
    unsaved_changes: int = 0
    reason: str = ""
    fenced: bool = False
    """Another writer has the workspace: trying again saves nothing."""
    salvage: str = ""
    """Set aside in the store under this name: nothing of it is on this node only."""


@dataclass(slots=True)
class Session:
    """A serving session."""

    ports: SessionPorts
    filesystem: Filesystem
    rebaser: Rebaser
    gatherer: Gatherer
    files: Files
    streamer: Streamer
    sealer: Sealer
    hydrator: Hydrator
    maps: BlockMaps
    metadata: Metadata
    packs: PackStore
    publisher: Publisher
    durability: Durability
    budget: Budget
    health: StoreHealth
    heartbeat: Heartbeat
    claimed: Claimed
    history: History
    collector: Collector
    snapshots: Snapshots
    salvager: Salvager
    warmer: Warmer
    started_s: float
    fenced: trio.Event = field(default_factory=trio.Event)
    streaming: trio.CancelScope = field(default_factory=trio.CancelScope)
    """The cut loop; a fenced session has none."""
    streaming_ended: trio.Event = field(default_factory=trio.Event)
    errors: list[str] = field(default_factory=list)

    @property
    def workspace(self) -> Workspace:
        """The live workspace."""
        return self.ports.workspace

    async def drain(self, deadline_s: float) -> Drained:
        """Publish everything if it fits before *deadline_s* (trio's clock); say what was left (P-12)."""
        ws = self.workspace
        number: ManifestNumber | None = None
        ws.drains += 1
        try:
            with trio.move_on_at(deadline_s):
                if ws.fenced is None:
                    with suppress(Fenced):
                        number = await self.streamer.barrier()
                if ws.fenced is not None:
                    await self.salvager.finished.wait()
        finally:
            ws.drains -= 1
        if ws.fenced is not None:
            return self._set_aside(ws.fenced)
        if number is not None and ws.oldest_unpublished_s is None:
            return Drained(True, number)
        left, changes = dirty_bytes(ws) + self.sealer.bytes_unnamed, self._unpublished_changes()
        head = self.streamer.head.manifest.number
        if not left and not changes:
            return Drained(True, head)  # only the barrier's own mark is missing, as in an outage
        late = "more was written meanwhile" if number is not None else "the deadline came first"
        return Drained(False, head, left, changes, self.health.last_error or late)

    def _set_aside(self, fenced: Fenced) -> Drained:
        """A fenced session saves nothing; when nothing was left to save, that is as good."""
        progress, number = self.salvager.progress, self.streamer.head.manifest.number
        if progress.outcome is Outcome.NOTHING:
            return Drained(True, number, fenced=True)
        place = progress.place if progress.outcome is Outcome.SAVED else ""
        reason = f"{fenced}; {progress.describe()}"
        changes = self._unpublished_changes()
        return Drained(False, number, progress.total_bytes, changes, reason, fenced=True, salvage=place)

    def _unpublished_changes(self) -> int:
        with self.workspace.kv.read() as view:
            return sum(1 for _ in view.scan(b"L", b"M"))

    async def fence(self, reason: Fenced) -> None:
        """Another writer took the workspace over: read-only from here on, every wait ends."""
        ws = self.workspace
        if ws.fenced is None:
            ws.fenced = reason
            ws.report(f"fenced: {reason}")
            self.fenced.set()
            self.streaming.cancel()
            self.streamer.end_waits(reason)
            await ws.wake_waiters()


@asynccontextmanager
async def serve(ports: SessionPorts, claim: Claim) -> AsyncIterator[Session]:
    """Claim, load and serve; the body gets the session once requests may come.

    Raises Fenced (lost the claim), UserError (live writer, foreign cache) or what the store says.
    """
    ws = ports.workspace
    async with trio.open_nursery() as nursery:
        claimed = await claim.run()
        session = _wire(ports, claim, claimed, nursery)
        async with session.sealer.serve():
            nursery.start_soon(session.durability.run)
            nursery.start_soon(_lasting, session, session.budget.run)
            nursery.start_soon(_stream, session)
            nursery.start_soon(_lasting, session, session.streamer.upload_early)
            nursery.start_soon(_salvage, session)
            nursery.start_soon(_beat, session)
            for run in (session.rebaser.run, session.gatherer.run, session.history.run, session.collector.run):
                nursery.start_soon(_lasting, session, run)
            if claimed.taken_over and ws.settings.warm_cache:
                nursery.start_soon(_warm, session)
            yield session
            ws.stopping = True
            session.streamer.end_waits(Unavailable("the session ends"))
            await ws.wake_waiters()
            with trio.move_on_after(ws.settings.fence_grace_s):
                await session.heartbeat.release()
            nursery.cancel_scope.cancel()


def _wire(ports: SessionPorts, claim: Claim, claimed: Claimed, nursery: trio.Nursery) -> Session:
    health, packs, metadata, publisher = claim.health, claim.packs, claim.metadata, claimed.publisher
    ws = ports.workspace
    _count_on(ws, publisher)
    maps = BlockMaps(ws, metadata)
    maps.use_base(claimed.base, claimed.root)
    blocks = Blocks(ws)
    hydrator = Hydrator(ws, packs, health, nursery)
    sealer = Sealer(ws, packs, lambda: publisher.head.manifest.writer_epoch)

    async def publish() -> None:
        await streamer.barrier()

    durability = Durability(ws, ports.journal, publish)
    sealer.settler.is_settled, sealer.settler.became_hole = durability.is_settled, durability.may_evict
    durability.start(publisher.head.manifest.change_seq, lambda: claim.sessions)
    blocks.may_destroy, durability.finish = durability.may_destroy, blocks.finish
    budget = Budget(ws, ports.disk, lambda: streamer.urge())
    budget.may_evict = durability.may_evict
    budget.reachable = lambda: health.reachable
    files = Files(
        ws, blocks=blocks, maps=maps, hydrator=hydrator, budget=budget, durability=durability, relatime=ports.relatime
    )
    files.load_marks()
    rebaser = Rebaser(ws, ports.store, metadata, health)
    streamer = Streamer(
        ws, sealer, metadata, publisher, durability,
        rebaser=rebaser, maps=maps, settle_marks=files.settle_marks,
    )  # fmt: skip
    streamer.on_published.append(rebaser.consider)
    streamer.about = _about(ports, claim, publisher)
    history = History(ws, ports.store, publisher, health)
    collector = Collector(ws, ports.store, metadata, publisher, sealer, history, claimed, files.load_map)
    keep_books(streamer, history, collector)
    trace_reads(ws, files, streamer)
    filesystem = Filesystem(ws, files)
    filesystem.reap_orphans()
    settle(ws)
    gatherer = Gatherer(ws, maps, hydrator, budget)
    streamer.load_maps = gatherer.load_maps
    heartbeat = Heartbeat(ports.store, ports.writer, publisher, health)
    salvager = Salvager(
        ws, ports.store, publisher, health, packs,
        session=claim.session, writer=ports.writer, workspace_id=ports.workspace_id,
    )  # fmt: skip
    return Session(
        ports, filesystem, rebaser, gatherer, files, streamer, sealer, hydrator, maps, metadata, packs, publisher,
        durability, budget, health, heartbeat, claimed, history, collector, Snapshots(ws, streamer, publisher, history),
        salvager, Warmer(ws, hydrator, files.load_map, budget, lambda: publisher.head.manifest), trio.current_time(),
    )  # fmt: skip


def _about(ports: SessionPorts, claim: Claim, publisher: Publisher) -> dict[str, Any]:
    """What every manifest of this session says of where it is."""
    here = place.note_of(ports.writer.mountpoint) or place.carried(publisher.head.manifest)
    return here | node_note.note_of(claim.node)


def _count_on(ws: Workspace, publisher: Publisher) -> None:
    """Counters go on from the map, and inode numbers carry the present writer epoch."""
    ws.load_counters()
    ws.start_inodes(publisher.head.manifest.writer_epoch)


async def _stream(session: Session) -> None:
    """Run the cut loop for as long as the session lives; only fencing ends it."""
    try:
        with session.streaming:
            await _stream_until_fenced(session)
    finally:
        session.streaming_ended.set()


async def _stream_until_fenced(session: Session) -> None:
    while True:
        try:
            if session.claimed.pending is not None:
                await session.claimed.pending()
                session.claimed.pending = None
                session.maps.use_base(session.streamer.head.manifest.base, None)
            await session.streamer.run()
        except Fenced as reason:
            await session.fence(reason)
            return
        except Exception as error:
            # The mount lives on and local data is safe: say it loudly, try again.
            log.exception("streaming stopped by an error; trying again")
            session.workspace.report(f"streaming: {type(error).__name__}: {error}")
            await trio.sleep(session.workspace.settings.retry_max_s)


async def _lasting(session: Session, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task whose errors are no reason to end the mount, and every open file with it: say it loudly, try again."""
    while True:
        try:
            await run()
        except Exception as error:
            log.exception("a task was stopped by an error; trying again")
            session.workspace.report(f"{type(error).__name__}: {error}")
            await trio.sleep(session.workspace.settings.retry_max_s)
        else:
            return


async def _warm(session: Session) -> None:
    """Fetch ahead until everything is here, or another writer has the workspace."""
    async with trio.open_nursery() as nursery:

        async def until_fenced() -> None:
            await session.fenced.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_fenced)
        await session.warmer.run()
        nursery.cancel_scope.cancel()


async def _salvage(session: Session) -> None:
    """Once fenced, and once the cut that was on its way is let go, bring what is unpublished to safety (H15)."""
    await session.fenced.wait()
    await session.streaming_ended.wait()
    await session.salvager.run()


async def _beat(session: Session) -> None:
    """Heartbeats, and a look for a newer head: an idle writer learns here that it was fenced."""
    while session.workspace.fenced is None:
        try:
            if session.claimed.pending is None:
                await session.heartbeat.beat()
                session.health.succeeded()
        except Fenced as reason:
            await session.fence(reason)
        except (Unavailable, StoreRefused) as error:
            await session.health.failed(error)
        except SpotwarpError as error:
            session.workspace.report(str(error))
        await trio.sleep(session.workspace.settings.heartbeat_s)
