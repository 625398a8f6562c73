"""After a takeover, bring what will be asked for before it is asked for (design: coming back).

The order: what the last start read, by its trace; small files; the newest complete checkpoint; the rest only if asked.
Invariant: this yields to every demand (engine/turns.py), evicts nothing, ends at its byte limit, at a share of the
cache's budget, and when the session is fenced; an error here costs nobody more than speed.
"""

from __future__ import annotations

import logging
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Corrupt, NotFound, SpotwarpError
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    INODE_TABLE,
    InodeRecord,
    block_key,
    ino_range,
    key_block,
    key_ino,
    table_range,
)
from spotwarp_fs.core.scratch import is_scratch
from spotwarp_fs.core.status import Hydration
from spotwarp_fs.core.trace import TRACE_KEY, Roles, decode
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.budget import Budget
from spotwarp_fs.engine.hydrate import Fetch, Hydrator, Place
from spotwarp_fs.engine.newest import newest_checkpoint
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.workspace import Workspace

log = logging.getLogger(__name__)

FILES_AT_ONCE: Final = 1024
"""Files whose block maps are loaded before the first of their blocks is fetched."""
ROUNDS_MAX: Final = 3
"""What an outage interrupted is tried again; what is damaged is left to whoever reads it."""

Extents = tuple[tuple[BlockIndex, int], ...]
Wish = tuple[Inode, Extents | None]
"""A file, and which of its blocks; None: all."""


class Warmer:
    """One takeover's background hydration."""

    def __init__(
        self,
        workspace: Workspace,
        hydrator: Hydrator,
        load_map: Callable[[Inode], Awaitable[None]],
        budget: Budget,
        head: Callable[[], Manifest],
    ) -> None:
        self._ws = workspace
        self._hydrator = hydrator
        self._load_map = load_map
        self._budget = budget
        self._head = head
        self._left_bytes = workspace.settings.warm_bytes_max
        self._full = False
        self.part = "none yet"
        """What is being brought; empty once there is nothing more to do."""
        self._wanted = Counter[Inode]()
        """Bytes that were missing when their file's turn came."""
        self._brought = Counter[Inode]()
        """Bytes that came since, of parts that have ended; those of the present part are counted when asked for."""
        self._begun: list[Fetch] = []

    async def run(self) -> None:
        """Bring everything in its order; returns when that is done or nothing more may come."""
        try:
            await self._run()
        except (SpotwarpError, OSError) as error:
            self._ws.report(f"what will be read next is not fetched ahead any more: {error}")
        finally:
            self.part = ""

    async def _run(self) -> None:
        if self._left_bytes <= 0:
            return
        for name, find in (("trace", self._traced), ("small", self._small), ("checkpoint", self._checkpoint)):
            await self._bring(name, await self._look(find))
        if self._ws.settings.hydrate_all:
            self._left_bytes = 1 << 62
            await self._bring("rest", await self._look(self._everything))

    async def _look(self, find: Callable[[KVRead], list[Wish]]) -> list[Wish]:
        snapshot = self._ws.kv.snapshot()
        try:
            return await self._ws.workers.run(Work.DISK, find, snapshot)
        finally:
            snapshot.close()

    def _traced(self, view: KVRead) -> list[Wish]:
        return list(traced_files(view, self._ws.policies).items())

    def _small(self, view: KVRead) -> list[Wish]:
        return [(ino, None) for ino in small_files(view, self._ws.settings)]

    def _checkpoint(self, view: KVRead) -> list[Wish]:
        return checkpoint_files(view, self._ws.policies, {item.ino for item in self._head().in_flight})

    def _everything(self, view: KVRead) -> list[Wish]:
        return [(ino, None) for ino, _ in _files(view)]

    async def _bring(self, name: str, wishes: list[Wish]) -> None:
        """Fetch one part, file maps first; the next part begins when this one is here."""
        self.part, before = name, self._left_bytes
        for _ in range(ROUNDS_MAX):
            begun = self._begun = list[Fetch]()
            for at in range(0, len(wishes), FILES_AT_ONCE):
                if self._full:
                    break
                places = await self._places(wishes[at : at + FILES_AT_ONCE])
                self._wanted |= self._hydrator.missing(places) + self._brought
                await self._hydrator.background(places, self._may_take, begun)
            for fetch in begun:
                await fetch.done.wait()
            self._brought, self._begun = self._brought_so_far(), []
            if not begun or self._full:
                break
        if not self._full:
            self._wanted = self._brought.copy()  # readers fetched the rest, or it is damaged
        log.info("warm part=%s files=%d bytes=%d full=%s", name, len(wishes), before - self._left_bytes, self._full)

    def progress(self) -> Hydration:
        """Say how far this is, for people; what readers had fetched meanwhile is not counted as missing."""
        brought = self._brought_so_far()
        done = sum(1 for ino, wanted in self._wanted.items() if brought[ino] >= wanted)
        return Hydration(self.part, self._wanted.total(), brought.total(), len(self._wanted), done)

    def _brought_so_far(self) -> Counter[Inode]:
        found = self._brought.copy()
        for fetch in self._begun:
            if fetch.here:
                found[fetch.item.ino] += fetch.item.frame.raw_bytes
        return found

    def _may_take(self, count: int) -> bool:
        room = self._budget.room_unasked() - self._hydrator.bytes_coming
        self._full = self._full or count > min(room, self._left_bytes)
        if not self._full:
            self._left_bytes -= count
        return not self._full

    async def _places(self, wishes: Sequence[Wish]) -> list[Place]:
        """Load the block maps of files, in the order in which these lie in the base; give their blocks as wished."""
        for ino in sorted(ino for ino, _ in wishes):
            try:
                await self._load_map(ino)
            except (Corrupt, NotFound) as error:
                log.warning("the block map of inode %#x is damaged: %s", ino, error)
            await trio.lowlevel.checkpoint()
        with self._ws.kv.read() as view:
            return [place for ino, extents in wishes for place in _places_of(view, ino, extents)]


