"""fsync: data on disk, and in the journal every change that makes it reachable.

Invariant: a caller joins only a group that has not begun (H10). A group syncs the data files first, then appends one
record with every change of the map since the last record, then syncs the journal. A file whose fdatasync failed stays
failed, for fsync and close, until the blocks in question are rewritten.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.changes import dropped_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Fenced, Refused, Unavailable
from spotwarp_fs.core.extents import Extent
from spotwarp_fs.core.journal import Changes, JournalLog, Record, Synced
from spotwarp_fs.core.ports import KVSnapshot, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    TREE_TABLES,
    NodeTable,
    changelog_key,
    ino_key,
    key_block,
    key_ino,
    table_range,
)
from spotwarp_fs.core.scratch import MADE_SO, is_scratch, is_unseen, published
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode
from spotwarp_fs.engine.workspace import Workspace

EIO = 5
EROFS = 30


@dataclass(slots=True)
class Group:
    """Callers of fsync that are answered together."""

    inodes: set[Inode] = field(default_factory=set)
    done: trio.Event = field(default_factory=trio.Event)
    error: str = ""


class Durability:
    """Group commit of fsyncs."""

    def __init__(self, workspace: Workspace, journal: JournalLog, publish: Callable[[], Awaitable[object]]) -> None:
        self._ws = workspace
        self._journal = journal
        self._publish = publish
        self._next = Group()
        self._wanted = trio.Event()
        self._lock = trio.Lock()
        self._journaled = ChangeSeq(0)
        """Changes up to here are in the journal or published."""
        self._failed: dict[Inode, str] = {}
        self._named: dict[tuple[Inode, BlockIndex], ChangeSeq] = {}
        """Local blocks that the journal vouches for: not to be punched before a manifest does instead (L4)."""
        self._removals: dict[Inode, ChangeSeq] = {}
        self._sessions: frozenset[str] = frozenset()

    def start(self, published: ChangeSeq, sessions: frozenset[str]) -> None:
        """Begin after what a manifest covers; everything later is journalled by the first fsync."""
        self._journaled = published
        self._sessions = sessions

    async def run(self) -> None:
        """Work through groups, one at a time."""
        while True:
            await self._wanted.wait()
            group, self._next, self._wanted = self._next, Group(), trio.Event()
            async with self._lock:
                await self._commit(group)
            group.done.set()

    async def sync_file(self, ino: Inode) -> None:
        """Return when the file would survive a crash of the machine; raises Refused(EIO) if it would not."""
        self.check_not_failed(ino)
        if self._ws.fenced is not None:
            return self._nothing_to_sync(ino)
        if self._ws.settings.fsync_remote and ino not in self._ws.scratch:
            await self._published()
            return
        await self._join({ino})
        self.check_not_failed(ino)

    def _nothing_to_sync(self, ino: Inode) -> None:
        """A read-only or fenced mount promises nothing new: what was not safe before it turned so is not safe now."""
        if ino in self._ws.dirty:
            raise Refused(EROFS, f"inode {ino:#x} has changes that will not be published: {self._ws.fenced}")

    async def sync_names(self, ino: Inode) -> None:
        """Return when the directory's entries would survive a crash of the machine."""
        if self._ws.settings.fsync_remote:
            await self._published()
            return
        await self._join(set())

    async def _published(self) -> None:
        try:
            await self._publish()
        except (Fenced, Unavailable) as error:
            raise Refused(EIO, f"this will not be published from here: {error}") from error

    async def _join(self, inodes: set[Inode]) -> None:
        group = self._next
        group.inodes |= inodes
        self._wanted.set()
        await group.done.wait()
        if group.error:
            raise Refused(EIO, group.error)

    def check_not_failed(self, ino: Inode) -> None:
        """Raise Refused(EIO) if an earlier fdatasync of the file failed."""
        reason = self._failed.get(ino)
        if reason is not None:
            raise Refused(EIO, reason)

    def note_write(self, ino: Inode, extent: Extent) -> None:
        """A rewrite of a failed file from its beginning makes it good again."""
        if ino in self._failed and extent.start == 0:
            del self._failed[ino]

    def may_evict(self, ino: Inode, block: BlockIndex) -> bool:
        """Nothing but the local bytes backs what the journal says of this block."""
        return (ino, block) not in self._named

    async def _commit(self, group: Group) -> None:
        workers = self._ws.workers
        seq = self._ws.counter.barrier()
        snapshot = self._ws.kv.snapshot()
        try:
            for ino in sorted(group.inodes):
                try:
                    await workers.run(Work.SYNC, self._ws.data.sync, ino)
                except OSError as error:
                    self._failed[ino] = f"fdatasync of inode {ino:#x} failed: {error}"
                    self._ws.report(self._failed[ino])
            synced = sorted(ino for ino in group.inodes - self._failed.keys() if not is_scratch(snapshot, ino))
            drops, changes = self._delta(snapshot, seq, synced)
            records: list[Record] = [Changes(seq, ChangeSet.of(drops, changes)), *(Synced(seq, ino) for ino in synced)]
            await workers.run(Work.SYNC, self._journal.append, records)
        except OSError as error:
            group.error = f"the fsync journal failed: {error}"
            self._ws.report(group.error)
            return
        finally:
            snapshot.close()
        for key in changes:
            if key[:1] == BLOCK_TABLE and changes[key] is not None:
                self._named[(key_ino(key), key_block(key))] = seq
        self._journaled = seq

    def _delta(
        self, snapshot: KVSnapshot, seq: ChangeSeq, synced: list[Inode]
    ) -> tuple[dict[Inode, BlockIndex], dict[bytes, bytes | None]]:
        """Every change since the last record, as values of now, and the in-flight marks of the synced files.

        What is scratch is left out: the head that a rebuild begins with has no place for it.
        """
        view = published(snapshot)
        rows = snapshot.scan(changelog_key(ChangeSeq(self._journaled + 1)), changelog_key(ChangeSeq(seq + 1)))
        keys = (key for _, key in rows if key[:1] not in TREE_TABLES or not is_unseen(snapshot, key_ino(key), MADE_SO))
        changes = {key: view.get(key) for key in keys}
        for ino in synced:
            key = ino_key(NodeTable.IN_FLIGHT, ino)
            changes[key] = view.get(key)
        drops = dropped_ranges(snapshot.scan(*table_range(NodeTable.RANGES)), seq)
        return {ino: first for ino, first in drops.items() if not is_scratch(snapshot, ino)}, changes

    async def published(self, seq: ChangeSeq) -> None:
        """A manifest covers everything up to *seq*."""
        self._journaled = ChangeSeq(max(self._journaled, seq))
        self._named = {block: named for block, named in self._named.items() if named > seq}
        async with self._lock:
            try:
                await self._ws.workers.run(Work.SYNC, self._journal.prune, seq, self._sessions)
            except OSError as error:
                self._ws.report(f"the fsync journal cannot be shortened: {error}")
        for ino in [ino for ino, removed in self._removals.items() if removed <= seq]:
            del self._removals[ino]
            self._ws.data.remove(ino)
            self._ws.use.note(ino)

    def defer_removal(self, ino: Inode) -> bool:
        """Keep the data file of a removed inode while the journal still vouches for it; True if it must stay."""
        if not any(named_ino == ino for named_ino, _ in self._named):
            return False
        self._removals[ino] = self._ws.counter.seq
        return True
