"""The port to a served workspace, whichever form it has, and the choice of the form.

Invariant: `run` knows forms by this port only; every form has a daemon with a control socket that knows `status`,
`sync`, `drain`, `note` and `wait-fenced`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spotwarp_fs.cli.mounts import underlay_path
from spotwarp_fs.cli.running.wish import RunWish
from spotwarp_fs.core.errors import ExitCode, UserError

if TYPE_CHECKING:
    from spotwarp_fs.cli.client import Progress
    from spotwarp_fs.cli.reports import MountReport, UmountReport
    from spotwarp_fs.cli.sources import LoadedSettings


class Form(Protocol):
    """One workspace, served by a daemon of its own."""

    @property
    def name(self) -> str:
        """`fuse` or `directory`."""

    @property
    def path(self) -> Path:
        """The workspace."""

    @property
    def files_die_with_daemon(self) -> bool:
        """Whether open files are lost when the daemon is killed, so that the command must start anew (P-01)."""

    def open(self, *, takeover: bool) -> MountReport:
        """Serve the workspace, or raise UserError (LIVE_WRITER while another writer's lease lasts)."""

    def call(
        self, operation: str, arguments: Mapping[str, Any] | None = None, *, silence_max_s: float = 30.0
    ) -> dict[str, Any]:
        """Ask the daemon; raises DaemonGone when there is none."""

    def daemon_pid(self) -> int:
        """The daemon that was last known to serve; 0 when none is."""

    def is_tended(self) -> bool:
        """Whether somebody would start the daemon again."""

    def processes(self) -> frozenset[int]:
        """The processes that serve it, which are no part of the command even where they descend from us."""

    def close(self, *, timeout_s: float, on_progress: Progress, complete: bool = False) -> UmountReport:
        """Publish what is left and stop serving; programs that still use the workspace are no hindrance.

        *complete*: the command has ended well, so nothing that it closed is half done.
        """


def choose(loaded: LoadedSettings, wish: RunWish) -> tuple[Form, str]:
    """Return the form for this machine and directory, and why it is this one; or raise UserError."""
    from spotwarp_fs.cli.running.directory_form import DirectoryForm
    from spotwarp_fs.cli.running.fuse_form import FuseForm

    mode = loaded.settings.mode
    if mode == "directory":
        return DirectoryForm(loaded, wish), "asked for by --mode"
    if mode == "fuse":
        reason = "asked for by --mode"
    else:
        against = _against_fuse(loaded, wish.workspace)
        if against is not None:
            return DirectoryForm(loaded, wish), against
        reason = "a trial mount worked, and the directory is empty"
    if wish.local_files == "adopt":
        raise UserError(
            f"--adopt-local makes the files in {wish.workspace} the next state, which only the directory form can: "
            "add --mode directory"
        )
    return FuseForm(loaded, wish, tried=mode == "auto"), reason


def _against_fuse(loaded: LoadedSettings, workspace: Path) -> str | None:
    """Say why the workspace can't be mounted here; None if it can: a trial mount has worked."""
    from spotwarp_fs.fuse.mountinfo import mounts_at, real_path
    from spotwarp_fs.fuse.mounting import NoFuse
    from spotwarp_fs.fuse.trying import try_mount

    if mounts_at(real_path(workspace)) or underlay_path(loaded.settings.state_dir, real_path(workspace)).exists():
        return None  # what stands there is a mount, or was one: the mount itself clears it away or refuses
    try:
        names = os.listdir(workspace)
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise UserError(f"{workspace} can't be used: {error.strerror}", ExitCode.MOUNTPOINT) from error
    if names:
        return f"{workspace} has files ({names[0]!r} and so on), which a mount would hide"
    try:
        try_mount()
    except NoFuse as error:
        return f"no FUSE mount is possible here: {error.cause}"
    return None
