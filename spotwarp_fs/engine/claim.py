"""Whose head is it, and may this start write after it?

Invariant: a head whose session this cache has journalled is its own: local state goes on on top of it and nothing is
rolled back (L1). A cache that finds a foreign head never serves: it is set aside as salvage. A takeover claims a
writer epoch, not a number (C17): a found writer epoch at or below the expected one is followed, a higher one that is
not ours means lost. A permit names the writer epoch, and takes the place of politeness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import trio

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import (
    Corrupt,
    ExitCode,
    Fenced,
    NotFound,
    StoreRefused,
    Unavailable,
    UserError,
)
from spotwarp_fs.core.journal import Changes, JournalLog, SessionBegun
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.manifests import InFlightItem, Manifest, check_successor, decode, digest_of, encode
from spotwarp_fs.core.namespace import make_root
from spotwarp_fs.core.ports import KVStore, ObjectStore, Work
from spotwarp_fs.core.records import INODE_TABLE, FrameRef, NodeTable, inode_key, table_range
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.core.sections import MetadataWriter
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber, WriterEpoch
from spotwarp_fs.engine import node_note, place
from spotwarp_fs.engine.attempts import Attempts
from spotwarp_fs.engine.claimed import Claimed
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.heartbeat import live_writer, read_beat
from spotwarp_fs.engine.load import BASE_KEY, HEAD_KEY, remember_head
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.node_note import RentedNode
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.permit import Following, Permit
from spotwarp_fs.engine.publish import Head, Publisher, find_head, read_ahead, read_manifest
from spotwarp_fs.engine.recover import LostMap, recover
from spotwarp_fs.engine.scratch import carried
from spotwarp_fs.engine.states import Latest, StateWish, find_state
from spotwarp_fs.engine.takeover import Taken, Takeover
from spotwarp_fs.engine.workspace import Workspace

SESSIONS_KEY = NodeTable.META + b"sessions"
SESSION_BYTES = 16
SESSIONS_KEPT = 64
FIRST_EPOCH = WriterEpoch(1)
ROUNDS_MAX = 2
"""So often a takeover that met a newer head is worked out anew before the writer epoch is raised first."""


class ForeignHead(Exception):
    """This cache stands on a state that another writer has gone on from; carries the head found."""

    def __init__(self, head: Head) -> None:
        super().__init__(f"manifest {head.manifest.number} is by session {head.manifest.session}")
        self.head = head


class Claim:
    """One start of a writer on one cache."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        *,
        workspace_id: str,
        actor: Actor,
        takeover: bool,
        journal: JournalLog,
        fresh_map: Callable[[], KVStore],
        workspace_name: str = "",
        at: StateWish | None = None,
        lost: LostMap | None = None,
        permit: Permit | None = None,
        node: RentedNode | None = None,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._workspace_id = workspace_id
        self._actor = actor
        self._takeover = takeover
        self._journal = journal
        self._fresh_map = fresh_map
        self._workspace_name = workspace_name
        self._at = at
        self._lost = lost
        self._permit = permit
        self.node = node
        self._known_sessions = frozenset(
            record.session for record in journal.records() if isinstance(record, SessionBegun)
        )
        self.health = StoreHealth(workspace.settings, workspace.entropy)
        self.packs = PackStore(workspace, store, self.health)
        self.metadata = Metadata(workspace, self.packs)
        self.session = workspace.entropy.token_bytes(SESSION_BYTES).hex()
        self._attempts = Attempts(store, self.health)

    @property
    def sessions(self) -> frozenset[str]:
        """Sessions of this cache: a head of one of them is its own."""
        return self._known_sessions

    async def run(self) -> Claimed:
        """Claim and load. Raises Fenced (lost), ForeignHead (stale cache), UserError (live writer)."""
        with self._ws.kv.read() as view:
            body = view.get(HEAD_KEY)
            raw = view.get(SESSIONS_KEY) or b""
        self._known_sessions |= {raw[at : at + SESSION_BYTES].hex() for at in range(0, len(raw), SESSION_BYTES)}
        if body is not None and not isinstance(self._at, Latest | None):
            self._give_up_cache()
        elif body is not None:
            return await self._restart(Head(decode(body), digest_of(body)))
        found = await find_head(self._store)
        if found is None:
            self._give_up_files()
            return await self._create() if self._permit is None else await self._permitted(self._permit)
        head, server_time_s = found
        self._attempts.note_server_time(server_time_s)
        if self._lost is not None or any(isinstance(record, Changes) for record in self._journal.records()):
            return await self._recover(head)
        self._give_up_files()
        if self._permit is not None and head.manifest.session not in self._known_sessions:
            return await self._permitted(self._permit)
        await self._be_polite(head)
        return await self._take_over(head)

    async def _permitted(self, permit: Permit) -> Claimed:
        """Follow the head until *permit* names a writer epoch, then claim exactly that one."""
        following = Following(self._store, self.health, self._new_takeover)
        epoch = await following.until_granted(permit)
        head, takeover = following.head, following.takeover
        if head is None or takeover is None:
            return await self._create(epoch)
        if head.manifest.writer_epoch >= epoch:
            raise Fenced(
                f"writer epoch {epoch} was permitted, and manifest {head.manifest.number} is of writer epoch "
                f"{head.manifest.writer_epoch} already (session {head.manifest.session}): another node was faster"
            )
        return await self._win(takeover, head, epoch)

    def _give_up_files(self) -> None:
        """Nothing vouches for what another start left."""
        for ino in list(self._ws.data.inodes()):
            if self._lost is not None:
                self._lost.rest.keep(ino, frozenset(), math.inf)
            self._ws.data.remove(ino)

    async def _be_polite(self, head: Head) -> None:
        """Refuse while the head's writer is alive, unless asked to take over; safety does not depend on it."""
        beat = await read_beat(self._store)
        if self._takeover or beat is None or beat.writer_epoch != head.manifest.writer_epoch:
            return
        if beat.session not in self._known_sessions and beat.age_s < self._ws.settings.lease_s:
            raise live_writer(beat, self._ws.settings.lease_s)

    async def _create(self, epoch: WriterEpoch = FIRST_EPOCH) -> Claimed:
        """Publish manifest 1 with an empty root."""
        ws = self._ws
        ws.load_counters()
        with ws.kv.read() as view:
            cut_short = view.get(inode_key(ROOT_INODE)) is not None
        if not cut_short:
            with ws.change() as recorder:
                make_root(recorder, self._actor, ws.wall.now_ns())
        with ws.kv.read() as view:
            start, stop = table_range(INODE_TABLE)
            change_set = ChangeSet((), tuple(view.scan(start, stop)))
        await self._note_session(epoch)
        written = await self.metadata.write(self._writer(epoch), change_set)
        manifest = Manifest(
            number=ManifestNumber(1),
            writer_epoch=epoch,
            session=self.session,
            workspace_id=self._workspace_id,
            parent_digest="",
            change_seq=ws.counter.seq,
            created_s=0.0,
            changes=written.root,
            changes_bytes=written.stored_bytes,
            directories=1,
            notes=node_note.note_of(self.node),
        )
        found = await self._attempts.create(manifest)
        if found is not None and found.session in self._known_sessions:
            # What an earlier start of this cache had sent arrived late.
            return await self._take_over(Head(found, digest_of(encode(found))))
        if found is not None:
            raise Fenced(f"another node created this workspace at the same moment (session {found.session})")
        head = Head(manifest, digest_of(encode(manifest)))
        with ws.kv.write() as txn:
            remember_head(txn, head)
            for row, _ in [*txn.scan(*table_range(NodeTable.CHANGELOG)), *txn.scan(*table_range(NodeTable.CHANGES))]:
                txn.delete(row)
        ws.oldest_unpublished_s = None
        return Claimed(self._publisher(head), None, None, True, None)

    async def _recover(self, head: Head) -> Claimed:
        """A cache without a map that may be believed: head and journal, if the head is its own (C4)."""
        if head.manifest.session not in self._known_sessions:
            raise ForeignHead(head)
        state = await recover(self._ws, self._store, self.metadata, self.health, head, self._journal, lost=self._lost)
        publisher = self._publisher(head)
        await self._raise(publisher, head)
        return Claimed(publisher, head.manifest.base, state.base, False, head.manifest)

    def _give_up_cache(self) -> None:
        """Somebody asks for another state than this cache has: nothing of it may be unpublished."""
        ws = self._ws
        with ws.kv.write() as txn:
            for table in (NodeTable.CHANGELOG, NodeTable.RANGES):
                if next(iter(txn.scan(*table_range(table))), None) is not None:
                    raise UserError(
                        "this node has changes that are not published yet, and going back would lose them: mount "
                        "without --at, unmount (which publishes them), then try again",
                        ExitCode.NOT_SAVED,
                    )
            txn.delete(HEAD_KEY)
        for ino in list(ws.data.inodes()):
            ws.data.remove(ino)

    async def _take_over(self, head: Head) -> Claimed:
        """Load *head* on an empty cache, then publish what is served of it with a raised writer epoch."""
        takeover, expected = self._new_takeover(), head.manifest.writer_epoch
        head = await self._load(takeover, head, expected)
        return await self._win(takeover, head, WriterEpoch(expected + 1))

    def _new_takeover(self) -> Takeover:
        return Takeover(
            self._ws, self._store, self.metadata, self.health, self._fresh_map, workspace_name=self._workspace_name
        )

    async def _win(self, takeover: Takeover, head: Head, epoch: WriterEpoch) -> Claimed:
        """Publish the takeover of *head*, which is loaded, as writer epoch *epoch*, or raise Fenced."""
        expected = WriterEpoch(epoch - 1)
        await self._note_session(epoch)
        rounds, behind = 0, list[Head]()
        while True:
            # A writer that publishes all the time is fenced first; what is served is then decided at leisure.
            bare = rounds >= ROUNDS_MAX
            self._ws.start_inodes(epoch)
            taken = takeover.bare(head) if bare else await self._taken(takeover, head, head)
            manifest = await self._successor_with(head, epoch, taken)
            found = await self._attempts.create(manifest)
            if found is None:
                break
            newer = await self._newer(head, found, expected)
            head, behind, rounds = newer[-1], behind + newer, rounds + 1
            if head.manifest.writer_epoch >= epoch:
                epoch = WriterEpoch(head.manifest.writer_epoch + 1)
                takeover.forget_inodes()
            if rounds < ROUNDS_MAX:
                await takeover.follow(behind)
                behind = []
        won = Head(manifest, digest_of(encode(manifest)))
        publisher = self._publisher(won)
        if bare:
            await takeover.follow(behind)
            taken = await self._taken(takeover, won, head)
            won = await publisher.publish(await self._successor_with(won, epoch, taken))
        await takeover.adopt(taken, won)
        return Claimed(publisher, won.manifest.base, takeover.base, False, head.manifest, taken.lines, taken_over=True)

    async def _load(self, takeover: Takeover, head: Head, expected: WriterEpoch) -> Head:
        """Load the head; a collector may be faster than we are, but not under an unchanged head (H6)."""
        while True:
            try:
                await takeover.load(head)
            except Corrupt:
                found = await find_head(self._store)
                if found is None or found[0].manifest.number == head.manifest.number:
                    raise
                head = found[0]
                self._check_expected(head.manifest, expected)
            else:
                return head

    async def _taken(self, takeover: Takeover, head: Head, content: Head) -> Taken:
        """Decide what is served after *head*, whose content is that of *content*."""
        now_s = self._attempts.server_now_s()
        if self._at is None:
            foreign = content.manifest.session not in self._known_sessions
            return await takeover.plan(head, content, pin_s=now_s if foreign else None)
        wanted = await find_state(self._store, self.metadata, self.health, content, now_s, self._at)
        if wanted.manifest.number == content.manifest.number:
            wanted = head
        return await takeover.exactly(head, wanted, pin_s=now_s)

    async def _newer(self, head: Head, found: Manifest, expected: WriterEpoch) -> list[Head]:
        """The old writer goes on (C17): give what it has published after *head*, *found* first, as far as that goes."""
        newer: list[Head] = []
        following: list[Head] = [Head(found, digest_of(encode(found)))]
        while following:
            for link in following:
                self._check_expected(link.manifest, expected)
                check_successor(head.manifest, link.manifest, parent_digest=head.digest)
                head = link
            newer += following
            following = await read_ahead(self._store, head.manifest.number)
        return newer

    def _check_expected(self, found: Manifest, expected: WriterEpoch) -> None:
        """A higher writer epoch than expected has won."""
        if found.writer_epoch > expected and found.session not in self._known_sessions:
            raise Fenced(
                f"session {found.session} took the workspace over first (manifest {found.number}, writer epoch "
                f"{found.writer_epoch}; this start expected {expected})"
            )

    async def _successor_with(self, head: Head, epoch: WriterEpoch, taken: Taken) -> Manifest:
        """Make the takeover manifest, its change set in the store before it."""
        manifest = self._successor(head, epoch, self._attempts.server_now_s(), taken.in_flight)
        written = await self.metadata.write(self._writer(epoch), taken.change_set) if taken.change_set else None
        return replace(
            manifest,
            changes=written.root if written is not None else None,
            changes_bytes=manifest.changes_bytes + (written.stored_bytes if written is not None else 0),
            takeover=taken.report,
            files=taken.files,
            directories=taken.directories,
            logical_bytes=taken.logical_bytes,
        )

    def _successor(
        self, head: Head, epoch: WriterEpoch, server_time_s: float, in_flight: tuple[InFlightItem, ...]
    ) -> Manifest:
        before = head.manifest
        return Manifest(
            number=ManifestNumber(before.number + 1),
            writer_epoch=epoch,
            session=self.session,
            workspace_id=self._workspace_id,
            parent_digest=head.digest,
            change_seq=before.change_seq,
            created_s=server_time_s,
            base_number=before.base_number,
            base=before.base,
            base_bytes=before.base_bytes,
            changes_bytes=before.changes_bytes,
            in_flight=in_flight,
            takeover={"from_number": before.number, "from_session": before.session},
            notes=place.carried(before) | carried(before) | node_note.note_of(self.node),
            files=before.files,
            directories=before.directories,
            logical_bytes=before.logical_bytes,
        )

    async def _restart(self, local: Head) -> Claimed:
        """A trusted cache: serve at once if the store is slow, raise the writer epoch as soon as it answers."""
        with self._ws.kv.read() as view:
            base_row = view.get(BASE_KEY)
        publisher = self._publisher(local)
        claimed = Claimed(publisher, FrameRef.decode(base_row) if base_row else None, None, False, local.manifest)

        async def raise_epoch() -> None:
            try:
                await self._raise(publisher, await self._own_head_patiently(local))
            except ForeignHead as foreign:
                raise Fenced(str(foreign)) from foreign

        claimed.pending = raise_epoch
        with trio.move_on_after(self._ws.settings.restart_store_wait_s):
            try:
                head = await self._own_head(local)
                claimed.base = head.manifest.base
                if claimed.base is not None:
                    claimed.root = await self.metadata.root(claimed.base)
                await self._raise(publisher, head)
                claimed.pending = None
            except (Unavailable, StoreRefused) as error:
                self.health.last_error = str(error)
        return claimed

    async def _own_head_patiently(self, local: Head) -> Head:
        while True:
            try:
                return await self._own_head(local)
            except (Unavailable, StoreRefused) as error:
                await self.health.failed(error)

    async def _own_head(self, local: Head) -> Head:
        """Follow the store from the cache's manifest to the head; every manifest on the way must be our own."""
        head = local
        while True:
            try:
                following, server_time_s = await read_manifest(self._store, ManifestNumber(head.manifest.number + 1))
            except NotFound:
                return head
            self._attempts.note_server_time(server_time_s)
            if following.manifest.session not in self._known_sessions:
                raise ForeignHead(following)
            check_successor(head.manifest, following.manifest, parent_digest=head.digest)
            head = following

    async def _raise(self, publisher: Publisher, head: Head) -> None:
        """Publish the takeover of an own restart; a rival at the number means fenced.

        What an earlier start of this cache had sent, or an earlier try of this one, may arrive late: it is followed.
        """
        while True:
            epoch = WriterEpoch(head.manifest.writer_epoch + 1)
            await self._note_session(epoch)
            manifest = self._successor(head, epoch, self._attempts.server_now_s(), head.manifest.in_flight)
            found = await self._attempts.create(manifest)
            if found is None:
                break
            if found.session not in self._known_sessions:
                raise Fenced(f"session {found.session} took the workspace over (manifest {found.number})")
            check_successor(head.manifest, found, parent_digest=head.digest)
            head = Head(found, digest_of(encode(found)))
        publisher.head = Head(manifest, digest_of(encode(manifest)))
        publisher.note_server_time(self._attempts.server_now_s())
        with self._ws.kv.write() as txn:
            remember_head(txn, publisher.head)

    async def _note_session(self, epoch: WriterEpoch) -> None:
        """Remember this session before its takeover is sent, so that a restart knows its own head (L1)."""
        with self._ws.kv.write() as txn:
            raw = (txn.get(SESSIONS_KEY) or b"") + bytes.fromhex(self.session)
            txn.put(SESSIONS_KEY, raw[-SESSION_BYTES * SESSIONS_KEPT :])
        await self._ws.workers.run(Work.SYNC, self._journal.append, [SessionBegun(self.session, epoch)])
        self._known_sessions |= {self.session}

    def _publisher(self, head: Head) -> Publisher:
        publisher = Publisher(self._store, head, self.health)
        publisher.note_server_time(self._attempts.server_now_s())
        return publisher

    def _writer(self, epoch: WriterEpoch) -> MetadataWriter:
        return MetadataWriter(lambda: pack_id(epoch, self._ws.entropy.token_bytes(8)))
