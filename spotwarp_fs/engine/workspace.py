"""The live workspace on this node: map, data files, generations, dirty index, and what may wait for it.

Invariant: `dirty` holds exactly the blocks of linked and unlinked inodes whose record in the map has no frame, save
those of scratch inodes, which are in `scratch_dirty`; `scratch` is table S in memory; every change of the map happens
in one step (no await) on the event loop.
"""

from __future__ import annotations

import logging
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from spotwarp_fs.core.changes import SEQ_KEY, ChangeCounter, Recorder
from spotwarp_fs.core.errors import Fenced, Refused, SpotwarpError
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import DataFiles, Entropy, KVRead, KVStore, KVWrite, Wall, Workers
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    BlockState,
    InodeRecord,
    NodeTable,
    block_key,
    counted,
    decode_u64,
    encode_u64,
    ino_range,
    inode_key,
    key_block,
    key_ino,
    table_range,
)
from spotwarp_fs.core.scratch import DERIVED_KEY, FIRST_ROW, MADE_SO
from spotwarp_fs.core.types import INODE_EPOCH_SHIFT, BlockIndex, ChangeSeq, Generation, Inode, WriterEpoch
from spotwarp_fs.engine.intervals import Intervals
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.unsynced import Unsynced
from spotwarp_fs.engine.use import Use

if TYPE_CHECKING:
    from spotwarp_fs.engine.cut import Cut

log = logging.getLogger(__name__)

NEXT_INODE_KEY = NodeTable.META + b"next_inode"
EROFS = 30


class Draining(SpotwarpError):
    """Upkeep has to wait for the end of a drain."""


class Generations:
    """A number per block, raised before every change of its bytes; compared after every wait.

    A number never comes back. When there are too many they are forgotten, and all blocks get one new number: whoever is
    waiting then does its work once more.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries = 0
        self._clock = 0
        self._of: dict[Inode, dict[BlockIndex, Generation]] = {}
        self._of_rest: dict[Inode, Generation] = {}
        self._of_all = Generation(0)

    def _next(self) -> Generation:
        self._clock += 1
        return Generation(self._clock)

    def raise_for(self, ino: Inode, block: BlockIndex) -> Generation:
        """Say that the block's bytes are about to change."""
        if self._entries >= self._entries_max:
            self._of.clear()
            self._of_rest.clear()
            self._entries, self._of_all = 0, self._next()
        blocks = self._of.get(ino)
        if blocks is None:
            blocks = self._of[ino] = {}
        self._entries += block not in blocks
        generation = blocks[block] = self._next()
        return generation

    def of(self, ino: Inode, block: BlockIndex) -> Generation:
        """The block's present generation."""
        blocks = self._of.get(ino)
        found = None if blocks is None else blocks.get(block)
        return self._of_rest.get(ino, self._of_all) if found is None else found

    def raise_for_all(self, ino: Inode, first: BlockIndex) -> None:
        """Say that every block from *first* on is about to change (truncate, unlink), also those never written here."""
        blocks = self._of.get(ino)
        for block in [b for b in blocks if b >= first] if blocks else []:
            self.raise_for(ino, block)
        self._entries += ino not in self._of_rest
        self._of_rest[ino] = self._next()

    def forget(self, ino: Inode) -> None:
        """The inode is gone, and its number is never given again."""
        self._entries -= len(self._of.pop(ino, ())) + (self._of_rest.pop(ino, None) is not None)


class BusyMarks:
    """Blocks whose local bytes are being read or replaced in a worker thread: eviction leaves them alone."""

    def __init__(self) -> None:
        self._count: dict[tuple[Inode, BlockIndex], int] = {}

    def __contains__(self, block: tuple[Inode, BlockIndex]) -> bool:
        return block in self._count

    @contextmanager
    def hold(self, ino: Inode, blocks: range | list[BlockIndex]) -> Iterator[None]:
        """Mark *blocks* of *ino* busy while the body runs."""
        keys = [(ino, BlockIndex(block)) for block in blocks]
        for key in keys:
            self._count[key] = self._count.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                if self._count[key] == 1:
                    del self._count[key]
                else:
                    self._count[key] -= 1


