"""Note in the map that the store has a block's content: which frame it is, or that it is a hole.

Invariant: a frame is set only for a block whose generation is that of the bytes it was made from (C6); zeros are given
back to the disk only as far as neither the map nor the fsync journal needs them (L4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spotwarp_fs.core.ports import KVWrite
from spotwarp_fs.core.records import (
    DIRTY,
    BlockState,
    FrameRef,
    FrameState,
    InodeRecord,
    NodeTable,
    block_key,
    ino_key,
    inode_key,
)
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.engine.blocks import LOADED
from spotwarp_fs.engine.jobs import Job
from spotwarp_fs.engine.workspace import Workspace, block_state


class Settler:
    """Settles the blocks of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._ws = workspace
        self.is_settled: Callable[[Inode], bool] = lambda ino: True
        """Whether a data file holds nothing that the map does not have (`Durability`)."""
        self.became_hole: Callable[[Inode, BlockIndex], object] = lambda ino, block: None
        """Told in the step in which a block of zeros loses its record."""

    def settle(self, txn: KVWrite, job: Job, ref: FrameRef | None) -> bool:
        """Note the frame of a block that still is as the job read it; False if that was nothing new."""
        ino, block = job.ino, job.block
        if job.generation is None or job.generation != self._ws.generations.of(ino, block):
            return False
        state = block_state(txn, ino, block)
        if state == DIRTY:
            settle(txn, ino, block, ref)
            if ref is None:
                # Or the journal goes on saying that the block is here, of an inode that counts it no more.
                self.became_hole(ino, block)
            return True
        if job.cut is not None and state is not None and ref is not None and state.state is FrameState.UNPUBLISHED:
            # An early job of the same bytes may have been here first, before the file grew and the block with it: two
            # frames then, and the manifest will name this one.
            txn.put(block_key(ino, block), replace(state, frame=ref).encode())
        return False

    def punch(self, ino: Inode, block: BlockIndex) -> None:
        """Give the space of zeros back, but not what a truncation left behind them and the journal vouches for (L4)."""
        ws, start, length = self._ws, block * BLOCK_BYTES, BLOCK_BYTES
        if not self.is_settled(ino):
            with ws.kv.read() as view:
                value = view.get(inode_key(ino))
            length = min(length, InodeRecord.decode(value).size - start) if value is not None else 0
        if length > 0:
            ws.data.punch(ino, start, length)
        ws.use.note(ino)


def settle(txn: KVWrite, ino: Inode, block: BlockIndex, ref: FrameRef | None) -> None:
    """Note the frame of a dirty block, or that it is a hole."""
    if ref is not None:
        txn.put(block_key(ino, block), BlockState(True, FrameState.UNPUBLISHED, ref).encode())
        return
    if txn.get(ino_key(NodeTable.UNLOADED, ino)) == LOADED:
        txn.delete(block_key(ino, block))
    else:  # after a rebuild: an empty value hides what the base may have
        txn.put(block_key(ino, block), b"")
    value = txn.get(inode_key(ino))
    if value is not None:
        record = InodeRecord.decode(value)
        # A slip in the count must not end all publishing.
        txn.put(inode_key(ino), replace(record, allocated=max(0, record.allocated - BLOCK_BYTES)).encode())
