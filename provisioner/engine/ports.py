"""What the engine needs of the outside, and its settings. Every limit of the engine is here, in seconds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from provisioner.core.blocklist import Blocked, Blocklist
from provisioner.core.detect import DetectSettings
from provisioner.core.errors import ProvisionerError
from provisioner.core.happenings import Failover
from provisioner.core.intents import Intent, IntentRecord
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Offer
from provisioner.core.ports import Clock, Entropy, Instance, Launch, Provider, Shelf, WorkspaceView
from provisioner.core.race.state import RACE_BUDGET_SHARE, Deadlines
from provisioner.core.timing import Comeback

EXIT_FAILED: Final = 1
EXIT_FENCED: Final = 12
"""As `spotwarp run`'s own: somebody who is no node of the job took the workspace over."""
EXIT_STOPPED: Final = 143
"""As of a command that was asked to stop: `spotwarp down`."""


class ControllerAlive(ProvisionerError):
    """Another controller of this job lives: its host, process and age are in the message, and what to do."""


class Superseded(ProvisionerError):
    """A controller with a higher number has taken over: this one stops, and touches nothing."""


class LedgerPort(Protocol):
    """What one machine remembers, for all its jobs. Each method that writes returns when it is durable.

    None of them waits for a network. Every method may raise LedgerCorrupt, which names the record.
    """

    def records(self, job: str) -> Sequence[IntentRecord]:
        """Return the newest record of each intent."""
        ...

    def append(self, job: str, record: IntentRecord) -> None:
        """Keep *record* as the newest of its intent."""
        ...

    def failovers(self, job: str) -> Sequence[Failover]:
        """Return all of them, oldest first."""
        ...

    def add_failover(self, job: str, failover: Failover) -> None:
        """Keep one; the same number again replaces it."""
        ...

    def blocklist(self) -> Blocklist:
        """Return the machines that failed, for all jobs."""
        ...

    def block(self, entry: Blocked, now_s: float) -> None:
        """Add one to the blocklist."""
        ...

    def spec(self, job: str) -> JobSpec | None:
        """Return what is to be kept running."""
        ...

    def keep_spec(self, spec: JobSpec) -> None:
        """Keep it."""
        ...

    def jobs(self) -> Sequence[str]:
        """Return the names of all jobs that it knows."""
        ...


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete listing of one account; *asked_at_s* is when its request was sent."""

    asked_at_s: float
    instances: tuple[Instance, ...]


class Listings(Protocol):
    """Where listings of an account come from: the provider itself, or what another job on this machine just got."""

    async def listing(self, provider: Provider, fresh_s: float) -> Listing:
        """Return one that was asked for at most *fresh_s* ago, or raise what `Provider.list_instances` raises."""
        ...


LaunchMaker = Callable[[Intent, Offer, JobSpec], Awaitable[Launch]]
"""Decides one create completely: image, script, environment, bid. Raises BadWish or StoreUnavailable, then nothing is
sent. The disk to rent is the spec's wish, which the engine has raised to what the workspace needs."""


def _lives(host: str, pid: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Me:
    """This controller, for the message that another one gets."""

    host: str
    pid: int
    may_live: Callable[[str, int], bool] = _lives
    """Whether a process of that host and number may be alive; False only for one of this host that is proven dead."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits, in seconds."""

    adopt: bool = False
    """Take the job over from a controller that lives."""
    again: bool = False
    """Start the command though the job has ended before."""
    beat_s: float = 5.0
    """Between two heartbeats of the controller."""
    stopped_s: float = 30.0
    """A controller whose heartbeat was not seen to move for this long is replaced."""
    look_s: float = 2.0
    """Between two reads of the node's heartbeat."""
    look_urgent_s: float = 1.0
    """The same, once it is overdue."""
    head_s: float = 10.0
    """Between two reads of the head while nobody races."""
    head_racing_s: float = 1.0
    report_s: float = 1.0
    """Between two reads of a node's report."""
    report_racing_s: float = 0.5
    """The same, while candidates race: a second counts."""
    request_s: float = 2.0
    """Between two looks for what a user asks for."""
    listing_s: float = 5.0
    """Between two listings of an account that has a node of this job; never more often than its own gap."""
    listing_racing_s: float = 2.5
    """Of one where candidates boot or losers are destroyed."""
    listing_idle_s: float = 60.0
    """Of an account that has none: something created late could appear."""
    search_s: float = 30.0
    """How long one provider's search may take; the others do not wait for it."""
    store_s: float = 15.0
    """How long one call to the store may take."""
    mirror_s: float = 20.0
    """A create whose intent is not in the mirror by then is not sent."""
    retry_first_s: float = 1.0
    retry_max_s: float = 10.0
    call_s: float = 60.0
    """How long a destroy or a bid may take before it counts as failed."""
    grace_s: float = 90.0
    """How long a node may take to publish when the job is stopped or its budget is used up."""
    teardown_s: float = 900.0
    """After this the end of the job names what could not be verified gone."""
    failed_pause_s: float = 60.0
    """After a race that nobody could win, before the next."""
    move_s: float = 1800.0
    """A planned move without a ready candidate is given up after this."""
    contract_lead_s: float = 3600.0
    """A node whose contract ends within this is left for another one, whose own lasts at least twice as long."""
    funds_s: float = 600.0
    """Between two looks at what the account of the node has left."""
    funds_lead_s: float = 3600.0
    """An account that pays its node for less than this is left for another provider."""
    cheaper_s: float = 600.0
    """Between two searches for a cheaper offer, when the user wants to move to one."""
    spent_s: float = 30.0
    """Between two `Spent` happenings."""
    race_budget_share: float = RACE_BUDGET_SHARE
    detect: DetectSettings = field(default_factory=DetectSettings)
    deadlines: Deadlines = field(default_factory=Deadlines)
    comeback: Comeback = field(default_factory=Comeback)
    """What a new node has to fetch, for ranking."""
    at_once: int = 2
    stagger_s: float = 5.0
    give_up_after_s: float | None = None
    """Of one race; None = never, as long as a provider can be used."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """Everything outside, for one job."""

    providers: Mapping[str, Provider]
    """By name; all that the spec names."""
    shelf: Shelf
    workspace: WorkspaceView
    ledger: LedgerPort
    clock: Clock
    entropy: Entropy
    launch_maker: LaunchMaker
    me: Me
    settings: EngineSettings = field(default_factory=EngineSettings)
    listings: Listings | None = None
    """None asks the providers themselves."""
