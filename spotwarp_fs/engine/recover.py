"""After a power loss: the map is built anew from the head and what the fsync journal can prove (C4).

Invariant: nothing is served before the data files hold nothing but what the journal vouches for, on disk, and the
journal says so (`core/rebuild.py` decides; its order is kept here).
"""

from __future__ import annotations

import trio

from spotwarp_fs.core.journal import JournalLog
from spotwarp_fs.core.ports import ObjectStore, Work
from spotwarp_fs.core.rebuild import Rebuilt, rebuild
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import LoadedState, load_state
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.publish import Head
from spotwarp_fs.engine.workspace import Workspace

CUT_BACK_NAMED_MAX = 20


async def recover(
    workspace: Workspace,
    store: ObjectStore,
    metadata: Metadata,
    health: StoreHealth,
    head: Head,
    journal: JournalLog,
) -> LoadedState:
    """Fill the empty map with *head* and the journal's valid prefix; data files keep what the journal proves."""
    state = await load_state(workspace, store, metadata, health, head)
    records = journal.records()
    with workspace.kv.write() as txn:
        rebuilt = rebuild(txn, head.manifest.change_seq, records, has_base=head.manifest.base is not None)
    await _keep_proven(workspace, rebuilt)
    await workspace.workers.run(Work.SYNC, journal.rewrite, rebuilt.journal)
    for lost in rebuilt.cut_back[:CUT_BACK_NAMED_MAX]:
        workspace.report(
            f"inode {lost.ino:#x} was changed after its last fsync: {lost.size_before} bytes, {lost.size_after} kept, "
            f"{len(lost.blocks)} blocks fell back"
        )
    return state


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
