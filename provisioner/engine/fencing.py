"""Who controls a job: the highest number below `controllers/`, each created once; all others stop.

The number is `controller_epoch` everywhere. Invariant: a controller that has seen a higher one sends nothing that
rents, and stops. Whether the one before still lives is observed, never compared by clocks: its heartbeat moves, or it
stood still for 30 s while it was watched.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.ports import Clock, Shelf
from provisioner.core.rendezvous import (
    BadMessage,
    Controller,
    alive_key,
    controller_key,
    decode,
    encode,
    job_prefix,
    read_controller_epoch,
)
from provisioner.engine.ports import ControllerAlive, EnginePorts, EngineSettings, Me, Superseded

WATCH_S: Final = 1.0
LEFT: Final = -1
"""In place of a heartbeat's count: the controller has ended by itself."""
Value = TypeVar("Value")


async def answered(settings: EngineSettings, call: Callable[[], Awaitable[Value]]) -> Value:
    """Make one call to the store, or raise StoreUnavailable when it takes too long."""
    with trio.move_on_after(settings.store_s):
        return await call()
    raise StoreUnavailable(f"the store gave no answer within {settings.store_s:.0f} s; try again")


class Fence:
    """This controller's place among those of its job."""

    def __init__(self, job: str, ports: EnginePorts) -> None:
        self._job = job
        self._shelf: Shelf = ports.shelf
        self._settings: EngineSettings = ports.settings
        self._clock: Clock = ports.clock
        self._me: Me = ports.me
        self._since_s = ports.clock.now_s()
        self._seq = 0
        self.controller_epoch = 0
        """This controller's number; 0 = not taken yet."""

    async def take(self) -> None:
        """Become the job's controller, or raise ControllerAlive."""
        while not self.controller_epoch:
            newest = await self._newest()
            if newest and not self._settings.adopt:
                await self._until_it_is_dead(newest)
            if await self._take_number(newest + 1):
                self.controller_epoch = newest + 1
        await self._beat_once()

    async def _take_number(self, number: int) -> bool:
        body = encode(Controller(number, self._me.host, self._me.pid, self._since_s))
        return await answered(self._settings, lambda: self._shelf.create(controller_key(self._job, number), body))

    async def check(self) -> None:
        """Raise Superseded when a higher number exists; StoreUnavailable when that cannot be seen."""
        newest = await self._newest()
        if newest > self.controller_epoch:
            raise Superseded(
                f"controller {newest} of job {self._job} has taken over from this one, controller "
                f"{self.controller_epoch}: this one stops and leaves everything as it is"
            )

    async def beat(self) -> None:
        """Leave a heartbeat and look for a higher number, until cancelled or Superseded."""
        while True:
            await trio.sleep(self._settings.beat_s)
            try:
                await self.check()
                await self._beat_once()
            except (StoreUnavailable, StoreDenied):
                # Without the store nothing is rented either: the next beat will tell.
                continue

    async def leave(self) -> None:
        """Say that this controller has ended by itself: the next one need not watch whether it moves."""
        body = Controller(self.controller_epoch, self._me.host, self._me.pid, self._since_s, LEFT)
        await answered(self._settings, lambda: self._shelf.put(alive_key(self._job), encode(body)))

    async def _beat_once(self) -> None:
        self._seq += 1
        body = Controller(self.controller_epoch, self._me.host, self._me.pid, self._since_s, self._seq)
        await answered(self._settings, lambda: self._shelf.put(alive_key(self._job), encode(body)))

    async def _newest(self) -> int:
        keys = await answered(self._settings, lambda: self._shelf.list(f"{job_prefix(self._job)}controllers/"))
        return max((number for key in keys if (number := read_controller_epoch(key)) is not None), default=0)

    async def _until_it_is_dead(self, newest: int) -> None:
        """Watch the newest controller's heartbeat: raise ControllerAlive when it moves, return when it does not."""
        first = await self._heartbeat()
        began_s = trio.current_time()
        while trio.current_time() - began_s < self._settings.stopped_s:
            if first is not None and (first.seq == LEFT or not self._me.may_live(first.host, first.pid)):
                return
            await trio.sleep(WATCH_S)
            now = await self._heartbeat()
            if now is not None and now != first:
                if first is None or now.controller_epoch >= newest:
                    raise ControllerAlive(_alive(self._job, now, self._clock.now_s()))
                first, began_s = now, trio.current_time()

    async def _heartbeat(self) -> Controller | None:
        raw = await answered(self._settings, lambda: self._shelf.get(alive_key(self._job)))
        try:
            return None if raw is None else decode(Controller, raw)
        except BadMessage:
            return None


def read_heartbeat(raw: bytes) -> int | None:
    """Return the count in a controller's heartbeat, LEFT for one that has ended; None for what is none."""
    try:
        return decode(Controller, raw).seq
    except BadMessage:
        return None


def _alive(job: str, other: Controller, now_s: float) -> str:
    age_s = max(0.0, now_s - other.since_s)
    return (
        f"job {job} is controlled by process {other.pid} on {other.host} since {age_s / 60:.0f} min (controller "
        f"{other.controller_epoch}), and it lives: watch it with `spotwarp ps`, end it there, or take the job over "
        "with --adopt"
    )
