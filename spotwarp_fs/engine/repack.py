"""Copy what the head still needs out of sparse packs, so that the packs can go (P-13).

Invariant: repacking is an ordinary change. A block's frame is replaced in one step only if it still is the one that was
copied, and the new frame is unpublished until a cut names it; content never changes, so no generation is raised. What
is copied has passed its digest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from spotwarp_fs.core.errors import Corrupt, NotFound
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.layout import pack_id, pack_key
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.ports import KVRead, Lane, ObjectStore, Work
from spotwarp_fs.core.records import (
    BlockState,
    FrameRef,
    FrameState,
    InodeRecord,
    NodeTable,
    inode_key,
    key_ino,
)
from spotwarp_fs.core.types import Inode, PackId
from spotwarp_fs.engine.publish import Publisher
from spotwarp_fs.engine.reach import Reach
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.workspace import Workspace

LoadMap = Callable[[Inode], Awaitable[None]]
"""Returns when the block map of an inode is whole, or the inode gone."""
RUN_BYTES_MAX = 8 << 20
"""Neighbouring frames are fetched in requests of about this size."""


class Repacker:
    """Makes dense packs of sparse ones."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        sealer: Sealer,
        reach: Reach,
        publisher: Publisher,
        load_map: LoadMap,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._sealer = sealer
        self._reach = reach
        self._publisher = publisher
        self._load_map = load_map

    async def repack(self, head: Manifest, packs: Sequence[PackId]) -> int:
        """Copy what *head* needs of *packs*, as far as one collection goes; returns how many packs were emptied."""
        if not packs:
            return 0
        rows = await self._reach.rows_in(head, frozenset(packs))
        for ino in sorted({key_ino(key) for key in rows}):
            await self._load_map(ino)
        by_pack: dict[PackId, dict[FrameRef, list[bytes]]] = {}
        with self._ws.kv.read() as view:
            for key, value in rows.items():
                ref = FrameRef.decode(value)
                if _names(view, key, ref):
                    by_pack.setdefault(ref.pack, {}).setdefault(ref, []).append(key)
        emptied, left = 0, self._ws.settings.repack_bytes_max
        for pack in packs:
            left -= sum(ref.stored_bytes for ref in by_pack.get(pack, ()))
            if left < 0:
                break
            try:
                await self._move(by_pack.get(pack, {}))
            except (Corrupt, NotFound) as error:
                self._ws.report(f"pack {pack} cannot be repacked: {error}")
            else:
                emptied += pack in by_pack
        return emptied

    async def _move(self, blocks: dict[FrameRef, list[bytes]]) -> None:
        builder = self._builder()
        for run in _runs(sorted(blocks, key=lambda ref: ref.offset)):
            for ref, stored in zip(run, await self._fetch(run), strict=True):
                if not builder.fits(len(stored)):
                    await self._finish(builder, blocks)
                    builder = self._builder()
                builder.add(stored, ref.digest, ref.raw_bytes)
        if builder.refs:
            await self._finish(builder, blocks)

    def _builder(self) -> PackBuilder:
        ident = self._ws.entropy.token_bytes(8)
        return PackBuilder(pack_id(self._publisher.head.manifest.writer_epoch, ident))

    async def _fetch(self, run: list[FrameRef]) -> list[bytes]:
        """Fetch frames as they are stored, and check each."""
        start = run[0].offset
        length = run[-1].offset + run[-1].stored_bytes - start
        found = await self._store.get(pack_key(run[0].pack), start=start, length=length, lane=Lane.BULK)
        return await self._ws.workers.run(Work.CPU, _checked, run, found.body)

    async def _finish(self, builder: PackBuilder, blocks: dict[FrameRef, list[bytes]]) -> None:
        """Upload, then let every block that still has the old frame have the new one: one step."""
        old = {(ref.digest, ref.raw_bytes): ref for ref in blocks}
        refs = await self._sealer.store_pack(builder)
        self._ws.check_no_drain()
        with self._ws.change() as recorder:
            for ref in refs:
                before = old[ref.digest, ref.raw_bytes]
                for key in blocks[before]:
                    if _names(recorder, key, before):
                        state = BlockState.decode(recorder.get(key) or b"")
                        recorder.put(key, BlockState(state.local, FrameState.UNPUBLISHED, ref).encode())
                known = recorder.get(NodeTable.DEDUP + ref.digest)
                if known is None or FrameRef.decode(known).pack == before.pack:
                    recorder.put_local(NodeTable.DEDUP + ref.digest, ref.encode())


def _names(view: KVRead, key: bytes, ref: FrameRef) -> bool:
    """Whether the block *key* of a file with a name has the frame *ref* (its map is loaded)."""
    value, record = view.get(key), view.get(inode_key(key_ino(key)))
    if not value or record is None or InodeRecord.decode(record).nlink == 0:
        return False
    return BlockState.decode(value).frame == ref


def _runs(refs: list[FrameRef]) -> list[list[FrameRef]]:
    """Group frames that lie close together."""
    runs: list[list[FrameRef]] = []
    for ref in refs:
        if runs and ref.offset + ref.stored_bytes - runs[-1][0].offset <= RUN_BYTES_MAX:
            runs[-1].append(ref)
        else:
            runs.append([ref])
    return runs


def _checked(run: list[FrameRef], body: bytes) -> list[bytes]:
    start = run[0].offset
    found = [body[ref.offset - start : ref.offset - start + ref.stored_bytes] for ref in run]
    for ref, stored in zip(run, found, strict=True):
        open_frame(ref, stored)
    return found
