"""Make a new base now and then, so that a mount reads little and old change sets can go.

Invariant: a base is made from published objects alone, never from the live map (C5); it is used only by a manifest that
names it, and until then the old base and every change set after it stay what readers need.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from spotwarp_fs.core.changesets import ChangeSet, fold
from spotwarp_fs.core.errors import Fenced, SpotwarpError
from spotwarp_fs.core.layout import pack_id
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import ObjectStore, Work
from spotwarp_fs.core.rebase import Reuse, Rewrite, Step, merge_section, plan_merge
from spotwarp_fs.core.sections import MetadataWriter, StreamWriter, Written
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import read_chain
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.publish import Head
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.workspace import Workspace


@dataclass(frozen=True, slots=True)
class NewBase:
    """A base that the next manifest may name."""

    number: ManifestNumber
    written: Written
    changes_bytes: int
    """`Manifest.changes_bytes` as of *number*: what this base has taken in."""


def is_due(manifest: Manifest, settings: EngineSettings) -> bool:
    """Changes since the base exceed half its size, or there are too many manifests (M-h)."""
    length = manifest.number - manifest.base_number
    large = manifest.changes_bytes > max(settings.rebase_bytes_min, settings.rebase_share * manifest.base_bytes)
    return length > settings.rebase_manifests_max or (large and length > 1)


class Rebaser:
    """Merges in the background, one base at a time."""

    def __init__(self, workspace: Workspace, store: ObjectStore, metadata: Metadata, health: StoreHealth) -> None:
        self._ws = workspace
        self._store = store
        self._metadata = metadata
        self._health = health
        self._head: Head | None = None
        self._wanted = trio.Event()
        self.ready: NewBase | None = None
        """Taken by the cut loop for its next manifest."""

    def consider(self, head: Head, change_set: ChangeSet) -> None:
        """After each publish: begin a new base when it is due."""
        if self._head is None and self.ready is None and is_due(head.manifest, self._ws.settings):
            self._head = head
            self._wanted.set()

    async def run(self) -> None:
        """Make bases as they are wanted."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            assert self._head is not None
            try:
                self.ready = await self.merge(self._head)
            except Fenced:
                return  # the mount goes on, read-only
            except (SpotwarpError, OSError) as error:
                self._ws.report(f"no new base could be made: {error}")
            finally:
                self._head = None

    async def merge(self, head: Head) -> NewBase:
        """Merge the base of *head* with the change sets after it, and bring the result into the store."""
        manifest = head.manifest
        base = await self._metadata.root(manifest.base) if manifest.base is not None else None
        chain = await read_chain(self._store, head, self._health, manifest.base_number)
        change_sets = [await self._metadata.change_set(link.manifest) for link in chain]
        folded = await self._ws.workers.run(Work.CPU, fold, change_sets)
        epoch = manifest.writer_epoch
        writer = MetadataWriter(lambda: pack_id(epoch, self._ws.entropy.token_bytes(8)))
        stream = writer.stream()
        for step in await self._ws.workers.run(Work.CPU, plan_merge, base, folded):
            await self._write(stream, step)
            await self._metadata.upload(writer.take_packs())
        written = await self._ws.workers.run(Work.CPU, stream.finish)
        await self._metadata.upload(await self._ws.workers.run(Work.CPU, writer.finish))
        return NewBase(manifest.number, written, manifest.changes_bytes)

    async def _write(self, stream: StreamWriter, step: Step) -> None:
        match step:
            case Reuse(section):
                stream.reuse(section)
            case Rewrite(section, puts, part):
                old = list(puts) if section is None else await self._metadata.section_puts(section)
                await self._ws.workers.run(Work.CPU, lambda: stream.extend(merge_section(old, part)))
