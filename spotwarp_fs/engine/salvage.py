"""Set aside in the store what a fenced session had not published (H15).

Invariant: nothing but objects below this session's own `salvage/` prefix is written; a frame that no manifest names is
never referred to where it lies, because the workspace's collector may delete its pack, but copied. The state object
comes first, so that the collector keeps what the rest is completed from, and the content object last: with it the
salvage is whole.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import trio

from spotwarp_fs.core import paths, salvage
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Corrupt, Denied, NotFound, PreconditionFailed, SpotwarpError, Unavailable
from spotwarp_fs.core.frames import digest, encode_frame
from spotwarp_fs.core.layout import SALVAGE_PREFIX, pack_id, salvage_prefix
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.ports import Lane, ObjectStore, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    BlockState,
    FrameRef,
    FrameState,
    block_key,
    key_block,
    key_ino,
)
from spotwarp_fs.core.salvage import CONTENT_NAME, STATE_NAME, SalvageContent, SalvageState
from spotwarp_fs.core.sections import MetadataWriter
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode, ManifestNumber, ObjectKey, PackId, WriterEpoch
from spotwarp_fs.core.units import format_size
from spotwarp_fs.engine import keepers
from spotwarp_fs.engine.cut import Cut
from spotwarp_fs.engine.export import export
from spotwarp_fs.engine.groups import only_cause
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Publisher
from spotwarp_fs.engine.seal import identify
from spotwarp_fs.engine.workspace import Workspace, block_state

log = logging.getLogger(__name__)


class Outcome(Enum):
    """How far the salvage of a session is."""

    NOT_NEEDED = "this session was not fenced"
    UNDER_WAY = "being set aside in the store"
    NOTHING = "everything was published"
    SAVED = "set aside in the store"
    FAILED = "kept in the cache of this node only"


@dataclass(slots=True)
class Progress:
    """What a salvage has done so far."""

    outcome: Outcome = Outcome.NOT_NEEDED
    place: str = ""
    """Its name below `salvage/`."""
    done_bytes: int = 0
    total_bytes: int = 0
    files: int = 0
    error: str = ""

    def describe(self) -> str:
        """Say in a sentence where the unpublished work is."""
        match self.outcome:
            case Outcome.NOT_NEEDED | Outcome.NOTHING:
                return str(self.outcome.value)
            case Outcome.SAVED:
                return f"what was not published is in the store, as salvage {self.place}"
            case Outcome.UNDER_WAY:
                return (
                    f"{format_size(self.done_bytes)} of {format_size(self.total_bytes)} of what was not published are "
                    f"set aside in the store (salvage {self.place or 'begins'}); all of it is in the cache of this node"
                )
            case Outcome.FAILED:
                return f"what was not published is in the cache of this node only ({self.error})"
            case _:
                assert_never(self.outcome)


class Salvager:
    """Waits for the fence of a session, and then brings what is unpublished to a place of its own."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        publisher: Publisher,
        health: StoreHealth,
        packs: PackStore,
        *,
        session: str,
        writer: Writer,
        workspace_id: str,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._publisher = publisher
        self._health = health
        self._ordinary = packs
        self._session = session
        self._writer = writer
        self._workspace_id = workspace_id
        self.progress = Progress()
        self.finished = trio.Event()

    async def run(self) -> None:
        """Set aside everything unpublished; waits out outages. No cut is open, and nothing is written any more."""
        ws = self._ws
        assert ws.fenced is not None, "only a fenced session sets its work aside"
        assert ws.cut is None, "the cut that was on its way has ended"
        self.progress.outcome = Outcome.UNDER_WAY
        # As any cut, it keeps its blocks from being evicted until they are read.
        cut = ws.cut = Cut.begin(ws, begun_s=trio.current_time(), barrier=False)
        try:
            await self._set_aside(cut, str(ws.fenced))
        except (SpotwarpError, OSError, BaseExceptionGroup) as error:
            cause = only_cause(error)
            if not isinstance(cause, SpotwarpError | OSError):
                raise
            self.progress.outcome = Outcome.FAILED
            self.progress.error = f"{type(cause).__name__}: {cause}"
            ws.report(f"unpublished work is only in the cache of this node, setting it aside failed: {cause}")
        finally:
            ws.cut = None
            cut.end()
        self.finished.set()

    async def _set_aside(self, cut: Cut, reason: str) -> None:
        progress, head = self.progress, self._publisher.head
        place = progress.place = self._place()
        packs = PackStore(
            self._ws, self._store, self._health,
            key_of=lambda pack: salvage.salvage_pack_key(place, pack), while_fenced=True,
        )  # fmt: skip
        copier = _Copier(self._ws, self._ordinary, packs, cut, head.manifest.writer_epoch)
        blocks = copier.blocks()
        if not blocks and not await self._exported(cut):
            progress.outcome, progress.place = Outcome.NOTHING, ""
            return
        progress.total_bytes = len(blocks) * BLOCK_BYTES
        progress.files = len({ino for ino, _, _ in blocks})
        log.info("salvage begins place=%s manifest=%d bytes=%d", place, head.manifest.number, progress.total_bytes)
        await self._create(STATE_NAME, self._state(reason).encode())
        await copier.copy(blocks, progress)
        root = await copier.write(await self._exported(cut))
        content = SalvageContent(root, tuple(sorted(copier.names)), self._publisher.server_now_s(), copier.damaged)
        await self._create(CONTENT_NAME, content.encode())
        progress.outcome = Outcome.SAVED
        log.info("salvage is whole place=%s packs=%d damaged=%d", place, len(copier.names), len(copier.damaged))

    async def _exported(self, cut: Cut) -> ChangeSet:
        head_seq = self._publisher.head.manifest.change_seq
        return salvage.tree_part(await self._ws.workers.run(Work.CPU, export, cut, head_seq))

    def _state(self, reason: str) -> SalvageState:
        head, progress = self._publisher.head, self.progress
        return SalvageState(
            number=head.manifest.number,
            digest=head.digest,
            writer_epoch=head.manifest.writer_epoch,
            session=self._session,
            workspace_id=self._workspace_id,
            host=self._writer.host,
            mountpoint=self._writer.mountpoint,
            reason=reason,
            created_s=self._publisher.server_now_s(),
            files=progress.files,
            unpublished_bytes=progress.total_bytes,
        )

    def _place(self) -> str:
        prefix = salvage_prefix(self._publisher.head.manifest.writer_epoch, self._session)
        return prefix.removeprefix(SALVAGE_PREFIX).rstrip("/")

    async def _create(self, name: str, body: bytes) -> None:
        """Create one of the two small objects; our own from a lost answer is as good."""
        key = salvage.object_key(self._place(), name)
        while True:
            try:
                await self._store.put_if_absent(key, body, lane=Lane.BULK)
            except PreconditionFailed:
                if (await self._read(key)) != body:
                    raise
                return
            except (Unavailable, Denied) as error:
                await self._health.failed(error)
            else:
                self._health.succeeded()
                return

    async def _read(self, key: ObjectKey) -> bytes:
        while True:
            try:
                return (await self._store.get(key, lane=Lane.BULK)).body
            except (Unavailable, Denied) as error:
                await self._health.failed(error)


