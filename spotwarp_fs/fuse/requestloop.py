"""How pyfuse3's loop waits for the next request: without a round through trio when it is there already, or nearly.

pyfuse3 asks trio twice per request: for a lock, because its tasks take turns to read, and for the device to be
readable. Together they cost as much as a small request itself (two task switches, `epoll_ctl`, `epoll_wait`). Like
`pyfuse3.asyncio.enable`, this puts something else in the place of the name `trio` in pyfuse3.

Invariant: a task that reads without a round gives trio one after `TURN_S` at the latest, and whoever waits for its
turn to read gets it as soon as the task that had it waits for something else.
"""

from __future__ import annotations

import select
import time
from types import SimpleNamespace
from typing import Any, Final

import pyfuse3
import trio

from spotwarp_fs.fuse.handshake import Handshake

TURN_S: Final = 0.0005
"""For so long requests may be read one after the other; then everything else in the daemon has its turn."""
SOON_S: Final = 0.00005
"""The next request of a program that writes or lists comes so soon after the answer to the last one."""
DESCRIPTORS_MAX: Final = 1024
"""`select` takes smaller numbers only; it is the one call with a timeout in microseconds."""


class ReadLock:
    """Whose turn it is to read: `trio.Lock` as far as pyfuse3 needs it, without a checkpoint where it is free.

    Letting go wakes one of those who wait, but the turn is not theirs yet: mostly the same task takes it again before
    anybody else runs.
    """

    def __init__(self) -> None:
        self._held = self._woken = False
        self._lot = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._lot.park()
            self._woken = False
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._held = False
        if self._lot and not self._woken:
            self._woken = True
            self._lot.unpark()


class Waiting:
    """Waits until the device is readable."""

    def __init__(self, handshake: Handshake | None) -> None:
        self._handshake = handshake
        self._turn_ends_s = 0.0

    async def wait_readable(self, device: int) -> None:
        """Return when there is a request; the device may also be closed, which raises ClosedResourceError."""
        if self._handshake is not None and self._handshake.is_over():
            self._handshake = None
        if time.perf_counter() < self._turn_ends_s and select.select((device,), (), (), SOON_S)[0]:
            return
        await trio.lowlevel.wait_readable(device)
        if device < DESCRIPTORS_MAX:
            self._turn_ends_s = time.perf_counter() + TURN_S


def take_over(handshake: Handshake | None) -> None:
    """Let pyfuse3 wait in this way; before `pyfuse3.main`."""
    lowlevel: dict[str, Any] = {
        name: getattr(trio.lowlevel, name) for name in ("current_task", "current_trio_token", "notify_closing")
    }
    lowlevel["wait_readable"] = Waiting(handshake).wait_readable
    pyfuse3.trio = SimpleNamespace(  # type: ignore[attr-defined]
        Lock=ReadLock,
        open_nursery=trio.open_nursery,
        from_thread=trio.from_thread,
        ClosedResourceError=trio.ClosedResourceError,
        lowlevel=SimpleNamespace(**lowlevel),
    )
