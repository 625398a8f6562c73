"""Bugs to plant in the engine, each the careless version of a rule: what simulated worlds are there to find.

A plant patches the engine for the time of a `with` block; the product has no switches for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import trio

from spotwarp_fs.core import layout
from spotwarp_fs.core.changes import Recorder
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Fenced, PreconditionFailed
from spotwarp_fs.core.extents import Extent, blocks_of
from spotwarp_fs.core.manifests import Manifest, decode
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.ports import Lane, Work
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, block_key, ino_range
from spotwarp_fs.core.scratch import published
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Generation, Inode, ManifestNumber
from spotwarp_fs.engine import stream
from spotwarp_fs.engine.blocks import Blocks, WritePlan
from spotwarp_fs.engine.budget import Budget
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.hydrate import Hydrator
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Publisher, read_manifest
from spotwarp_fs.engine.seal import Job, Sealer
from spotwarp_fs.engine.stream import Streamer
from spotwarp_fs.engine.workspace import Generations, block_state


@dataclass(frozen=True)
class Plant:
    """A bug: what it does, and the method that it replaces."""

    story: str
    owner: Any
    name: str
    bug: Callable[..., Any]

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.owner, self.name, self.bug):
            yield


PLANTS: dict[str, Plant] = {}


def plant(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a careless version of `owner.name`."""

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        assert bug.__doc__
        PLANTS[bug.__name__] = Plant(bug.__doc__, owner, name, bug)
        return bug

    return register


_acknowledge = Sealer._acknowledge
_truncate, _plan_write = Blocks.truncate, Blocks.plan_write
_drop = Budget._drop
_write_changes = Streamer._write
_publish = Publisher.publish
_upload = PackStore.upload


@plant(PackStore, "upload")
async def manifest_before_its_packs(self: PackStore, builder: PackBuilder) -> tuple[FrameRef, ...]:
    """A frame counts as soon as its upload began."""
    body = builder.finish()

    async def later() -> None:
        await trio.sleep(5)
        with suppress(BaseException):
            await self.upload_body(builder.pack, body, lane=Lane.BULK)

    trio.lowlevel.spawn_system_task(later)
    return builder.refs


@plant(Sealer, "_acknowledge")
def frame_set_whatever_was_written_since(self: Sealer, job: Job, ref: FrameRef | None) -> None:
    """An upload's frame is taken for the block's present content (C6)."""
    job.generation = self._ws.generations.of(job.ino, job.block)
    _acknowledge(self, job, ref)


@plant(Blocks, "truncate")
def truncation_without_a_new_generation(self: Blocks, ino: Inode, size: int, now_ns: int, **options: bool) -> Any:
    """Only writes raise a block's generation."""
    with patch.object(Generations, "raise_for_all"), patch.object(Generations, "raise_for"):
        return _truncate(self, ino, size, now_ns, **options)


@plant(Publisher, "_create")
async def own_lost_answer_taken_for_a_rival(self: Publisher, number: Any, body: bytes) -> Manifest | None:
    """412 means that somebody else has published (C16)."""

    key = layout.manifest_key(number)
    try:
        await self._store.put_if_absent(key, body, lane=Lane.CONTROL)
    except PreconditionFailed:
        return decode((await self._store.get(key, lane=Lane.CONTROL)).body)
    return None


@plant(Blocks, "plan_write")
def partial_write_over_an_absent_block(self: Blocks, ino: Inode, extent: Extent) -> WritePlan:
    """A write goes to the data file whether or not the rest of its block is there (C1)."""
    return replace(_plan_write(self, ino, extent), missing=[])


@plant(Budget, "_drop")
def punch_after_a_wait(self: Budget, ino: Inode, blocks: list[BlockIndex]) -> None:
    """Eviction marks at once, and punches when a worker thread comes to it (C2)."""

    async def later() -> None:
        await trio.sleep(0.1)
        with suppress(BaseException):
            for block in blocks:
                self._ws.data.punch(ino, block * BLOCK_BYTES, BLOCK_BYTES)

    with patch.object(type(self._ws.data), "punch"):
        _drop(self, ino, blocks)
    trio.lowlevel.spawn_system_task(later)


@plant(Budget, "_free_to_go")
def frozen_block_evicted_once_it_has_a_frame(self: Budget, ino: Inode, block: BlockIndex) -> bool:
    """What has a frame may go, even if a cut has yet to read it."""
    return (ino, block) not in self._ws.busy and self.may_evict(ino, block)


