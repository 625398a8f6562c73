"""Bring the head onto an empty node and work out what a takeover of it serves, as one change set (P-05, P-18).

Invariant: until the takeover is published the live map holds exactly the head, so that a head which moves on meanwhile
is followed change set by change set (C17); afterwards it holds what the takeover manifest says. A change set names no
pack that is condemned or gone.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spotwarp_fs.core import retention
from spotwarp_fs.core.changes import SEQ_KEY
from spotwarp_fs.core.changesets import NOTHING, ChangeSet, fold
from spotwarp_fs.core.collection import condemned_in
from spotwarp_fs.core.errors import Corrupt, Denied, ExitCode, NotFound, Unavailable, UserError
from spotwarp_fs.core.inflight import Mark
from spotwarp_fs.core.layout import pack_key
from spotwarp_fs.core.manifests import NO_MANIFEST, InFlightItem, Manifest
from spotwarp_fs.core.ports import KVRead, KVStore, ObjectStore
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    FrameRef,
    InodeRecord,
    NodeTable,
    encode_u64,
    ino_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
)
from spotwarp_fs.core.replacement import LeftOut, Older, Plan, Served, replace_in_flight
from spotwarp_fs.core.sections import Root
from spotwarp_fs.core.subtrees import BlockCopy, resolve
from spotwarp_fs.core.takeover import (
    GoBack,
    Replacement,
    Serve,
    ServeHead,
    blocks_needed,
    decide,
    going_back,
    lost_files,
)
from spotwarp_fs.core.types import BlockIndex, Inode, ManifestNumber, PackId
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import (
    BASE_KEY,
    apply_chain,
    apply_state,
    clear_map,
    read_chain,
    read_change_sets,
    remember_head,
)
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX, Metadata
from spotwarp_fs.engine.older import NotLoaded, OlderStates
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.publish import Head
from spotwarp_fs.engine.telling import Draft, lines_of, outermost, report_of
from spotwarp_fs.engine.workspace import Workspace


class Unusable(Exception):
    """A state that was chosen reaches packs that are condemned or gone; carries which."""

    def __init__(self, number: ManifestNumber, reason: str) -> None:
        super().__init__(f"manifest {number} cannot be taken from: {reason}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Taken:
    """What a takeover publishes."""

    change_set: ChangeSet = NOTHING
    """What makes the served state of the head, pins included."""
    in_flight: tuple[InFlightItem, ...] = ()
    """Half-done things that are served as they are, because somebody asked for this very state."""
    report: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()
    """For people: what is not served as the head has it, and how to get it."""
    files: int = 0
    directories: int = 0
    logical_bytes: int = 0


class Takeover:
    """One takeover of a foreign (or forgotten) head."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        metadata: Metadata,
        health: StoreHealth,
        fresh_map: Callable[[], KVStore],
        *,
        workspace_name: str,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._metadata = metadata
        self._health = health
        self._name = workspace_name
        self._states = OlderStates(store, metadata, health, fresh_map)
        self._inodes: list[Inode] = []
        """Numbers given to what is put back: the same ones again when a plan is made anew."""
        self._excluded: set[ManifestNumber] = set()
        self._base_number = NO_MANIFEST
        self.base: Root | None = None

    async def load(self, head: Head) -> None:
        """Fill the map with the state of *head*; the map is not yet that of a node which may serve."""
        ws, manifest = self._ws, head.manifest
        await clear_map(ws)
        chain = await read_chain(self._store, head, self._health, manifest.base_number)
        self.base = await self._metadata.root(manifest.base) if manifest.base is not None else None
        change_sets = await read_change_sets(self._metadata, chain)
        for link, change_set in zip(chain, change_sets, strict=True):
            self._states.note(link, change_set)
        await apply_chain(ws, self._metadata, self.base, change_sets)
        self._note_base(manifest)

    async def follow(self, newer: Sequence[Head]) -> None:
        """The head moved on before the takeover was published."""
        if not newer:
            return
        for head in newer:
            self._states.note(head)
        manifest = newer[-1].manifest
        await apply_state(self._ws, fold(await self._states.change_sets(newer[0].manifest.number - 1, manifest.number)))
        if manifest.base is not None and manifest.base_number != self._base_number:
            self.base = await self._metadata.root(manifest.base)
        self._note_base(manifest)

    def _note_base(self, manifest: Manifest) -> None:
        self._base_number = manifest.base_number
        with self._ws.kv.write() as txn:
            txn.put(SEQ_KEY, encode_u64(manifest.change_seq))
            if manifest.base is None:
                txn.delete(BASE_KEY)
            else:
                txn.put(BASE_KEY, manifest.base.encode())

    async def plan(self, head: Head, content: Head, *, pin_s: float | None) -> Taken:
        """Decide what is served after *head*, whose content is that of *content*; *pin_s* pins it at this time."""
        while True:
            serve = await self._decide(content)
            try:
                draft = await self._draft(content, serve)
            except Unusable as unusable:
                self._ws.report(f"takeover: {unusable}")
                self._excluded.add(unusable.number)
                continue
            return self._taken(head, content, serve, draft, pin_s)

    def bare(self, head: Head) -> Taken:
        """Change nothing yet, and go on listing what the head has in flight."""
        before = head.manifest
        report = {"from_number": before.number, "from_session": before.session}
        return Taken(NOTHING, before.in_flight, report, (), before.files, before.directories, before.logical_bytes)

    def forget_inodes(self) -> None:
        """The writer epoch is another one now, and with it the numbers."""
        self._inodes.clear()

    async def exactly(self, head: Head, wanted: Head, *, pin_s: float | None) -> Taken:
        """Serve the state *wanted* as it is, whatever was in flight; raises UserError when it is not kept whole."""
        number = wanted.manifest.number
        items = tuple(replace(item, torn=True) for item in wanted.manifest.in_flight)
        draft = Draft(number, [], [])
        if number != head.manifest.number:
            self._states.note(wanted)
            try:
                draft.parts = [await self._difference(number, head.manifest.number)]
                await self._check(_packs(draft.parts[0]), number)
            except (Unusable, Corrupt) as error:
                raise UserError(
                    f"manifest {number} is no longer kept as a whole ({error}); name states that you may want to go "
                    "back to with `spotwarp snapshot create`",
                    ExitCode.NOT_FOUND,
                ) from error
        taken = self._taken(head, head, ServeHead(), draft, pin_s)
        return replace(taken, in_flight=items)

    async def adopt(self, taken: Taken, won: Head) -> None:
        """The takeover is published: bring the map to what it says, and let the node serve."""
        await apply_state(self._ws, taken.change_set)
        now_ns = self._ws.wall.now_ns()
        with self._ws.kv.write() as txn:
            for item in taken.in_flight:
                if item.kind == "file":
                    mark = Mark(since_ns=now_ns, flushed_ns=now_ns, torn=True)
                    txn.put(ino_key(NodeTable.IN_FLIGHT, item.ino), mark.encode())
            remember_head(txn, won)
        self._states.close()

    async def _decide(self, content: Head) -> Serve:
        if not content.manifest.in_flight:
            return ServeHead()
        manifests = [head.manifest for head in await self._read_back(content)]
        return decide(manifests, self._usable(content, manifests), self._ws.settings.atomic_max_age_s)

    def _usable(self, content: Head, manifests: list[Manifest]) -> set[ManifestNumber]:
        """What was retained when the head was published is there, or condemned by a manifest that we have read."""
        with self._ws.kv.read() as view:
            named, pins = retention.names_in(view), retention.pins_in(view)
        kept = retention.retained(manifests, content.manifest.created_s, named=named.values(), pins=pins)
        return kept.keys() - self._excluded

    async def _read_back(self, content: Head) -> list[Head]:
        """Read the manifests from the base, or from the age limit, to the head, and older ones that rows name."""
        newest = content.manifest
        with self._ws.kv.read() as view:
            rows = {*retention.keeps_in(view), *retention.pins_in(view), *retention.names_in(view).values()}
        first = newest.base_number + 1
        found = await self._states.manifests(range(first, newest.number))
        oldest_s = newest.created_s - self._ws.settings.atomic_max_age_s
        while first > 1:
            upto, first = first, max(1, first - FETCH_PARALLEL_MAX)
            found = await self._states.manifests(range(first, upto)) + found
            if found[0].manifest.created_s < oldest_s:
                break
        older = await self._states.manifests(sorted(number for number in rows if number < first))
        return [*older, *found, content]

    async def _draft(self, content: Head, serve: Serve) -> Draft:
        number = content.manifest.number
        if isinstance(serve, ServeHead):
            return Draft(number, [], [])
        manifests = [head.manifest for head in await self._read_back(content)]
        usable = self._usable(content, manifests)
        older = Older([m for m in manifests if m.number in usable], self._states.view)
        if not isinstance(serve, GoBack):
            plan = await self._planned(lambda view: Served(number, view), serve.replaced, older)
            return await self._finished(Draft(number, [], []), plan)
        with _unusable_if_damaged(serve.to):
            state = await self._states.load(serve.to)
            after = fold(await self._states.change_sets(serve.to, number))
            await state.load_blocks(blocks_needed(after))
        back = going_back(after, state.view)
        await self._check(_packs(back), serve.to)
        plan = await self._planned(lambda _: Served(serve.to, state.view), serve.replaced, older, serve.behind)
        behind = [
            LeftOut(item.path, number, serve.to if resolve(state.view, item.path) else None, item.torn)
            for item in outermost(serve.behind)
        ]
        draft = Draft(serve.to, [back], behind)
        with self._ws.kv.read() as view:
            draft.lost = tuple(sorted(set(lost_files(after, view, self._ws.policies))))
        return await self._finished(draft, plan)

    async def _planned(
        self,
        served: Callable[[KVRead], Served],
        replaced: Sequence[Replacement],
        older: Older,
        behind: Sequence[InFlightItem] = (),
    ) -> Plan:
        """Plan the replacements, reading each older state when it is first asked for."""
        while True:
            allocate = self._numbers().__next__
            snapshot = self._ws.kv.snapshot()
            try:
                return replace_in_flight(served(snapshot), replaced, older, self._ws.policies, allocate, behind)
            except NotLoaded as missing:
                wanted = missing.number
            finally:
                snapshot.close()
            with _unusable_if_damaged(wanted):
                await self._states.load(wanted)

    def _numbers(self) -> Iterator[Inode]:
        """Give inode numbers, those given before first."""
        yield from tuple(self._inodes)
        while True:
            self._inodes.append(self._ws.new_inode())
            yield self._inodes[-1]

    async def _finished(self, draft: Draft, plan: Plan) -> Draft:
        """Add the planned changes, with the blocks of what is copied."""
        rows: dict[BlockCopy, list[tuple[BlockIndex, bytes]]] = {}
        for copy in plan.copies:
            with _unusable_if_damaged(copy.source):
                state = await self._states.load(copy.source)
                await state.load_blocks([copy.ino])
            start, stop = ino_range(BLOCK_TABLE, copy.ino)
            rows[copy] = [(key_block(key), value) for key, value in state.view.scan(start, stop)]
            await self._check({FrameRef.decode(ref).pack for _, ref in rows[copy]}, copy.source)
        draft.parts.append(plan.change_set(rows))
        draft.left_out += plan.left_out
        draft.put_back, draft.missing = plan.put_back, plan.missing
        return draft

    async def _check(self, packs: set[PackId], number: ManifestNumber) -> None:
        """Raise Unusable if any of *packs*, which state *number* needs, is condemned or gone."""
        with self._ws.kv.read() as view:
            bad = packs & condemned_in(view).keys()
        if bad:
            raise Unusable(number, f"{len(bad)} of its packs are condemned, pack {min(bad)} among them")

        async def gone(pack: PackId) -> bool:
            while True:
                try:
                    await self._store.head(pack_key(pack))
                except NotFound:
                    return True
                except (Unavailable, Denied) as error:
                    await self._health.failed(error)
                else:
                    return False

        wanted = sorted(packs)
        for pack, is_gone in zip(wanted, await each(gone, wanted, limit=FETCH_PARALLEL_MAX), strict=True):
            if is_gone:
                raise Unusable(number, f"its pack {pack} is gone")

    async def _difference(self, wanted: ManifestNumber, head: ManifestNumber) -> ChangeSet:
        """Give the changes that make *wanted* of *head*, found by comparing the two whole (its cost is their size)."""
        before, after = await self._states.load(head), await self._states.load(wanted)
        for state in (before, after):
            rows = state.view.scan(INODE_TABLE, bytes([INODE_TABLE[0] + 1]))
            await state.load_blocks([key_ino(key) for key, _ in rows])
        changes: dict[bytes, bytes | None] = {}
        drops: dict[Inode, BlockIndex] = {}
        for table in TREE_TABLES:
            start, stop = table, bytes([table[0] + 1])
            for key, value in after.view.scan(start, stop):
                if before.view.get(key) != value:
                    changes[key] = value
            for key, _ in before.view.scan(start, stop):
                if after.view.get(key) is not None:
                    continue
                if table == BLOCK_TABLE and after.view.get(inode_key(key_ino(key))) is None:
                    drops[key_ino(key)] = BlockIndex(0)
                else:
                    changes[key] = None
        return ChangeSet.of(drops, changes)

    def _taken(self, head: Head, content: Head, serve: Serve, draft: Draft, pin_s: float | None) -> Taken:
        with self._ws.kv.read() as view:
            if pin_s is not None:
                draft.parts.append(ChangeSet.of({}, retention.pin(view, content.manifest.number, pin_s)))
            change_set = fold(draft.parts)
            sizes = _sizes(view, change_set)
        manifest = head.manifest
        seconds = content.manifest.created_s - self._created_s(draft.number, content)
        return Taken(
            change_set=change_set,
            report=report_of(content, draft, seconds),
            lines=lines_of(content, serve, draft, seconds, self._name),
            files=manifest.files + sizes[0],
            directories=manifest.directories + sizes[1],
            logical_bytes=manifest.logical_bytes + sizes[2],
        )

    def _created_s(self, number: ManifestNumber, content: Head) -> float:
        known = self._states.known(number)
        return known.manifest.created_s if known is not None else content.manifest.created_s


@contextmanager
def _unusable_if_damaged(number: ManifestNumber) -> Iterator[None]:
    """An older state that cannot be read is not taken from; the head can still be served."""
    try:
        yield
    except Corrupt as error:
        raise Unusable(number, str(error)) from error


def _packs(change_set: ChangeSet) -> set[PackId]:
    changes = change_set.changes
    return {FrameRef.decode(value).pack for key, value in changes if key[:1] == BLOCK_TABLE and value is not None}


def _sizes(head: KVRead, change_set: ChangeSet) -> tuple[int, int, int]:
    """How many files, directories and bytes the changes add."""
    files = directories = size = 0
    for key, value in change_set.changes:
        if key[:1] != INODE_TABLE:
            continue
        for record, sign in ((head.get(key), -1), (value, 1)):
            if record is None:
                continue
            inode = InodeRecord.decode(record)
            if stat.S_ISDIR(inode.mode):
                directories += sign
            else:
                files += sign
                size += sign * inode.size
    return files, directories, size
