"""The FUSE form behind `run`'s port: mount and umount.

Invariant: closing it takes the mount away, whoever still uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spotwarp_fs.cli.running.daemon_form import DaemonForm

if TYPE_CHECKING:
    from spotwarp_fs.cli.client import Progress
    from spotwarp_fs.cli.reports import MountReport, UmountReport
    from spotwarp_fs.cli.running.wish import RunWish
    from spotwarp_fs.cli.sources import LoadedSettings


class FuseForm(DaemonForm):
    """A workspace mounted by a supervised daemon."""

    name = "fuse"
    files_die_with_daemon = True

    def __init__(self, loaded: LoadedSettings, wish: RunWish, *, tried: bool) -> None:
        """*tried*: a trial mount has just worked."""
        from spotwarp_fs.fuse.mountinfo import real_path

        super().__init__(loaded, Path(real_path(wish.workspace)))
        self._wish = wish
        self._tried = tried

    def open(self, *, takeover: bool) -> MountReport:
        """Mount."""
        from spotwarp_fs.cli import wiring
        from spotwarp_fs.cli.reports import MountWish

        made: list[MountReport] = []
        wish = MountWish(
            mountpoint=self.path,
            takeover=takeover,
            tried=self._tried,
            permit=self._wish.permit,
            node_intent=self._wish.node_intent,
            node_instance=self._wish.node_instance,
        )
        wiring.mount(self._loaded, wish, made.append)
        self.record()
        return made[0]

    def close(self, *, timeout_s: float, on_progress: Progress, complete: bool = False) -> UmountReport:
        """Drain and unmount; programs that keep files open meet a dead mount."""
        from spotwarp_fs.cli import wiring

        return wiring.umount(
            self.record(), self._loaded.settings.state_dir, timeout_s=timeout_s, force=True, on_progress=on_progress,
            complete=complete,
        )  # fmt: skip
