"""What a daemon is started for.

Invariant: it travels as JSON in the daemon's argv, which others can read, so it holds no secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DaemonWish:
    """A mount to serve."""

    mountpoint: str
    """A real path."""
    flags: Mapping[str, Any]
    """Settings from the command line, by dotted key."""
    takeover: bool = False
    restarted: bool = False
    """Started by the supervisor after a death: never takes over from anybody else (L11)."""
    supervisor_pid: int = 0
    read_only: bool = False
    form: str = "fuse"
    """`fuse` or `directory`."""
    restore: bool = False
    adopt_local: bool = False
    at: str | None = None
    """The state to go back to, as `--at` says it; a restart goes on with what it has."""
    permit: str | None = None
    """A file that will say which writer epoch may be claimed (`cli.permit_file`)."""
    node_intent: str | None = None
    """The rented node that this is, for the notes of manifests."""
    node_instance: str = ""

    def to_json(self) -> str:
        """Write for argv."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Ready:
    """What was mounted, as the daemon tells it."""

    mountpoint: str
    workspace: str
    store: str
    form: str
    created: bool
    manifest: int
    age_s: float
    logical_bytes: int
    files: int
    read_only: bool
    daemon_pid: int
    left_out: tuple[str, ...] = ()
    """What the served state lacks of the head, each with the command that fetches it."""
    notes: tuple[str, ...] = ()
    resumed_from: int | None = None
    """The state that was taken up; None for a new workspace."""
