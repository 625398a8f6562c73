"""What every form has in common: a daemon with a record and a control socket, tended by a supervisor.

Invariant: the record is read anew whenever the daemon is asked, for it may be another daemon by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotwarp_fs.cli import client
from spotwarp_fs.cli.mounts import MountRecord, is_alive, read_records
from spotwarp_fs.core.errors import SpotwarpError

if TYPE_CHECKING:
    from spotwarp_fs.cli.sources import LoadedSettings


class DaemonForm:
    """A workspace with a daemon; a form adds how it is opened and closed."""

    def __init__(self, loaded: LoadedSettings, path: Path) -> None:
        self._loaded = loaded
        self.path = path
        self._record: MountRecord | None = None

    def record(self) -> MountRecord:
        """The workspace as it is recorded now, or as it was last: a daemon that comes back writes its record late."""
        for record in read_records(self._loaded.settings.state_dir):
            if record.mountpoint == str(self.path):
                self._record = record
        if self._record is None:
            raise SpotwarpError(f"{self.path} is served, but no record of it is in {self._loaded.settings.state_dir}")
        return self._record

    def call(
        self, operation: str, arguments: Mapping[str, Any] | None = None, *, silence_max_s: float = client.SILENCE_MAX_S
    ) -> dict[str, Any]:
        """Ask the daemon that serves now."""
        return client.call(self.record(), operation, arguments, silence_max_s=silence_max_s)

    def daemon_pid(self) -> int:
        """The daemon of the record, if it lives."""
        pid = self.record().daemon_pid
        return pid if is_alive(pid) else 0

    def is_tended(self) -> bool:
        """Whether the supervisor lives."""
        return is_alive(self.record().supervisor_pid)

    def processes(self) -> frozenset[int]:
        """Supervisor and daemon."""
        record = self.record()
        return frozenset({record.supervisor_pid, record.daemon_pid})