def _places_of(view: KVRead, ino: Inode, extents: Extents | None) -> Iterator[Place]:
    if extents is None:
        return ((ino, key_block(key)) for key, _ in view.scan(*ino_range(BLOCK_TABLE, ino)))
    rows = (view.scan(block_key(ino, first), block_key(ino, BlockIndex(first + n))) for first, n in extents)
    return ((ino, key_block(key)) for row in rows for key, _ in row)


def _files(view: KVRead) -> Iterator[tuple[Inode, int]]:
    """Give regular files with a name and their sizes, the oldest first: so they lie in packs."""
    for key, value in view.scan(*table_range(INODE_TABLE)):
        record, ino = InodeRecord.decode(value), key_ino(key)
        if stat.S_ISREG(record.mode) and record.nlink and record.size and not is_scratch(view, ino):
            yield ino, record.size


def traced_files(view: KVRead, policies: Policies) -> dict[Inode, Extents]:
    """Return what the last start read, in its order, by the roles that files have now."""
    roles, found = Roles(policies), dict[Inode, Extents]()
    for entry in decode(view.get(TRACE_KEY)):
        ino = roles.find(view, entry.role)
        if ino is not None:
            found.setdefault(ino, entry.extents)
    return found


def small_files(view: KVRead, settings: EngineSettings) -> list[Inode]:
    """Return the small files that are fetched ahead, up to the limits."""
    small = ((ino, size) for ino, size in _files(view) if size <= settings.warm_file_bytes_max)
    found, total = list[Inode](), 0
    for ino, size in islice(small, settings.warm_small_files_max):
        total += size
        if total > settings.warm_small_bytes_max:
            break
        found.append(ino)
    return found


def checkpoint_files(view: KVRead, policies: Policies, unsafe: set[Inode]) -> list[Wish]:
    """Return the files of the newest complete checkpoint."""
    newest = newest_checkpoint(view, policies, unsafe)
    if newest is None:
        return []
    return [(node.ino, None) for _, node in paths.subtree(view, newest.ino) if stat.S_ISREG(node.record.mode)]
