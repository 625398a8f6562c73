"""What the provisioner needs of the outside, as Protocols: a provider, the wall clock, entropy.

A provider is one file that implements `Provider`. Invariants every adapter keeps, whatever its service does:

1. `create` sends exactly one request that can rent something, ever; it never retries, and the client library below
   it must not either. What it cannot prove is `CreateUnknown`.
2. `list_instances` is complete or raises: a page that failed is ProviderUnavailable, never a shorter list.
3. `destroy` of an instance that does not exist succeeds. That it succeeded proves nothing; a later listing does.
4. Prices are for the whole machine per hour; a service that counts per GPU is converted here.
5. No account key enters a label, an error, a log line, an argument list or a rented host's environment (P-15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from provisioner.core.gpus import Gpu
from provisioner.core.offers import Fuse, Market, Offer
from provisioner.core.timing import BOOT_VAST, BootTimes
from provisioner.core.wishes import Wish


class InstanceStatus(Enum):
    """A provider's many words for the state of an instance, in six."""

    CREATING = "creating"
    """Accepted, not yet on a machine (Vast: null, created, scheduling; RunPod: PROVISIONING)."""
    LOADING = "loading"
    """Pulling or starting the image (Vast: loading, rebooting; RunPod: STARTING, runtime null)."""
    RUNNING = "running"
    STOPPED = "stopped"
    """Outbid or stopped: no process lives, its disk is kept and billed, and it may come back by itself as a zombie."""
    FAILED = "failed"
    """Will never run, but still exists and may be billed (OCI failure, image not found; RunPod: ERROR)."""
    GONE = "gone"
    """The provider says it no longer exists. Absence from one listing is not this: see `race`."""
    UNKNOWN = "unknown"
    """The provider does not know (Vast: unknown, offline) or used a word that the adapter does not."""


class DeadMan(Enum):
    """What destroys a node whose controller is gone for good."""

    SERVER = "server"
    """The provider does, at a time given at creation (RunPod GraphQL `terminateAfter`)."""
    IN_BOX = "in-box"
    """The node does, with a key for itself that the provider puts into the container."""
    PROCESS = "process"
    """Its own death ends the rental (the local provider)."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider can do today, after its probe; the engine asks once per run."""

    spot: bool
    rebid: bool
    """A stopped instance can be brought back by a higher bid."""
    stop_start: bool
    dead_man: DeadMan
    fuse: Fuse
    label_chars_max: int
    script_bytes_max: int
    """Longest start script and arguments together; longer ones travel in the environment."""
    visible_after_s: float
    """How long after an accepted create a listing may still not show it: unknown outcomes are settled after this."""
    create_gap_s: float
    """Least time between two creates (Vast 4.5 s, RunPod v2 1 s of its 60 a minute)."""
    list_gap_s: float
    """Least time between two listings (Vast 1 s, RunPod v2 2 to 3 s)."""
    notice_s: float = 0.0
    """Warning before a spot instance is taken."""
    boot: BootTimes = BOOT_VAST
    """How long its boots take, for ranking and deadlines; Vast's until the adapter knows better."""
    names_machines: bool = True
    """Whether offers and instances carry a machine id; else the blocklist goes by region and GPU, for an hour."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One create, decided completely before it is sent; the intent with the same label is in the ledger already."""

    label: str
    """Unique for ever; the instance's label or name, and how an unknown outcome is settled."""
    offer: Offer
    image: str
    disk_gb: float
    script: str
    """What the container runs as its first process, for `/bin/sh -c`; not secret."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """May hold the job's own secrets and store credentials scoped to the workspace; never an account's key."""
    image_login: str | None = None
    """Registry user and password in the form the provider takes; secret."""
    bid_usd_h: float | None = None
    """For spot: the bid for the machine. None rents on demand."""
    ends_at_s: float | None = None
    """When the provider itself shall destroy it, where it can (`DeadMan.SERVER`)."""

    def __repr__(self) -> str:
        # The environment and the registry login hold secrets, and a dataclass's own repr would print them (P-15).
        return f"Launch({self.label!r}, {self.offer.key}, image={self.image!r}, {len(self.environment)} variables)"


class RefusedWhy(Enum):
    """Why nothing was created, as far as it matters for what is tried next."""

    NO_CAPACITY = "no capacity"
    """Taken meanwhile, or never there: next offer."""
    BID_TOO_LOW = "bid too low"
    RATE_LIMITED = "rate limited"
    """The provider did not look at the request; the offer may be tried again."""
    BAD_REQUEST = "bad request"
    """Wrong in itself (422, image name, argument): the same launch elsewhere on this provider fails too."""
    NO_CREDIT = "no credit"
    DENIED = "denied"


@dataclass(frozen=True, slots=True)
class Created:
    """The provider confirmed the rental."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class CreateRefused:
    """Proven: no instance runs because of this create."""

    why: RefusedWhy
    message: str
    left_behind: tuple[str, ...] = ()
    """Instances that the refusal nevertheless made (Vast's low bid leaves a stopped one): they are destroyed."""

    @property
    def retryable(self) -> bool:
        """Tell whether the same provider is worth another offer."""
        return self.why in (RefusedWhy.NO_CAPACITY, RefusedWhy.BID_TOO_LOW, RefusedWhy.RATE_LIMITED)


