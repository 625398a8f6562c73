"""What happens to a race (events) and what it wants done (commands).

The engine carries commands out in their order and makes each `Record` durable before it goes on; a `Create` is sent
once and never again, also not after a crash, since a recovered race never repeats it. Everything else may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from provisioner.core.blocklist import Blocked
from provisioner.core.intents import Intent, IntentRecord
from provisioner.core.offers import Offer
from provisioner.core.ports import CreateOutcome, Instance
from provisioner.core.ranking import Ranked


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class OffersFound:
    """A search ended: what passed `sift` and the blocklist, in `race_order`; *why* says what excluded the rest."""

    offers: tuple[Ranked, ...]
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateEnded:
    """What became of the one create of an intent."""

    ident: str
    outcome: CreateOutcome


@dataclass(frozen=True, slots=True)
class Listed:
    """A complete listing of one provider; *asked_at_s* is when the request was sent."""

    provider: str
    asked_at_s: float
    instances: tuple[Instance, ...]


class Report(Enum):
    """What a node says through the store."""

    BOOTED = "booted"
    READY = "ready"
    """GPU seen, CUDA works, store throughput above the floor."""
    UNFIT = "unfit"
    """A check failed."""
    LOST = "lost"
    """It saw that another one took the workspace over, and destroys itself."""


@dataclass(frozen=True, slots=True)
class NodeReported:
    """A node's own word."""

    ident: str
    report: Report
    why: str = ""


@dataclass(frozen=True, slots=True)
class HeadRead:
    """The newest manifest's writer epoch, and the intent whose node started it (None: not one of ours)."""

    asked_at_s: float
    writer_epoch: int
    holder: str | None
    instance_id: str | None = None
    """Which instance the node says it is, where its provider tells it: one create may have made two."""


@dataclass(frozen=True, slots=True)
class ClaimsAllowed:
    """Detection (or a planned move) says that the workspace may be taken over now."""


@dataclass(frozen=True, slots=True)
class Rebid:
    """The incumbent is stopped and its provider sells it back at *bid_usd_h* for the machine, within the cap."""

    bid_usd_h: float
    usd_h: float
    """All in, as the budget counts it."""


@dataclass(frozen=True, slots=True)
class DestroyAccepted:
    """The provider accepted a destroy, or said that there is no such instance."""

    ident: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The incumbent lives after all, or (*everything*) the user wants all of it gone."""

    why: str
    everything: bool = False


Event = (
    Tick
    | OffersFound
    | CreateEnded
    | Listed
    | NodeReported
    | HeadRead
    | ClaimsAllowed
    | Rebid
    | DestroyAccepted
    | Cancel
)


@dataclass(frozen=True, slots=True)
class Record:
    """Make this record durable before the next command."""

    record: IntentRecord


@dataclass(frozen=True, slots=True)
class Create:
    """Send the intent's create, once."""

    intent: Intent
    offer: Offer


@dataclass(frozen=True, slots=True)
class RaiseBid:
    """Bring a stopped instance back."""

    provider: str
    instance_id: str
    bid_usd_h: float


@dataclass(frozen=True, slots=True)
class Permit:
    """Tell the node, through the store, that it may claim exactly this writer epoch."""

    ident: str
    writer_epoch: int


@dataclass(frozen=True, slots=True)
class ReadHead:
    """Read the newest manifest soon: a candidate's time to claim is over, and only the store knows who won."""


@dataclass(frozen=True, slots=True)
class Destroy:
    """Destroy an instance; safe to repeat."""

    ident: str
    provider: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Search:
    """Look for offers on all providers that are not barred."""

    spot: bool
    on_demand: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Keep this entry in the blocklist, across runs."""

    entry: Blocked


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the user."""

    text: str


Command = Record | Create | RaiseBid | Permit | ReadHead | Destroy | Search | Block | Announce
