"""What commands ask for and what they get back: plain values between a command and its wiring.

Invariant: nothing here does anything; each value is printed by one command and made by one wiring module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from spotwarp_fs.cli.daemon_wish import Ready


@dataclass(frozen=True, slots=True)
class MountWish:
    """What `mount` was asked for, beyond settings."""

    mountpoint: Path
    takeover: bool = False
    read_only: bool = False
    at: str | None = None
    foreground: bool = False
    form: str = "fuse"
    restore: bool = False
    adopt_local: bool = False
    tried: bool = False
    """A trial mount has just worked."""
    permit: Path | None = None
    """A file that will say which writer epoch may be claimed."""
    node_intent: str | None = None
    node_instance: str = ""


@dataclass(frozen=True, slots=True)
class MountReport(Ready):
    """What was mounted; `mount` prints it when the workspace is usable."""

    supervisor_pid: int = 0


@dataclass(frozen=True, slots=True)
class UmountReport:
    """What an unmount achieved."""

    mountpoint: str
    workspace: str
    manifest: int | None
    saved: bool
    dirty_bytes: int = 0
    left: tuple[str, ...] = ()
    """Paths that could not be saved, a sample."""
    fenced: bool = False
    """Another writer has the workspace; what was left is salvage."""


@dataclass(frozen=True, slots=True)
class WorkspaceLine:
    """One workspace of a store."""

    name: str
    head_number: int
    age_s: float
    logical_bytes: int
    files: int
    live: bool
    """A writer has shown itself lately."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file of a listing."""

    path: bytes
    kind: str
    """One letter, as `ls -l` shows it: `-dlpscb`."""
    mode: int
    uid: int
    gid: int
    links: int
    size: int
    mtime_ns: int
    target: bytes | None = None


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy moved."""

    files: int
    bytes_copied: int
    manifest: int


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push published."""

    workspace: str
    manifest: int
    files: int
    bytes_read: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class SalvageLine:
    """Work that a writer left unpublished."""

    id: str
    workspace: str
    writer_epoch: int
    where: str
    """`node` or `store`."""
    age_s: float
    files: int
    dirty_bytes: int
    reason: str = ""
    complete: bool = True
    """Can be copied as it is; one in the store may have been cut short."""


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was brought back from a salvage."""

    files: int
    bytes_copied: int
    manifest: int
    """The state that the lost writer went on from."""
    removed: tuple[str, ...] = ()
    """Paths that it had removed."""
    damaged: tuple[str, ...] = ()
    """Files that were set aside with holes, because blocks of them could not be read then."""
    unreadable: tuple[str, ...] = ()
    """Files that could not be copied, each with the reason."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `doctor`."""

    name: str
    outcome: str
    """`ok`, `warn` or `fail`."""
    detail: str
    remedy: str = ""
    exit_code: int = field(default=1)
