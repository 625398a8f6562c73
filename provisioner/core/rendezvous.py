"""What controller and nodes tell each other through the store: keys and bodies (docs/decisions/failover-rendezvous.md).

    controller ── orders ──▶ node        permit, hand over, end
    controller ◀── report ── node        phase, checks, times, exit code
    controller ◀─ notes["node"] of the newest manifest: who holds the workspace; only this decides

Invariant: no body holds a secret, and one that is not understood is an error of its own (`BadMessage`), never a guess;
a reader keeps the newest of what it has read (`seq` of reports, `(controller_epoch, seq)` of orders).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, TypeVar

from provisioner.core.errors import ProvisionerError

VERSION: Final = 1
JOBS_PREFIX: Final = "jobs/"
EPOCH_DIGITS: Final = 8
HISTORY_DIGITS: Final = 6
_CONTROLLER: Final = re.compile(r"/controllers/([0-9]{8})$")
Body = TypeVar("Body", "Report", "Orders", "Controller", "Request")


class BadMessage(ProvisionerError):
    """A body in the store is not what its version says."""


def job_prefix(job: str) -> str:
    """Where everything of one job lies, ending in "/"."""
    return f"{JOBS_PREFIX}{job}/"


def spec_key(job: str) -> str:
    """What is to be kept running."""
    return f"{job_prefix(job)}spec"


def controller_key(job: str, controller_epoch: int) -> str:
    """Created once by the controller that takes this number."""
    assert 0 < controller_epoch < 10**EPOCH_DIGITS, controller_epoch
    return f"{job_prefix(job)}controllers/{controller_epoch:0{EPOCH_DIGITS}d}"


def read_controller_epoch(key: str) -> int | None:
    """Read the controller's number out of a key, or None for another kind of object.

    >>> read_controller_epoch(controller_key("llama", 3)), read_controller_epoch(alive_key("llama"))
    (3, None)
    """
    found = _CONTROLLER.search(key)
    return int(found[1]) if found else None


def alive_key(job: str) -> str:
    """The controller's heartbeat."""
    return f"{job_prefix(job)}controllers/alive"


def intent_key(job: str, ident: str) -> str:
    """The mirror of one ledger record (`intents.encode`)."""
    return f"{job_prefix(job)}intents/{ident}"


def history_key(job: str, number: int) -> str:
    """One failover, for reports."""
    assert 0 < number < 10**HISTORY_DIGITS, number
    return f"{job_prefix(job)}history/{number:0{HISTORY_DIGITS}d}"


def request_key(job: str) -> str:
    """What a user asks of the controller."""
    return f"{job_prefix(job)}request"


def report_key(job: str, ident: str) -> str:
    """What the node of *ident* says."""
    return f"{job_prefix(job)}nodes/{ident}/report"


def orders_key(job: str, ident: str) -> str:
    """What the node of *ident* shall do."""
    return f"{job_prefix(job)}nodes/{ident}/orders"


def log_key(job: str, ident: str) -> str:
    """The end of the command's output on the node of *ident*."""
    return f"{job_prefix(job)}nodes/{ident}/log"


def bundle_key(sha256: str) -> str:
    """The archive that nodes unpack and run."""
    return f"bundles/{sha256}.tgz"


class NodePhase(Enum):
    """How far a node has come, in its own words; it only ever goes down this list."""

    BOOTED = "booted"
    """Its agent runs."""
    READY = "ready"
    """GPU seen, CUDA works, store throughput above the floor; the head is loaded and followed."""
    RUNNING = "running"
    """It holds the workspace, and the command runs."""
    HANDING_OVER = "handing over"
    """Told to: it publishes the next quiescent state and stops the command."""
    ENDED = "ended"
    """The command ended (`exit_code`) and everything is published, or `why` says what is not."""
    UNFIT = "unfit"
    """A check failed."""
    LOST = "lost"
    """It saw that another node took the workspace over; it destroys itself."""


@dataclass(frozen=True, slots=True)
class Report:
    """The newest word of a node; times are seconds since the epoch by the node's own clock, for people."""

    ident: str
    seq: int
    phase: NodePhase
    instance_id: str = ""
    """As its provider names it inside the container; empty where it does not."""
    why: str = ""
    exit_code: int | None = None
    writer_epoch: int | None = None
    resumed_from: int | None = None
    """The manifest that its workspace was restored from."""
    notice_ends_at_s: float | None = None
    """Its provider takes it away then."""
    checks: Mapping[str, str] = field(default_factory=dict)
    """What was measured: gpu, cuda, store_up_mbps, store_down_mbps, form."""
    times: Mapping[str, float] = field(default_factory=dict)
    """When each phase began, and `claimed`, `first_read`, `started` (the command)."""
    self_destruct: str = ""
    """How the node would end its own rental, or why it cannot: for the controller to tell the user."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The newest word to a node."""

    controller_epoch: int
    seq: int
    permit_writer_epoch: int | None = None
    hand_over: bool = False
    """Publish the next quiescent state, stop the command, and say ENDED: another node goes on."""
    end: bool = False
    """Stop everything and destroy yourself."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Who controls a job."""

    controller_epoch: int
    host: str
    pid: int
    since_s: float
    seq: int = 0
    """Counts its heartbeats."""


class RequestKind(Enum):
    """What a user may ask for."""

    MOVE = "move"
    """Go on elsewhere, with nothing lost."""
    DRILL = "drill"
    """Destroy the node as if it were lost."""
    DOWN = "down"
    """Publish, then tear everything down; the workspace stays."""


@dataclass(frozen=True, slots=True)
class Request:
    """A user's wish; the controller deletes it when it is done. The newest one replaces what was not done yet."""

    kind: RequestKind
    of: str = ""
    """For a move or a drill: the intent of the node that is meant, so that it is done once; empty = whichever holds."""
    why: str = ""
    provider: str = ""
    """For a move: where to; empty = anywhere."""


def encode(body: Report | Orders | Controller | Request) -> bytes:
    """Write a body; equal ones give equal bytes."""
    fields = asdict(body)
    if isinstance(body, Report):
        fields["phase"] = body.phase.value
    if isinstance(body, Request):
        fields["kind"] = body.kind.value
    return json.dumps({"version": VERSION, **fields}, sort_keys=True, separators=(",", ":")).encode()


def decode(kind: type[Body], raw: bytes) -> Body:
    """Read what `encode` wrote, or raise BadMessage.

    >>> decode(Orders, encode(Orders(controller_epoch=2, seq=7, permit_writer_epoch=5))).permit_writer_epoch
    5
    """
    try:
        fields: dict[str, Any] = dict(json.loads(raw))
        version = fields.pop("version")
        if version != VERSION:
            raise BadMessage(f"a {kind.__name__} has version {version}, this program reads {VERSION}: use a newer one")
        if kind is Report:
            fields["phase"] = NodePhase(fields["phase"])
        if kind is Request:
            fields["kind"] = RequestKind(fields["kind"])
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"a {kind.__name__} of {len(raw)} bytes cannot be read: {error!r}") from error
