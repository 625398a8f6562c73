"""Keep states by name, for a workspace that is not mounted here or named by `--workspace`: `snapshot`.

Invariant: names are rows of the map, changed only by publishing (H14). Listing reads; creating and deleting go through
the daemon of a mount on this machine, else through a short writer session, which refuses while another writer lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spotwarp_fs.cli import client
from spotwarp_fs.cli.at import check_snapshot_name
from spotwarp_fs.cli.mounts import MountRecord, current_records
from spotwarp_fs.cli.reading import opened, run
from spotwarp_fs.cli.writing import WriterWish, writing
from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.records import SNAPSHOT_TABLE, encode_u64
from spotwarp_fs.core.retention import names_in
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.states import Latest, unknown_snapshot

if TYPE_CHECKING:
    from spotwarp_fs.cli.settings import Settings
    from spotwarp_fs.cli.sources import LoadedSettings


def snapshot(loaded: LoadedSettings, workspace: str, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Do `create`, `list` or `delete`, through the workspace's mount on this machine if it has one."""
    settings = loaded.settings
    if operation == "list":
        return run(lambda: _listed(settings, workspace))
    if operation == "create":
        check_snapshot_name(arguments["name"])
    mounted = mounted_here(settings, workspace)
    if mounted is not None:
        return client.call(mounted, f"snapshot.{operation}", arguments)
    change = create if operation == "create" else delete

    async def changed() -> dict[str, Any]:
        wish = WriterWish(workspace, f"(no mount: spotwarp snapshot {operation})")
        async with writing(settings, wish) as session:
            before = session.claimed.resumed_from
            number = before.number if before is not None else session.streamer.head.manifest.number
            return await change(session, str(arguments["name"]), number)

    return run(changed)


def mounted_here(settings: Settings, workspace: str) -> MountRecord | None:
    """Return the workspace's mount on this machine, if it has one."""
    records = current_records(settings.state_dir)
    return next((r for r in records if r.workspace == workspace and r.store == settings.store_url()), None)


async def _listed(settings: Settings, workspace: str) -> dict[str, Any]:
    async with opened(settings, workspace, Latest()) as reader:
        found = []
        for name, number in (await reader.snapshots()).items():
            made_s = (await reader.manifest_at(number)).created_s
            age_s = max(0.0, reader.server_time_s - made_s) if made_s else 0.0
            found.append({"name": name.decode("utf-8", "surrogateescape"), "manifest": int(number), "age_s": age_s})
    return {"snapshots": sorted(found, key=lambda item: (item["manifest"], item["name"]))}


async def create(session: Session, name: str, number: ManifestNumber) -> dict[str, Any]:
    """Keep state *number*, which is published, as *name*; returns when the name is published too.

    Raises UserError when the name is taken.
    """
    key = SNAPSHOT_TABLE + check_snapshot_name(name)
    with session.workspace.kv.read() as view:
        taken = names_in(view).get(key[1:])
    if taken is not None and taken != number:
        raise UserError(f"snapshot {name!r} exists and is manifest {taken}; delete it first, or choose another name")
    if taken is None:
        with session.workspace.change() as recorder:
            recorder.put(key, encode_u64(number))
        await session.streamer.barrier()
    return {"name": name, "manifest": int(number)}


async def delete(session: Session, name: str, number: ManifestNumber | None = None) -> dict[str, Any]:
    """Forget *name*; returns when that is published. Raises NotFound, which names the others."""
    key = SNAPSHOT_TABLE + name.encode("utf-8", "surrogateescape")
    with session.workspace.kv.read() as view:
        names = names_in(view)
    if key[1:] not in names:
        raise unknown_snapshot(key[1:], names)
    with session.workspace.change() as recorder:
        recorder.delete(key)
    await session.streamer.barrier()
    return {"name": name, "manifest": int(names[key[1:]])}
