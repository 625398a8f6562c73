"""When to cut, and the way of a cut into the store: seal, export, publish, confirm.

Invariant: one unpublished cut at a time (H8); a barrier is answered by a cut that begins after it was asked for
(H10); change rows are dropped, and blocks marked published, only by a confirmed publish (C16).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import trio

from spotwarp_fs.core import inflight
from spotwarp_fs.core.changes import confirm_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.inflight import InFlight
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.manifests import InFlightItem, Manifest
from spotwarp_fs.core.ports import KVRead, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    BlockState,
    FrameRef,
    FrameState,
    NodeTable,
    changelog_key,
    table_range,
)
from spotwarp_fs.core.scratch import published
from spotwarp_fs.core.sections import MetadataWriter, Written
from spotwarp_fs.core.types import ChangeSeq, Inode, ManifestNumber, PackId, WriterEpoch
from spotwarp_fs.engine.blockmaps import BlockMaps
from spotwarp_fs.engine.cut import Abandoned, Cut
from spotwarp_fs.engine.durability import Durability
from spotwarp_fs.engine.early import EarlyUpload
from spotwarp_fs.engine.export import complete, draft
from spotwarp_fs.engine.load import remember_head
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.publish import Head, Publisher
from spotwarp_fs.engine.rebase import NewBase, Rebaser
from spotwarp_fs.engine.scratch import note_of
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.workspace import Workspace

ROWS_PER_STEP = 2_000
QUIESCENT_GAP_S = 1.0
"""Cuts asked for by the end of something in flight come at most this often."""
JUDGE_GAP_S = 0.25
JUDGE_SHARE = 10
"""Whether a cut now would be quiescent is asked at most every quarter of a second, and for a tenth of the time."""


@dataclass(slots=True)
class Barrier:
    """Somebody waits for everything before it to be published."""

    done: trio.Event = field(default_factory=trio.Event)
    number: ManifestNumber | None = None
    error: SpotwarpError | None = None
    """Why there will be no such manifest from this session."""


class Streamer:
    """The cut loop."""

    def __init__(
        self,
        workspace: Workspace,
        sealer: Sealer,
        metadata: Metadata,
        publisher: Publisher,
        durability: Durability,
        *,
        rebaser: Rebaser,
        maps: BlockMaps,
        settle_marks: Callable[[tuple[Inode, ...]], None],
    ) -> None:
        self._ws = workspace
        self._sealer = sealer
        self._metadata = metadata
        self._publisher = publisher
        self._durability = durability
        self._rebaser = rebaser
        self._maps = maps
        self._settle_marks = settle_marks
        self._barriers: list[Barrier] = []
        self._answering: list[Barrier] = []
        """Asked for before the cut that is on its way began."""
        self._asked = trio.Event()
        early = EarlyUpload(workspace, sealer)
        self.urge, self.upload_early = early.urge, early.run
        self._last_begun_s = -1e9
        self._last_took_s = 0.0
        self._due_by_clock_s: float | None = None
        self._judge_again_s = -1e9
        self.cutting_since_s: float | None = None
        """Age of the oldest change in the cut that is being published (for the RPO)."""
        self.last_published_s: float | None = None
        self.all_complete = False
        """The program that wrote all this has ended well: what it has closed is whole."""
        self.abandoned_cuts = 0
        self.only_when_asked = False
        """Cut at barriers only: a tool that replaces a tree must not publish half of it."""
        self.before_cut: list[Callable[[KVRead, NewBase | None], Mapping[bytes, bytes | None]]] = []
        """Asked in the step of each cut, when no cut is open, for bookkeeping rows that its manifest must have."""
        self.may_rebase: Callable[[], bool] = lambda: True
        """Whether it is known which states older than a new base must stay."""
        self.load_maps: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Awaited just before each cut; what it does must still hold in the step that follows."""
        self.about: dict[str, Any] = {}
        """What every manifest of this session notes, for people."""
        self.on_published: list[Callable[[Head, ChangeSet], None]] = []

    @property
    def head(self) -> Head:
        """The newest manifest of this writer."""
        return self._publisher.head

    async def barrier(self) -> ManifestNumber:
        """Return the manifest that has everything acknowledged before this call; raises Fenced when there is none."""
        if self._ws.fenced is not None:
            raise self._ws.fenced
        unchanged = self._ws.oldest_unpublished_s is None and self.cutting_since_s is None
        # What the head lists as in flight may have ended since without a change: a close is none.
        if unchanged and self.head.manifest.barrier and not self.head.manifest.in_flight:
            return self.head.manifest.number
        barrier = Barrier()
        self._barriers.append(barrier)
        self._asked.set()
        await barrier.done.wait()
        if barrier.error is not None:
            raise barrier.error
        assert barrier.number is not None
        return barrier.number

    def end_waits(self, error: SpotwarpError) -> None:
        """Answer everybody who waits for a manifest: this session publishes no more (H2)."""
        for barrier in [*self._answering, *self._barriers]:
            barrier.error = error
            barrier.done.set()
        self._answering, self._barriers = [], []

    async def run(self) -> None:
        """Cut and publish until cancelled; raises Fenced."""
        pause_s = self._ws.settings.retry_first_s
        while True:
            await self._until_due()
            self._ws.heed_releases = True  # the state that is cut now may have something in flight
            self._answering, self._barriers = self._barriers, []
            self._asked = trio.Event()
            try:
                await self._cut_and_publish(barrier=bool(self._answering))
                for barrier in self._answering:
                    barrier.number = self.head.manifest.number
                    barrier.done.set()
                self._answering = []
            except Abandoned as reason:
                self.abandoned_cuts += 1
                self._ws.report(f"a cut was abandoned: {reason}")
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._ws.settings.retry_max_s)  # a bad block stays until it is rewritten
            else:
                pause_s = self._ws.settings.retry_first_s
            finally:
                # Whatever ended this cut, the next one answers them.
                self._barriers = self._answering + self._barriers
                self._answering = []

    async def _until_due(self) -> None:
        """Wait for a barrier, for the interval, or for the end of what was in flight."""
        ws = self._ws
        while not self._barriers:
            if self.only_when_asked:
                await self._asked.wait()
                continue
            now = trio.current_time()
            due = self._due_s()
            if due is not None and now >= due and not self._better_wait(now):
                return
            if ws.released.is_set() and now >= self._may_judge_s():
                ws.released = trio.Event()
                if self._quiet_moment():
                    return
            slow = self._last_took_s > ws.settings.interval_s
            ws.heed_releases = slow or not self.head.manifest.quiescent
            await self._asked_or_released(min(due if due is not None and due > now else now + 1.0, now + 1.0))

    async def _asked_or_released(self, deadline_s: float) -> None:
        """Wait for a barrier, or for the end of something in flight: the gap between two saves may be short."""
        with trio.move_on_at(deadline_s):
            async with trio.open_nursery() as nursery:

                async def released() -> None:
                    await trio.sleep_until(self._may_judge_s())
                    await self._ws.released.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(released)
                await self._asked.wait()
                nursery.cancel_scope.cancel()

    def _due_s(self) -> float | None:
        """When the interval of an unpublished change ends, or when an in-flight rule ends by the clock."""
        due = self._ws.due_s
        if self._due_by_clock_s is not None:
            due = self._due_by_clock_s if due is None else min(due, self._due_by_clock_s)
        return due

    def _better_wait(self, now: float) -> bool:
        """After a cut longer than the interval, the next waits for a quiescent moment, but not for ever (L9)."""
        if self._last_took_s <= self._ws.settings.interval_s:
            return False
        oldest = self._ws.oldest_unpublished_s
        if oldest is not None and now - oldest >= self._ws.settings.atomic_max_age_s:
            return False
        return now < self._judge_again_s or not self._judge_live().quiescent

    def _may_judge_s(self) -> float:
        """Since when a release is worth a look: judging costs, and so does a cut."""
        return max(self._judge_again_s, self._last_begun_s + QUIESCENT_GAP_S)

    def _quiet_moment(self) -> bool:
        """The last thing in flight just ended: a cut now is worth most, also if nothing else has changed."""
        return not self.head.manifest.quiescent and self._judge_live().quiescent

    def _judge_live(self) -> InFlight:
        begun_s = trio.current_time()
        with self._ws.kv.read() as everything:
            view = published(everything)
            start, stop = table_range(NodeTable.CHANGELOG)
            changed = [key for _, key in view.scan(start, stop)]
            found = inflight.candidates(view, changed, self._ws.policies, self.head.manifest.in_flight)
            max_age_ns = int(self._ws.settings.atomic_max_age_s * 1e9)
            judged = inflight.in_flight(view, self._ws.policies, self._ws.wall.now_ns(), found, max_age_ns)
        took_s = trio.current_time() - begun_s
        self._judge_again_s = begun_s + took_s + max(JUDGE_GAP_S, JUDGE_SHARE * took_s)
        return judged

    async def _let_closes_arrive(self) -> None:
        """Wait a moment for files whose close is on its way: RELEASE comes late (C11)."""
        ws = self._ws
        deadline = trio.current_time() + ws.settings.closes_wait_s
        while trio.current_time() < deadline and self._closing_atomic():
            with trio.move_on_at(deadline):
                await ws.released.wait()
            if ws.released.is_set():
                ws.released = trio.Event()

    def _closing_atomic(self) -> bool:
        with self._ws.kv.read() as everything:
            return inflight.closing_atomic(published(everything), self._ws.policies, self._ws.wall.now_ns())

    def _put_bookkeeping(self, base: NewBase | None) -> None:
        """Give the state about to be cut the rows that it must have: one step with the cut."""
        ws = self._ws
        with ws.kv.read() as view:
            rows = [row for rows in self.before_cut for row in rows(view, base).items()]
        if rows:
            with ws.change() as recorder:
                for key, value in rows:
                    if value is None:
                        recorder.delete(key)
                    else:
                        recorder.put(key, value)

    async def _cut_and_publish(self, *, barrier: bool) -> None:
        ws = self._ws
        await self._let_closes_arrive()
        await self.load_maps()
        base = self._rebaser.ready if self.may_rebase() else None
        self._put_bookkeeping(base)
        acknowledged = self._sealer.acknowledged()
        begun = trio.current_time()
        self._last_begun_s = begun
        # An early job in the pipeline keeps its generation; what it acknowledges later is simply known by digest.
        cut = Cut.begin(ws, begun_s=begun, barrier=barrier)
        oldest, ws.oldest_unpublished_s = ws.oldest_unpublished_s, None
        due, ws.due_s = ws.due_s, None
        self.cutting_since_s = oldest if oldest is not None else begun
        counters = ws.files, ws.directories, ws.logical_bytes
        ws.cut = cut
        done = False
        try:
            found, notes = self._judge(cut), self.about | note_of(cut.snapshot)
            drafted = await ws.workers.run(Work.CPU, draft, cut, self.head.manifest.change_seq)
            # Before anything waits for the store: in an outage the map would grow with every request.
            cut.let_go()
            await self._sealer.seal_cut(cut)
            change_set = await ws.workers.run(Work.CPU, complete, drafted, cut.sealed)
            if change_set or (barrier and not self.head.manifest.barrier) or found.items != self._listed():
                written = await self._write(change_set)
                cut.check()
                self._durability.cut_sent(cut.seq)
                cut.sent = True
                manifest = self._manifest(cut, written, found, counters, base, notes)
                head = await self._publisher.publish(manifest)
                if base is not None:
                    # Block maps that are not loaded yet come from there from now on.
                    self._rebaser.ready = None
                    self._maps.use_base(base.written.root, None)
                await self._confirm(cut, head, change_set)
                self._sealer.settled(acknowledged)
            else:
                # Whatever changed is scratch: nothing that a later manifest would have to say.
                await self._drop_rows(cut.seq)
            done = True
        finally:
            ws.cut = None
            cut.end()
            if not done:
                ws.oldest_unpublished_s = _earlier(oldest, ws.oldest_unpublished_s)
                ws.due_s = _earlier(due, ws.due_s)
            self.cutting_since_s = None
            self._last_took_s = trio.current_time() - begun

    def _listed(self) -> tuple[InFlightItem, ...]:
        return tuple(self.head.manifest.in_flight)

    def _judge(self, cut: Cut) -> InFlight:
        """What was in flight at the cut (P-05), by its own snapshot."""
        ws = self._ws
        view = published(cut.snapshot)
        rows = view.scan(NodeTable.CHANGELOG, changelog_key(ChangeSeq(cut.seq + 1)))
        listed = self.head.manifest.in_flight
        found = inflight.candidates(view, (key for _, key in rows), ws.policies, listed)
        max_age_ns = int(ws.settings.atomic_max_age_s * 1e9)
        # What only waits for time to tell that nothing follows has waited long enough then.
        now_ns = cut.wall_ns + (max_age_ns if self.all_complete else 0)
        judged = inflight.in_flight(view, ws.policies, now_ns, found, max_age_ns)
        self._settle_marks(judged.settled)
        now_s = trio.current_time()
        due_ns = judged.due_ns
        self._due_by_clock_s = None if due_ns is None else now_s + max(0.5, (due_ns - cut.wall_ns) / 1e9)
        return judged

    async def _write(self, change_set: ChangeSet) -> Written | None:
        if not change_set:
            return None
        epoch = self.head.manifest.writer_epoch
        return await self._metadata.write(MetadataWriter(lambda: self._new_pack(epoch)), change_set)

    def _new_pack(self, epoch: WriterEpoch) -> PackId:
        return pack_id(epoch, self._ws.entropy.token_bytes(8))

    def _manifest(
        self,
        cut: Cut,
        written: Written | None,
        found: InFlight,
        counters: tuple[int, int, int],
        base: NewBase | None,
        notes: dict[str, Any],
    ) -> Manifest:
        before = self.head.manifest
        stored = (written.stored_bytes if written is not None else 0) - (base.changes_bytes if base is not None else 0)
        files, directories, logical_bytes = counters
        return Manifest(
            number=ManifestNumber(before.number + 1),
            writer_epoch=before.writer_epoch,
            session=before.session,
            workspace_id=before.workspace_id,
            parent_digest=self.head.digest,
            change_seq=cut.seq,
            created_s=self._publisher.server_now_s(),
            base_number=base.number if base is not None else before.base_number,
            base=base.written.root if base is not None else before.base,
            changes=written.root if written is not None else None,
            base_bytes=base.written.stored_bytes if base is not None else before.base_bytes,
            changes_bytes=before.changes_bytes + stored,
            in_flight=found.items,
            barrier=cut.barrier,
            files=files,
            directories=directories,
            logical_bytes=logical_bytes,
            notes=notes,
        )

    async def _confirm(self, cut: Cut, head: Head, change_set: ChangeSet) -> None:
        """The manifest is there: drop its change rows, and mark as published what still is as it says."""
        ws = self._ws
        with ws.kv.write() as txn:
            remember_head(txn, head)
        blocks = [(key, value) for key, value in change_set.changes if key[:1] == BLOCK_TABLE and value is not None]
        for at in range(0, len(blocks), ROWS_PER_STEP):
            with ws.kv.write() as txn:
                for key, value in blocks[at : at + ROWS_PER_STEP]:
                    held = txn.get(key)
                    state = BlockState.decode(held) if held else None
                    if state is None or state.state is not FrameState.UNPUBLISHED:
                        continue
                    if state.frame == FrameRef.decode(value):
                        txn.put(key, BlockState(state.local, FrameState.PUBLISHED, state.frame).encode())
            await trio.lowlevel.checkpoint()
        await self._drop_rows(cut.seq)
        self._sealer.named(change_set)
        self.last_published_s = trio.current_time()
        await self._durability.published(cut.seq)
        for tell in self.on_published:
            tell(head, change_set)
        await ws.wake_waiters()

    async def _drop_rows(self, seq: ChangeSeq) -> None:
        """Forget the change rows up to *seq*, a step's worth at a time.

        Ranges go first. The next cut may find any rest of the other rows, each stands for itself; a range without the
        rows that followed it would drop blocks that nothing puts back.
        """
        ws = self._ws
        with ws.kv.write() as txn:
            confirm_ranges(txn, seq)
        while True:
            with ws.kv.write() as txn:
                stop = changelog_key(ChangeSeq(seq + 1))
                rows = list(islice(txn.scan(NodeTable.CHANGELOG, stop), ROWS_PER_STEP))
                for row, key in rows:
                    txn.delete(row)
                    txn.delete(NodeTable.CHANGES + key)
                if len(rows) < ROWS_PER_STEP:
                    return
            await trio.lowlevel.checkpoint()


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((time for time in (one, other) if time is not None), default=None)
