"""Set aside in the store what a cache has to itself that another node has gone on from (H15), without serving it.

Invariant: the workspace's own objects are only read; what is written lies below this cache's own `salvage/` prefix.
"""

from __future__ import annotations

from spotwarp_fs.core.errors import Fenced
from spotwarp_fs.core.manifests import decode, digest_of
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.load import HEAD_KEY
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Head, Publisher
from spotwarp_fs.engine.salvage import Progress, Salvager
from spotwarp_fs.engine.workspace import Workspace


async def set_stale_aside(
    workspace: Workspace, store: ObjectStore, writer: Writer, *, workspace_id: str, reason: str
) -> Progress | None:
    """Upload what no manifest has; None when there is no map that says what that is. Waits out outages."""
    with workspace.kv.read() as view:
        body = view.get(HEAD_KEY)
    if body is None:
        return None
    workspace.load_counters()
    workspace.fenced = Fenced(reason)
    head = Head(decode(body), digest_of(body))
    health = StoreHealth(workspace.settings, workspace.entropy)
    salvager = Salvager(
        workspace, store, Publisher(store, head, health), health, PackStore(workspace, store, health),
        session=head.manifest.session, writer=writer, workspace_id=workspace_id,
    )  # fmt: skip
    await salvager.run()
    return salvager.progress
