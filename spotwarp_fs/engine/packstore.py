"""Bring packs into the store and frames back out of it.

Invariant: an uploaded pack is byte for byte what was sent, also when an answer was lost (H19); a frame that is
returned has passed the digest of its record (P-08).
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from spotwarp_fs.core.errors import Corrupt, Fenced, NotFound, PreconditionFailed, StoreRefused, Unavailable
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.layout import pack_id, pack_key
from spotwarp_fs.core.packs import TRAILER_BYTES, PackBuilder, same_pack
from spotwarp_fs.core.ports import Lane, ObjectStore, Work
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import ObjectKey, PackId, pack_epoch
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.workspace import Workspace

CORRUPT_TRIES = 3
"""A body that fails its digest is fetched again this often: damage on the way is more common than damage at rest."""


class PackStore:
    """Packs of one workspace."""

    def __init__(
        self,
        workspace: Workspace,
        store: ObjectStore,
        health: StoreHealth,
        *,
        key_of: Callable[[PackId], ObjectKey] = pack_key,
        while_fenced: bool = False,
    ) -> None:
        self._ws = workspace
        self._store = store
        self._health = health
        self.key_of = key_of
        """Where a pack lies: salvage has a place of its own."""
        self._while_fenced = while_fenced
        self.bytes_uploaded = 0
        self.bytes_fetched = 0

    async def upload(self, builder: PackBuilder) -> tuple[FrameRef, ...]:
        """Upload, trying for as long as the session lives; returns the frames' final places, or raises Fenced."""
        body = await self._ws.workers.run(Work.CPU, builder.finish)
        while True:
            try:
                await self.upload_body(builder.pack, body, lane=Lane.BULK)
                return builder.refs
            except PreconditionFailed:
                builder, body = await self._renamed(builder, body)

    async def upload_body(self, pack: PackId, body: bytes, lane: Lane = Lane.CONTROL) -> None:
        """Upload a finished pack, waiting out outages; raises Fenced, or PreconditionFailed if its name is taken."""
        while True:
            if self._ws.fenced is not None and not self._while_fenced:
                raise Fenced(str(self._ws.fenced))
            try:
                await self._put(pack, body, lane)
            except PreconditionFailed:
                raise
            except (Unavailable, StoreRefused) as error:
                await self._health.failed(error)
            else:
                self.bytes_uploaded += len(body)
                return

    async def _put(self, pack: PackId, body: bytes, lane: Lane) -> None:
        """One try; a 412 from our own earlier try is a success."""
        key = self.key_of(pack)
        try:
            await self._store.put_if_absent(key, body, lane=lane)
        except PreconditionFailed:
            if not await self._is_ours(key, body, lane):
                raise
        self._health.succeeded()

    async def _is_ours(self, key: ObjectKey, body: bytes, lane: Lane) -> bool:
        """Whether *key* holds *body*; a difference counts when seen again: damage on the way is likelier."""
        found = await self._store.head(key, lane=lane)
        start = max(0, found.size_bytes - TRAILER_BYTES)
        for _ in range(CORRUPT_TRIES):
            tail = await self._store.get(key, start=start, length=TRAILER_BYTES, lane=lane)
            if same_pack(body, stored_size=found.size_bytes, stored_trailer=tail.body):
                return True
        return False

    async def _renamed(self, builder: PackBuilder, body: bytes) -> tuple[PackBuilder, bytes]:
        """The name is taken by other bytes: the same frames under a new one."""
        renamed = PackBuilder(pack_id(pack_epoch(builder.pack), self._ws.entropy.token_bytes(8)))
        for ref in builder.refs:
            renamed.add(body[ref.offset : ref.offset + ref.stored_bytes], ref.digest, ref.raw_bytes)
        return renamed, await self._ws.workers.run(Work.CPU, renamed.finish)

    async def fetch(self, ref: FrameRef, *, lane: Lane) -> bytes:
        """Fetch one frame's content; see `fetch_run`."""
        return (await self.fetch_run([ref], lane=lane))[0]

    async def fetch_run(self, refs: list[FrameRef], *, lane: Lane) -> list[bytes]:
        """Fetch neighbouring frames of one pack in one request and check each against its record.

        Raises NotFound, Corrupt after several tries, or Unavailable or another StoreRefused (try again).
        """
        start, stop = refs[0].offset, refs[-1].offset + refs[-1].stored_bytes
        for attempt in range(CORRUPT_TRIES):
            found = await self._store.get(self.key_of(refs[0].pack), start=start, length=stop - start, lane=lane)
            self._health.succeeded()
            self.bytes_fetched += len(found.body)
            try:
                return await self._ws.workers.run(Work.CPU, _open_all, refs, found.body, start)
            except Corrupt:
                if attempt == CORRUPT_TRIES - 1:
                    raise
                await trio.sleep(self._ws.settings.retry_first_s)
        raise AssertionError("unreachable")

    async def fetch_patiently(self, ref: FrameRef, *, lane: Lane, wait_s: float) -> bytes:
        """Fetch one frame, waiting out an outage for up to *wait_s*; then raises what it met last."""
        deadline = trio.current_time() + wait_s
        while True:
            try:
                return await self.fetch(ref, lane=lane)
            except NotFound as error:
                raise Corrupt(f"pack {ref.pack} is missing from the store: {error}") from error
            except (Unavailable, StoreRefused) as error:
                if trio.current_time() >= deadline:
                    raise
                await self._health.failed(error)


def _open_all(refs: list[FrameRef], body: bytes, start: int) -> list[bytes]:
    view = memoryview(body)
    return [open_frame(ref, view[ref.offset - start : ref.offset - start + ref.stored_bytes]) for ref in refs]
