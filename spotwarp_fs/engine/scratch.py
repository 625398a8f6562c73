"""What a session does about scratch: settle it at the start, bring its bytes here, and name it for the next node.

Invariant: before a cut publishes that an inode is gone, its block map is whole on this node, since no later base has
it. Its bytes follow as fast as there is room: the store keeps their frames only for as long as it keeps older states.
"""

from __future__ import annotations

from itertools import islice

import trio

from spotwarp_fs.core.border import Border
from spotwarp_fs.core.errors import Corrupt, NotFound, Refused
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.paths import walk
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, ino_range, key_block
from spotwarp_fs.core.scratch import DERIVED_KEY, scratch_paths
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.blockmaps import BlockMaps
from spotwarp_fs.engine.budget import Budget
from spotwarp_fs.engine.hydrate import Hydrator
from spotwarp_fs.engine.workspace import Workspace

NOTE = "scratch"
"""Name of the manifest's note."""
PATHS_MAX = 50
"""Paths that a manifest names, the first of them by directory."""
BLOCKS_AT_ONCE = 16
LOOK_PERIOD_S = 1.0
NO_ROOM_PAUSE_S = 30.0


def settle(workspace: Workspace) -> None:
    """At start: bring what counts as scratch in line with the settings, if they are not those it was last done with."""
    globs = workspace.policies.scratch
    noted = "\n".join(globs.globs).encode("utf-8", "surrogateescape")
    with workspace.kv.read() as view:
        if view.get(DERIVED_KEY) == noted:
            return
    before = len(workspace.withdrawn)
    with workspace.change() as recorder:
        Border(recorder, globs).derive()
        recorder.put_local(DERIVED_KEY, noted)
    withdrawn = len(workspace.withdrawn) - before
    if withdrawn > 0:
        workspace.report(
            f"{withdrawn} files and directories that were published are scratch by the settings of this mount: the "
            "next state no longer has them"
        )


def note_of(view: KVRead) -> dict[str, list[str]]:
    """Name what this node keeps to itself, for a manifest's notes."""
    found = [path.decode("utf-8", "replace") for path in islice(scratch_paths(view), PATHS_MAX + 1)]
    if len(found) > PATHS_MAX:
        found[PATHS_MAX] = "..."
    return {NOTE: found} if found else {}


def carried(manifest: Manifest) -> dict[str, list[str]]:
    """The note of *manifest* for its successor by another node, which has not looked yet."""
    found = manifest.notes.get(NOTE)
    return {NOTE: found} if isinstance(found, list) else {}


def not_restored(view: KVRead, found: Manifest | None) -> tuple[str, ...]:
    """Say which scratch of the state that was taken over is not here, a line each."""
    named = carried(found).get(NOTE, []) if found is not None else []
    return tuple(f"scratch, not restored: {path}" for path in named if not _is_here(view, str(path)))


def _is_here(view: KVRead, path: str) -> bool:
    try:
        walk(view, path.encode())
    except Refused:
        return False
    return True


class Gatherer:
    """Brings the block maps and bytes of what was published once, and is scratch now, to this node."""

    def __init__(self, workspace: Workspace, maps: BlockMaps, hydrator: Hydrator, budget: Budget) -> None:
        self._ws = workspace
        self._maps = maps
        self._hydrator = hydrator
        self._budget = budget
        self._lost: set[Inode] = set()

    async def load_maps(self) -> None:
        """Return when every block map that the next cut may take out of the store is here."""
        while True:
            lacking = [ino for ino in self._ws.withdrawn - self._lost if self._maps.needs_loading(ino)]
            if not lacking:
                return
            for ino in lacking:
                try:
                    await self._maps.load(ino)
                except (Corrupt, NotFound) as error:
                    self._give_up(ino, str(error))

    async def run(self) -> None:
        """Fetch absent blocks until cancelled."""
        while True:
            if not self._ws.withdrawn - self._lost:
                self._ws.withdrew = trio.Event()
                await self._ws.withdrew.wait()
            await trio.sleep(LOOK_PERIOD_S)
            for ino in sorted(self._ws.withdrawn - self._lost):
                if ino in self._ws.withdrawn and not self._maps.needs_loading(ino):
                    await self._fetch(ino)

    async def _fetch(self, ino: Inode) -> None:
        while ino in self._ws.withdrawn and ino not in self._lost:
            absent = self._absent(ino)
            if not absent:
                self._ws.withdrawn.discard(ino)
                return
            if not await self._budget.room_for_blocks(len(absent)):
                self._ws.report(f"no room for scratch that only the store has, and not for ever (inode {ino:#x})")
                await trio.sleep(NO_ROOM_PAUSE_S)
                return
            try:
                await self._hydrator.demand(ino, absent)
            except Refused as error:
                self._give_up(ino, str(error))

    def _absent(self, ino: Inode) -> list[BlockIndex]:
        with self._ws.kv.read() as view:
            rows = view.scan(*ino_range(BLOCK_TABLE, ino))
            absent = (key_block(key) for key, value in rows if value and not BlockState.decode(value).local)
            return list(islice(absent, BLOCKS_AT_ONCE))

    def _give_up(self, ino: Inode, reason: str) -> None:
        self._lost.add(ino)
        self._ws.report(f"scratch inode {ino:#x} cannot be brought here: {reason}")
