"""Find a job in the store, tell whether its controller lives, and hand it a request.

Invariant: a request is one object, written by who asks and deleted by the controller that has done it; whoever waits
for it waits for that, so it does not matter where the controller runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import trio

from provisioner.cli.facts import JobFacts, job_names, read_job
from provisioner.cli.jobs_here import JobsHere, host_name, lives, may_live
from provisioner.core import rendezvous
from provisioner.core.errors import BadWish, StoreUnavailable
from provisioner.core.ports import Shelf
from provisioner.core.rendezvous import Controller, Request
from provisioner.meeting import StoreShelf
from spotwarp_fs.api import LoadedSettings, Store

BEATS_S: Final = 7.0
"""A controller leaves a heartbeat every 5 s: one that lives has moved in this time."""
LEFT: Final = -1
"""In place of a heartbeat's count: the controller ended by itself."""
LOOK_S: Final = 1.0


class Alive(Enum):
    """What can be told of a job's controller."""

    YES = "alive"
    NO = "dead"
    LEFT = "left"
    """It ended by itself; nodes may go on."""
    NONE = "none"


@asynccontextmanager
async def opened_store(loaded: LoadedSettings) -> AsyncIterator[tuple[Store, StoreShelf]]:
    """Open the settings' store, and close it in the end."""
    store = Store(loaded.settings)
    try:
        yield store, StoreShelf(store)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await store.aclose()


async def the_job(shelf: Shelf, name: str | None, where: str) -> JobFacts:
    """Read the job of *name*, or the only one there is; raises BadWish when that is not clear."""
    known = await job_names(shelf)
    if name is None and len(known) == 1:
        name = known[0]
    if name is None:
        names = f"name one of {', '.join(known)}" if known else "start one with `spotwarp failover`"
        raise BadWish(f"the store {where} has {len(known)} jobs: {names}")
    if name not in known:
        raise BadWish(f"the store {where} has no job {name!r}; it has {', '.join(known) or 'none'}")
    return await read_job(shelf, name)


async def alive(shelf: Shelf, facts: JobFacts, here: JobsHere) -> Alive:
    """Tell whether a job's controller lives: by its process if it was begun on this machine, else by its heartbeat."""
    controller = facts.controller
    if controller is None:
        return Alive.NONE
    if controller.seq == LEFT:
        return Alive.LEFT
    if not may_live(controller.host, controller.pid):
        return Alive.NO
    record = here.read(facts.job)
    if controller.host == host_name() and record is not None and record.pid == controller.pid and lives(record):
        return Alive.YES
    # Elsewhere, or a number that came again after a reboot or in a container.
    await trio.sleep(BEATS_S)
    raw = await shelf.get(rendezvous.alive_key(facts.job))
    now = None if raw is None else rendezvous.decode(Controller, raw)
    moved = now is not None and (now.controller_epoch, now.seq) != (controller.controller_epoch, controller.seq)
    return Alive.YES if moved else Alive.NO


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a request."""

    done: bool
    """Deleted by the controller; else still there when the patience ended."""
    replaced: bool = False
    """Another request has taken its place."""


async def ask(shelf: Shelf, job: str, request: Request, patience_s: float) -> Done:
    """Hand *request* to the job's controller and wait until it is done."""
    key, body = rendezvous.request_key(job), rendezvous.encode(request)
    await shelf.put(key, body)
    with trio.move_on_after(patience_s):
        while True:
            await trio.sleep(LOOK_S)
            try:
                found = await shelf.get(key)
            except StoreUnavailable:
                continue  # the request is there; only looking failed
            if found is None:
                return Done(done=True)
            if found != body:
                return Done(done=False, replaced=True)
    return Done(done=False)
