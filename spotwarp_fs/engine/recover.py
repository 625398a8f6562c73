"""After a power loss, or when the map is damaged: the map is built anew from the head and the fsync journal (C4).

Invariant: nothing is served before the data files hold nothing but what the journal vouches for, on disk, and the
journal says so (`core/rebuild.py` decides; its order is kept here). After a power loss the other local bytes may be
anything; when only the map was lost they are as they were written, and are kept elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import NotFound, StoreRefused, Unavailable
from spotwarp_fs.core.journal import JournalLog
from spotwarp_fs.core.ports import ObjectStore, Work
from spotwarp_fs.core.rebuild import Rebuilt, rebuild
from spotwarp_fs.core.types import BlockIndex, Inode, ManifestNumber
from spotwarp_fs.core.units import format_size
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import LoadedState, load_state
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.publish import Head, read_manifest
from spotwarp_fs.engine.workspace import Workspace

CUT_BACK_NAMED_MAX = 20
ANCESTORS_MAX = 16
"""So many manifests before the head are looked at for the one whose cut came before."""


class Rest(Protocol):
    """Where local bytes are kept that only a damaged map vouched for."""

    @property
    def name(self) -> str:
        """Where that is, for the report."""
        ...

    def keep(self, ino: Inode, proven: frozenset[BlockIndex], settled_age_s: float) -> int:
        """Bring every block but these there, unless the file is older than that; gives what it occupies there."""
        ...

    def tell(self, message: str, kept: Sequence[tuple[Inode, int, bytes | None]]) -> None:
        """Write down what happened, and for each file its size there and its path in the workspace."""
        ...


@dataclass(frozen=True, slots=True)
class LostMap:
    """A map that was found damaged, and set aside."""

    reason: str
    rest: Rest


async def recover(
    workspace: Workspace,
    store: ObjectStore,
    metadata: Metadata,
    health: StoreHealth,
    head: Head,
    journal: JournalLog,
    *,
    lost: LostMap | None = None,
) -> LoadedState:
    """Fill the empty map with *head* and the journal's valid prefix; data files keep what the journal proves.

    With a *lost* map, what nothing vouches for any more goes to its `rest` first.
    """
    state = await load_state(workspace, store, metadata, health, head)
    records = journal.records()
    with workspace.kv.write() as txn:
        rebuilt = rebuild(txn, head.manifest.change_seq, records, has_base=head.manifest.base is not None)
    if lost is not None:
        await _keep_rest(workspace, store, head, rebuilt, lost)
    await _keep_proven(workspace, rebuilt)
    await workspace.workers.run(Work.SYNC, journal.rewrite, rebuilt.journal)
    for cut_back in rebuilt.cut_back[:CUT_BACK_NAMED_MAX]:
        workspace.report(
            f"inode {cut_back.ino:#x} was changed after its last fsync: {cut_back.size_before} bytes, "
            f"{cut_back.size_after} kept, {len(cut_back.blocks)} blocks fell back"
        )
    return state


async def _keep_rest(workspace: Workspace, store: ObjectStore, head: Head, rebuilt: Rebuilt, lost: LostMap) -> None:
    settled_age_s = await _settled_age_s(store, head)
    kept: list[tuple[Inode, int, bytes | None]] = []
    for ino in list(workspace.data.inodes()):
        proven = rebuilt.trusted.get(ino, frozenset())
        size = await workspace.workers.run(Work.DISK, lost.rest.keep, ino, proven, settled_age_s)
        if size:
            with workspace.kv.read() as view:
                kept.append((ino, size, paths.path_of(view, ino)))
    total = format_size(sum(size for _, size, _ in kept))
    message = (
        f"the metadata map of this node was damaged ({lost.reason}) and was built anew from manifest "
        f"{head.manifest.number} and the fsync journal: what was neither published nor fsynced by then may be missing. "
        f"The damaged map is kept in {lost.rest.name}"
    )
    if kept:
        message += f", with {total} of {len(kept)} files that nothing vouches for now (`spotwarp salvage list`)"
    await workspace.workers.run(Work.SYNC, lost.rest.tell, message, kept)
    workspace.report(message)


async def _settled_age_s(store: ObjectStore, head: Head) -> float:
    """How long ago, at the least, the cut began that *head* stands on; infinite when that is not known.

    It began after the newest manifest of an earlier change seq was published.
    """
    manifest = head.manifest
    try:
        for _ in range(ANCESTORS_MAX):
            if manifest.number <= 1:
                break
            before, server_time_s = await read_manifest(store, ManifestNumber(manifest.number - 1))
            manifest = before.manifest
            if manifest.change_seq < head.manifest.change_seq:
                return server_time_s - manifest.created_s if manifest.created_s and server_time_s else math.inf
    except (NotFound, Unavailable, StoreRefused):
        pass
    return math.inf


async def _keep_proven(workspace: Workspace, rebuilt: Rebuilt) -> None:
    for ino in list(workspace.data.inodes()):
        blocks = rebuilt.trusted.get(ino)
        if blocks is None:
            workspace.data.remove(ino)
        else:
            await workspace.workers.run(Work.DISK, workspace.data.keep_only, ino, blocks)
            workspace.data.truncate(ino, rebuilt.sizes[ino])
            await workspace.workers.run(Work.SYNC, workspace.data.sync, ino)
        await trio.lowlevel.checkpoint()
