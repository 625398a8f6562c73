"""Find out what the retained states reach, section by section of their bases (`core/reachability.py` counts).

Invariant: a base is never in memory whole; a state that cannot be read ends the collection, never shortens the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from spotwarp_fs.core.changesets import ChangeSet, Put, fold, part_of
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.reachability import PackLive, Sweep
from spotwarp_fs.core.records import BLOCK_TABLE, PACK_KEY_BYTES, FrameRef, key_ino, pack_key_bytes, table_range
from spotwarp_fs.core.sections import Root, SectionKind
from spotwarp_fs.core.types import ManifestNumber, PackId
from spotwarp_fs.engine.history import History
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX, Metadata
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Chain:
    """A base and the change sets after it, as far as block records go."""

    base_number: ManifestNumber
    root: Root
    change_sets: Sequence[tuple[ManifestNumber, ChangeSet]]
    frames: Sequence[FrameRef]
    """Metadata frames that reading this chain needs."""


class Reach:
    """Reads chains of retained states."""

    def __init__(self, workspace: Workspace, metadata: Metadata, history: History) -> None:
        self._ws = workspace
        self._metadata = metadata
        self._history = history

    async def live(
        self, head: ManifestNumber, retained: Iterable[ManifestNumber], anchors: Iterable[ManifestNumber]
    ) -> dict[PackId, PackLive]:
        """Count what is reached of each pack."""
        numbers = sorted({*retained, head})
        sweep = Sweep(head, numbers, anchors)
        last_of: dict[ManifestNumber, Manifest] = {}
        for manifest in await self._history.read(numbers):
            last_of[manifest.base_number] = manifest
        for manifest in last_of.values():
            chain = await self.chain(manifest)
            sweep.metadata(chain.frames)
            async for rows, start, stop in self._pieces(chain.root):
                part = [(number, part_of(change_set, start, stop)) for number, change_set in chain.change_sets]
                await self._ws.workers.run(Work.CPU, sweep.chain, chain.base_number, rows, part, manifest.number)
        return sweep.result()

    async def chain(self, manifest: Manifest) -> Chain:
        """Read how the state of *manifest* is put together."""
        numbers = [ManifestNumber(n) for n in range(manifest.base_number + 1, manifest.number + 1)]
        links = await self._history.read(numbers)
        root, frames = Root(), []
        if manifest.base is not None:
            root = await self._metadata.root(manifest.base)
            frames = [manifest.base, *(section.frame for section in root.sections)]

        async def one(link: Manifest) -> tuple[ChangeSet, list[FrameRef]]:
            change_set, used = await self._metadata.change_set_and_frames(link)
            blocks = tuple(change for change in change_set.changes if change[0][:1] == BLOCK_TABLE)
            return ChangeSet(change_set.drops, blocks), used

        found = await each(one, links, limit=FETCH_PARALLEL_MAX)
        frames += [frame for _, used in found for frame in used]
        change_sets = [(number, change_set) for number, (change_set, _) in zip(numbers, found, strict=True)]
        return Chain(manifest.base_number, root, change_sets, frames)

    async def rows_in(self, manifest: Manifest, packs: frozenset[PackId]) -> dict[bytes, bytes]:
        """Give the block rows of a state that name a frame in one of *packs*."""
        chain = await self.chain(manifest)
        wanted = {pack_key_bytes(pack) for pack in packs}
        folded = fold(change_set for _, change_set in chain.change_sets)
        found: dict[bytes, bytes] = {}
        async for rows, start, stop in self._pieces(chain.root):
            part = part_of(folded, start, stop)
            drops = {drop.ino: drop for drop in part.drops}
            changes = dict(part.changes)
            for key, value in rows:
                drop = drops.get(key_ino(key))
                if value[:PACK_KEY_BYTES] in wanted and key not in changes and (drop is None or key < drop.start):
                    found[key] = value
            found |= {
                key: value for key, value in changes.items() if value is not None and value[:PACK_KEY_BYTES] in wanted
            }
        return found

    async def _pieces(self, root: Root) -> AsyncIterator[tuple[list[Put], bytes, bytes]]:
        """Give the block rows of a base in pieces, which together span the whole table."""
        start, end = table_range(BLOCK_TABLE)
        sections = [section for section in root.sections if section.kind is SectionKind.BLOCKS]
        if not sections:
            rows = [(k, v) for k, v in root.records.changes if k[:1] == BLOCK_TABLE and v is not None]
            yield rows, start, end
            return
        for at, section in enumerate(sections):
            stop = sections[at + 1].first_key if at + 1 < len(sections) else end
            yield await self._metadata.section_puts(section), start, stop
            start = stop
