"""The jobs whose controllers were started on this machine: one small record each, and the log of one in the background.

    <state_dir>/jobs/<job>/here.json       store, workspace, the controller's process and when that began
                           controller.log  of a controller in the background

Invariant: a process counts as a controller only with the start time that was written down: process ids come again.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

RECORD: Final = "here.json"
LOG: Final = "controller.log"


@dataclass(frozen=True, slots=True)
class Here:
    """One job's controller, as it was started here."""

    job: str
    store: str
    workspace: str
    pid: int
    pid_began: int
    """The kernel's count of ticks at which the process began."""


class JobsHere:
    """The records below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._base = state_dir / "jobs"

    def log(self, job: str) -> Path:
        """Where a controller in the background writes."""
        return self._base / job / LOG

    def write(self, job: str, store: str, workspace: str) -> None:
        """Note that this process controls *job*."""
        pid = os.getpid()
        record = Here(job, store, workspace, pid, process_began(pid) or 0)
        path = self._base / job / RECORD
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_suffix(f".{pid}")
        part.write_text(json.dumps(asdict(record)))
        part.replace(path)

    def read(self, job: str) -> Here | None:
        """Return a job's record; None without one, or when it cannot be read."""
        try:
            fields: dict[str, Any] = dict(json.loads((self._base / job / RECORD).read_text()))
            return Here(**fields)
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> Sequence[Here]:
        """Return every record."""
        try:
            names = sorted(path.parent.name for path in self._base.glob(f"*/{RECORD}"))
        except OSError:
            return []
        return [record for name in names if (record := self.read(name)) is not None]


def host_name() -> str:
    """Name this machine, as controllers tell each other."""
    return socket.gethostname()


def process_began(pid: int) -> int | None:
    """Return when a process began, in ticks since boot; None when there is none."""
    try:
        # The name stands in parentheses and may hold blanks; what comes after the last one is numbers.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def lives(record: Here | None) -> bool:
    """Tell whether a record's controller is still there."""
    return record is not None and record.pid_began != 0 and process_began(record.pid) == record.pid_began


def may_live(host: str, pid: int) -> bool:
    """Tell whether a controller may live; False only for one of this machine whose process is gone."""
    return host != host_name() or process_began(pid) is not None
