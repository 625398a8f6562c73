"""Early upload: cold dirty blocks go to the store before the cut, so that a cut is short and the link is never idle.

Invariant: nothing is sent early while a cut is on its way; the newest files go first, for with a link that is too slow
the others may soon be gone (P-17).
"""

from __future__ import annotations

import trio

from spotwarp_fs.core.records import NodeTable, ino_key
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.workspace import Workspace

URGENT_PERIOD_S = 0.02


class EarlyUpload:
    """Looks for what is cold, and sends it."""

    def __init__(self, workspace: Workspace, sealer: Sealer) -> None:
        self._ws = workspace
        self._sealer = sealer
        self._urgent = False

    def urge(self) -> None:
        """Send everything dirty now: somebody waits for room."""
        self._urgent = True

    async def run(self) -> None:
        """Send cold dirty blocks, until cancelled."""
        ws, settings = self._ws, self._ws.settings
        while True:
            await trio.sleep(settings.early_upload_period_s if not self._urgent else URGENT_PERIOD_S)
            if ws.cut is not None or ws.fenced is not None:
                continue
            urgent, self._urgent = self._urgent, False
            before = trio.current_time() - (0.0 if urgent else settings.cold_after_s)
            for ino, block in self._cold(before, settings.early_upload_batch, unnamed=urgent):
                if ws.cut is not None:
                    break
                await self._sealer.submit(ino, block, None)
            if urgent:
                self._sealer.flush()

    def _cold(self, before: float, count_max: int, *, unnamed: bool) -> list[tuple[Inode, BlockIndex]]:
        """Dirty blocks to send; those of files without a name only for room: no manifest will have them (P-10)."""
        found: list[tuple[Inode, BlockIndex]] = []
        with self._ws.kv.read() as view:
            for ino, blocks in reversed(self._ws.dirty.items()):
                if not unnamed and view.get(ino_key(NodeTable.ORPHANS, ino)) is not None:
                    continue
                for block, written_s in blocks.items():
                    if written_s <= before and not self._sealer.busy_with(ino, block):
                        found.append((ino, block))
                        if len(found) == count_max:
                            return found
        return found
