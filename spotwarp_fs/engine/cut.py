"""One cut: the frozen state between two requests, and what must be kept so that it can still be read.

Invariant: until a frozen block has been read for sealing, its bytes at the cut can be had from exactly one place: the
spool (kept before an overwrite), the data file moved aside (truncated to zero or unlinked), or the live data file
with its generation unchanged. A cut may be abandoned until its manifest is sent (H8); nothing that matters is lost by
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotwarp_fs.core.extents import valid_bytes
from spotwarp_fs.core.ports import KVSnapshot
from spotwarp_fs.core.records import FrameRef, InodeRecord, NodeTable, ino_key, inode_key
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, ChangeSeq, Generation, Inode

if TYPE_CHECKING:
    from spotwarp_fs.engine.workspace import Workspace


class Abandoned(Exception):
    """The cut was given up before its manifest was sent; the next one takes everything."""


@dataclass(slots=True)
class Cut:
    """A state being published."""

    workspace: Workspace
    token: str
    seq: ChangeSeq
    snapshot: KVSnapshot
    begun_s: float
    wall_ns: int
    frozen: dict[Inode, set[BlockIndex]]
    """Dirty at the cut and not read yet."""
    barrier: bool = False
    """Answers a sync, a drain or a remote fsync."""
    sizes: dict[Inode, int] = field(default_factory=dict)
    sealed: dict[tuple[Inode, BlockIndex], FrameRef | None] = field(default_factory=dict)
    """Frames of the blocks that were dirty at the cut; None where the content was all zeros (a hole)."""
    abandoned: str = ""
    sent: bool = False
    _aside: set[Inode] = field(default_factory=set)
    _kept: set[tuple[Inode, BlockIndex]] = field(default_factory=set)
    _let_go: bool = False

    @classmethod
    def begin(cls, workspace: Workspace, *, begun_s: float, barrier: bool) -> Cut:
        """Freeze the present state. One step: no request can fall into it."""
        token = workspace.entropy.token_bytes(8).hex()
        seq = workspace.counter.barrier()
        snapshot = workspace.kv.snapshot()
        frozen: dict[Inode, set[BlockIndex]] = {}
        sizes: dict[Inode, int] = {}
        for ino, blocks in workspace.dirty.items():
            value = snapshot.get(inode_key(ino))
            if value is None or snapshot.get(ino_key(NodeTable.ORPHANS, ino)) is not None:
                continue
            frozen[ino] = set(blocks)
            sizes[ino] = InodeRecord.decode(value).size
        return cls(workspace, token, seq, snapshot, begun_s, workspace.wall.now_ns(), frozen, barrier, sizes)

    def protects(self, ino: Inode, block: BlockIndex) -> bool:
        """The live data file still holds the only copy of this frozen block."""
        blocks = self.frozen.get(ino)
        return (
            blocks is not None
            and block in blocks
            and ino not in self._aside
            and (ino, block) not in self._kept
            and not self.abandoned
        )

    def protected(self, ino: Inode) -> list[BlockIndex]:
        """Frozen blocks of *ino* whose only copy is in the live data file."""
        return sorted(block for block in self.frozen.get(ino, ()) if self.protects(ino, block))

    def needs(self, ino: Inode) -> bool:
        """The live data file of *ino* must not be destroyed."""
        return any(self.protects(ino, block) for block in self.frozen.get(ino, ()))

    def keep(self, ino: Inode, block: BlockIndex) -> None:
        """Copy a frozen block to the spool; a spool that fails abandons the cut, never the request."""
        data = self.workspace.data
        self.workspace.generations.raise_for(ino, block)
        try:
            length = valid_bytes(self.sizes[ino], block)
            data.append_aside_block(self.token, ino, block, data.pread(ino, block * BLOCK_BYTES, length))
        except OSError as error:
            self.abandon(f"the spool failed: {error}")
            return
        self._kept.add((ino, block))

    def set_aside(self, ino: Inode) -> None:
        """Leave the data file to this cut; the inode goes on with a new, empty one."""
        for block in self.frozen.get(ino, ()):
            self.workspace.generations.raise_for(ino, block)
        try:
            self.workspace.data.set_aside(ino, self.token)
        except OSError as error:
            self.abandon(f"the data file of inode {ino:#x} could not be set aside: {error}")
            return
        self._aside.add(ino)

    def generation(self, ino: Inode, block: BlockIndex) -> Generation | None:
        """The generation that the live bytes must keep while they are read; None when they lie elsewhere."""
        if (ino, block) in self._kept or ino in self._aside:
            return None
        return self.workspace.generations.of(ino, block)

    def read(self, ino: Inode, block: BlockIndex) -> bytes:
        """Read a frozen block from where it lies now (blocking; the caller compares generations afterwards)."""
        data, length = self.workspace.data, valid_bytes(self.sizes[ino], block)
        if (ino, block) in self._kept:
            return data.read_aside_block(self.token, ino, block)
        if ino in self._aside:
            return data.pread_aside(ino, self.token, block * BLOCK_BYTES, length)
        return data.pread(ino, block * BLOCK_BYTES, length)

    def read_done(self, ino: Inode, block: BlockIndex) -> None:
        """The bytes are in memory: nothing needs to be kept for this block any more."""
        self.frozen[ino].discard(block)

    def abandon(self, reason: str) -> None:
        """Give the cut up; raises nothing, the cut loop notices."""
        assert not self.sent, "a number for which a PUT was sent keeps its body until the outcome is known"
        self.abandoned = self.abandoned or reason

    def check(self) -> None:
        """Raise Abandoned if the cut was given up."""
        if self.abandoned:
            raise Abandoned(self.abandoned)

    def let_go(self) -> None:
        """Close the snapshot; every change of the map since it was opened takes new pages until then."""
        if not self._let_go:
            self._let_go = True
            self.snapshot.close()

    def end(self) -> None:
        """Let go of the snapshot and of everything kept; whoever still reads for it finds it abandoned."""
        self.abandoned = self.abandoned or "it has ended"
        self.frozen.clear()
        self.let_go()
        self.workspace.data.drop_aside(self.token)
