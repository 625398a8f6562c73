"""What a controller tells whoever watches it, and the record of one failover.

The engine calls an observer with `Happening`s in their order; a display reduces them, the ledger keeps `Failover`s.
Times are seconds since the epoch by the controller's clock; durations are from the loss, as people ask for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from provisioner.core.detect import Health
from provisioner.core.errors import LedgerCorrupt
from provisioner.core.race.state import Phase

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class OffersSeen:
    """A search ended: how many offers fit, by provider, and why the others do not."""

    at_s: float
    fitting: Mapping[str, int]
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidateMoved:
    """A candidate is in another phase."""

    at_s: float
    ident: str
    provider: str
    phase: Phase
    usd_h: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """The node's health changed."""

    at_s: float
    ident: str
    health: Health
    why: str


@dataclass(frozen=True, slots=True)
class NodeSaid:
    """A node's report has a new phase."""

    at_s: float
    ident: str
    phase: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A line for people."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Spent:
    """What the job has cost until now."""

    at_s: float
    nodes_usd: float
    racing_usd: float
    usd_h: float
    """What all instances that exist cost per hour now."""


@dataclass(frozen=True, slots=True)
class Failover:
    """One change of node, launches and planned moves included; None = that phase was not reached or not seen."""

    number: int
    kind: str
    """`launch`, `loss`, `move` or `drill`."""
    why: str
    lost_at_s: float
    """The last moment at which the node before was known to live; of a launch or move, when it was decided."""
    detected_at_s: float
    won_at_s: float | None = None
    winner: str | None = None
    """The intent."""
    provider: str = ""
    gpu: str = ""
    usd_h: float = 0.0
    lost: str | None = None
    """The intent of the node before."""
    candidates: int = 0
    reaped: int = 0
    detect_s: float | None = None
    """From the loss until a race was decided on."""
    race_s: float | None = None
    """Search, ranking, create: until the winner's create was accepted."""
    boot_s: float | None = None
    """Until the winner's agent spoke."""
    checks_s: float | None = None
    claim_s: float | None = None
    """From ready (or allowed, whichever is later) until the takeover manifest."""
    first_read_s: float | None = None
    """Until the command's workspace was usable."""
    ready_s: float | None = None
    """From the loss until the command runs on a usable workspace."""
    state_age_s: float | None = None
    """How old the restored state was at the loss: the work that is done again."""
    racing_usd: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FailoverEnded:
    """A failover is over: the command runs again."""

    at_s: float
    failover: Failover


Happening = OffersSeen | CandidateMoved | Judged | NodeSaid | Said | Spent | FailoverEnded
Observer = Callable[[Happening], None]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    exit_code: int
    why: str
    failovers: tuple[Failover, ...] = ()
    nodes_usd: float = 0.0
    racing_usd: float = 0.0
    orphans: tuple[str, ...] = field(default=())
    """Instances that could not be verified gone; empty unless a provider failed to the end."""


def encode_failover(failover: Failover) -> bytes:
    """Write a record."""
    return json.dumps({"version": VERSION, **asdict(failover)}, sort_keys=True, separators=(",", ":")).encode()


def decode_failover(raw: bytes) -> Failover:
    """Read what `encode_failover` wrote, or raise LedgerCorrupt."""
    try:
        fields: dict[str, Any] = dict(json.loads(raw))
        version = fields.pop("version")
        if version != VERSION:
            raise LedgerCorrupt(f"a failover has version {version}, this program reads {VERSION}: use a newer one")
        return Failover(**{**fields, "notes": tuple(fields["notes"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerCorrupt(f"the record of a failover cannot be read: {error!r}") from error
