"""Follow a workspace's head until somebody says which writer epoch this start may claim.

Invariant: nothing is published while it waits, and a permit only ends the wait: the takeover manifest decides, so that
of any number of starts with the same permit one wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from spotwarp_fs.core.errors import Corrupt, NotFound, StoreRefused, Unavailable
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.types import ManifestNumber, WriterEpoch
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.publish import Head, find_head, read_ahead
from spotwarp_fs.engine.takeover import Takeover

LOOK_PERIOD_S: Final = 0.1
"""Between two looks for the permit, which lies on this machine."""
FOLLOW_PERIOD_S: Final = 1.0
FOLLOWED_MAX: Final = 1000
"""Manifests that are followed one by one; after so many the head is loaded anew, which forgets what came between."""

DAMAGED_TRIES: Final = 4


class Permit(Protocol):
    """Somebody outside who says when, and for which writer epoch."""

    def prefetched(self, number: ManifestNumber | None) -> None:
        """Say that the head, manifest *number*, is loaded and followed from now on; None: there is no state yet."""
        ...

    def granted(self) -> WriterEpoch | None:
        """Return the writer epoch to claim; None while there is none. Raises UserError for what is no permit."""
        ...


class Following:
    """An empty cache that keeps the newest state in its map, and publishes nothing."""

    def __init__(self, store: ObjectStore, health: StoreHealth, new_takeover: Callable[[], Takeover]) -> None:
        self._store = store
        self._health = health
        self._new_takeover = new_takeover
        self._followed = 0
        self.takeover: Takeover | None = None
        """What the head is loaded into."""
        self.head: Head | None = None

    async def until_granted(self, permit: Permit) -> WriterEpoch:
        """Load the head and follow it until *permit* says so; what is newest then is loaded on return."""
        await self._patiently()
        permit.prefetched(self.head.manifest.number if self.head is not None else None)
        follow_at_s = trio.current_time() + FOLLOW_PERIOD_S
        while (epoch := permit.granted()) is None:
            await trio.sleep(LOOK_PERIOD_S)
            if trio.current_time() >= follow_at_s:
                await self._patiently()
                follow_at_s = trio.current_time() + FOLLOW_PERIOD_S
        await self._patiently()
        return epoch

    async def _patiently(self) -> None:
        """Catch up with the head, through outages and through collections of what was being read."""
        damaged = 0
        while True:
            try:
                await self._catch_up()
            except (NotFound, Corrupt) as error:
                # A collector was faster: a newer head says what is there. What stays unreadable is no accident.
                self.head, damaged = None, damaged + 1
                if damaged == DAMAGED_TRIES:
                    raise
                await self._health.failed(error)
            except (Unavailable, StoreRefused) as error:
                await self._health.failed(error)
            else:
                self._health.succeeded()
                return

    async def _catch_up(self) -> None:
        if self.head is None or self._followed > FOLLOWED_MAX:
            found = await find_head(self._store)
            if found is None:
                return
            self.takeover, self._followed = self._new_takeover(), 0
            await self.takeover.load(found[0])
            self.head = found[0]
        assert self.takeover is not None
        while newer := await read_ahead(self._store, self.head.manifest.number):
            await self.takeover.follow(newer)
            self.head = newer[-1]
            self._followed += len(newer)
