"""Mount and unmount: start the daemon (supervised or in the foreground), and end it with everything saved.

Invariant: `mount` returns only when the workspace is usable or with the daemon's own reason; nothing half-started
remains.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.derived import cache_directory, workspace_of
from spotwarp_fs.cli.mounts import (
    MountRecord,
    find_mount,
    is_alive,
    mount_id,
    mounts_directory,
    remove_record,
    underlay_path,
)
from spotwarp_fs.core.errors import ExitCode, UserError

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import MountReport, MountWish, UmountReport
    from spotwarp_fs.cli.sources import LoadedSettings

START_TIMEOUT_S = 300.0
PERMITTED_TIMEOUT_S = 7 * 24 * 3600.0
"""A permit comes when somebody gives it; whoever waits for one is ended by a signal."""
END_TIMEOUT_S = 15.0
LOG_NAME = "daemon.log"

Progress = Callable[[Mapping[str, Any]], None]


def mount(loaded: LoadedSettings, wish: MountWish, announce: Callable[[MountReport], None]) -> int:
    """Mount, call *announce* when the workspace is usable, and return: at once, or in the foreground after the end."""
    from spotwarp_fs.fuse.mountinfo import real_path

    settings = loaded.settings
    if wish.form == "fuse":
        _check_fuse(loaded, wish)
    _make_state_dir(settings.state_dir)
    mountpoint = real_path(wish.mountpoint)
    _make(wish.mountpoint)
    refuse_live_mount(mountpoint)
    daemon_wish = DaemonWish(
        mountpoint, flags_of(loaded), takeover=wish.takeover, read_only=wish.read_only, at=wish.at, form=wish.form,
        restore=wish.restore, adopt_local=wish.adopt_local, permit=str(wish.permit) if wish.permit else None,
        node_intent=wish.node_intent, node_instance=wish.node_instance,
    )  # fmt: skip
    if wish.foreground:
        return _foreground(daemon_wish, announce)
    name = workspace_of(settings, Path(mountpoint))
    place = cache_directory(settings, name)
    if wish.read_only:
        # Beside the cache of a writer of the same workspace, which has a supervisor of its own.
        place = place.parent / f"look-{mount_id(mountpoint)}"
    return _supervised(daemon_wish, place, settings.state_dir, announce)


def _check_fuse(loaded: LoadedSettings, wish: MountWish) -> None:
    """Raise UserError, with the command to type instead, if the workspace is not to be mounted here or can't be."""
    from spotwarp_fs.fuse.mounting import NoFuse, check_fuse
    from spotwarp_fs.fuse.trying import try_mount

    mode = loaded.settings.mode
    if mode == "directory":
        raise UserError(f"`mount` has no directory form (mode: directory): {_instead(loaded, wish)}")
    try:
        if mode == "auto" and not wish.tried:
            try_mount()
        else:
            check_fuse()
    except NoFuse as error:
        raise UserError(
            f"{wish.mountpoint} can't be mounted, {error.cause}: {_instead(loaded, wish)}", ExitCode.NO_FUSE
        ) from error


def _instead(loaded: LoadedSettings, wish: MountWish) -> str:
    """Say what to type where `mount` is not the command."""
    if wish.read_only:
        return "`spotwarp ls`, `cat` and `cp` read a workspace without a mount"
    words = ["spotwarp", "start", "--workspace", str(wish.mountpoint)]
    for key, option in (("store", "--store"), ("workspace", "--name")):
        if loaded.given.get(key) and loaded.given[key].kind == "flag":
            words += [option, str(getattr(loaded.settings, key))]
    return (
        f"type `{shlex.join(words)}` for a plain directory (add --restore if the workspace is to go on in an empty "
        "one), or `spotwarp run -- COMMAND`"
    )


def refuse_live_mount(mountpoint: str) -> None:
    """Raise AlreadyMounted if a filesystem answers at *mountpoint*; a dead mount is for the daemon to clear away."""
    from spotwarp_fs.fuse.mountinfo import MountState, state_of, top_mount
    from spotwarp_fs.fuse.mounting import AlreadyMounted

    entry = top_mount(mountpoint)
    if entry is not None and entry.is_fuse and state_of(mountpoint) is MountState.ALIVE:
        raise AlreadyMounted(mountpoint, entry)


