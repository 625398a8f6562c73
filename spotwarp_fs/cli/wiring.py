"""Build the objects that a command needs, and run it: what each command asks for, and what it gets back.

Invariant: commands know these signatures only; which store, map, engine and mount stand behind them is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from spotwarp_fs.cli.mounts import MountRecord
from spotwarp_fs.cli.options import Location
from spotwarp_fs.core.errors import UserError

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import (
        Check,
        CopyReport,
        ListedFile,
        MountReport,
        MountWish,
        PushReport,
        SalvageLine,
        SalvageReport,
        UmountReport,
        WorkspaceLine,
    )
    from spotwarp_fs.cli.sources import LoadedSettings

Progress = Callable[[Mapping[str, Any]], None]


def mount(loaded: LoadedSettings, wish: MountWish, announce: Callable[[MountReport], None]) -> int:
    """Mount, call *announce* when the workspace is usable, and return: at once, or in the foreground after the end."""
    from spotwarp_fs.cli import wiring_mount

    return wiring_mount.mount(loaded, wish, announce)


def umount(
    record: MountRecord,
    state_dir: Path,
    *,
    timeout_s: float,
    force: bool,
    on_progress: Progress,
    complete: bool = False,
) -> UmountReport:
    """Drain and unmount; a mount whose daemon and supervisor are dead is cleaned away, its cache kept.

    *complete*: the program that wrote to it has ended well, so nothing that it closed is half done.
    """
    from spotwarp_fs.cli import wiring_mount

    return wiring_mount.umount(
        record, state_dir, timeout_s=timeout_s, force=force, on_progress=on_progress, complete=complete
    )


def list_workspaces(loaded: LoadedSettings) -> Iterator[WorkspaceLine]:
    """Give the workspaces of the store by name; one that cannot be read is a warning."""
    from spotwarp_fs.cli import wiring_read

    return wiring_read.list_workspaces(loaded)


def list_files(loaded: LoadedSettings, where: Location, *, at: str | None, recursive: bool) -> Iterator[ListedFile]:
    """Give the file at *where*, or what a directory holds, by name; raises NotFound."""
    from spotwarp_fs.cli import wiring_read

    return wiring_read.list_files(loaded, where, at=at, recursive=recursive)


def read_file(loaded: LoadedSettings, where: Location, *, at: str | None, sink: BinaryIO) -> int:
    """Write a file's bytes to *sink* and return their number; raises NotFound, Corrupt."""
    from spotwarp_fs.cli import wiring_read

    return wiring_read.read_file(loaded, where, at=at, sink=sink)


def copy_out(
    loaded: LoadedSettings, where: Location, target: Path, *, at: str | None, recursive: bool, on_progress: Progress
) -> CopyReport:
    """Copy a file or tree out of a workspace, with modes, times, links and holes."""
    from spotwarp_fs.cli import wiring_copy

    return wiring_copy.copy_out(loaded, where, target, at=at, recursive=recursive, on_progress=on_progress)


def push(
    loaded: LoadedSettings, directory: Path, workspace: str, *, takeover: bool, replace: bool, on_progress: Progress
) -> PushReport:
    """Publish *directory* as the workspace's next state; raises UserError (WOULD_WIPE) unless *replace*."""
    from spotwarp_fs.cli import wiring_push

    return wiring_push.push(loaded, directory, workspace, takeover=takeover, replace=replace, on_progress=on_progress)


def snapshot(loaded: LoadedSettings, workspace: str, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Do `create`, `list` or `delete` on a workspace not mounted here, through its live writer if it has one."""
    from spotwarp_fs.cli import wiring_snapshot

    return wiring_snapshot.snapshot(loaded, workspace, operation, arguments)


def collect(loaded: LoadedSettings, workspace: str, *, dry_run: bool, on_progress: Progress) -> dict[str, Any]:
    """Collect garbage of a workspace that is not mounted here, through its live writer if it has one."""
    from spotwarp_fs.cli.wiring_collect import collect as collected

    return collected(loaded, workspace, dry_run=dry_run)


def salvage_list(loaded: LoadedSettings, workspace: str | None) -> Iterator[SalvageLine]:
    """Give what can be salvaged, on this node and in the store."""
    from spotwarp_fs.cli import wiring_salvage

    return wiring_salvage.salvage_list(loaded, workspace)


def salvage_copy(
    loaded: LoadedSettings, salvage_id: str, target: Path, *, whole: bool, on_progress: Progress
) -> SalvageReport:
    """Copy what a salvage changed or made, or with *whole* all of its tree, into *target*."""
    from spotwarp_fs.cli import wiring_salvage

    return wiring_salvage.salvage_copy(loaded, salvage_id, target, whole=whole, on_progress=on_progress)


def salvage_drop(loaded: LoadedSettings, salvage_id: str) -> str:
    """Delete a salvage for good; gives its whole id."""
    from spotwarp_fs.cli import wiring_salvage

    return wiring_salvage.salvage_drop(loaded, salvage_id)


def probe_store(loaded: LoadedSettings, *, write: bool) -> Iterator[Check]:
    """Check that the store answers; with *write*, that it honours what safe writing needs (P-16)."""
    from spotwarp_fs.cli import wiring_doctor

    return wiring_doctor.probe_store(loaded, write=write)


def save_check(cache: Path, save_bytes: int) -> Check:
    """Tell how long a save of *save_bytes* would block in either form, with the cache's disk under both."""
    from spotwarp_fs.cli import wiring_speed

    return wiring_speed.save_check(cache, save_bytes)


def lease_check(directory: Path) -> Check:
    """Tell whether a restore into *directory* may leave large files for later."""
    from spotwarp_fs.cli import wiring_speed

    return wiring_speed.lease_check(directory)


def stale_locks(loaded: LoadedSettings, workspace: str) -> Iterator[Check]:
    """Look through the head of a workspace for locks and sockets of programs that a lost node took with it (D13)."""
    from spotwarp_fs.cli import wiring_doctor

    return wiring_doctor.stale_locks(loaded, workspace)


def _unwired(what: str) -> UserError:
    return UserError(f"`spotwarp {what}` is not wired to the engine yet")
