"""Change the bytes of files: the steps of write, truncate and removal, block by block.

Invariant: a step has no await. A partly covered block has local bytes before its step runs (C1); a frozen block is
kept for the cut before its bytes change (C7); the generation rises before every `pwrite` (C6). A block with a frame
and local bytes is marked before its `pwrite`; an absent one that is fully overwritten after it (H3). A hole is marked
after it too: reads go by the map, and what a crash may have left under a hole is cleared before the hole is filled.
The caller replies last.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from spotwarp_fs.core.attributes import without_privileges
from spotwarp_fs.core.changes import Recorder
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.extents import Extent, blocks_of, pieces_per_block
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    DIRTY,
    BlockState,
    InodeRecord,
    NodeTable,
    after_write,
    block_key,
    counted,
    ino_key,
    ino_range,
    inode_key,
    key_block,
)
from spotwarp_fs.core.types import BLOCK_BYTES, FILE_BYTES_MAX, BlockIndex, Inode
from spotwarp_fs.engine.workspace import Workspace, block_state, read_inode

EFBIG = 27
SET_ID_BITS = stat.S_ISUID | stat.S_ISGID
LOADED = b""
"""Value of table U once an inode's map is whole; a cutoff (4 bytes) before that; no row: what the base says."""
SPOOL_BLOCKS_PER_STEP_MAX = 64
"""A truncation that would copy more frozen blocks than this abandons the cut instead of stalling the loop."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The pieces of a read: block, extent, and whether it has bytes (else a hole)."""

    pieces: list[tuple[BlockIndex, Extent, bool]]
    missing: list[BlockIndex]
    all_local: bool

    @property
    def blocks(self) -> list[BlockIndex]:
        """The blocks that the read touches."""
        return [block for block, _, _ in self.pieces]

    @property
    def extent(self) -> Extent:
        """What is read."""
        return Extent(self.pieces[0][1].start, self.pieces[-1][1].stop)

    def without(self, blocks: Container[BlockIndex]) -> list[tuple[BlockIndex, Extent, bool]]:
        """The pieces of all other blocks."""
        return [item for item in self.pieces if item[0] not in blocks]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What a write meets."""

    record: InodeRecord
    states: dict[BlockIndex, BlockState | None]
    """The rows of the blocks it touches; empty when all of them are dirty."""
    missing: list[BlockIndex]
    """Blocks that are changed only in part and whose bytes are not here."""


class Blocks:
    """Byte-level steps on one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._ws = workspace
        self.may_destroy: Callable[[Inode, BlockIndex], bool] = lambda ino, first: True
        """Asks whether bytes from a block on may go now; while the fsync journal vouches for them, `finish` waits."""

    def plan_write(self, ino: Inode, extent: Extent) -> WritePlan:
        """Say what a write of *extent* meets; it counts for a `write` in the same step.

        Most small writes meet blocks that are dirty already: then the map is not asked for them.
        """
        ws = self._ws
        with ws.kv.read() as view:
            record = read_inode(view, ino)
            if ws.all_dirty(ino, blocks_of(extent)):
                return WritePlan(record, {}, [])
            states, missing = {}, []
            for block, piece in pieces_per_block(extent):
                state = states[block] = block_state(view, ino, block)
                if state is not None and not state.local:
                    start = block * BLOCK_BYTES
                    if piece.start != start or piece.stop < min(start + BLOCK_BYTES, record.size):
                        missing.append(block)
        return WritePlan(record, states, missing)

    def missing_for_truncate(self, view: KVRead, ino: Inode, size: int) -> list[BlockIndex]:
        """The block that *size* cuts in two, when its bytes are not here and some of them would go."""
        if size % BLOCK_BYTES == 0:
            return []
        block = BlockIndex(size // BLOCK_BYTES)
        state = block_state(view, ino, block)
        if state is None or state.local or state.frame is None:
            return []
        return [block] if state.frame.raw_bytes > size % BLOCK_BYTES else []

    def plan_read(self, view: KVRead, ino: Inode, extent: Extent) -> ReadPlan:
        """Say for each block of *extent* where its bytes are: reads go by the map, never by what the file holds."""
        pieces, missing, all_local = [], [], True
        for block, piece in pieces_per_block(extent):
            state = block_state(view, ino, block)
            if state is None:
                all_local = False
            elif not state.local:
                missing.append(block)
            pieces.append((block, piece, state is not None))
        return ReadPlan(pieces, missing, all_local)

    def read_pieces(self, ino: Inode, plan: ReadPlan) -> bytes:
        """Read what *plan* says is local, and zeros for holes (blocking)."""
        if plan.all_local:
            first, last = plan.pieces[0][1], plan.pieces[-1][1]
            return self._ws.data.pread(ino, first.start, last.stop - first.start)
        return b"".join(self.read_each(ino, plan.pieces).values())

    def read_each(self, ino: Inode, pieces: list[tuple[BlockIndex, Extent, bool]]) -> dict[BlockIndex, bytes]:
        """Read local pieces, and zeros for holes, one by one (blocking)."""
        return {
            block: self._ws.data.pread(ino, piece.start, piece.length) if here else bytes(piece.length)
            for block, piece, here in pieces
        }

    def write(
        self,
        ino: Inode,
        offset: int,
        data: bytes,
        now_ns: int,
        plan: WritePlan,
        *,
        keeps_privileges: bool = True,
    ) -> None:
        """Write *data* at *offset*; every block that it covers in part has local bytes."""
        ws, record, states = self._ws, plan.record, plan.states
        stop = offset + len(data)
        if stop > FILE_BYTES_MAX:
            raise Refused(EFBIG, f"a file holds at most {FILE_BYTES_MAX} bytes; this write ends at {stop}")
        if offset > record.size:
            # Bytes beyond the old end may be left over from a truncation that a crash cut short.
            ws.data.truncate(ino, record.size)
        blocks = [BlockIndex(block) for block in blocks_of(Extent(offset, stop))]
        for block in blocks:
            self._keep_for_cut(ino, block)
            ws.generations.raise_for(ino, block)
        holes = [block for block, state in states.items() if state is None]
        self._mark_early(
            ino, [b for b, state in states.items() if state is not None and state.local and not state.dirty]
        )
        for block in holes:
            ws.data.clear(ino, block * BLOCK_BYTES, BLOCK_BYTES)
        ws.data.pwrite(ino, offset, data)
        with ws.change() as recorder:
            put_rows = self._mark if states else self._mark_again
            put_rows(recorder, ino, blocks)
            allocated = record.allocated + len(holes) * BLOCK_BYTES
            changed = record.with_content(max(record.size, stop), allocated, now_ns)
            if record.mode & SET_ID_BITS and not keeps_privileges:
                changed = replace(changed, mode=without_privileges(record.mode))
            recorder.put(inode_key(ino), changed.encode())
        if any(state is None or not state.local for state in states.values()):
            # At most one block per file is counted late: what it grows by is noted when the next one begins.
            ws.use.note(ino)
        for block in blocks:
            ws.mark_dirty(ino, block)
        ws.bytes_written += len(data)

    def _mark_early(self, ino: Inode, framed: list[BlockIndex]) -> None:
        """Mark blocks that have a frame and local bytes dirty, before these change."""
        if framed:
            with self._ws.change() as recorder:
                self._mark(recorder, ino, framed)
            # Before anything that may fail: a block that is dirty in the map only would end all publishing.
            for block in framed:
                self._ws.mark_dirty(ino, block)

    def write_on(self, ino: Inode, offset: int, data: bytes, now_ns: int) -> bool:
        """Write into blocks that are dirty and whose change is noted already; False, and nothing done, for all others.

        This is `write` for most small writes: only bytes, size and times change, so one row does. The order is the
        same: the generation rises before the `pwrite`, and the row is committed after it.
        """
        ws = self._ws
        stop = offset + len(data)
        first, last = offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        key = inode_key(ino)
        if last - first > 1 or stop > FILE_BYTES_MAX or not ws.counter.has_noted(key):
            return False
        blocks = (BlockIndex(first),) if first == last else (BlockIndex(first), BlockIndex(last))
        if not ws.all_dirty(ino, blocks):
            return False
        for block in blocks:
            if not ws.counter.has_noted(block_key(ino, block)):
                return False
            if ws.cut is not None and ws.cut.protects(ino, block):
                return False
        with ws.kv.write() as txn:
            value = txn.get(key)
            if value is None:
                return False
            mode, _, size = counted(value)
            if offset > size or mode & SET_ID_BITS:
                return False
            for block in blocks:
                ws.generations.raise_for(ino, block)
            ws.data.pwrite(ino, offset, data)
            changed = after_write(value, stop, now_ns)
            txn.put(key, changed)
        ws.recount(ino, value, changed)
        for block in blocks:
            ws.mark_dirty(ino, block)
        ws.bytes_written += len(data)
        return True

    def truncate(self, ino: Inode, size: int, now_ns: int, *, keeps_privileges: bool = True) -> InodeRecord:
        """Set the length; the block that is cut in two has local bytes (or loses nothing)."""
        ws = self._ws
        if size > FILE_BYTES_MAX:
            raise Refused(EFBIG, f"a file holds at most {FILE_BYTES_MAX} bytes; {size} were asked for")
        with ws.kv.read() as view:
            record = read_inode(view, ino)
        first = BlockIndex(-(-size // BLOCK_BYTES))
        shrinks = size < record.size
        if shrinks:
            self._keep_rest_for_cut(ino, size)
            ws.generations.raise_for(ino, BlockIndex(size // BLOCK_BYTES))
            ws.generations.raise_for_all(ino, BlockIndex(size // BLOCK_BYTES))
        else:
            ws.data.truncate(ino, record.size)
        dropped: list[BlockIndex] = []
        changed = False
        with ws.change() as recorder:
            if shrinks:
                dropped = self._drop(recorder, ino, first)
                record = replace(record, allocated=record.allocated - len(dropped) * BLOCK_BYTES if size else 0)
                changed = self._mark_cut_block(recorder, ino, size)
            if size == 0:
                # In the same transaction: what the base says of this inode no longer counts.
                recorder.put_local(ino_key(NodeTable.UNLOADED, ino), LOADED)
            mode = record.mode if keeps_privileges else without_privileges(record.mode)
            record = replace(record, size=size, mode=mode, mtime_ns=now_ns, ctime_ns=now_ns)
            recorder.put(inode_key(ino), record.encode())
        for block in dropped:
            ws.unmark_dirty(ino, block)
        if changed:
            ws.mark_dirty(ino, BlockIndex(size // BLOCK_BYTES))
        # After the commit: a start deletes spools, so until then the only copy stays where the map says it is.
        if not shrinks or self.may_destroy(ino, BlockIndex(size // BLOCK_BYTES)):
            self.finish(ino)
        return record

    def drop_all(self, recorder: Recorder, ino: Inode) -> None:
        """Forget every block of an inode that is being reaped; `removed` follows after the commit."""
        self._ws.generations.raise_for_all(ino, BlockIndex(0))
        self._drop(recorder, ino, BlockIndex(0))
        recorder.delete_local(ino_key(NodeTable.UNLOADED, ino))
        recorder.delete_local(ino_key(NodeTable.IN_FLIGHT, ino))
        recorder.delete_local(ino_key(NodeTable.SCRATCH, ino))

    def removed(self, ino: Inode) -> None:
        """An inode is gone: nothing of it is dirty, and its data file goes."""
        self._ws.forget_dirty(ino)
        self.remove_data(ino)

    def remove_data(self, ino: Inode) -> None:
        """Delete the data file of an inode that is gone, as soon as the fsync journal says so too."""
        if self.may_destroy(ino, BlockIndex(0)):
            self.finish(ino)

    def finish(self, ino: Inode) -> None:
        """Destroy what the data file holds and the map does not; a cut that still needs all of it gets the file."""
        ws = self._ws
        with ws.kv.read() as view:
            value = view.get(inode_key(ino))
        size = 0 if value is None else InodeRecord.decode(value).size
        if size == 0 and ws.cut is not None and ws.cut.needs(ino):
            ws.cut.set_aside(ino)
        if value is None:
            ws.data.remove(ino)
            ws.generations.forget(ino)
        else:
            ws.data.truncate(ino, size)
        ws.use.note(ino)

    def _drop(self, recorder: Recorder, ino: Inode, first: BlockIndex) -> list[BlockIndex]:
        """Drop block records from *first* on; returns the blocks that were there."""
        _, stop = ino_range(BLOCK_TABLE, ino)
        dropped = [key_block(key) for key, value in recorder.scan(block_key(ino, first), stop) if value]
        recorder.drop_blocks(ino, first)
        return dropped

    def _mark_cut_block(self, recorder: Recorder, ino: Inode, size: int) -> bool:
        """The block that *size* cuts in two changes: its frame no longer holds its content. False if there is none."""
        block = BlockIndex(size // BLOCK_BYTES)
        state = block_state(recorder, ino, block) if size % BLOCK_BYTES else None
        if state is None or not state.local:
            return False
        self._mark(recorder, ino, [block])
        return True

    def _mark(self, recorder: Recorder, ino: Inode, blocks: Iterable[BlockIndex]) -> None:
        dirty = DIRTY.encode()
        for block in blocks:
            recorder.put(block_key(ino, block), dirty)

    def _mark_again(self, recorder: Recorder, ino: Inode, blocks: Iterable[BlockIndex]) -> None:
        """Their rows say so already."""
        for block in blocks:
            recorder.touch(block_key(ino, block))

    def _keep_for_cut(self, ino: Inode, block: BlockIndex) -> None:
        cut = self._ws.cut
        if cut is not None and cut.protects(ino, block):
            cut.keep(ino, block)

    def _keep_rest_for_cut(self, ino: Inode, size: int) -> None:
        """Copy the frozen blocks that a truncation changes, if they are few (to zero, the file moves aside later)."""
        cut = self._ws.cut
        if cut is None or size == 0 or not cut.needs(ino):
            return
        frozen = [block for block in cut.protected(ino) if block >= size // BLOCK_BYTES]
        if len(frozen) > SPOOL_BLOCKS_PER_STEP_MAX:
            cut.abandon(f"a truncation would copy {len(frozen)} frozen blocks")
            return
        for block in frozen:
            cut.keep(ino, block)


def cut_piece(raw: bytes, block: BlockIndex, piece: Extent) -> bytes:
    """Cut a piece out of a block's valid bytes; what lies beyond them reads as zeros (H5)."""
    start = piece.start - block * BLOCK_BYTES
    return raw[start : start + piece.length].ljust(piece.length, b"\0")
