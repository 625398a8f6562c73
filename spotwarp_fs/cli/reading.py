"""Open a workspace's state from any machine: store, identity, an empty map in a temporary directory, a pin.

Invariant: nothing is left on this machine, and nothing in the store but a pin that ends by itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

from spotwarp_fs.cli import output
from spotwarp_fs.cli.stores import find_workspace, open_store_of
from spotwarp_fs.core.errors import NotFound, Refused, SpotwarpError, UserError
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import DataFiles
from spotwarp_fs.engine.reader import Reader, ReadPorts, open_state
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.states import StateWish
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.memory import MemoryDataFiles
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.local.workers import ThreadWorkers

if TYPE_CHECKING:
    from spotwarp_fs.cli.settings import Settings

READ_WAIT_S = 60.0
RUN_BLOCKS = 4
"""With `fetch_threads` runs at a time this bounds memory: 16 runs of 4 MiB, stored and decoded, are 128 MiB."""
MAP_BYTES = 16 << 30

T = TypeVar("T")


def run(call: Callable[[], Awaitable[T]]) -> T:
    """Run *call* to its end; of several errors at once the one that explains the most is raised."""
    try:
        return trio.run(call)
    except BaseExceptionGroup as group:
        raise output.first_of_group(group) from None


@asynccontextmanager
async def opened(settings: Settings, name: str, wish: StateWish) -> AsyncIterator[Reader]:
    """Load a state of workspace *name*; raises NotFound, Corrupt, Unavailable, Denied or UserError (newer format)."""
    store = open_store_of(settings)
    maps: list[LmdbKV] = []
    numbers = count()
    try:
        _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
        with tempfile.TemporaryDirectory(prefix="spotwarp-read-") as directory:

            def new_workspace() -> Workspace:
                # On disk: the names of a big workspace do not fit every laptop's memory.
                maps.append(LmdbKV(Path(directory) / str(next(numbers)), map_bytes=MAP_BYTES))
                return reading_workspace(settings, maps[-1])

            try:
                async with open_state(ReadPorts(scoped, new_workspace), wish) as reader:
                    yield reader
                    if reader.unpinned:
                        output.warn(f"{name} was read without a pin, since the store refused it: {reader.unpinned}")
            finally:
                for kv in maps:
                    kv.close()
    finally:
        await store.aclose()


def reading_workspace(settings: Settings, kv: LmdbKV, data: DataFiles | None = None) -> Workspace:
    """Put a workspace around a map that is only read; by default it has no bytes of its own."""
    return Workspace(
        kv,
        data or MemoryDataFiles(),
        wall=SystemWall(),
        entropy=SystemEntropy(),
        workers=ThreadWorkers(),
        policies=Policies.build(),
        settings=EngineSettings(
            read_wait_max_s=READ_WAIT_S,
            hydrate_parallel_max=settings.fetch_threads,
            hydrate_run_blocks=RUN_BLOCKS,
            sections_cached=32,
        ),
    )


def at_path(error: SpotwarpError, workspace: str, path: bytes) -> SpotwarpError:
    """Say at which path of which workspace an error was met."""
    where = f"{workspace}:{path.decode('utf-8', 'surrogateescape')}"
    if isinstance(error, Refused):
        # ENOENT, ENOTDIR and the like: for a command, the path is not there.
        return NotFound(f"{where}: {os.strerror(error.errno)}")
    if isinstance(error, UserError):
        return UserError(f"{where}: {error}", error.exit_code)
    return type(error)(f"{where}: {error}")