class _Copier:
    """Brings blocks and metadata into packs of the salvage's own."""

    def __init__(
        self, workspace: Workspace, ordinary: PackStore, packs: PackStore, cut: Cut, epoch: WriterEpoch
    ) -> None:
        self._ws = workspace
        self._epoch = epoch
        self._ordinary = ordinary
        self._packs = packs
        self._cut = cut
        self._places: dict[bytes, FrameRef] = {}
        """By digest: what this salvage has in its packs."""
        self._moved: dict[bytes, FrameRef | None] = {}
        """By block key: where the copy of an unpublished frame lies; None for what was lost."""
        self._damaged: set[Inode] = set()
        self._uploads = trio.Semaphore(workspace.settings.packs_in_flight_max)
        self.names: set[PackId] = set()

    @property
    def damaged(self) -> tuple[str, ...]:
        """Paths of files that miss blocks."""
        found = [paths.path_of(self._cut.snapshot, ino) for ino in sorted(self._damaged)]
        return tuple(path.decode("utf-8", "backslashreplace") for path in found if path is not None)

    def blocks(self) -> list[tuple[Inode, BlockIndex, FrameRef | None]]:
        """Every block whose present content no manifest names: dirty, or with the unpublished frame that it has."""
        found: dict[tuple[Inode, BlockIndex], FrameRef | None] = {}
        for key in salvage.unpublished_keys(self._cut.snapshot):
            value = self._cut.snapshot.get(key) if key[:1] == BLOCK_TABLE else None
            state = BlockState.decode(value) if value else None
            if state is not None and state.state is FrameState.UNPUBLISHED:
                found[key_ino(key), key_block(key)] = state.frame
        found.update(((ino, block), None) for ino, blocks in self._cut.frozen.items() for block in blocks)
        return [(ino, block, frame) for (ino, block), frame in sorted(found.items(), key=lambda item: item[0])]

    async def copy(self, blocks: list[tuple[Inode, BlockIndex, FrameRef | None]], progress: Progress) -> None:
        """Bring the content of *blocks* into the store, a few packs at a time."""
        builder = self._new_builder()
        async with trio.open_nursery() as nursery:
            for ino, block, frame in blocks:
                raw = await (self._dirty(ino, block) if frame is None else self._framed(ino, block, frame))
                ref = await self._place(raw, builder) if raw is not None else None
                if frame is None:
                    self._cut.sealed[ino, block] = ref
                else:
                    self._moved[block_key(ino, block)] = ref
                progress.done_bytes += BLOCK_BYTES
                if builder.size_bytes >= self._ws.settings.pack_bytes_target:
                    await self._send(nursery, builder)
                    builder = self._new_builder()
            if builder.refs:
                await self._send(nursery, builder)

    async def _place(self, raw: bytes, builder: PackBuilder) -> FrameRef | None:
        """Give the frame that holds *raw*, put into *builder* if it is new; None for zeros, which are a hole."""
        name = await self._ws.workers.run(Work.CPU, identify, raw)
        if name is None:
            return None
        if name not in self._places:
            stored = await self._ws.workers.run(Work.CPU, encode_frame, raw)
            self._places[name] = builder.add(stored, name, len(raw))
        return self._places[name]

    async def _dirty(self, ino: Inode, block: BlockIndex) -> bytes | None:
        """Read a block that has no frame; None, and noted, when the disk refuses."""
        try:
            with self._ws.busy.hold(ino, [block]):
                raw: bytes = await self._ws.workers.run(Work.DISK, self._cut.read, ino, block)
        except OSError as error:
            self._lose(ino, block, error)
            return None
        self._cut.read_done(ino, block)
        return raw

    async def _framed(self, ino: Inode, block: BlockIndex, frame: FrameRef) -> bytes | None:
        """Read a block that has an unpublished frame: here if its bytes are here, else where the frame lies."""
        with self._ws.busy.hold(ino, [block]):
            with self._ws.kv.read() as view:
                state = block_state(view, ino, block)
            if state is not None and state.local:
                try:
                    offset = block * BLOCK_BYTES
                    raw: bytes = await self._ws.workers.run(
                        Work.DISK, self._ws.data.pread, ino, offset, frame.raw_bytes
                    )
                    if digest(raw) == frame.digest:
                        return raw
                except OSError as error:
                    log.warning("salvage reads from the store instead inode=%x block=%d error=%s", ino, block, error)
        try:
            return await self._ordinary.fetch_patiently(frame, lane=Lane.BULK, wait_s=math.inf)
        except (Corrupt, NotFound) as error:
            self._lose(ino, block, error)
            return None

    def _lose(self, ino: Inode, block: BlockIndex, error: Exception) -> None:
        self._ws.report(f"block {block} of inode {ino:#x} cannot be set aside: {error}")
        self._damaged.add(ino)

    async def _send(self, nursery: trio.Nursery, builder: PackBuilder) -> None:
        await self._uploads.acquire()
        nursery.start_soon(self._upload, builder)

    async def _upload(self, builder: PackBuilder) -> None:
        try:
            body = await self._ws.workers.run(Work.CPU, builder.finish)
            await self._packs.upload_body(builder.pack, body, lane=Lane.BULK)
        finally:
            self._uploads.release()

    def _new_builder(self) -> PackBuilder:
        return PackBuilder(self._new_pack())

    def _new_pack(self) -> PackId:
        pack = pack_id(self._epoch, self._ws.entropy.token_bytes(8))
        self.names.add(pack)
        return pack

    async def write(self, exported: ChangeSet) -> FrameRef:
        """Write the changes, with the copies instead of what was copied; gives their root."""
        changes = tuple((key, self._copied(key, value)) for key, value in exported.changes)
        writer = MetadataWriter(self._new_pack)
        written = await self._ws.workers.run(Work.CPU, writer.write, ChangeSet(exported.drops, changes))
        for pack, body in await self._ws.workers.run(Work.CPU, writer.finish):
            await self._packs.upload_body(pack, body, lane=Lane.BULK)
        return written.root

    def _copied(self, key: bytes, value: bytes | None) -> bytes | None:
        if value is None or key not in self._moved:
            return value
        ref = self._moved[key]
        return None if ref is None else ref.encode()


async def salvaged_bases(store: ObjectStore) -> set[ManifestNumber]:
    """Give the manifests that salvage in the store is completed from: their packs stay until it is dropped."""
    return await keepers.needed_by_salvage(store)
