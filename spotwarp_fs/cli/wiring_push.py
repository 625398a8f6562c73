"""A directory becomes a workspace's next state: `push`.

Invariant (P-18): a directory that would take most of what the workspace holds away is refused before anything is
claimed, so that a refused push disturbs nobody; what --replace allows is pinned for a week.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spotwarp_fs.cli import output
from spotwarp_fs.cli.pushing import Progress, Pusher
from spotwarp_fs.cli.reading import opened, run
from spotwarp_fs.cli.scanning import Scan, scan_directory
from spotwarp_fs.cli.stores import find_workspace, open_store_of
from spotwarp_fs.cli.writing import WriterWish, refuse_live_writer, writing
from spotwarp_fs.core import retention
from spotwarp_fs.core.errors import ExitCode, NotFound, UserError
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber
from spotwarp_fs.core.units import format_size
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.states import Latest
from spotwarp_fs.local.system import SystemEntropy

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import PushReport
    from spotwarp_fs.cli.settings import Settings
    from spotwarp_fs.cli.sources import LoadedSettings


@dataclass(frozen=True, slots=True)
class Before:
    """The state that a push is to follow."""

    number: ManifestNumber
    files: int
    logical_bytes: int
    kept_files: int
    """How many of its files the directory has as well, by path."""


def push(
    loaded: LoadedSettings, directory: Path, workspace: str, *, takeover: bool, replace: bool, on_progress: Progress
) -> PushReport:
    """Publish *directory* as the workspace's next state; raises UserError (WOULD_WIPE) unless *replace*."""
    scan = scan_directory(os.fsencode(directory))
    wish = WriterWish(
        workspace,
        f"(no mount: spotwarp push {directory})",
        create=True,
        takeover=takeover,
        # What was pushed is whole by definition: nothing of it is in flight, whatever it is called.
        policies=Policies.build(atomic=(), atomic_dirs=()),
    )

    async def pushed() -> PushReport:
        before = await _before(loaded.settings, workspace, scan, takeover=takeover)
        wipes = before is not None and would_wipe(before, scan)
        if before is not None and wipes and not replace:
            raise refusal(workspace, directory, before, scan)
        async with writing(loaded.settings, wish) as session:
            if not takeover:
                check_unmoved(session, workspace, before)
            return await _push(session, workspace, scan, before.number if before and wipes else None, on_progress)

    return run(pushed)


async def _before(settings: Settings, workspace: str, scan: Scan, *, takeover: bool) -> Before | None:
    """Look at the present state; None for a workspace that has none."""
    store = open_store_of(settings)
    try:
        _, scoped = await find_workspace(store, workspace, create=False, entropy=SystemEntropy())
        if not takeover:
            await refuse_live_writer(scoped)
        async with opened(settings, workspace, Latest()) as reader:
            files = [(path, node) for path, node in reader.subtree(ROOT_INODE) if not stat.S_ISDIR(node.record.mode)]
            paths = scan.paths()
            kept = sum(path in paths for path, _ in files)
            size = sum(node.record.size for _, node in files)
            return Before(reader.manifest.number, len(files), size, kept)
    except NotFound:
        return None
    finally:
        await store.aclose()


def would_wipe(before: Before, after: Scan) -> bool:
    """Tell whether the push would take most of a workspace away: fewer than half its files or bytes are left (P-18).

    A file counts as left if the directory has its path; so an unrelated directory is caught as well as an empty one.
    """
    return before.kept_files * 2 < before.files or retention.would_wipe(before, after)


def refusal(workspace: str, directory: Path, before: Before, after: Scan) -> UserError:
    """Describe both sides."""
    return UserError(
        f"workspace {workspace} has {before.files:,} files, {format_size(before.logical_bytes)}, at manifest "
        f"{before.number}; {directory} has {after.files:,} files, {format_size(after.logical_bytes)}, and "
        f"{before.kept_files:,} of the workspace's files are among them. If the rest is to go, say --replace (the "
        f"present state then stays readable for 7 days with --at {before.number})",
        ExitCode.WOULD_WIPE,
    )


def check_unmoved(session: Session, workspace: str, before: Before | None) -> None:
    """Refuse when somebody published between the look at the present state and the claim: he was not compared."""
    found = session.claimed.resumed_from
    looked_at = before.number if before is not None else None
    if (found.number if found is not None else None) != looked_at and (found is None or found.files):
        raise UserError(
            f"workspace {workspace} was at manifest {looked_at or 'none'} and somebody else has just published "
            f"manifest {found.number if found is not None else 1}; nothing was pushed, try again",
            ExitCode.LIVE_WRITER,
        )


async def _push(
    session: Session, workspace: str, scan: Scan, pinned: ManifestNumber | None, on_progress: Progress
) -> PushReport:
    from spotwarp_fs.cli.reports import PushReport

    pusher = Pusher(session, scan, on_progress)
    await pusher.run()
    if pinned is not None:
        _pin(session, pinned)
    on_progress({"done_bytes": scan.logical_bytes, "total_bytes": scan.logical_bytes, "phase": "publishing"})
    number = await session.streamer.barrier()
    for path in pusher.unsettled[:10]:
        output.warn(f"{os.fsdecode(path)} changed each time it was read; what was pushed of it may be a mixture")
    return PushReport(workspace, int(number), scan.files, pusher.bytes_read, session.packs.bytes_uploaded)


def _pin(session: Session, number: ManifestNumber) -> None:
    with session.workspace.change() as recorder:
        for key, value in retention.pin(recorder, number, session.publisher.server_now_s()).items():
            if value is None:
                recorder.delete(key)
            else:
                recorder.put(key, value)
