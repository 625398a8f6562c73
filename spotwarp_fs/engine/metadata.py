"""Read and write the metadata of states: roots, sections, change sets.

Invariant: what is read has passed its digest; what is written is in the store before its root is given out (pack before
manifest).
"""

from __future__ import annotations

from collections import OrderedDict

from spotwarp_fs.core.changesets import ChangeSet, Put, concat, decode_records, puts_of
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import Lane, Work
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.sections import MetadataWriter, Root, Section, Written, parse_root
from spotwarp_fs.core.types import PackId
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.workspace import Workspace

FETCH_PARALLEL_MAX = 16


class Metadata:
    """Metadata frames of one workspace, with a few decoded sections kept."""

    def __init__(self, workspace: Workspace, packs: PackStore) -> None:
        self._ws = workspace
        self._packs = packs
        self._kept: OrderedDict[FrameRef, list[Put]] = OrderedDict()
        self.bytes_read = 0
        self.unnamed: set[PackId] = set()
        """Packs of this session that no collection has seen in use yet: never candidates for one (C9)."""

    async def _frame(self, ref: FrameRef) -> bytes:
        self.bytes_read += ref.stored_bytes
        wait_s = self._ws.settings.read_wait_max_s
        return await self._packs.fetch_patiently(ref, lane=Lane.CONTROL, wait_s=wait_s)

    async def root(self, ref: FrameRef) -> Root:
        """Read a root."""
        return parse_root(await self._frame(ref))

    async def change_set(self, manifest: Manifest) -> ChangeSet:
        """Read everything that *manifest* changed."""
        if manifest.changes is None:
            return ChangeSet()
        root = await self.root(manifest.changes)
        if not root.sections:
            return root.records
        return concat(await self._all(root.sections))

    async def change_set_and_frames(self, manifest: Manifest) -> tuple[ChangeSet, list[FrameRef]]:
        """Read everything that *manifest* changed, and say in which frames it lies."""
        if manifest.changes is None:
            return ChangeSet(), []
        root = await self.root(manifest.changes)
        if not root.sections:
            return root.records, [manifest.changes]
        return concat(await self._all(root.sections)), [manifest.changes, *(s.frame for s in root.sections)]

    async def tree_puts(self, root: Root) -> list[list[Put]]:
        """Read the sections of a base that a mount needs at once: everything but block maps."""
        if not root.sections:
            return [puts_of(root.records)]
        return [puts_of(part) for part in await self._all(tuple(root.without_blocks()))]

    async def _all(self, sections: tuple[Section, ...]) -> list[ChangeSet]:
        """Read sections in parallel, in order."""

        async def one(section: Section) -> ChangeSet:
            raw = await self._frame(section.frame)
            return await self._ws.workers.run(Work.CPU, decode_records, raw)

        return await each(one, sections, limit=FETCH_PARALLEL_MAX)

    async def section_puts(self, section: Section) -> list[Put]:
        """Read one section of a base; the last few are kept, because neighbours are opened together."""
        kept = self._kept.get(section.frame)
        if kept is None:
            raw = await self._frame(section.frame)
            kept = self._kept[section.frame] = puts_of(await self._ws.workers.run(Work.CPU, decode_records, raw))
        self._kept.move_to_end(section.frame)
        if len(self._kept) > self._ws.settings.sections_cached:
            self._kept.popitem(last=False)
        return kept

    async def write(self, writer: MetadataWriter, change_set: ChangeSet) -> Written:
        """Write a change set and bring its packs into the store."""
        written = await self._ws.workers.run(Work.CPU, writer.write, change_set)
        await self.upload(await self._ws.workers.run(Work.CPU, writer.finish))
        return written

    async def upload(self, packs: list[tuple[PackId, bytes]]) -> None:
        """Bring finished metadata packs into the store, side by side."""

        self.unnamed.update(pack for pack, _ in packs)

        async def one(item: tuple[PackId, bytes]) -> None:
            await self._packs.upload_body(*item)

        await each(one, packs, limit=FETCH_PARALLEL_MAX)
