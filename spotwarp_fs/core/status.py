"""What a running workspace says about itself: the one schema of `status`, its JSON and its rendering.

Invariant: every field has a meaning in every form and mode; a figure that is not known is None, never a guess of zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class SafeCheckpoint:
    """The newest complete checkpoint that survives the loss of this node."""

    name: str
    age_s: float
    manifest: int


@dataclass(frozen=True, slots=True)
class InFlightItem:
    """A file or directory that is being written as a whole; *torn* if its writer died."""

    path: str
    kind: str
    """`file` or `directory`."""
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since this daemon began to serve."""

    bytes_written: int = 0
    bytes_uploaded: int = 0
    bytes_fetched: int = 0
    frames_deduplicated: int = 0


@dataclass(frozen=True, slots=True)
class Hydration:
    """What is brought from the store before anybody asks for it; what is wanted is known a thousand files ahead."""

    part: str
    """`trace`, `small`, `checkpoint` or `rest`; empty once nothing more comes in background."""
    wanted_bytes: int = 0
    fetched_bytes: int = 0
    wanted_files: int = 0
    fetched_files: int = 0
    """Files of which everything wanted is here."""


@dataclass(slots=True)
class Scanning:
    """How a plain directory is watched and scanned; the lists name the first few."""

    walks: int = 0
    whole_walks: int = 0
    bytes_read: int = 0
    reading: list[str] = field(default_factory=list)
    """Large files that are being read beside the next walks."""
    unsettled: list[str] = field(default_factory=list)
    """Files that changed under the last read, or could not be read: they are tried again."""
    fuzzy: list[str] = field(default_factory=list)
    """Files that never settle: what is published of them may never have been their content at one moment."""
    watching: str = ""
    """`intact`, or what is not watched and why."""
    last_walk_s: float = 0.0
    """What the last walk took."""


@dataclass(frozen=True, slots=True)
class Status:
    """Everything `spotwarp status` shows."""

    workspace: str
    store: str
    form: str
    """`fuse` or `directory`."""
    mode: str
    """`writer` or `reader`."""
    head_number: int
    head_age_s: float
    writer_epoch: int
    session: str
    rpo_seconds: float
    """Age of the oldest acknowledged change that the store does not have; 0 when it has all."""
    dirty_bytes: int
    unpublished_bytes: int
    """Dirty bytes and those uploaded already that no manifest names yet."""
    drain_eta_seconds: float | None = None
    """How long a drain would take at the present rate; None until a rate is known."""
    newest_safe_checkpoint: SafeCheckpoint | None = None
    produced_bytes_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    falling_behind: bool = False
    cache_used_bytes: int = 0
    cache_budget_bytes: int = 0
    in_flight: tuple[InFlightItem, ...] = ()
    fenced: bool = False
    salvage: str | None = None
    """Where the unpublished work of a fenced writer is, in words."""
    read_only: bool = False
    store_reachable: bool = True
    store_error: str | None = None
    notices: tuple[str, ...] = ()
    """What was lost or set aside on this node and not dealt with yet, in words."""
    hydration: Hydration | None = None
    """None where nothing is fetched ahead: on the node that wrote it, and in a mount that only looks."""
    readers_waiting: int = 0
    """Requests that wait for blocks from the store."""
    scanning: Scanning | None = None
    """In the directory form."""
    last_publish_s: float | None = None
    """Seconds since this daemon last published; None before the first time."""
    rss_bytes: int = 0
    files: int = 0
    logical_bytes: int = 0
    totals: Totals = field(default_factory=Totals)
    daemon_pid: int = 0
    supervisor_pid: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Status:
        """Read what `to_dict` wrote, without a newer daemon's extra fields, or raise KeyError if one is missing."""
        known: dict[str, Any] = _known(cls, values)
        checkpoint = known.get("newest_safe_checkpoint")
        known["newest_safe_checkpoint"] = SafeCheckpoint(**_known(SafeCheckpoint, checkpoint)) if checkpoint else None
        known["in_flight"] = tuple(InFlightItem(**_known(InFlightItem, item)) for item in known.get("in_flight", ()))
        hydration = known.get("hydration")
        known["hydration"] = Hydration(**_known(Hydration, hydration)) if hydration else None
        scanning = known.get("scanning")
        known["scanning"] = Scanning(**_known(Scanning, scanning)) if scanning else None
        known["notices"] = tuple(known.get("notices", ()))
        known["totals"] = Totals(**_known(Totals, known.get("totals", {})))
        try:
            return cls(**known)
        except TypeError as error:
            raise KeyError(f"the status lacks a field: {error}") from error


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
