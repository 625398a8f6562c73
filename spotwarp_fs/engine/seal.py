"""Turn dirty blocks into frames that the store has acknowledged: read, digest, compress, pack, upload.

Invariant: a frame is set in the map only if the block's generation is the same before the read that made it and when
the store has acknowledged its pack (C6). One pipeline serves the cut and the early upload; at most
`frames_in_memory_max` blocks are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import trio

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.codec import SAMPLE_MIN_BYTES
from spotwarp_fs.core.collection import condemned_key
from spotwarp_fs.core.errors import Fenced
from spotwarp_fs.core.extents import valid_bytes
from spotwarp_fs.core.frames import digest, encode_frame, is_zero
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    DIRTY,
    FrameRef,
    InodeRecord,
    NodeTable,
    inode_key,
)
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode, PackId, WriterEpoch
from spotwarp_fs.engine.cut import Cut
from spotwarp_fs.engine.jobs import Job, Offer, OpenPack
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.settling import Settler
from spotwarp_fs.engine.workspace import Workspace, block_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


T = TypeVar("T")

SMALL_BYTES = SAMPLE_MIN_BYTES - 1
"""A block up to this is read, digested and encoded on the loop: 30 µs, where three thread switches cost 300. Above it
the encoder takes samples, which alone costs 200."""
SETTLED_PER_STEP = 256


class Sealer:
    """The pipeline; `serve` must run while jobs are submitted."""

    def __init__(self, workspace: Workspace, packs: PackStore, writer_epoch: Callable[[], WriterEpoch]) -> None:
        self._ws = workspace
        self._packs = packs
        self._writer_epoch = writer_epoch
        self._room = trio.Semaphore(workspace.settings.frames_in_memory_max)
        self._reading = 0
        self._last_placed = trio.Event()
        self._last_placed.set()
        self._open: OpenPack | None = None
        self._uploading: dict[bytes, list[Job]] = {}
        self._submitted: dict[tuple[Inode, BlockIndex], Job] = {}
        self._uploads = trio.Semaphore(workspace.settings.packs_in_flight_max)
        self._unnamed: set[PackId] = set()
        self._held: Counter[PackId] = Counter()
        """Packs whose frames answered an offer that has not reached the map."""
        self._unnamed_bytes: dict[PackId, int] = {}
        self.bytes_sealed = 0
        self.frames_deduplicated = 0
        self.settler = Settler(workspace)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Run the pipeline while the body runs; what is in it then is given up."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._linger)
            yield
            nursery.cancel_scope.cancel()

    def busy_with(self, ino: Inode, block: BlockIndex) -> bool:
        """The block's present content is in the pipeline already."""
        job = self._submitted.get((ino, block))
        return job is not None and job.generation == self._ws.generations.of(ino, block)

    async def submit(self, ino: Inode, block: BlockIndex, cut: Cut | None) -> Job:
        """Start sealing one block; waits for room in the pipeline, not for the store."""
        job = await self._begin(Job(ino, block, cut, turn=self._last_placed))
        if cut is None:
            self._submitted[(ino, block)] = job
        return job

    async def _begin(self, job: Job) -> Job:
        if not self._room.value:
            self.flush()  # frames in the open pack hold all the room
        await self._room.acquire()
        job.turn, self._last_placed = self._last_placed, job.placed
        self._reading += 1
        self._nursery.start_soon(self._prepare, job)
        return job

    async def seal_cut(self, cut: Cut) -> None:
        """Give every frozen block of *cut* a frame in the store; raises Abandoned when the cut was given up."""
        jobs = []
        for ino in sorted(cut.frozen):
            for block in sorted(cut.frozen.get(ino, ())):
                cut.check()
                jobs.append(await self.submit(ino, block, cut))
        while self._reading:
            await trio.sleep(0.001)
        self.flush()
        for job in jobs:
            await job.done.wait()
        cut.check()

    def flush(self) -> None:
        """Send the open pack, full or not."""
        if self._open is not None and self._open.jobs:
            pack, self._open = self._open, None
            self._nursery.start_soon(self._upload, pack)

    async def offer(self, raw: bytes, name: bytes) -> Offer:
        """Start making a frame of a block whose digest is *name*; waits for room in the pipeline, not for the store.

        Whoever puts the frame into the map, or does not want it any more, calls `let_go`.
        """
        offer = Offer(raw, name)
        await self._begin(Job(Inode(0), BlockIndex(0), None, self._last_placed, offer=offer, placed=offer.placed))
        return offer

    async def answered(self, offers: Iterable[Offer]) -> bool:
        """Return when the store has what was offered; False when something was given up and must be offered again."""
        offers = list(offers)
        for offer in offers:
            await offer.placed.wait()
        self.flush()
        for offer in offers:
            await offer.done.wait()
        return all(offer.frame is not None for offer in offers)

    def let_go(self, offers: Iterable[Offer]) -> None:
        """The map has these frames, or nobody wants them."""
        for offer in offers:
            if not offer.dropped and offer.frame is not None:
                self._held[offer.frame.pack] -= 1
                if self._held[offer.frame.pack] <= 0:
                    del self._held[offer.frame.pack]
            offer.dropped = True

    @property
    def unnamed(self) -> set[PackId]:
        """Packs of this session that no published manifest has named yet: never candidates for collection (C9)."""
        return self._unnamed | self._held.keys()

    @property
    def bytes_unnamed(self) -> int:
        """Uploaded bytes that no published manifest names yet."""
        return sum(self._unnamed_bytes.values())

    def named(self, change_set: ChangeSet) -> None:
        """A published manifest names these frames: their packs are like any other from now on."""
        for key, value in change_set.changes:
            if key[:1] == BLOCK_TABLE and value is not None:
                pack = FrameRef.decode(value).pack
                self._unnamed.discard(pack)
                self._unnamed_bytes.pop(pack, None)

    async def store_pack(self, builder: PackBuilder) -> tuple[FrameRef, ...]:
        """Bring a pack into the store, safe from collection from its first byte on; raises Fenced."""
        self._unnamed.add(builder.pack)
        refs = await self._packs.upload(builder)
        for ref in refs:
            self._unnamed.add(ref.pack)
            self._unnamed_bytes[ref.pack] = self._unnamed_bytes.get(ref.pack, 0) + ref.stored_bytes
            self.bytes_sealed += ref.stored_bytes
        return refs

    def acknowledged(self) -> frozenset[PackId]:
        """Packs that the store has and no published manifest names yet."""
        return frozenset(self._unnamed_bytes.keys() - self._held.keys())

    def settled(self, packs: Iterable[PackId]) -> None:
        """A cut that began when these were acknowledged is published.

        What it does not name of them is named by the live map, or was overwritten before anybody could see it.
        """
        for pack in packs:
            self._unnamed.discard(pack)
            self._unnamed_bytes.pop(pack, None)

    async def _prepare(self, job: Job) -> None:
        """Read and encode a job's block, then put it into the open pack."""
        try:
            raw = await self._read(job) if job.offer is None else _taken(job.offer)
            if raw is None:
                self._finish(job)
                return
            name = job.offer.name if job.offer is not None else await self._compute(len(raw), identify, raw)
            if name is None:
                self._acknowledge([(job, None)])
                return
            known = self._known(name)
            if known is not None:
                self.frames_deduplicated += 1
                self._acknowledge([(job, known)])
                return
            waiting = self._waiting(name)
            if waiting is not None:
                waiting.append(job)
                return
            stored = await self._compute(len(raw), encode_frame, raw)
            # In the order of submission: blocks of one file that lie together in a pack come back in one request.
            await job.turn.wait()
            waiting = self._waiting(name)
            if waiting is not None:
                waiting.append(job)
            else:
                self._add(job, stored, name, len(raw))
        except Exception as error:  # whatever it is, it must not take the mount along
            if job.cut is not None and job.cut.abandoned:
                self._finish(job)  # its spool went while the block was being read
                return
            # What cannot be read is not published: the cut is given up, and the next one tries again.
            what = "a block" if job.offer is not None else f"block {job.block} of inode {job.ino:#x}"
            self._ws.report(f"{what} cannot be sealed: {error}")
            if job.cut is not None:
                job.cut.abandon(str(error))
            self._finish(job)
        finally:
            self._reading -= 1
            job.placed.set()

    async def _read(self, job: Job) -> bytes | None:
        """Read the job's bytes so that they belong to one generation; None when there is nothing to seal any more."""
        ws = self._ws
        while True:
            if job.cut is not None:
                if job.cut.abandoned:
                    return None
                job.generation = job.cut.generation(job.ino, job.block)
                length = valid_bytes(job.cut.sizes[job.ino], job.block)
                raw = self._read_here(job, length) if job.generation is not None else None
                if raw is None:
                    with ws.busy.hold(job.ino, [job.block]):
                        raw = await ws.workers.run(Work.DISK, job.cut.read, job.ino, job.block)
                if job.cut.abandoned:
                    return None
                if job.generation == job.cut.generation(job.ino, job.block):
                    if job.generation is not None and ws.unsynced.has_block(job.ino, job.block):
                        job.cut.abandon(ws.unsynced.reason(job.ino) or "")
                        return None
                    job.cut.read_done(job.ino, job.block)
                    return raw
                continue
            with ws.kv.read() as view:
                value = view.get(inode_key(job.ino))
                state = block_state(view, job.ino, job.block)
            if value is None or state is None or not state.dirty:
                return None
            length = valid_bytes(InodeRecord.decode(value).size, job.block)
            job.generation = ws.generations.of(job.ino, job.block)
            raw = self._read_here(job, length)
            if raw is None:
                with ws.busy.hold(job.ino, [job.block]):
                    raw = await ws.workers.run(Work.DISK, ws.data.pread, job.ino, job.block * BLOCK_BYTES, length)
            same = job.generation == ws.generations.of(job.ino, job.block)
            return raw if same and not ws.unsynced.has_block(job.ino, job.block) else None

    def _read_here(self, job: Job, length: int) -> bytes | None:
        """Read a small block in place, if the page cache has it: a thread would cost more than the bytes."""
        if length > SMALL_BYTES:
            return None
        return self._ws.data.pread_cached(job.ino, job.block * BLOCK_BYTES, length)

    async def _compute(self, raw_bytes: int, call: Callable[[bytes], T], raw: bytes) -> T:
        """Digest or encode: a small block in place, a large one in a worker thread."""
        if raw_bytes > SMALL_BYTES:
            return await self._ws.workers.run(Work.CPU, call, raw)
        await trio.lowlevel.checkpoint()
        return call(raw)

    def _known(self, name: bytes) -> FrameRef | None:
        """A frame with this content that the store has and nobody has condemned."""
        with self._ws.kv.read() as view:
            value = view.get(NodeTable.DEDUP + name)
            ref = None if value is None else FrameRef.decode(value)
            return None if ref is None or view.get(condemned_key(ref.pack)) is not None else ref

    def _waiting(self, name: bytes) -> list[Job] | None:
        if self._open is not None and name in self._open.jobs:
            return self._open.jobs[name]
        return self._uploading.get(name)

    def _add(self, job: Job, stored: bytes, name: bytes, raw_bytes: int) -> None:
        if self._open is None:
            ident = self._ws.entropy.token_bytes(8)
            builder = PackBuilder(pack_id(self._writer_epoch(), ident))
            self._open = OpenPack(builder, opened_s=trio.current_time())
        self._open.builder.add(stored, name, raw_bytes)
        self._open.jobs[name] = [job]
        if self._open.builder.size_bytes >= self._ws.settings.pack_bytes_target:
            self.flush()

    async def _linger(self) -> None:
        """Send an early pack that does not fill."""
        while True:
            await trio.sleep(self._ws.settings.pack_linger_s / 2)
            if self._open is not None and trio.current_time() - self._open.opened_s >= self._ws.settings.pack_linger_s:
                self.flush()

    async def _upload(self, pack: OpenPack) -> None:
        """Bring one pack into the store, then let its jobs know."""
        self._uploading.update(pack.jobs)
        try:
            async with self._uploads:
                self._drop_superseded(pack)
                refs = await self.store_pack(pack.builder) if pack.jobs else ()
        except Fenced as fenced:
            for job in (job for jobs in pack.jobs.values() for job in jobs):
                if job.cut is not None:
                    job.cut.abandon(str(fenced))
                self._finish(job)
            return
        except Exception as error:
            await self._give_up(pack, error)
            return
        try:
            await self._settle_pack(pack, refs)
        except OSError as error:
            await self._give_up(pack, error)
        await self._ws.wake_waiters()

    async def _settle_pack(self, pack: OpenPack, refs: Sequence[FrameRef]) -> None:
        """Note where the frames of a pack lie, for whoever has such a block."""
        with self._ws.kv.write() as txn:
            for ref in refs:
                txn.put(NodeTable.DEDUP + ref.digest, ref.encode())
        for ref in refs:
            self._uploading.pop(ref.digest, None)
        done = [(job, ref) for ref in refs for job in pack.jobs[ref.digest]]
        for at in range(0, len(done), SETTLED_PER_STEP):
            self._acknowledge(done[at : at + SETTLED_PER_STEP])
            await trio.lowlevel.checkpoint()

    async def _give_up(self, pack: OpenPack, error: Exception) -> None:
        """A pack, or the note of its frames, was refused: their blocks stay dirty, and are sent again later."""
        self._ws.report(f"a pack of {len(pack.jobs)} frames is given up: {error}")
        await trio.sleep(self._ws.settings.retry_max_s)  # not one pack after the other, as fast as the link goes
        for name, jobs in pack.jobs.items():
            self._uploading.pop(name, None)
            for job in jobs:
                if job.done.is_set():
                    continue
                if job.cut is not None and (job.ino, job.block) not in job.cut.sealed:
                    job.cut.abandon(str(error))
                self._finish(job)

    def _drop_superseded(self, pack: OpenPack) -> None:
        """Take out what was replaced or deleted while the pack waited for its turn: it is not sent (P-17)."""
        gone = [name for name, jobs in pack.jobs.items() if not any(map(self._wanted, jobs))]
        for name in gone:
            del self._uploading[name]
            for job in pack.jobs.pop(name):
                self._finish(job)
        if gone:
            pack.builder = pack.builder.only(pack.jobs.keys())

    def _wanted(self, job: Job) -> bool:
        """A cut needs the job's bytes, or they still are the block's and have no frame."""
        if job.offer is not None:
            return not job.offer.dropped
        if job.cut is not None and not job.cut.abandoned:
            return True
        with self._ws.kv.read() as view:
            same = job.generation is not None and job.generation == self._ws.generations.of(job.ino, job.block)
            return same and block_state(view, job.ino, job.block) == DIRTY

    def _acknowledge(self, done: Sequence[tuple[Job, FrameRef | None]]) -> None:
        """The store has these jobs' contents (None: zeros): set the frame of each block that still has that content.

        One step; the change rows stay until a manifest names the frames.
        """
        ws = self._ws
        settled = []
        with ws.kv.write() as txn:
            for job, ref in done:
                if job.offer is not None:
                    self._answer(job.offer, ref)
                    continue
                if job.cut is not None:
                    job.cut.sealed[(job.ino, job.block)] = ref
                if self.settler.settle(txn, job, ref):
                    settled.append((job, ref))
        for job, ref in settled:
            ws.unmark_dirty(job.ino, job.block)
            if ref is None:
                self.settler.punch(job.ino, job.block)
        for job, _ in done:
            self._finish(job)

    def _answer(self, offer: Offer, ref: FrameRef | None) -> None:
        """In one step with the look that found the frame good: from here on its pack is held."""
        if ref is not None and not offer.dropped:
            offer.frame = ref
            self._held[ref.pack] += 1

    def _finish(self, job: Job) -> None:
        if job.offer is not None:
            job.offer.done.set()
        elif self._submitted.get((job.ino, job.block)) is job:
            del self._submitted[(job.ino, job.block)]
        self._room.release()
        job.done.set()


def _taken(offer: Offer) -> bytes | None:
    """The bytes, which the pipeline lets go as soon as it can."""
    raw, offer.raw = offer.raw, b""
    return None if offer.dropped else raw


def identify(raw: bytes) -> bytes | None:
    """Return the content's digest, or None when it is all zeros."""
    return None if is_zero(raw) else digest(raw)
