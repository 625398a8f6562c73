"""Open files: reads, writes, sizes, and when an inode without a name may go.

Invariant: a handle holds its inode; an inode is reaped when it has no name, no handle and no lookup. The in-flight
mark of a file (C12) is set before its first write is acknowledged and ended only by the rules of `core/inflight.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from spotwarp_fs.core import inflight, namespace, paths
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.extents import Extent, blocks_of
from spotwarp_fs.core.inflight import Mark
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import NodeTable, ino_key, inode_key
from spotwarp_fs.core.requests import Actor, Handle, Node
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.blockmaps import BlockMaps
from spotwarp_fs.engine.blocks import Blocks, ReadPlan, cut_piece
from spotwarp_fs.engine.budget import Budget
from spotwarp_fs.engine.durability import Durability
from spotwarp_fs.engine.hydrate import Hydrator
from spotwarp_fs.engine.workspace import Workspace

EBADF = 9
DAY_NS = 86_400 * 1_000_000_000
O_ACCMODE = os.O_ACCMODE


@dataclass(slots=True)
class OpenFile:
    """What a handle refers to."""

    ino: Inode
    writable: bool
    keeps_privileges: bool = True
    """Whether writing through it leaves set-user-id bits alone."""


class Files:
    """Everything that happens through handles."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        blocks: Blocks,
        maps: BlockMaps,
        hydrator: Hydrator,
        budget: Budget,
        durability: Durability,
        relatime: bool = False,
    ) -> None:
        self._ws = workspace
        self._blocks = blocks
        self._maps = maps
        self._hydrator = hydrator
        self._budget = budget
        hydrator.spare_blocks = budget.spare_blocks
        hydrator.room_unasked = budget.room_unasked
        self._durability = durability
        self._relatime = relatime
        self._files: dict[Handle, OpenFile] = {}
        self._last_handle = 0
        self._holders: Counter[Inode] = Counter()
        """Handles and lookups that keep an inode alive."""
        self._writers: Counter[Inode] = Counter()
        self._unreaped: set[Inode] = set()
        self._marks: dict[Inode, Mark] = {}
        self.on_read: Callable[[Inode, BlockIndex, BlockIndex], None] | None = None
        """Told of every read, as long as somebody wants to know."""

    def new_handle(self) -> Handle:
        """Give a handle number that was never used."""
        self._last_handle += 1
        return Handle(self._last_handle)

    def pin(self, ino: Inode) -> None:
        """One more reason to keep an inode."""
        self._holders[ino] += 1

    def unpin(self, ino: Inode, count: int = 1) -> None:
        """Fewer reasons; the last one gone, an inode without a name is reaped."""
        self._holders[ino] -= count
        if self._holders[ino] <= 0:
            del self._holders[ino]
            self._reap_if_unnamed(ino)

    def remember(self, ino: Inode) -> None:
        """The kernel was handed an entry."""
        self._holders[ino] += 1

    def forget(self, pairs: list[tuple[Inode, int]]) -> None:
        """The kernel let go of lookup counts."""
        for ino, count in pairs:
            if ino in self._holders:
                self.unpin(ino, count)

    def lost_name(self, node: Node) -> None:
        """A name of *node* went; without a holder its inode goes too, once it was the last."""
        if node.record.nlink == 0 and node.ino not in self._holders:
            self._reap_if_possible(node.ino)

    def _reap_if_unnamed(self, ino: Inode) -> None:
        if self._ws.fenced is not None:
            return
        with self._ws.kv.read() as view:
            unnamed = view.get(ino_key(NodeTable.ORPHANS, ino)) is not None
        if unnamed:
            self._reap_if_possible(ino)

    def _reap_if_possible(self, ino: Inode) -> None:
        """The name is gone already, so that a full disk is no answer: what cannot be reaped now is tried again."""
        for each in (ino, *self._unreaped):
            try:
                self.reap(each)
            except OSError as error:
                self._unreaped.add(each)
                self._ws.report(f"inode {each:#x}, which has no name, cannot be removed yet: {error}")
                return
            self._unreaped.discard(each)

    def reap(self, ino: Inode) -> None:
        """Forget an inode without a name: records, blocks, data file."""
        with self._ws.change() as recorder:
            self._blocks.drop_all(recorder, ino)
            namespace.reap(recorder, ino)
        self._marks.pop(ino, None)
        self._maps.forget(ino)
        self._durability.note_end(ino, 0)
        self._blocks.removed(ino)

    def remove_data(self, ino: Inode) -> None:
        """Delete what an inode that is gone has left."""
        self._blocks.remove_data(ino)

    def made(self, ino: Inode, mark: Mark | None = None) -> None:
        """The block map of a new inode is whole; *mark* is what the map says of its being written."""
        self._maps.is_whole(ino)
        if mark is not None:
            self._marks[ino] = mark

    async def load_map(self, ino: Inode) -> None:
        """Return when the block map of *ino* is whole, or the inode gone."""
        with self._ws.kv.read() as view:
            gone = view.get(inode_key(ino)) is None
        if gone:
            return
        self.pin(ino)
        try:
            await self._maps.load(ino)
        finally:
            self.unpin(ino)

    async def open(self, ino: Inode, flags: int, actor: Actor) -> Handle:
        """Open; with O_TRUNC this call truncates."""
        writable = flags & O_ACCMODE != os.O_RDONLY
        if writable or flags & os.O_TRUNC:
            self._ws.check_writable()
        with self._ws.kv.read() as view:
            paths.inode(view, ino)
        self.pin(ino)  # its last name may go while this waits, and then the open file is all that keeps it
        try:
            if flags & os.O_TRUNC:
                self._writers[ino] += 1
                try:
                    await self.truncate(ino, 0, keeps_privileges=actor.keeps_privileges)
                finally:
                    self._writers[ino] -= 1
            else:
                await self._maps.load(ino)
            return self.opened(ino, flags, actor)
        finally:
            self.unpin(ino)

    def opened(self, ino: Inode, flags: int, actor: Actor) -> Handle:
        """Make a handle."""
        handle = self.new_handle()
        writable = flags & O_ACCMODE != os.O_RDONLY
        self._files[handle] = OpenFile(ino, writable, actor.keeps_privileges)
        self._holders[ino] += 1
        if writable:
            self._writers[ino] += 1
        return handle

    def _file(self, handle: Handle) -> OpenFile:
        found = self._files.get(handle)
        if found is None:
            raise Refused(EBADF, f"handle {handle} is not open")
        return found

    async def read(self, handle: Handle, offset: int, size: int) -> bytes:
        """Read what there is of `[offset, offset + size)`, fetching blocks that are only in the store."""
        ino = self._file(handle).ino
        ws = self._ws
        noted = False
        while True:
            with ws.kv.read() as view:
                record = paths.inode(view, ino)
                stop = min(offset + size, record.size)
                if stop <= offset:
                    return b""
                extent = Extent(offset, stop)
                plan = self._blocks.plan_read(view, ino, extent)
            if not noted:
                noted = True
                self._note_read(ino, plan)
            if plan.missing:
                through = await self._bring(ino, plan)
                if through is not None:
                    return through
                continue
            if self._relatime:
                self._touch_atime(ino)
            if plan.all_local:
                found = ws.data.pread_cached(ino, offset, extent.length)
                if found is not None:
                    return found
            generations = [ws.generations.of(ino, block) for block in plan.blocks]
            with ws.busy.hold(ino, plan.blocks):
                found = await ws.workers.run(Work.DISK, self._blocks.read_pieces, ino, plan)
            if generations == [ws.generations.of(ino, block) for block in plan.blocks]:
                return found

    def _note_read(self, ino: Inode, plan: ReadPlan) -> None:
        first, last = plan.pieces[0][0], plan.pieces[-1][0]
        self._hydrator.note_read(ino, first, last)
        if self.on_read is not None:
            self.on_read(ino, first, last)

    async def _bring(self, ino: Inode, plan: ReadPlan) -> bytes | None:
        """Fetch what a read lacks; where there is no room for it, give the bytes read."""
        with self._ws.busy.hold(ino, plan.blocks):
            if not await self._budget.room_for_blocks(len(plan.missing)):
                return await self._read_through(ino, plan)
            await self._hydrator.demand(ino, plan.missing)
        return None

    async def _read_through(self, ino: Inode, plan: ReadPlan) -> bytes | None:
        """Serve a read from memory: the cache has no room, and a read must not wait for writers' uploads (H18).

        None when something changed meanwhile.
        """
        ws = self._ws
        generations = [ws.generations.of(ino, block) for block in plan.blocks]
        fetched = await self._hydrator.fetch_through(ino, plan.missing)
        local = plan.without(fetched)
        with ws.busy.hold(ino, plan.blocks):
            parts = await ws.workers.run(Work.DISK, self._blocks.read_each, ino, local)
        if generations != [ws.generations.of(ino, block) for block in plan.blocks]:
            return None
        with ws.kv.read() as view:
            if self._blocks.plan_read(view, ino, plan.extent) != plan:
                return None
        return b"".join(
            cut_piece(fetched[block], block, piece) if block in fetched else parts[block]
            for block, piece, _ in plan.pieces
        )

    def _touch_atime(self, ino: Inode) -> None:
        """Relatime: atime alone never makes a manifest (M-d), so it is not noted as a change."""
        now_ns = self._ws.wall.now_ns()
        with self._ws.kv.read() as view:
            record = paths.inode(view, ino)
        if record.atime_ns <= max(record.mtime_ns, record.ctime_ns) or now_ns - record.atime_ns > DAY_NS:
            with self._ws.kv.write() as txn:
                txn.put(inode_key(ino), replace(record, atime_ns=now_ns).encode())

    async def write(
        self, handle: Handle, offset: int, data: bytes, *, given_up: Callable[[], bool] | None = None
    ) -> int:
        """Write all of *data*; waits for budget and for blocks that it covers in part, before anything changes.

        A wait ends with EINTR when *given_up* says that nobody wants the write any more.
        """
        file = self._file(handle)
        if not file.writable:
            raise Refused(EBADF, f"handle {handle} is not open for writing")
        if not data:
            return 0
        ws, ino = self._ws, file.ino
        tight = self._budget.tight
        if not tight and self._is_being_written(ino) and self._blocks.write_on(ino, offset, data, ws.wall.now_ns()):
            self._durability.note_write(ino, offset, len(data))
            return len(data)
        extent = Extent(offset, offset + len(data))
        if tight:
            await self._budget.room_for_bytes(len(data), given_up)
        while True:
            ws.check_writable()
            if not self._durability.is_settled(ino):
                await self._durability.settle(ino)
                continue
            plan = self._blocks.plan_write(ino, extent)
            if not plan.missing:
                break
            # Or a full cache evicts the first while the second is on its way, and so on for ever.
            with ws.busy.hold(ino, blocks_of(extent)):
                await self._budget.room_for_blocks(len(plan.missing))
                await self._hydrator.demand(ino, plan.missing, for_write=True, given_up=given_up)
        self._mark_written(ino)
        self._blocks.write(ino, offset, data, ws.wall.now_ns(), plan, keeps_privileges=file.keeps_privileges)
        self._durability.note_write(ino, offset, len(data))
        return len(data)

    def _is_being_written(self, ino: Inode) -> bool:
        """Tell whether a write needs no look at anything but its blocks: it has its mark, and nothing to wait for."""
        mark = self._marks.get(ino)
        return (
            mark is not None
            and not (mark.flushed_ns or mark.torn)
            and self._ws.fenced is None
            and self._durability.is_settled(ino)
        )

    async def truncate(self, ino: Inode, size: int, *, keeps_privileges: bool = True) -> None:
        """Set a file's length; unless *keeps_privileges*, it is set-user-id no more."""
        ws = self._ws
        if size:
            await self._maps.load(ino)
        while True:
            ws.check_writable()
            if not self._durability.is_settled(ino):
                await self._durability.settle(ino)
                continue
            with ws.kv.read() as view:
                missing = self._blocks.missing_for_truncate(view, ino, size)
            if not missing:
                break
            await self._budget.room_for_blocks(len(missing))
            await self._hydrator.demand(ino, missing, for_write=True)
        if self._writers.get(ino):
            self._mark_written(ino)
        self._blocks.truncate(ino, size, ws.wall.now_ns(), keeps_privileges=keeps_privileges)
        self._durability.note_end(ino, size)
        if size == 0:
            self._maps.is_whole(ino)

    def _mark_written(self, ino: Inode) -> None:
        """Set the in-flight mark, if this is the first write since the last release."""
        mark = self._marks.get(ino)
        changed = inflight.on_write(mark, self._ws.wall.now_ns())
        if changed is not mark:
            self._put_mark(ino, changed)

    def is_marked(self, ino: Inode) -> bool:
        """Tell whether a file counts as being written."""
        mark = self._marks.get(ino)
        return mark is not None and not mark.torn

    def set_mark(self, ino: Inode, mark: Mark | None) -> None:
        """Say whether a file is being written, for a workspace whose writes nobody sees (the directory form)."""
        if mark is None and ino not in self._marks:
            return
        if mark is None or not self.is_marked(ino):
            self._put_mark(ino, mark)
            if mark is None:
                self._ws.released.set()

    def _put_mark(self, ino: Inode, mark: Mark | None) -> None:
        key = ino_key(NodeTable.IN_FLIGHT, ino)
        with self._ws.kv.write() as txn:
            if mark is None:
                txn.delete(key)
            else:
                txn.put(key, mark.encode())
        # After the commit: a mark that is only here would not be set again, and a kill would certify half a file.
        if mark is None:
            self._marks.pop(ino, None)
        else:
            self._marks[ino] = mark

    async def flush(self, handle: Handle, *, dying: bool = False) -> None:
        """A descriptor was closed; a failed fsync of the file is reported here too."""
        file = self._file(handle)
        if file.writable:
            mark = self._marks.get(file.ino)
            changed = inflight.on_flush(mark, self._ws.wall.now_ns(), dying=dying)
            if changed is not mark:
                self._put_mark(file.ino, changed)
            self._durability.check_not_failed(file.ino)

    async def release(self, handle: Handle) -> None:
        """The last descriptor is gone."""
        file = self._files.pop(handle)
        ino = file.ino
        if file.writable:
            self._writers[ino] -= 1
            left = self._writers[ino]
            if not left:
                del self._writers[ino]
            mark = self._marks.get(ino)
            changed = inflight.on_release(mark, self._ws.wall.now_ns(), writers=left)
            if changed is not mark:
                self._put_mark(ino, changed)
                self._ws.use.note(ino)
                if self._ws.heed_releases and (changed is None or changed.torn):
                    self._ws.released.set()
        self.unpin(ino)

    def load_marks(self) -> None:
        """At start: no handle exists any more, so what was not released is torn (C12)."""
        now_ns = self._ws.wall.now_ns()
        with self._ws.kv.read() as view:
            start, stop = NodeTable.IN_FLIGHT, bytes([NodeTable.IN_FLIGHT[0] + 1])
            rows = [(Inode(int.from_bytes(key[1:9])), Mark.decode(value)) for key, value in view.scan(start, stop)]
        for ino, mark in rows:
            self._put_mark(ino, inflight.on_daemon_restart(mark, now_ns))

    def settle_marks(self, settled: tuple[Inode, ...]) -> None:
        """Drop marks that count as released at a cut, if they still do."""
        now_ns = self._ws.wall.now_ns()
        for ino in settled:
            mark = self._marks.get(ino)
            if mark is not None and inflight.standing(mark, now_ns) is inflight.Standing.RELEASED:
                self._put_mark(ino, None)

    async def fsync(self, handle: Handle, *, datasync: bool) -> None:
        """Return when data and metadata would survive a crash of the machine (or are published: `fsync: remote`)."""
        await self._durability.sync_file(self._file(handle).ino)

    async def sync_names(self, ino: Inode) -> None:
        """fsync of a directory: its entries are in the journal when this returns."""
        await self._durability.sync_names(ino)

    async def sync_new_name(self, ino: Inode) -> None:
        """A file got a name: with `fsync: remote`, one that was fsynced is published under it."""
        await self._durability.sync_new_name(ino)

    def budget_figures(self) -> tuple[int, int]:
        """Total and free bytes of this node's budget."""
        return self._budget.figures()
