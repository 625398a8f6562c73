"""The numbers that bound every store request, and the threads that requests run in.

Invariant: each lane has threads and connections of its own, so forty hung uploads delay no reader and no manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.ports import Lane

LANE_THREADS: Final = {Lane.CONTROL: 8, Lane.DEMAND: 24, Lane.BULK: 8}
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 20.0
"""Between two bytes from the server, not for a whole body: a slow link is not an outage."""
ASK_FIRST_BYTES: Final = 1 << 20
"""Uploads from this size on wait for the store's "100 Continue", so that a refusal does not cost the whole body."""
LIST_PAGE_KEYS: Final = 1000
DELETE_BATCH_KEYS: Final = 1000
CREDENTIAL_REFRESH_S: Final = 1.0
"""Refused credentials are looked up again at most this often."""
TEMP_FILE_AGE_MAX_S: Final = 3600.0
"""Older temporary files of the directory store belong to nobody alive."""

T = TypeVar("T")


class Answered(Unavailable):
    """5xx or 429: the store is there, and answers."""


class Throttled(Answered):
    """503 SlowDown or 429: the store wants fewer requests."""


class LaneThreads:
    """Worker threads for blocking calls, limited per lane."""

    def __init__(self) -> None:
        self._limiters = {lane: trio.CapacityLimiter(count) for lane, count in LANE_THREADS.items()}

    async def run(self, lane: Lane, call: Callable[[], T]) -> T:
        """Run *call* in a thread of *lane*.

        A cancelled caller leaves at once; the thread keeps its place in the lane until its own timeouts end it.
        """
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiters[lane])
