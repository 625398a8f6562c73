"""Read what was set aside: in the store by a fenced writer, or on a node as the cache that it was.

Invariant: reading changes neither the salvage nor the workspace. A state in the store is completed from the manifest
that its writer published last, which the collector keeps; the map on a node is whole by itself, and only blocks that
were evicted come from the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from spotwarp_fs.core import salvage
from spotwarp_fs.core.errors import Corrupt, NotFound
from spotwarp_fs.core.journal import JournalLog, SessionBegun
from spotwarp_fs.core.layout import SALVAGE_PREFIX, pack_key
from spotwarp_fs.core.manifests import decode, digest_of
from spotwarp_fs.core.ports import KVRead, KVStore, Lane, ObjectStore, Work
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, ino_range, key_block
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.salvage import CONTENT_NAME, STATE_NAME, Concerned, SalvageContent, SalvageState
from spotwarp_fs.core.types import BLOCK_BYTES, ManifestNumber, ObjectKey, PackId, WriterEpoch
from spotwarp_fs.engine.load import BASE_KEY, HEAD_KEY, apply_state, load_state
from spotwarp_fs.engine.publish import Head, find_head, read_manifest
from spotwarp_fs.engine.reader import Piece, Reader, ReadPorts
from spotwarp_fs.engine.recover import LostMap, recover

DELETED_PER_REQUEST = 500


@dataclass(frozen=True, slots=True)
class StoredSalvage:
    """What a fenced writer has set aside in the store."""

    place: str
    state: SalvageState | None
    """None when not even that was written: nothing can be made of the rest."""
    content: SalvageContent | None
    """None when it was cut short: its node may still have everything."""
    stored_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Salvaged:
    """An open salvage: the tree as the lost writer last saw it, and what of it no manifest has."""

    reader: Reader
    concerned: Concerned
    damaged: tuple[str, ...] = ()
    """Files that were set aside with holes."""


async def stored_salvages(store: ObjectStore) -> list[StoredSalvage]:
    """Read what was set aside in a workspace, oldest writer epoch first."""
    found: dict[str, tuple[int, float, set[str]]] = {}
    async for info in store.list_objects(SALVAGE_PREFIX, lane=Lane.CONTROL):
        place = salvage.place_of(info.key)
        if place is not None:
            size, age_s, names = found.get(place, (0, 0.0, set()))
            names.add(info.key.rpartition("/")[2])
            found[place] = size + info.size_bytes, max(age_s, info.server_time_s - info.modified_s), names
    return [await _described(store, place, *found[place]) for place in sorted(found)]


async def _described(store: ObjectStore, place: str, size: int, age_s: float, names: set[str]) -> StoredSalvage:
    state = content = None
    if STATE_NAME in names:
        key = salvage.object_key(place, STATE_NAME)
        state = salvage.decode_state((await store.get(key)).body, key)
    if CONTENT_NAME in names:
        key = salvage.object_key(place, CONTENT_NAME)
        content = salvage.decode_content((await store.get(key)).body, key)
    return StoredSalvage(place, state, content, size, max(0.0, age_s))


async def drop_stored(store: ObjectStore, place: str) -> None:
    """Delete a salvage: what describes it last, because without that the collector would not dare to collect."""
    keys: list[ObjectKey] = []
    async for info in store.list_objects(f"{SALVAGE_PREFIX}{place}/", lane=Lane.CONTROL):
        keys.append(info.key)
    last = salvage.object_key(place, STATE_NAME)
    first = [key for key in keys if key != last]
    for at in range(0, len(first), DELETED_PER_REQUEST):
        await store.delete(first[at : at + DELETED_PER_REQUEST])
    if last in keys:
        await store.delete([last])


async def open_stored(ports: ReadPorts, found: StoredSalvage) -> Salvaged:
    """Load the state that a salvage in the store describes.

    Raises NotFound for one that was cut short, Corrupt, Unavailable.
    """
    state, content = found.state, found.content
    if state is None or content is None:
        raise NotFound(
            f"salvage {found.place} in the store was cut short; if its node is still there, `spotwarp salvage list` "
            "shows what it has"
        )
    head, _ = await read_manifest(ports.store, state.number)
    if head.digest != state.digest:
        raise Corrupt(f"salvage {found.place} continues manifest {state.number} with digest {state.digest}, "
                      f"the store has {head.digest}")  # fmt: skip
    reader = Reader(ports, head)
    own = frozenset(content.packs)

    def key_of(pack: PackId) -> ObjectKey:
        return salvage.salvage_pack_key(found.place, pack) if pack in own else pack_key(pack)

    reader.packs.key_of = key_of
    loaded = await load_state(reader.workspace, ports.store, reader.metadata, reader.health, head)
    change_set = await reader.metadata.change_set(replace(head.manifest, changes=content.root))
    await apply_state(reader.workspace, change_set)
    reader.maps.use_base(head.manifest.base, loaded.base)
    with reader.view() as view:
        concerned = salvage.concerned(view, salvage.keys_of(change_set))
    return Salvaged(reader, concerned, content.damaged)


@dataclass(frozen=True, slots=True)
class KeptSummary:
    """What a map that was set aside on a node holds."""

    number: int
    writer_epoch: WriterEpoch
    files: int
    """Files with unpublished changes."""
    unpublished_bytes: int


def summary_of(view: KVRead) -> KeptSummary | None:
    """Look at a map that was set aside; None when it never held a state."""
    body = view.get(HEAD_KEY)
    if body is None:
        return None
    manifest = decode(body)
    keys = list(salvage.unpublished_keys(view))
    values = {key: view.get(key) for key in keys if key[:1] == BLOCK_TABLE}
    held = [key for key, value in values.items() if value]
    files = {path for path in salvage.concerned(view, iter(keys)).whole}
    return KeptSummary(manifest.number, manifest.writer_epoch, len(files), len(held) * BLOCK_BYTES)


def has_state(kv: KVStore) -> bool:
    """Tell whether a map holds a state; one from another boot was thrown away, and the journal is what is left."""
    with kv.read() as view:
        return view.get(HEAD_KEY) is not None


async def rebuild_kept(ports: ReadPorts, journal: JournalLog, lost: LostMap | None = None) -> None:
    """Build the map anew from the last manifest of the journal's sessions and what the journal proves (C4).

    Raises NotFound when no such manifest exists.
    """
    known = {record.session for record in journal.records() if isinstance(record, SessionBegun)}
    found = await find_head(ports.store)
    head = found[0] if found is not None else None
    while head is not None and head.manifest.session not in known:
        number = ManifestNumber(head.manifest.number - 1)
        head = (await read_manifest(ports.store, number))[0] if number else None
    if head is None:
        raise NotFound("no manifest is by a session of this cache: it had published nothing, and its map is gone")
    reader = Reader(ports, head)
    await recover(reader.workspace, ports.store, reader.metadata, reader.health, head, journal, lost=lost)


def open_kept(ports: ReadPorts) -> Salvaged:
    """Open the map and data files of a node that were set aside; raises NotFound when the map never held a state."""
    reader = KeptReader.of(ports)
    with reader.view() as view:
        concerned = salvage.concerned(view, salvage.unpublished_keys(view))
    return Salvaged(reader, concerned)


class KeptReader(Reader):
    """Reads local bytes where there are some, and fetches the rest."""

    @classmethod
    def of(cls, ports: ReadPorts) -> KeptReader:
        """Read the head that the map stands on."""
        workspace = ports.new_workspace()
        with workspace.kv.read() as view:
            body, base = view.get(HEAD_KEY), view.get(BASE_KEY)
        if body is None:
            raise NotFound("this cache was set aside before it held a state")
        reader = cls(ReadPorts(ports.store, lambda: workspace), Head(decode(body), digest_of(body)))
        reader.maps.use_base(FrameRef.decode(base) if base else None, None)
        return reader

    @asynccontextmanager
    async def content(self, node: Node) -> AsyncIterator[AsyncIterator[Piece]]:
        """Give the pieces of a file, those that are here first."""
        async with super().content(node) as fetched:
            pieces = self._here_and_there(node, fetched)
            try:
                yield pieces
            finally:
                await pieces.aclose()

    async def _here_and_there(self, node: Node, fetched: AsyncIterator[Piece]) -> AsyncGenerator[Piece, None]:
        with self.workspace.kv.read() as view:
            rows = [(key_block(key), value) for key, value in view.scan(*ino_range(BLOCK_TABLE, node.ino)) if value]
        for block, value in rows:
            offset = block * BLOCK_BYTES
            length = min(BLOCK_BYTES, node.record.size - offset)
            if BlockState.decode(value).local and length > 0:
                raw = await self.workspace.workers.run(Work.DISK, self.workspace.data.pread, node.ino, offset, length)
                yield Piece(offset, raw)
        async for piece in fetched:
            yield piece
