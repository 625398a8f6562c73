"""A mount that only looks: one published state, pinned, its blocks fetched as they are read.

Invariant: nothing is claimed and nothing is published; every change is refused with EROFS, so another writer is never
disturbed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from spotwarp_fs.core.errors import Fenced
from spotwarp_fs.core.journal import JournalLog
from spotwarp_fs.engine.blocks import Blocks
from spotwarp_fs.engine.budget import Budget, Disk
from spotwarp_fs.engine.durability import Durability
from spotwarp_fs.engine.files import Files
from spotwarp_fs.engine.filesystem import Filesystem
from spotwarp_fs.engine.hydrate import Hydrator
from spotwarp_fs.engine.reader import Reader, ReadPorts, open_state
from spotwarp_fs.engine.states import StateWish


@dataclass(frozen=True, slots=True)
class Looking:
    """A served state."""

    filesystem: Filesystem
    reader: Reader
    budget: Budget


@asynccontextmanager
async def serve_state(
    ports: ReadPorts, wish: StateWish, disk: Disk, journal: JournalLog, *, relatime: bool = False
) -> AsyncIterator[Looking]:
    """Load the state that *wish* means and serve it while the body runs."""
    async with open_state(ports, wish) as reader, trio.open_nursery() as nursery:
        ws = reader.workspace
        ws.load_counters()
        ws.fenced = Fenced("this mount is read-only")
        hydrator = Hydrator(ws, reader.packs, reader.health, nursery)
        budget = Budget(ws, disk, lambda: None)
        files = Files(
            ws,
            blocks=Blocks(ws),
            maps=reader.maps,
            hydrator=hydrator,
            budget=budget,
            durability=Durability(ws, journal, _nothing_to_publish),
            relatime=relatime,
        )
        nursery.start_soon(budget.run)
        yield Looking(Filesystem(ws, files), reader, budget)
        ws.stopping = True
        await ws.wake_waiters()
        nursery.cancel_scope.cancel()


async def _nothing_to_publish() -> None:
    await trio.lowlevel.checkpoint()