@plant(Hydrator, "_install")
def fetched_block_written_unseen(
    self: Hydrator, ino: Inode, block: BlockIndex, frame: FrameRef, generation: Generation, raw: bytes
) -> None:
    """What a GET brought goes to the data file, whatever happened meanwhile (C2)."""
    ws = self._ws
    with ws.kv.read() as view:
        state = block_state(view, ino, block)
    if state is None:
        return
    ws.data.pwrite(ino, block * BLOCK_BYTES, raw)
    with ws.kv.write() as txn:
        txn.put(block_key(ino, block), BlockState(True, state.state, state.frame).encode())


@plant(Streamer, "_write")
async def export_of_live_values(self: Streamer, change_set: ChangeSet) -> Any:
    """The values of the moment of export are published, not those of the cut (C5)."""
    with self._ws.kv.read() as everything:
        view = published(everything)
        live = ((key, value if key[:1] == BLOCK_TABLE else view.get(key)) for key, value in change_set.changes)
        change_set = ChangeSet(change_set.drops, tuple(live))
    return await _write_changes(self, change_set)


@plant(Publisher, "publish")
async def zombie_goes_on_after_the_foreign_manifest(self: Publisher, candidate: Manifest) -> Any:
    """A writer that finds a foreign manifest takes the next number (P-06)."""

    try:
        return await _publish(self, candidate)
    except Fenced:
        self.head, _ = await read_manifest(self._store, candidate.number)
        after = replace(
            candidate, number=ManifestNumber(candidate.number + 1), parent_digest=self.head.digest,
            change_seq=max(candidate.change_seq, self.head.manifest.change_seq),
        )  # fmt: skip
        with patch("spotwarp_fs.engine.publish.check_successor"):
            return await _publish(self, after)


@plant(Streamer, "_write")
async def rows_dropped_before_the_manifest_is_there(self: Streamer, change_set: Any) -> Any:
    """Changes count as exported once they are uploaded (C16)."""
    written = await _streamer_write(self, change_set)
    if self._ws.cut is not None:
        await self._drop_rows(self._ws.cut.seq)
    return written


_streamer_write = Streamer._write


@plant(Blocks, "truncate")
def file_set_aside_before_the_commit(self: Blocks, ino: Inode, size: int, now_ns: int) -> Any:
    """A truncation to zero moves the frozen file first, and a start deletes spools (C7)."""
    cut = self._ws.cut
    if size == 0 and cut is not None and cut.needs(ino):
        cut.set_aside(ino)
    return _truncate(self, ino, size, now_ns)


@plant(Blocks, "_keep_for_cut")
def overwrite_under_a_cut(self: Blocks, ino: Inode, block: BlockIndex) -> None:
    """Frozen bytes are overwritten before the cut has read them (C7)."""


@plant(Blocks, "write")
def mark_before_bytes(self: Blocks, ino: Inode, offset: int, data: bytes, now_ns: int) -> None:
    """An absent block that is overwritten counts as local before its bytes are written (H3)."""

    ws = self._ws
    with ws.kv.read() as view:
        states = {b: block_state(view, ino, BlockIndex(b)) for b in blocks_of(Extent(offset, offset + len(data)))}
    absent = [BlockIndex(b) for b, state in states.items() if state is not None and not state.local]
    if absent:
        with ws.change() as recorder:
            self._mark(recorder, ino, absent)
    _write(self, ino, offset, data, now_ns)


_write = Blocks.write


@plant(stream, "complete")
def deletions_left_out(*arguments: Any) -> ChangeSet:
    """A change set has values, not what went (H4)."""

    found = _complete(*arguments)
    return ChangeSet((), tuple((key, value) for key, value in found.changes if value is not None))


_complete: Callable[..., ChangeSet] = stream.__dict__["complete"]


@plant(Recorder, "drop_blocks")
def truncated_blocks_not_dropped_from_the_store(self: Recorder, ino: Inode, first: BlockIndex) -> None:
    """A truncation is noted for blocks that are here, not for those that still lie in the base (H4)."""

    _, stop = ino_range(BLOCK_TABLE, ino)
    for key, _value in list(self.scan(block_key(ino, first), stop)):
        self.delete(key)


@plant(Claim, "_note_session")
async def session_not_noted_before_its_takeover(self: Claim, epoch: Any) -> None:
    """A cache does not remember what it sent (L1)."""
    await self._ws.workers.run(Work.SYNC, lambda: None)
