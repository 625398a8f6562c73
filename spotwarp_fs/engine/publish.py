"""Advance the head: find it, and create the manifest after it exactly once.

Invariant: a number for which a PUT was sent gets no other body until its outcome is known; the digest of the whole body
decides whose a found manifest is (C16). Any foreign manifest at a serving writer's number means fenced (C17).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import trio

from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import Conflict, Corrupt, Fenced, NotFound, PreconditionFailed, StoreRefused, Unavailable
from spotwarp_fs.core.manifests import Manifest, check_successor, decode, digest_of, encode
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.parallel import each

GALLOP_MAX = 1 << 40
READ_AHEAD = 8
CORRUPT_TRIES = 3
"""Damage on the way is more common than damage at rest."""


@dataclass(frozen=True, slots=True)
class Head:
    """A published manifest, and the digest of its body."""

    manifest: Manifest
    digest: str


async def read_manifest(store: ObjectStore, number: ManifestNumber) -> tuple[Head, float]:
    """Read manifest *number* and the store's clock; raises NotFound when it does not exist."""
    for attempt in range(CORRUPT_TRIES):
        found = await store.get(layout.manifest_key(number), lane=Lane.CONTROL)
        try:
            manifest = decode(found.body, what=f"manifest {number}")
            break
        except Corrupt:
            if attempt == CORRUPT_TRIES - 1:
                raise
    if manifest.number != number:
        raise Corrupt(f"manifest object {number} says that it is number {manifest.number}")
    return Head(manifest, digest_of(found.body)), found.server_time_s


async def read_ahead(store: ObjectStore, number: ManifestNumber) -> list[Head]:
    """Read the manifests after *number* without a gap, several in the time of one; an outage ends the list early."""

    async def one(ahead: int) -> Head | None:
        try:
            return (await read_manifest(store, ManifestNumber(number + ahead)))[0]
        except (Unavailable, StoreRefused):
            return None

    found = await each(one, range(1, READ_AHEAD + 1), limit=READ_AHEAD)
    return [head for head in takewhile(lambda head: head is not None, found) if head is not None]


async def exists(store: ObjectStore, number: ManifestNumber) -> bool:
    """Whether manifest *number* is there."""
    try:
        await store.head(layout.manifest_key(number), lane=Lane.CONTROL)
    except NotFound:
        return False
    return True


async def find_head(store: ObjectStore) -> tuple[Head, float] | None:
    """Find the highest-numbered manifest: from the hint, then galloping; None when there is no manifest at all.

    Numbers are dense and never deleted, so "N exists and N+1 does not" is the head whatever listings say (C11).
    """
    low = await _hinted(store)
    step = 1
    while step < GALLOP_MAX and await exists(store, ManifestNumber(low + step)):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if await exists(store, ManifestNumber(middle)):
            low = middle
        else:
            high = middle
    if low == 0:
        return None
    try:
        return await read_manifest(store, ManifestNumber(low))
    except Corrupt as error:
        older = f"; older states can be read, read-only: --at {low - 1} and below" if low > 1 else ""
        raise Corrupt(f"the newest state of {store.url} cannot be read: {error}{older}") from error


async def _hinted(store: ObjectStore) -> int:
    """A number that certainly exists, or 0: the hint is only a place to begin."""
    try:
        hint = int((await store.get(layout.HEAD_HINT, lane=Lane.CONTROL)).body)
    except (NotFound, ValueError):
        return 0
    return hint if hint > 0 and await exists(store, ManifestNumber(hint)) else 0


class Publisher:
    """Creates manifests after a known head."""

    def __init__(self, store: ObjectStore, head: Head, health: StoreHealth) -> None:
        self._store = store
        self._health = health
        self.head = head
        self.server_time_s = 0.0
        self.server_time_at_s = 0.0
        """trio's clock at `server_time_s`."""

    def server_now_s(self) -> float:
        """The store's clock now, as far as it is known."""
        return self.server_time_s + (trio.current_time() - self.server_time_at_s)

    def note_server_time(self, server_time_s: float) -> None:
        """Remember the store's clock."""
        self.server_time_s, self.server_time_at_s = server_time_s, trio.current_time()

    async def publish(self, candidate: Manifest) -> Head:
        """Advance the head to *candidate*, or raise Fenced and leave it untouched.

        Every pack that *candidate* names is in the store already, so a crash here leaves unreferenced packs to collect
        and never a manifest that dangles. Waits out outages for as long as it is not cancelled.
        """
        check_successor(self.head.manifest, candidate, parent_digest=self.head.digest)
        body = encode(candidate)
        while True:
            try:
                found = await self._create(candidate.number, body)
            except (Unavailable, StoreRefused) as error:
                # Also what trying again cannot cure: an earlier try may still arrive, so the number keeps its body.
                await self._health.failed(error)
                continue
            self._health.succeeded()
            if found is not None:
                raise Fenced(
                    f"manifest {candidate.number} was published by session {found.session}, writer epoch "
                    f"{found.writer_epoch}; this session is {candidate.session}, writer epoch {candidate.writer_epoch}"
                )
            self.head = Head(candidate, digest_of(body))
            return self.head

    async def _create(self, number: ManifestNumber, body: bytes) -> Manifest | None:
        """Try once; None when the store has *body* under *number*, else the manifest that stands there instead."""
        key = layout.manifest_key(number)
        try:
            info = await self._store.put_if_absent(key, body, lane=Lane.CONTROL)
            self.note_server_time(info.server_time_s)
            return None
        except (PreconditionFailed, Conflict, Unavailable):
            # A lost answer makes our own first try look like a rival's: the bytes decide.
            try:
                found = await self._store.get(key, lane=Lane.CONTROL)
            except NotFound as error:
                raise Unavailable(f"manifest {number}: not created yet") from error
            self.note_server_time(found.server_time_s)
            if found.body == body:
                return None
            try:
                return decode(found.body)
            except Corrupt as error:
                # Most likely damaged on its way. Until it is read, ours may be what stands there: the same body again.
                raise Unavailable(f"manifest {number} cannot be read back: {error}") from error

    async def write_hint(self) -> None:
        """Leave the head's number where the next start begins to look."""
        await self._store.put(layout.HEAD_HINT, str(self.head.manifest.number).encode(), lane=Lane.CONTROL)
