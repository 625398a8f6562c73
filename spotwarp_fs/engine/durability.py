"""fsync: data on disk, and in the journal every change that makes it reachable.

Invariant: a caller joins only a group that has not begun (H10). A group looks at the map, syncs the data files, then
appends one record with every change of the map since the last record, then syncs the journal. Bytes that the journal
vouches for go only after it, or a manifest, says that they are gone (L4): until then a truncated or removed file keeps
them, and whoever wants to change it waits. A file whose fdatasync failed stays failed, for fsync and close, until
everything in doubt was written again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.errors import Fenced, Refused, Unavailable
from spotwarp_fs.core.extents import Extent
from spotwarp_fs.core.journal import Changes, JournalLog, Record, Synced, journalled_upto
from spotwarp_fs.core.ports import KVSnapshot, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    BlockState,
    InodeRecord,
    NodeTable,
    decode_u64,
    encode_u64,
    ino_range,
    inode_key,
    key_block,
)
from spotwarp_fs.core.scratch import is_scratch
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode
from spotwarp_fs.engine.delta import changes_between, few_rows, replaced
from spotwarp_fs.engine.vouched import Vouched
from spotwarp_fs.engine.workspace import Workspace, block_state

EIO = 5
EROFS = 30
SENT_KEY = NodeTable.META + b"sent_seq"
"""Change seq of the newest cut whose manifest was sent: it may be the head without our knowing (D in `Changes`)."""


@dataclass(slots=True)
class Group:
    """Callers of fsync that are answered together."""

    inodes: set[Inode] = field(default_factory=set)
    done: trio.Event = field(default_factory=trio.Event)
    error: str = ""

    def end(self, error: str = "") -> None:
        """Answer everybody."""
        self.error = self.error or error
        self.done.set()


class Durability:
    """Group commit of fsyncs, and of what must be journalled before bytes may go."""

    def __init__(self, workspace: Workspace, journal: JournalLog, publish: Callable[[], Awaitable[object]]) -> None:
        self._ws = workspace
        self._journal = journal
        self._publish = publish
        self.finish: Callable[[Inode], None] = lambda ino: None
        """Destroys the bytes of a file that the map no longer has."""
        self._next = Group()
        self._wanted = trio.Event()
        self._soon = trio.Event()
        self._lock = trio.Lock()
        self._ended = False
        self._published_seq = self._journaled = self._sent = ChangeSeq(0)
        """A manifest has everything up to the first; the journal, or a manifest, everything up to the second."""
        self._vouched = Vouched()
        self._pending: dict[Inode, ChangeSeq] = {}
        """Files that still hold bytes which the map does not have, and the change that took them."""
        self._answered: set[Inode] = set()
        """Files that a remote fsync answered for and that nothing was written to after it."""
        self._releasing: set[tuple[Inode, BlockIndex]] = set()
        """Blocks that eviction waits for."""
        self._suspect = False
        """The journal failed: nothing is appended to it, it is written anew."""
        self._compacted_bytes = 0
        self._sessions: Callable[[], frozenset[str]] = frozenset

    def start(self, published: ChangeSeq, sessions: Callable[[], frozenset[str]]) -> None:
        """Go on with the journal that is there, on top of a manifest that covers everything up to *published*."""
        records = self._journal.records()
        self._sessions = sessions
        self._published_seq = published
        self._journaled = journalled_upto(records, published)
        self._vouched = Vouched(records)
        self._vouched.published(published)
        with self._ws.kv.read() as view:
            sent = view.get(SENT_KEY)
            # Blocks of zeros whose end as a record the last daemon had no time to journal.
            places = [(ino, block) for ino in self._vouched.synced for block in self._vouched.named(ino)]
            self._releasing |= {place for place in places if block_state(view, *place) is None}
        if self._releasing:
            self._wanted.set()
        self._sent = ChangeSeq(decode_u64(sent) if sent else 0)
        if self._ws.counter.seq > self._journaled:
            # The last daemon may have been killed between a truncation and its place in the journal.
            for ino in self._vouched.synced:
                self._defer(ino)

    async def run(self) -> None:
        """Work through groups, one at a time."""
        group = self._next
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._linger)
                while True:
                    await self._wanted.wait()
                    group, self._next, self._wanted = self._next, Group(), trio.Event()
                    async with self._lock:
                        await self._commit(group)
                    group.end()
        finally:
            self._ended = self._ws.stopping
            if self._ended:
                for left in (group, self._next):
                    left.end("the mount ends")

    async def _linger(self) -> None:
        """Bring to the journal, after a while, what nobody waits for."""
        while True:
            await self._soon.wait()
            await trio.sleep(self._ws.settings.journal_linger_s)
            self._soon = trio.Event()
            self._wanted.set()

    async def sync_file(self, ino: Inode) -> None:
        """Return when the file would survive a crash of the machine; raises Refused(EIO) if it would not."""
        self.check_not_failed(ino)
        if self._ws.fenced is None:
            if self._ws.settings.fsync_remote and ino not in self._ws.scratch:
                self._answered.add(ino)
                await self._published()
                return
            await self._join({ino})
            self.check_not_failed(ino)
        self._check_nothing_lost(inode_key(ino), inode_key(Inode(ino + 1)))

    async def sync_names(self, ino: Inode) -> None:
        """Return when the directory's entries would survive a crash of the machine."""
        if self._ws.fenced is None:
            if self._ws.settings.fsync_remote and ino not in self._ws.scratch:
                await self._published()
                return
            await self._join(set())
        self._check_nothing_lost(*ino_range(ENTRY_TABLE, ino))

    async def sync_new_name(self, ino: Inode) -> None:
        """With `fsync: remote`, publish the new name of a file that was fsynced: so, and without more, files are saved.

        The name stands already, and the kernel keeps its directory locked meanwhile: after `rename_publish_wait_s`, or
        when nothing can be published from here, this returns without it.
        """
        if ino not in self._answered:
            return
        self._answered.discard(ino)
        if self._ws.fenced is None and ino not in self._ws.scratch:
            with trio.move_on_after(self._ws.settings.rename_publish_wait_s), suppress(Refused):
                await self._published()

    def _check_nothing_lost(self, start: bytes, stop: bytes) -> None:
        """A fenced mount promises nothing new: what was not published before will not be. Raises Refused(EROFS)."""
        if self._ws.fenced is None:
            return
        with self._ws.kv.read() as view:
            rows = view.scan(NodeTable.CHANGES + start, NodeTable.CHANGES + stop)
            if next(iter(rows), None) is not None:
                raise Refused(EROFS, f"there are changes that will not be published: {self._ws.fenced}")

    async def _published(self) -> None:
        if self._ws.stopping:
            raise Refused(EIO, "this will not be published from here: the mount ends")
        try:
            await self._publish()
        except (Fenced, Unavailable) as error:
            raise Refused(EIO, f"this will not be published from here: {error}") from error

    async def _join(self, inodes: set[Inode]) -> None:
        if self._ended:
            raise Refused(EIO, "the mount ends")
        group = self._next
        group.inodes |= inodes
        self._wanted.set()
        await group.done.wait()
        if group.error:
            raise Refused(EIO, group.error)

    def check_not_failed(self, ino: Inode) -> None:
        """Raise Refused(EIO) if an earlier fdatasync of the file failed."""
        reason = self._ws.unsynced.reason(ino)
        if reason is not None:
            raise Refused(EIO, reason)

    def note_write(self, ino: Inode, offset: int, count: int) -> None:
        """A failed file is good again when everything that was in doubt has been written again."""
        self._answered.discard(ino)
        if ino in self._ws.unsynced and self._ws.unsynced.written(ino, Extent(offset, offset + count)):
            self._ws.data.clear_failed(ino)

    def note_end(self, ino: Inode, size: int) -> None:
        """What lies beyond the end of a file, or is removed with it, is no longer in doubt."""
        self._answered.discard(ino)
        if self._ws.unsynced.cut(ino, size):
            self._ws.data.clear_failed(ino)

    def may_evict(self, ino: Inode, block: BlockIndex) -> bool:
        """Return whether the journal does without the local bytes; if not, it is told, and eviction asks again."""
        if not self._vouched.holds(ino, block):
            return True
        self._releasing.add((ino, block))
        self._wanted.set()
        return False

    def may_destroy(self, ino: Inode, first: BlockIndex) -> bool:
        """Return whether bytes from block *first* on may go at once; if not, `finish` is called when they may."""
        if ino not in self._pending and not self._vouched.holds_any(ino, first):
            return True
        self._defer(ino)
        return False

    def _defer(self, ino: Inode) -> None:
        self._pending[ino] = self._ws.counter.seq
        self._soon.set()

    def is_settled(self, ino: Inode) -> bool:
        """Return whether the data file holds nothing that the map does not have."""
        return ino not in self._pending

    async def settle(self, ino: Inode) -> None:
        """Return when bytes that the map no longer has are gone; raises Refused(EIO) when the disk fails."""
        seq = self._pending[ino]
        await self._join(set())
        if self._pending.get(ino) == seq:
            raise Refused(EIO, f"the cache cannot let go of what inode {ino:#x} held before")

    def cut_sent(self, seq: ChangeSeq) -> None:
        """The manifest of a cut is about to be sent: from now on it may be the head, also for a later start."""
        self._sent = seq
        with self._ws.kv.write() as txn:
            txn.put(SENT_KEY, encode_u64(seq))

    async def _commit(self, group: Group) -> None:
        ws = self._ws
        seq = ws.counter.barrier()
        snapshot = ws.kv.snapshot()
        compact = self._suspect or self._has_outgrown()
        inodes = group.inodes | self._vouched.synced if compact else group.inodes
        self._vouched.begin(inodes)
        releasing, self._releasing = self._releasing, set()
        try:
            changes = await self._look(snapshot, self._published_seq if compact else self._journaled, seq, inodes)
            self._vouched.coming(changes)
            synced = [ino for ino in sorted(inodes) if await self._sync_data(ino) and not is_scratch(snapshot, ino)]
            blocks = releasing | {(ino, block) for ino in synced for block in self._vouched.named(ino)}
            records: list[Record] = [
                changes, *replaced(snapshot, changes, sorted(blocks)), *(Synced(seq, ino) for ino in synced)
            ]  # fmt: skip
            if compact or len(records) > 1 or changes.change_set or changes.earlier:
                await self._write(records, compact=compact)
        except OSError as error:
            self._suspect = True
            self._releasing |= releasing
            group.error = f"the fsync journal failed: {error}"
            ws.report(group.error)
            return
        finally:
            snapshot.close()
        self._journaled = ChangeSeq(max(self._journaled, seq))
        self._finish_pending()
        if releasing:
            await ws.wake_waiters()

    def _has_outgrown(self) -> bool:
        """A long outage makes a long journal: then one record takes its place, if every file can be synced again."""
        limit = max(self._ws.settings.journal_bytes_max, 2 * self._compacted_bytes)
        return self._journal.size_bytes > limit and not any(ino in self._ws.unsynced for ino in self._vouched.synced)

    async def _look(
        self, snapshot: KVSnapshot, since: ChangeSeq, seq: ChangeSeq, synced: frozenset[Inode] | set[Inode]
    ) -> Changes:
        """Tell what changed; a long list is made in a thread, and meanwhile everything counts as vouched for."""
        cut = self._ws.cut
        cuts = {self._sent} if cut is None else {self._sent, cut.seq}
        edges = [since, *sorted(edge for edge in cuts if since < edge < seq), max(since, seq)]
        if few_rows(snapshot, since, seq):
            return changes_between(snapshot, edges, sorted(synced))
        return await self._ws.workers.run(Work.SYNC, changes_between, snapshot, edges, sorted(synced))

    async def _write(self, records: list[Record], *, compact: bool) -> None:
        run = self._ws.workers.run
        if compact:
            await run(Work.SYNC, self._journal.compact, records)
            self._suspect = False
            self._compacted_bytes = self._journal.size_bytes
        else:
            await run(Work.SYNC, self._journal.append, records)
        self._vouched.arrived(records, alone=compact)

    async def _sync_data(self, ino: Inode) -> bool:
        """Sync one data file; False, and the file is failed from now on, if that is not possible."""
        if ino in self._ws.unsynced:
            return False
        try:
            await self._ws.workers.run(Work.SYNC, self._ws.data.sync, ino)
        except OSError as error:
            self._failed(ino, f"fdatasync of inode {ino:#x} failed: {error}")
            return False
        return True

    def _failed(self, ino: Inode, reason: str) -> None:
        """What is only here is in doubt; what the store has too is fetched again."""
        ws = self._ws
        only_here = []
        with ws.kv.write() as txn:
            value = txn.get(inode_key(ino))
            size = InodeRecord.decode(value).size if value is not None else 0
            for key, found in list(txn.scan(*ino_range(BLOCK_TABLE, ino))):
                state = BlockState.decode(found) if found else None
                if state is None or not state.local:
                    continue
                if state.dirty:
                    only_here.append(key_block(key))
                else:
                    ws.generations.raise_for(ino, key_block(key))
                    txn.put(key, state.without_local_bytes().encode())
        if ws.cut is not None and ws.cut.needs(ino):
            ws.cut.abandon(reason)
        ws.unsynced.failed(ino, reason, only_here, size)
        ws.report(reason)

    def _finish_pending(self) -> None:
        for ino in [ino for ino, seq in self._pending.items() if seq <= self._journaled]:
            try:
                self.finish(ino)
            except OSError as error:
                self._ws.report(f"inode {ino:#x}: what it held before cannot be removed: {error}")
            else:
                del self._pending[ino]

    async def published(self, seq: ChangeSeq) -> None:
        """A manifest covers everything up to *seq*."""
        async with self._lock:
            self._published_seq = ChangeSeq(max(self._published_seq, seq))
            self._journaled = ChangeSeq(max(self._journaled, seq))
            self._vouched.published(seq)
            self._finish_pending()
            try:
                await self._ws.workers.run(Work.SYNC, self._journal.prune, seq, self._sessions())
                self._compacted_bytes = 0
            except OSError as error:
                self._suspect = True
                self._ws.report(f"the fsync journal cannot be shortened: {error}")
