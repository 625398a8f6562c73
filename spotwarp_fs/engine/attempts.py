"""Try to create a manifest as a start of a writer does, and keep the store's clock.

Invariant: a body that may have arrived is tried again as it is, until it is known what stands at its number.
"""

from __future__ import annotations

import trio

from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import Conflict, Corrupt, PreconditionFailed, StoreRefused, Unavailable
from spotwarp_fs.core.manifests import Manifest, decode, encode
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.engine.health import StoreHealth


class Attempts:
    """One start's tries."""

    def __init__(self, store: ObjectStore, health: StoreHealth) -> None:
        self._store = store
        self._health = health
        self._server_time_s = self._server_time_at_s = 0.0

    async def create(self, manifest: Manifest) -> Manifest | None:
        """Create the manifest; None when it is ours, else the one that stands at its number. Waits out outages."""
        body = encode(manifest)
        key = layout.manifest_key(manifest.number)
        while True:
            try:
                info = await self._store.put_if_absent(key, body, lane=Lane.CONTROL)
                self.note_server_time(info.server_time_s)
                self._health.succeeded()
                return None
            except (PreconditionFailed, Conflict, Unavailable) as error:
                try:
                    found = await self._store.get(key, lane=Lane.CONTROL)
                except (Unavailable, StoreRefused):
                    await self._health.failed(error)
                    continue
                self.note_server_time(found.server_time_s)
                if found.body == body:
                    return None
                try:
                    return decode(found.body)
                except Corrupt as damaged:  # most likely on its way here
                    await self._health.failed(damaged)
            except StoreRefused as error:
                await self._health.failed(error)

    def note_server_time(self, server_time_s: float) -> None:
        """Remember the store's clock."""
        self._server_time_s, self._server_time_at_s = server_time_s, trio.current_time()

    def server_now_s(self) -> float:
        """The store's clock now; 0 while it has not answered."""
        return self._server_time_s + (trio.current_time() - self._server_time_at_s) if self._server_time_s else 0.0
