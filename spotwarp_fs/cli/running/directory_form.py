"""The directory form behind `run`'s port: start and stop.

Invariant: an empty directory is filled from the workspace's state without being asked, since that is what a new node
is; in every other case the wipe guard decides, as for `start`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spotwarp_fs.cli.running.daemon_form import DaemonForm

if TYPE_CHECKING:
    from spotwarp_fs.cli.client import Progress
    from spotwarp_fs.cli.reports import MountReport, UmountReport
    from spotwarp_fs.cli.running.wish import RunWish
    from spotwarp_fs.cli.sources import LoadedSettings


class DirectoryForm(DaemonForm):
    """A plain directory that is scanned by a supervised daemon."""

    name = "directory"
    files_die_with_daemon = False

    def __init__(self, loaded: LoadedSettings, wish: RunWish) -> None:
        from spotwarp_fs.fuse.mountinfo import real_path

        super().__init__(loaded, Path(real_path(wish.workspace)))
        self._wish = wish

    def open(self, *, takeover: bool) -> MountReport:
        """Start."""
        from spotwarp_fs.cli import wiring
        from spotwarp_fs.cli.reports import MountWish

        made: list[MountReport] = []
        wish = MountWish(
            mountpoint=self.path,
            takeover=takeover,
            form="directory",
            restore=self._wish.local_files == "restore" or self._is_empty(),
            adopt_local=self._wish.local_files == "adopt",
            permit=self._wish.permit,
            node_intent=self._wish.node_intent,
            node_instance=self._wish.node_instance,
        )
        wiring.mount(self._loaded, wish, made.append)
        self.record()
        return made[0]

    def _is_empty(self) -> bool:
        try:
            return not os.listdir(self.path)
        except OSError:
            return True

    def close(self, *, timeout_s: float, on_progress: Progress, complete: bool = False) -> UmountReport:
        """Scan once more, drain and end the daemon; the directory stays."""
        from spotwarp_fs.cli import wiring

        return wiring.umount(
            self.record(), self._loaded.settings.state_dir, timeout_s=timeout_s, force=True, on_progress=on_progress,
            complete=complete,
        )  # fmt: skip
