"""What was rented: the wish as it was ordered, and the life it leads.

The phases are those of the machinery; each front end writes them in its provider's words. `phase` is the truth,
`shown` what the provider's API says: it lags behind after a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from provisioner.simulator.market.claims import Claim
from provisioner.simulator.market.machines import HOURS_PER_MONTH, Machine


class Phase(StrEnum):
    """Where an instance is in its life."""

    PROVISIONING = "provisioning"
    CREATED = "created"
    LOADING = "loading"
    RUNNING = "running"
    STOPPED = "stopped"
    EXITED = "exited"
    BROKEN = "broken"
    OFFLINE = "offline"
    UNKNOWN = "unknown"
    GONE = "gone"


BOOTING = frozenset({Phase.PROVISIONING, Phase.CREATED, Phase.LOADING})
ACTIVE = BOOTING | {Phase.RUNNING}


class Why(StrEnum):
    """Why an instance is not running."""

    NOTHING = ""
    USER = "user"
    OUTBID = "outbid"
    LOW_BID = "low bid"
    QUEUED = "queued"
    CREDIT = "credit"
    EXPIRED = "expired"
    DIED = "died"


RESUMES_BY_ITSELF = frozenset({Why.OUTBID, Why.LOW_BID, Why.QUEUED})


class Reason(StrEnum):
    """Why the market refused."""

    NO_SUCH_OFFER = "no such offer"
    TAKEN = "taken"
    NO_CAPACITY = "no capacity"
    NO_GPUS = "no GPUs on the machine"
    NO_DISK = "no disk"
    NO_CREDIT = "no credit"


class Refused(Exception):
    """The market cannot do it; nothing was created."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Order:
    """A create request in the market's terms."""

    provider: str
    account: str
    machine: Machine
    gpus: int
    bid: float | None
    """Dollars per GPU-hour, or None for on-demand."""
    label: str
    image: str
    disk_gb: float
    env: dict[str, str] = field(default_factory=dict)
    command: str = ""
    """The start script or arguments, as given."""
    ports: tuple[str, ...] = ()
    asked: dict[str, Any] = field(default_factory=dict)
    """The request's own fields, for the front end's answers."""
    queue: bool = False
    """Wait for GPUs instead of being refused: Vast without `cancel_unavail` (providers.md 0, fact 6)."""
    lifetime_s: float | None = None
    """RunPod's terminateAfter, from now."""


@dataclass(slots=True)
class Instance:
    """One rental."""

    key: str
    number: int
    ident: str
    """The id that the provider gave: Vast's contract number, RunPod's pod id."""
    order: Order
    claim: Claim
    label: str
    created_at: float
    phase: Phase = Phase.PROVISIONING
    shown: Phase = Phase.PROVISIONING
    why: Why = Why.NOTHING
    outbid_shows_exited: bool = False
    wanted_running: bool = True
    started_at: float | None = None
    changed_at: float = 0.0
    ended_at: float | None = None
    message: str = ""
    instance_key: str = ""
    """The key that lives in the container and may only act on this instance."""
    port_base: int = 0
    life: int = 0
    """Raised at each start and stop, so that what was planned for an earlier life does not happen."""
    boots: int = 0
    frozen: bool = False
    locked: bool = False
    hidden_until: float = 0.0
    fate: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What will go wrong, by kind of fault, with its parameters."""

    @property
    def machine(self) -> Machine:
        """Return where it lives."""
        return self.order.machine

    @property
    def is_spot(self) -> bool:
        """Return whether it can be outbid."""
        return self.claim.bid is not None

    def gpu_rate(self) -> float:
        """Return dollars per hour for all its GPUs."""
        per_gpu = self.machine.price if self.claim.bid is None else self.claim.bid
        return per_gpu * self.order.gpus

    def storage_rate(self) -> float:
        """Return dollars per hour for its disk."""
        return self.order.disk_gb * self.machine.storage_cost / HOURS_PER_MONTH