def flags_of(loaded: LoadedSettings) -> dict[str, Any]:
    """Take what came from the command line, for the daemon to read again: flags hold no secrets."""
    found: dict[str, Any] = {}
    for key, source in loaded.given.items():
        if source.kind == "flag":
            value: Any = loaded.settings
            for part in key.split("."):
                value = getattr(value, part)
            found[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _make_state_dir(state_dir: Path) -> None:
    """Raise UserError if nothing can be noted there; containers often have a home that is not their user's."""
    place = mounts_directory(state_dir)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(
            f"{state_dir} can't be written ({error.strerror}), and what is mounted is noted there: name a directory of "
            "this user's, with --state-dir (`start`, `run`) or in SPOTWARP_STATE_DIR",
            ExitCode.CACHE,
        ) from error


def _make(mountpoint: Path) -> None:
    try:
        mountpoint.mkdir(parents=True)
    except FileExistsError:
        # Also said of a mount whose daemon died, which answers nothing else; `fuse.mounting` looks what is there.
        return
    except OSError as error:
        raise UserError(f"{mountpoint} cannot be made: {error.strerror}", ExitCode.MOUNTPOINT) from error


def _report(values: Mapping[str, Any], supervisor_pid: int) -> MountReport:
    from spotwarp_fs.cli.reports import MountReport

    known = {**values, "left_out": tuple(values["left_out"]), "notes": tuple(values["notes"])}
    return MountReport(**known, supervisor_pid=supervisor_pid)


def _foreground(wish: DaemonWish, announce: Callable[[MountReport], None]) -> int:
    import logging

    import trio

    from spotwarp_fs.cli.daemon import run
    from spotwarp_fs.local.allocator import keep_memory_together

    keep_memory_together()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    return int(trio.run(run, wish, lambda ready: announce(_report(asdict(ready), 0))))


def _supervised(wish: DaemonWish, place: Path, state_dir: Path, announce: Callable[[MountReport], None]) -> int:
    """Start a supervised daemon, or join one that is bringing this very mount back."""
    from spotwarp_fs.fuse.launching import launch_supervised
    from spotwarp_fs.local.cachedir import make_place

    argv = [sys.executable, "-m", "spotwarp_fs.cli.daemon", wish.to_json()]
    # Before anything is written there: it may be inside some workspace.
    place = make_place(place, mountpoint=Path(wish.mountpoint))
    timeout_s = START_TIMEOUT_S if wish.permit is None else PERMITTED_TIMEOUT_S
    started = launch_supervised(argv, wish.mountpoint, place / LOG_NAME, timeout_s)
    if started.exit_code != ExitCode.OK:
        raise UserError(started.message or f"the daemon ended; see {place / LOG_NAME}", ExitCode(started.exit_code))
    try:
        ready = json.loads(started.message)
    except ValueError:
        ready = asdict(_joined(find_mount(state_dir, wish.mountpoint)))
    announce(_report(ready, started.supervisor_pid or 0))
    return ExitCode.OK


def _joined(record: MountRecord) -> Ready:
    """Ask a daemon that somebody else started how it stands."""
    from spotwarp_fs.cli.client import call

    status = call(record, "status")
    return Ready(
        mountpoint=record.mountpoint,
        workspace=record.workspace,
        store=record.store,
        form=str(status["form"]),
        created=False,
        manifest=int(status["head_number"]),
        age_s=float(status["head_age_s"]),
        logical_bytes=int(status["logical_bytes"]),
        files=int(status["files"]),
        read_only=bool(status["read_only"]),
        daemon_pid=record.daemon_pid,
    )


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
    from spotwarp_fs.cli import client
    from spotwarp_fs.cli.reports import UmountReport

    if not is_alive(record.daemon_pid) and not is_alive(record.supervisor_pid):
        clean_away(record, state_dir)
        saved = (Path(record.cache_dir) / "state" / "released").exists()
        left = () if saved else (f"the daemon had died; what it had not published is in {record.cache_dir}",)
        return UmountReport(record.mountpoint, record.workspace, None, saved=saved, left=left)
    silence_s = max(client.SILENCE_MAX_S, timeout_s + 5.0)
    wish = {"timeout_s": timeout_s, "force": force, "complete": complete}
    done = client.call(record, "drain", wish, on_progress=on_progress, silence_max_s=silence_s)
    _wait_for_end(record)
    return UmountReport(
        record.mountpoint,
        record.workspace,
        int(done["number"]),
        saved=bool(done["saved"]),
        dirty_bytes=int(done["unsaved_bytes"]),
        left=(str(done["reason"]),) if done["reason"] else (),
        fenced=bool(done.get("fenced")),
    )


def _wait_for_end(record: MountRecord) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    pids = [pid for pid in (record.daemon_pid, record.supervisor_pid) if pid and pid != os.getpid()]
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def clean_away(record: MountRecord, state_dir: Path) -> None:
    """Both processes are dead: detach what they left, and open the directory below again."""
    from spotwarp_fs.fuse import mounting, underlay

    if record.form == "fuse":
        mounting.clear_dead_mounts(record.mountpoint)
        underlay.reopen(record.mountpoint, underlay_path(state_dir, record.mountpoint))
    remove_record(state_dir, record.mountpoint)
