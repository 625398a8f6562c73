"""The FUSE form behind `run`'s port: mount, control socket, umount.

Invariant: the record of the mount is read anew whenever the daemon is asked, for it may be another daemon by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotwarp_fs.cli import client
from spotwarp_fs.cli.mounts import MountRecord, is_alive, read_records
from spotwarp_fs.core.errors import SpotwarpError

if TYPE_CHECKING:
    from spotwarp_fs.cli.client import Progress
    from spotwarp_fs.cli.reports import MountReport, UmountReport
    from spotwarp_fs.cli.sources import LoadedSettings


class FuseForm:
    """A workspace mounted by a supervised daemon."""

    name = "fuse"
    files_die_with_daemon = True

    def __init__(self, loaded: LoadedSettings, workspace: Path) -> None:
        from spotwarp_fs.fuse.mountinfo import real_path

        self._loaded = loaded
        self.path = Path(real_path(workspace))
        self._record: MountRecord | None = None

    def open(self, *, takeover: bool) -> MountReport:
        """Mount."""
        from spotwarp_fs.cli import wiring
        from spotwarp_fs.cli.reports import MountWish

        made: list[MountReport] = []
        wiring.mount(self._loaded, MountWish(mountpoint=self.path, takeover=takeover), made.append)
        self._known()
        return made[0]

    def _known(self) -> MountRecord:
        """The mount as it is recorded now, or as it was: a daemon that comes back writes its record late."""
        for record in read_records(self._loaded.settings.state_dir):
            if record.mountpoint == str(self.path):
                self._record = record
        if self._record is None:
            raise SpotwarpError(f"{self.path} is mounted, but no record of it is in {self._loaded.settings.state_dir}")
        return self._record

    def call(
        self, operation: str, arguments: Mapping[str, Any] | None = None, *, silence_max_s: float = client.SILENCE_MAX_S
    ) -> dict[str, Any]:
        """Ask the daemon that serves now."""
        return client.call(self._known(), operation, arguments, silence_max_s=silence_max_s)

    def daemon_pid(self) -> int:
        """The daemon of the record, if it lives."""
        pid = self._known().daemon_pid
        return pid if is_alive(pid) else 0

    def is_tended(self) -> bool:
        """Whether the supervisor lives."""
        return is_alive(self._known().supervisor_pid)

    def processes(self) -> frozenset[int]:
        """Supervisor and daemon."""
        record = self._known()
        return frozenset({record.supervisor_pid, record.daemon_pid})

    def close(self, *, timeout_s: float, on_progress: Progress) -> UmountReport:
        """Drain and unmount; programs that keep files open meet a dead mount."""
        from spotwarp_fs.cli import wiring

        return wiring.umount(self._known(), timeout_s=timeout_s, force=True, on_progress=on_progress)
