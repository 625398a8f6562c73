"""Which published states this writer knows, which of them stay, and the rows that say so (P-13, P-18).

Invariant: before `complete` is set nothing is known to be free; afterwards every state that has to stay is known: the
head, everything younger than an hour, and what rows of the map keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import trio

from spotwarp_fs.core import retention
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import KVRead, ObjectStore
from spotwarp_fs.core.retention import Reason
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import read_patiently
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.publish import Head, Publisher
from spotwarp_fs.engine.rebase import NewBase
from spotwarp_fs.engine.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Size:
    """The counters of a state that is not published yet."""

    files: int
    logical_bytes: int


class History:
    """The states up to this writer's head."""

    def __init__(self, workspace: Workspace, store: ObjectStore, publisher: Publisher, health: StoreHealth) -> None:
        self._ws = workspace
        self._store = store
        self._publisher = publisher
        self._health = health
        self._manifests: dict[ManifestNumber, Manifest] = {}
        self.complete = trio.Event()

    @property
    def manifests(self) -> list[Manifest]:
        """Every state known, oldest first."""
        self.published(self._publisher.head, ChangeSet())
        return [self._manifests[number] for number in sorted(self._manifests)]

    def published(self, head: Head, change_set: ChangeSet) -> None:
        """This writer has published another state."""
        self._manifests[head.manifest.number] = head.manifest

    async def read(self, numbers: Iterable[ManifestNumber]) -> list[Manifest]:
        """Give manifests, from the store if they are not known."""

        async def one(number: ManifestNumber) -> Manifest:
            known = self._manifests.get(number)
            return known or (await read_patiently(self._store, number, self._health)).manifest

        return await each(one, numbers, limit=FETCH_PARALLEL_MAX)

    async def run(self) -> None:
        """Read what was published before this session began; an error is reported, and tried again."""
        while True:
            try:
                await self._read_back()
            except SpotwarpError as error:
                self._ws.report(f"older states cannot be read, so nothing is collected: {error}")
                await trio.sleep(self._ws.settings.retry_max_s)
            else:
                self.complete.set()
                return

    async def _read_back(self) -> None:
        head = self._publisher.head.manifest
        with self._ws.kv.read() as view:
            rows = {*retention.keeps_in(view), *retention.pins_in(view), *retention.names_in(view).values()}
        first = int(head.number)
        while first > 1:
            upto, first = first, max(1, first - FETCH_PARALLEL_MAX)
            found = await self.read(ManifestNumber(number) for number in range(first, upto))
            self._manifests |= {manifest.number: manifest for manifest in found}
            old = self._publisher.server_now_s() - found[0].created_s > self._ws.settings.retain_recent_s
            if old and first <= head.base_number:
                break
        found = await self.read(number for number in rows if number < first)
        self._manifests |= {manifest.number: manifest for manifest in found}

    def retained(self, view: KVRead, readers: Iterable[ManifestNumber] = ()) -> dict[ManifestNumber, set[Reason]]:
        """Tell which states stay, and why; what does not is forgotten here."""
        keep = retention.retained(
            self.manifests,
            self._publisher.server_now_s(),
            named=retention.names_in(view).values(),
            pins=retention.pins_in(view),
            readers=readers,
            recent_s=self._ws.settings.retain_recent_s,
        )
        base_number = self._publisher.head.manifest.base_number
        for number in [n for n in self._manifests if n not in keep and n <= base_number]:
            del self._manifests[number]
        return keep

    def rows_before_cut(self, view: KVRead, new_base: NewBase | None) -> dict[bytes, bytes | None]:
        """Give the retention rows that the state about to be cut must have."""
        head, ws = self._publisher.head.manifest, self._ws
        rows: dict[bytes, bytes | None] = {}
        if retention.would_wipe(head, Size(ws.files, ws.logical_bytes)):
            rows |= retention.pin(view, head.number, self._publisher.server_now_s())
        if new_base is not None:
            rows |= retention.keep_changes(view, self.retained(view), new_base.number)
        return rows

    def rows_now(self, view: KVRead) -> dict[bytes, bytes | None]:
        """Give the changes of retention rows that time alone has brought."""
        head = self._publisher.head.manifest
        ended = retention.ended_pins(view, self._publisher.server_now_s())
        return ended | retention.keep_changes(view, self.retained(view), head.base_number)
