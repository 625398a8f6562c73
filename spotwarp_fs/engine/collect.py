"""Delete packs that nothing needs, in two steps, and make sparse ones dense (P-13; `core/collection.py` decides).

Invariant: a listing only finds candidates, it never says what is in use. What is condemned is decided in one step with
the cut that publishes it, when no other cut is open, after a look at everything that only this node refers to (C9). A
pack is deleted only under a head that is proven to be ours still (C10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import trio

from spotwarp_fs.core import collection, layout
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.collection import Condemned, Inventory, Plan, Refused, Writer
from spotwarp_fs.core.errors import SpotwarpError, Unavailable, UserError
from spotwarp_fs.core.ports import KVRead, Lane, ObjectStore
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    BlockState,
    FrameRef,
    NodeTable,
    ino_range,
    key_ino,
    table_range,
)
from spotwarp_fs.core.retention import Reason
from spotwarp_fs.core.types import ManifestNumber, PackId
from spotwarp_fs.engine import keepers
from spotwarp_fs.engine.claimed import Claimed
from spotwarp_fs.engine.history import History
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.publish import Head, Publisher, exists
from spotwarp_fs.engine.reach import Reach
from spotwarp_fs.engine.rebase import NewBase
from spotwarp_fs.engine.repack import LoadMap, Repacker
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.stream import Streamer
from spotwarp_fs.engine.workspace import Draining, Workspace

ANCHORS = {Reason.NAMED, Reason.PINNED}
DELETED_PER_REQUEST = 500
ROWS_PER_STEP = 2_000
CONDEMN_WAIT_S = 120.0


class Busy(SpotwarpError):
    """Too much is unpublished to look at it in one step; the next collection tries again."""


@dataclass(slots=True)
class _Candidates:
    """Packs to condemn with the next cut, if nothing refers to them by then."""

    packs: frozenset[PackId]
    done: trio.Event = field(default_factory=trio.Event)
    condemned: frozenset[PackId] = frozenset()


class Collector:
    """The collector of a live writer."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        metadata: Metadata,
        publisher: Publisher,
        sealer: Sealer,
        history: History,
        claimed: Claimed,
        load_map: LoadMap,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._metadata = metadata
        self._publisher = publisher
        self._sealer = sealer
        self._history = history
        self._claimed = claimed
        self._reach = Reach(workspace, metadata, history)
        self._repacker = Repacker(workspace, store, sealer, self._reach, publisher, load_map)
        self._lock = trio.Lock()
        self._took_over_s: float | None = None
        self._published_s: dict[ManifestNumber, float] = {}
        self._named_since: set[PackId] = set()
        """Packs that manifests published since the inventory name."""
        self._confirmed = publisher.head.manifest.number
        self._candidates: _Candidates | None = None

    def published(self, head: Head, change_set: ChangeSet) -> None:
        """This writer has published a state."""
        number = head.manifest.number
        self._published_s[number] = self._publisher.server_now_s()
        self._named_since |= {FrameRef.decode(v).pack for k, v in change_set.changes if k[:1] == BLOCK_TABLE and v}
        self._confirmed = number

    async def run(self) -> None:
        """Collect now and then; what goes wrong is reported, and the next round tries again."""
        await trio.sleep(self._ws.settings.collect_first_s)
        while self._ws.fenced is None:
            try:
                await self.collect()
            except Draining:
                pass
            except (SpotwarpError, OSError) as error:
                self._ws.report(f"nothing was collected: {error}")
            await trio.sleep(self._ws.settings.collect_period_s)

    async def collect(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Collect now, or say what that would do; raises UserError when it may not be done, and what the store says."""
        async with self._lock:
            await self._history.complete.wait()
            inventory = await self._inventory()
            planned = self._plan(inventory)
            if dry_run:
                return _summary(inventory, planned, planned.delete, planned.condemn, len(planned.repack))
            deleted = await self._delete(inventory, planned)
            condemned = await self._condemn(planned.condemn)
            self._put_rows(self._history.rows_now)
            (head,) = await self._history.read([inventory.head])
            repacked = await self._repacker.repack(head, planned.repack)
            self._metadata.unnamed -= inventory.live.keys()
            return _summary(inventory, planned, deleted, condemned, repacked)

    def _plan(self, inventory: Inventory) -> Plan:
        settings = self._ws.settings
        now_s = self._publisher.server_now_s()
        skew_s = self._ws.wall.now_ns() / 1e9 - now_s
        planned = collection.plan(inventory, self._writer(), now_s=now_s, skew_s=skew_s, grace_s=settings.grace_s)
        if isinstance(planned, Refused):
            raise UserError(f"nothing may be collected: {planned.reason}")
        if wrong := {pack for pack in planned.disputed if pack in inventory.live and inventory.live[pack].head_bytes}:
            self._ws.report(
                f"{len(wrong)} condemned packs are in use by the newest state and stay: {sorted(wrong)[:3]}"
            )
        return planned

    def _writer(self) -> Writer:
        serving = self._ws.fenced is None and not self._ws.stopping and self._claimed.pending is None
        if serving and self._took_over_s is None:
            self._took_over_s = self._publisher.server_now_s()
        return Writer(self._publisher.head.manifest.writer_epoch, serving, self._took_over_s or float("inf"))

    async def _inventory(self) -> Inventory:
        """Gather everything of the published head; pins and salvage first, so that what they ask for is seen."""
        self._named_since.clear()
        self._writer()
        head = self._publisher.head.manifest.number
        readers = {number for number in await keepers.pinned_by_readers(self._store) if number <= head}
        salvage = await keepers.needed_by_salvage(self._store)
        stored: dict[PackId, int] = {}
        async for info in self._store.list_objects(layout.PACKS_PREFIX, lane=Lane.BULK):
            pack = layout.pack_of(info.key)
            if pack is not None:
                stored[pack] = info.size_bytes
        with self._ws.kv.read() as view:
            kept = self._history.retained(view, readers | salvage)
            condemned = _published(view)
            held = self._held(view)
        anchors = [number for number, reasons in kept.items() if reasons & ANCHORS]
        live = await self._reach.live(head, kept, anchors)
        return Inventory(
            head=head,
            stored=stored,
            live=live,
            condemned=condemned,
            held=held,
            unnamed=self._sealer.unnamed | self._metadata.unnamed,
            published_s=self._published_s,
        )

    def _held(self, view: KVRead) -> set[PackId]:
        """Packs that only this node refers to: unpublished blocks, and files that are open and have no name.

        Every unpublished frame has a row in the change log: it is in the next cut.
        """
        limit = self._ws.settings.condemn_changes_max
        keys = [key for _, key in islice(view.scan(*table_range(NodeTable.CHANGELOG)), limit + 1)]
        if len(keys) > limit:
            raise Busy(f"more than {limit} changes are not published yet")
        values = [view.get(key) for key in keys if key[:1] == BLOCK_TABLE]
        for row, _ in list(view.scan(*table_range(NodeTable.ORPHANS))):
            values += [value for _, value in view.scan(*ino_range(BLOCK_TABLE, key_ino(row)))]
        states = [BlockState.decode(value) for value in values if value]
        return {state.frame.pack for state in states if state.frame is not None}

    async def _delete(self, inventory: Inventory, planned: Plan) -> frozenset[PackId]:
        """Delete what was condemned long enough ago, then let its rows go."""
        with self._ws.kv.read() as view:
            held = self._held(view)
        doomed = sorted(planned.delete - held - self._named_since - self._sealer.unnamed - self._metadata.unnamed)
        gone = [*doomed, *sorted(planned.forget)]
        await self._forget_frames(frozenset(gone))
        for at in range(0, len(doomed), DELETED_PER_REQUEST):
            await self._check_ours()
            keys = [layout.pack_key(pack) for pack in doomed[at : at + DELETED_PER_REQUEST]]
            await self._store.delete(keys, lane=Lane.BULK)
        self._put_rows(lambda _: {collection.condemned_key(pack): None for pack in gone})
        return frozenset(doomed)

    async def _check_ours(self) -> None:
        """Ask the store for a rival's manifest: a zombie that has not noticed yet deletes nothing it can help."""
        if self._ws.fenced is not None:
            raise self._ws.fenced
        head = self._publisher.head.manifest.number
        following = ManifestNumber(head + 1)
        if (
            await exists(self._store, following)
            and self._ws.cut is None
            and self._publisher.head.manifest.number == head
        ):
            raise Unavailable(f"manifest {following} is not this session's: nothing more is deleted")

    async def _forget_frames(self, packs: frozenset[PackId]) -> None:
        """No new block may find frames of these by their digest, also when their rows are gone."""
        if not packs:
            return
        at, stop = table_range(NodeTable.DEDUP)
        while True:
            with self._ws.kv.write() as txn:
                rows = list(islice(txn.scan(at, stop), ROWS_PER_STEP))
                for row, value in rows:
                    if FrameRef.decode(value).pack in packs:
                        txn.delete(row)
            if len(rows) < ROWS_PER_STEP:
                return
            at = rows[-1][0] + b"\0"
            await trio.lowlevel.checkpoint()

    async def _condemn(self, packs: frozenset[PackId]) -> frozenset[PackId]:
        """Have *packs* condemned by the next manifest: at once, or in the step of the next cut if one is open now."""
        if not packs:
            return packs
        candidates = self._candidates = _Candidates(packs)
        if self._ws.cut is None:
            self._put_rows(lambda view: self.rows_before_cut(view, None))
        with trio.move_on_after(CONDEMN_WAIT_S):
            await candidates.done.wait()
        self._candidates = None
        return candidates.condemned

    def rows_before_cut(self, view: KVRead, base: NewBase | None) -> Mapping[bytes, bytes | None]:
        """Give the rows that condemn what nothing refers to any more; no cut is open."""
        candidates, self._candidates = self._candidates, None
        if candidates is None:
            return {}
        candidates.done.set()
        head = self._publisher.head.manifest.number
        if self._confirmed != head or self._ws.fenced is not None:
            return {}
        try:
            held = self._held(view)
        except Busy:
            return {}
        kept = held | self._named_since | self._sealer.unnamed | self._metadata.unnamed
        candidates.condemned = candidates.packs - kept
        row = collection.condemned_row(ManifestNumber(head + 1), self._publisher.server_now_s())
        return {collection.condemned_key(pack): row for pack in sorted(candidates.condemned)}

    def _put_rows(self, rows: Callable[[KVRead], Mapping[bytes, bytes | None]]) -> None:
        """Change bookkeeping rows in one step with the look that they are made from."""
        self._ws.check_no_drain()
        with self._ws.kv.read() as view:
            changes = dict(rows(view))
        if changes:
            with self._ws.change() as recorder:
                for key, value in changes.items():
                    if value is None:
                        recorder.delete(key)
                    else:
                        recorder.put(key, value)


def keep_books(streamer: Streamer, history: History, collector: Collector) -> None:
    """Have the cut loop ask both for rows before each cut, and tell both of each publish."""
    streamer.on_published += [history.published, collector.published]
    streamer.may_rebase = history.complete.is_set
    streamer.before_cut += [history.rows_before_cut, collector.rows_before_cut]


def _published(view: KVRead) -> dict[PackId, Condemned]:
    """Read the condemned packs whose rows no change is pending for: those that a published manifest has."""
    rows = collection.condemned_in(view)
    pending = NodeTable.CHANGES
    return {pack: row for pack, row in rows.items() if view.get(pending + collection.condemned_key(pack)) is None}


def _summary(
    inventory: Inventory, planned: Plan, deleted: Iterable[PackId], condemned: Iterable[PackId], repacked: int
) -> dict[str, Any]:
    """The figures that `spotwarp gc` shows."""
    deleted, condemned = set(deleted), set(condemned)
    size = inventory.stored
    return {
        "deleted_packs": len(deleted),
        "deleted_bytes": sum(size[pack] for pack in deleted),
        "condemned_packs": len(condemned),
        "condemned_bytes": sum(size[pack] for pack in condemned),
        "repacked": repacked,
        "disputed": len(planned.disputed),
        "stored_bytes": sum(size.values()) - sum(size[pack] for pack in deleted),
        "live_bytes": planned.live_bytes,
    }
