"""Block maps load at first open (P-07): until then they lie in the base's sections.

Invariant: a record that the node has wins over one of the base; an empty value is a hole over the base; a cutoff row
says from which block on the base no longer counts. Once loaded, an inode's map is whole, a row says so, and no base is
asked again, also not a newer one: it may hold blocks that were dropped here since. An inode is loaded before it is
changed, or made here.
"""

from __future__ import annotations

from bisect import bisect_left

import trio

from spotwarp_fs.core.ports import KVWrite
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    BlockState,
    FrameRef,
    FrameState,
    NodeTable,
    decode_u32,
    ino_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
)
from spotwarp_fs.core.sections import Root, Section, SectionKind
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.blocks import LOADED
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.workspace import Workspace


class BlockMaps:
    """Knows which inodes still have records in the base only."""

    def __init__(self, workspace: Workspace, metadata: Metadata) -> None:
        self._ws = workspace
        self._metadata = metadata
        self._base: FrameRef | None = None
        self._sections: list[Section] | None = []
        self._loading: dict[Inode, trio.Event] = {}
        self._loaded: set[Inode] = set()

    def use_base(self, base: FrameRef | None, root: Root | None) -> None:
        """From now on unloaded maps lie in *base* (a newer one holds what the older one did, and later changes).

        Without its *root*, because the store did not answer yet, whoever needs it waits for it.
        """
        self._base = base
        self._sections = None if base is not None and root is None else _block_sections(root)

    def needs_loading(self, ino: Inode) -> bool:
        """Some of the inode's records may be in the base only."""
        if ino in self._loaded:
            return False
        with self._ws.kv.read() as view:
            if view.get(ino_key(NodeTable.UNLOADED, ino)) == LOADED:
                self._loaded.add(ino)
                return False
        return True

    def is_whole(self, ino: Inode) -> None:
        """The row that says so was just written: the inode was made here, or lost all its blocks."""
        self._loaded.add(ino)

    def forget(self, ino: Inode) -> None:
        """The inode is gone."""
        self._loaded.discard(ino)

    async def load(self, ino: Inode) -> None:
        """Return when the block map is whole, or the inode gone. Waits for the store; never with anything held."""
        while self.needs_loading(ino) and not self._is_gone(ino):
            event = self._loading.get(ino)
            if event is not None:
                await event.wait()
                continue
            event = self._loading[ino] = trio.Event()
            try:
                await self._load(ino)
            finally:
                del self._loading[ino]
                event.set()

    def _is_gone(self, ino: Inode) -> bool:
        with self._ws.kv.read() as view:
            return view.get(inode_key(ino)) is None

    async def _load(self, ino: Inode) -> None:
        start, stop = ino_range(BLOCK_TABLE, ino)
        records: list[tuple[bytes, bytes]] = []
        while self._sections is None:
            base = self._base
            assert base is not None
            sections = _block_sections(await self._metadata.root(base))
            if base == self._base:  # a newer one may have come meanwhile
                self._sections = sections
        for section in self._sections:
            if section.last_key >= start and section.first_key < stop:
                puts = await self._metadata.section_puts(section)
                first = bisect_left(puts, (start,))
                records += puts[first : bisect_left(puts, (stop,), first)]
        # What was removed meanwhile left nothing behind, and must not get records again.
        if self.needs_loading(ino) and not self._is_gone(ino):
            with self._ws.kv.write() as txn:
                install(txn, ino, records)
            self._loaded.add(ino)


def _block_sections(root: Root | None) -> list[Section]:
    return [s for s in root.sections if s.kind is SectionKind.BLOCKS] if root is not None else []


def install(txn: KVWrite, ino: Inode, records: list[tuple[bytes, bytes]]) -> None:
    """Put the base's records of one inode under what the node knows already, and note that the map is whole."""
    row = ino_key(NodeTable.UNLOADED, ino)
    cutoff = txn.get(row)
    first_dropped = decode_u32(cutoff) if cutoff else None
    for key, value in records:
        assert key_ino(key) == ino
        if (first_dropped is None or key_block(key) < first_dropped) and txn.get(key) is None:
            frame = FrameRef.decode(value)
            txn.put(key, BlockState(local=False, state=FrameState.PUBLISHED, frame=frame).encode())
            txn.put(NodeTable.DEDUP + frame.digest, value)
    for key, value in list(txn.scan(*ino_range(BLOCK_TABLE, ino))):
        if value == b"":
            txn.delete(key)
    txn.put(row, LOADED)


def apply_cutoff(txn: KVWrite, ino: Inode, first: BlockIndex) -> None:
    """A later change set dropped blocks of an inode whose map still lies in the base."""
    row = ino_key(NodeTable.UNLOADED, ino)
    before = txn.get(row)
    if before != LOADED:
        known = decode_u32(before) if before else first
        txn.put(row, min(first, known).to_bytes(4))