class CountingRecorder(Recorder):
    """A recorder that remembers which inode records changed, for the counters of P-18, and what became scratch."""

    def __init__(self, txn: KVWrite, counter: ChangeCounter) -> None:
        super().__init__(txn, counter)
        self.inodes: list[tuple[Inode, bytes | None, bytes | None]] = []
        self.crossed: dict[Inode, bytes | None] = {}
        """Inodes whose row in table S was written, with what it says now."""
        self.touched: set[bytes] = set()

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of a published table."""
        if key[:1] == INODE_TABLE:
            self.inodes.append((key_ino(key), self.get(key), value))
        super().put(key, value)

    def delete(self, key: bytes) -> None:
        """Remove a key of a published table."""
        if key[:1] == INODE_TABLE:
            self.inodes.append((key_ino(key), self.get(key), None))
        super().delete(key)

    def touch(self, key: bytes) -> None:
        """Note that *key* must be in the next cut."""
        self.touched.add(key)
        super().touch(key)

    def put_local(self, key: bytes, value: bytes) -> None:
        """Set a key of a node table."""
        if key[:1] == NodeTable.SCRATCH and key != DERIVED_KEY:
            self.crossed[key_ino(key)] = value
        super().put_local(key, value)

    def delete_local(self, key: bytes) -> bool:
        """Remove a key of a node table."""
        found = super().delete_local(key)
        if found and key[:1] == NodeTable.SCRATCH:
            self.crossed[key_ino(key)] = None
        return found


class Workspace:
    """Everything that the engine's tasks share."""

    drains = 0
    """Drains under way: while there is one, upkeep changes no rows, which would look unsaved at its end."""
    notices: tuple[str, ...] = ()
    """What the user has to know until it is dealt with; `status` shows them all."""

    def __init__(
        self,
        kv: KVStore,
        data: DataFiles,
        *,
        wall: Wall,
        entropy: Entropy,
        workers: Workers,
        policies: Policies,
        settings: EngineSettings,
    ) -> None:
        self.kv = kv
        self.data = data
        self.wall = wall
        self.entropy = entropy
        self.workers = workers
        self.policies = policies
        self.settings = settings
        self.generations = Generations(settings.generations_max)
        self.busy = BusyMarks()
        self.unsynced = Unsynced()
        self.dirty: dict[Inode, dict[BlockIndex, float]] = {}
        self.scratch: set[Inode] = set()
        self.scratch_dirty: dict[Inode, dict[BlockIndex, float]] = {}
        self.withdrawn: set[Inode] = set()
        """Scratch inodes that were published once: their bytes, and even their block maps, may be in the store only."""
        self.withdrew = trio.Event()
        """Set when one more is."""
        self.cut: Cut | None = None
        self.fenced: Fenced | None = None
        self.stopping = False
        self.freed = trio.Condition()
        """Notified when blocks become evictable, and when waits must end."""
        self.oldest_unpublished_s: float | None = None
        self.due_s: float | None = None
        """When the first of the unpublished changes wants to be cut."""
        self.intervals = Intervals(policies, settings.interval_s)
        self.bytes_written = 0
        self.reports: deque[str] = deque(maxlen=20)
        self.use = Use(data)
        self.files = 0
        self.directories = 0
        self.logical_bytes = 0
        self.released = trio.Event()
        """Set when a file's last write handle is released; the cut loop replaces it."""
        self.heed_releases = True
        """The cut loop waits for something in flight to end; else a release is not worth waking it."""
        self._next_inode = 0
        self._inode_limit = 0
        self.counter = ChangeCounter(ChangeSeq(0))

    def load_counters(self) -> None:
        """Read counters and the dirty index back from the map (at start, after a load)."""
        with self.kv.read() as view:
            seq = view.get(SEQ_KEY)
            self.counter = ChangeCounter(ChangeSeq(decode_u64(seq) if seq else 0))
            following = view.get(NEXT_INODE_KEY)
            self._next_inode = self._inode_limit = decode_u64(following) if following else 0
            self._load_scratch(view)
            self.dirty.clear()
            for key, value in view.scan(*table_range(BLOCK_TABLE)):
                if value and value[0] & 1 and BlockState.decode(value).dirty:
                    self.mark_dirty(key_ino(key), key_block(key))
            self.files = self.directories = self.logical_bytes = 0
            for key, value in view.scan(*table_range(INODE_TABLE)):
                if key_ino(key) not in self.scratch:
                    self._count(value, 1)
            if next(iter(view.scan(NodeTable.CHANGELOG, bytes([NodeTable.CHANGELOG[0] + 1]))), None) is not None:
                self.note_change(self.settings.interval_s)
        self.use.load()

    def _load_scratch(self, view: KVRead) -> None:
        rows = [(key_ino(key), value) for key, value in view.scan(FIRST_ROW, table_range(NodeTable.SCRATCH)[1])]
        self.scratch = {ino for ino, _ in rows}
        self.withdrawn = {ino for ino, since in rows if decode_u64(since) != MADE_SO}
        self.scratch_dirty.clear()

    def recount(self, ino: Inode, earlier: bytes | None, later: bytes | None) -> None:
        """An inode's record is *later* now; None: there is, or was, none."""
        if ino in self.scratch:
            return
        if earlier is not None:
            self._count(earlier, -1)
        if later is not None:
            self._count(later, 1)

    def _count(self, value: bytes, sign: int) -> None:
        """Add an inode record to the counters, or take it out."""
        mode, nlink, size = counted(value)
        if nlink == 0:
            return
        if stat.S_ISDIR(mode):
            self.directories += sign
            return
        self.files += sign
        self.logical_bytes += sign * size

    @property
    def dirty_blocks(self) -> int:
        """How many blocks have no frame and want one."""
        return sum(map(len, self.dirty.values()))

    @property
    def scratch_blocks(self) -> int:
        """How many blocks will never have one."""
        return sum(map(len, self.scratch_dirty.values()))

    def all_dirty(self, ino: Inode, blocks: Iterable[int]) -> bool:
        """Tell whether these blocks all have local bytes and no frame; then the map need not be asked."""
        known = (self.scratch_dirty if ino in self.scratch else self.dirty).get(ino)
        return known is not None and all(block in known for block in blocks)

    def mark_dirty(self, ino: Inode, block: BlockIndex) -> None:
        """Note a block without a frame, and when it was last written."""
        table = self.scratch_dirty if ino in self.scratch else self.dirty
        blocks = table.get(ino)
        if blocks is None:
            blocks = table[ino] = {}
        blocks[block] = trio.current_time()

    def unmark_dirty(self, ino: Inode, block: BlockIndex) -> None:
        """The block has a frame now, or is gone."""
        table = self.scratch_dirty if ino in self.scratch else self.dirty
        blocks = table.get(ino)
        if blocks is not None and blocks.pop(block, None) is not None and not blocks:
            del table[ino]

    def forget_dirty(self, ino: Inode) -> None:
        """The inode is gone."""
        self.dirty.pop(ino, None)
        self.scratch_dirty.pop(ino, None)

    def report(self, message: str) -> None:
        """Note something that the user should see; the newest few are kept for `status`."""
        self.reports.append(message)
        log.warning(message)

    def check_no_drain(self) -> None:
        """Refuse upkeep's changes while a drain is under way."""
        if self.drains:
            raise Draining("a drain is under way, which upkeep must not give more to publish: try again later")

    def check_writable(self) -> None:
        """Refuse changes once fenced (EROFS)."""
        if self.fenced is not None:
            raise Refused(EROFS, f"the workspace was taken over: {self.fenced}")

    @contextmanager
    def change(self) -> Iterator[Recorder]:
        """One step that changes the map: a transaction that commits when the block ends. No await inside."""
        before = self.counter.seq
        try:
            with self.kv.write() as txn:
                recorder = CountingRecorder(txn, self.counter)
                yield recorder
                now = {ino: txn.get(inode_key(ino)) for ino in recorder.crossed}
        except BaseException:
            self.counter.rolled_back()
            raise
        for ino, earlier, later in recorder.inodes:
            self.recount(ino, earlier, later)
        for ino, since in recorder.crossed.items():
            self._cross(ino, since, now[ino])
        if self.counter.seq != before:
            self.note_change(self._interval_s(recorder))

    def _cross(self, ino: Inode, since: bytes | None, record: bytes | None) -> None:
        """An inode became scratch (*since* is its row), or is no longer."""
        was = ino in self.scratch
        dirty = (self.scratch_dirty if was else self.dirty).pop(ino, {})
        self.withdrawn.discard(ino)
        if since is None:
            self.scratch.discard(ino)
        else:
            self.scratch.add(ino)
            if decode_u64(since) != MADE_SO:
                self.withdrawn.add(ino)
                self.withdrew.set()
        if was and record is not None:
            # It has been back, and that made blocks dirty.
            with self.kv.read() as view:
                for key, value in view.scan(*ino_range(BLOCK_TABLE, ino)):
                    if value and BlockState.decode(value).dirty:
                        self.mark_dirty(ino, key_block(key))
        elif dirty:
            self.scratch_dirty[ino] = dirty
        if record is not None and was != (since is not None):
            self._count(record, 1 if was else -1)

    def _interval_s(self, recorder: CountingRecorder) -> float:
        """Within what time the changes of a step want to be cut (S8)."""
        if not self.intervals.differ:
            return self.settings.interval_s
        with self.kv.read() as view:
            changed = {key_ino(key) for key in recorder.touched if key[:1] in TREE_TABLES}
            return self.intervals.shortest(view, changed)

    def note_change(self, within_s: float) -> None:
        """Remember since when something is unpublished, and when it is due."""
        now = trio.current_time()
        if self.oldest_unpublished_s is None:
            self.oldest_unpublished_s = now
        if self.due_s is None or self.due_s > now + within_s:
            self.due_s = now + within_s

    def start_inodes(self, writer_epoch: WriterEpoch) -> None:
        """Give inode numbers of *writer_epoch* from now on, unless it is the one in use already."""
        if self._next_inode >> INODE_EPOCH_SHIFT < writer_epoch:
            self._next_inode = self._inode_limit = (writer_epoch << INODE_EPOCH_SHIFT) + 1

    def new_inode(self) -> Inode:
        """Give a number that was never used (C15), outside `change`: the counter is persisted in batches."""
        if self._next_inode >= self._inode_limit:
            limit = self._next_inode + self.settings.inode_batch
            with self.kv.write() as txn:
                txn.put(NEXT_INODE_KEY, encode_u64(limit))
            self._inode_limit = limit
        ino = Inode(self._next_inode)
        self._next_inode += 1
        return ino

    async def wake_waiters(self) -> None:
        """Let every wait in a handler look again: space was freed, or it must end."""
        async with self.freed:
            self.freed.notify_all()


def block_state(view: KVRead, ino: Inode, block: BlockIndex) -> BlockState | None:
    """The block's record, or None for a hole (an empty value is a hole over a base that is not loaded)."""
    value = view.get(block_key(ino, block))
    return BlockState.decode(value) if value else None


def read_inode(view: KVRead, ino: Inode) -> InodeRecord:
    """The inode's record; raises Refused(ESTALE) when there is none."""
    value = view.get(inode_key(ino))
    if value is None:
        raise Refused(116, f"inode {ino:#x} does not exist")
    return InodeRecord.decode(value)