@dataclass(frozen=True, slots=True)
class CreateUnknown:
    """Anything may have happened: a timeout, a dropped connection, a 5xx, a body that cannot be read."""

    message: str


CreateOutcome = Created | CreateRefused | CreateUnknown


@dataclass(frozen=True, slots=True)
class SshAddress:
    """Where `spotwarp ssh` connects; SpotWarp itself never does."""

    host: str
    port: int
    user: str = "root"


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of the account, as a listing shows it now."""

    provider: str
    instance_id: str
    label: str
    """Empty for what was not created by us."""
    status: InstanceStatus
    status_text: str = ""
    """The provider's own words, for people."""
    market: Market | None = None
    """Read back after create, since a bid can silently become on-demand; None = the provider does not say."""
    usd_h: float | None = None
    """Compute price of the machine now; compared with the cap after create."""
    gpu: Gpu | None = None
    gpu_count: int | None = None
    machine_id: str | None = None
    location: str = ""
    created_at_s: float | None = None
    min_bid_usd_h: float | None = None
    """What a stopped spot instance needs to come back."""
    contract_ends_at_s: float | None = None
    """When its host takes the machine back, whatever is paid; None = never, or the provider does not say."""
    starts_by_itself: bool = False
    """A stopped or queued instance that will run, and be billed, when the GPU is free again."""
    ssh: SshAddress | None = None


class Provider(Protocol):
    """One account at one provider. Every method may raise ProviderUnavailable, RateLimited or ProviderDenied.

    Calls keep the provider's rate limits by waiting, except `create`, which says RATE_LIMITED instead of waiting
    longer than its `create_gap_s`.
    """

    @property
    def name(self) -> str:
        """As in `--providers` and in offers."""
        ...

    async def capabilities(self) -> Capabilities:
        """Say what the service can do today, asking it where that changes (cached; free of charge)."""
        ...

    async def search(self, wish: Wish) -> Sequence[Offer]:
        """Return what may fit *wish*, in every market it allows; free of charge.

        Spot offers are priced at their minimum bid: the caller decides the bid (`offers.with_bid`), and checks all of
        the wish again (`wishes.sift`).
        """
        ...

    async def create(self, launch: Launch) -> CreateOutcome:
        """Send *launch* exactly once. Never raises once a byte was sent; cancelled, its outcome is unknown."""
        ...

    async def list_instances(self) -> Sequence[Instance]:
        """Return every instance of the account, with or without our labels, or raise."""
        ...

    async def show(self, instance_id: str) -> Instance | None:
        """Return one instance, or None when the provider says that there is none."""
        ...

    async def destroy(self, instance_id: str) -> None:
        """Ask for the end of an instance and of its disk; one that is gone already is fine."""
        ...

    async def balance_usd(self) -> float | None:
        """Return what the account can still spend, or None where the provider does not say."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


class Rebids(Protocol):
    """What a provider with `Capabilities.rebid` also has."""

    async def rebid(self, instance_id: str, bid_usd_h: float) -> None:
        """Raise the bid of a machine; a stopped instance comes back when the bid suffices. Safe to repeat."""
        ...


class StopsAndStarts(Protocol):
    """What a provider with `Capabilities.stop_start` also has."""

    async def stop(self, instance_id: str) -> None:
        """Stop the processes; the disk is kept and billed."""
        ...

    async def start(self, instance_id: str) -> None:
        """Start it again; raises ProviderRefused when the GPU is taken and nothing was queued."""
        ...


class Shelf(Protocol):
    """The store as controller and nodes use it, for the small objects of `rendezvous`; keys are below its prefix.

    Every method raises StoreUnavailable when nothing is proven (try again), and StoreDenied when the keys are refused.
    """

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None when it is proven absent."""
        ...

    async def put(self, key: str, body: bytes) -> None:
        """Create or replace."""
        ...

    async def create(self, key: str, body: bytes) -> bool:
        """Create it once, ever; False when it was there already, with other content."""
        ...

    async def list(self, prefix: str) -> Sequence[str]:
        """Return every key below *prefix*, in order."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete; what is absent is fine."""
        ...


@dataclass(frozen=True, slots=True)
class WorkspaceHead:
    """The newest manifest of a workspace, as far as a controller needs it."""

    number: int
    writer_epoch: int
    created_at_s: float
    """By the store's clock."""
    intent: str | None
    """Of the node whose session wrote it; None = nobody that was rented for a job."""
    instance_id: str | None
    quiescent: bool
    logical_bytes: int
    files: int
    resumed_from: int | None = None
    """Of a takeover manifest: the manifest that was served on."""


class WorkspaceView(Protocol):
    """The job's workspace, read only. Raises what `Shelf` raises."""

    async def head(self) -> WorkspaceHead | None:
        """Return the newest manifest, or None for a workspace that has no state yet."""
        ...

    async def heartbeat(self) -> str | None:
        """Return a token that changes with each heartbeat of the head's writer; None without one."""
        ...


class Clock(Protocol):
    """Wall time: deadlines must survive the controller, so they are not on a monotonic clock."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        ...


class Entropy(Protocol):
    """Random bytes, seeded in tests."""

    def token_bytes(self, count: int) -> bytes:
        """Return *count* random bytes."""
        ...
