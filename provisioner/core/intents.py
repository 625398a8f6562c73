"""Ledger records: one intent before each create, and every state it passes through.

    written ──▶ unknown ──▶ rented ──▶ claiming ──▶ winner
       │           │           │           │          │ ▲
       │           │           ▼           ▼          ▼ │ (a rebid: winner ──▶ rented)
       └───────────┴──────▶ reaping ◀───── kept ◀─────┘
                               │ ▲
                               ▼ │ (seen again after all)
                              gone

Invariant: an intent is durable before the request that it announces is sent, its label is never used again, and it
ends as winner or as gone, where gone means proven never created or verified destroyed. No field holds a secret.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Final

from provisioner.core.errors import BadWish, LedgerCorrupt
from provisioner.core.offers import Market

VERSION: Final = 1
LABEL_PREFIX: Final = "sw"
JOB_CHARS_MAX: Final = 100
"""Labels stay below RunPod's 191 characters for a name (providers.md 7.6)."""
_JOB: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")
_LABEL: Final = re.compile(rf"{LABEL_PREFIX}-({_JOB.pattern})-([0-9a-f]{{8}})-([0-9]{{1,6}})")


class IntentState(Enum):
    """How far an intent has come, as the ledger knows it."""

    WRITTEN = "written"
    """The create may or may not have been sent: after a crash this means the same as UNKNOWN."""
    UNKNOWN = "unknown"
    """Sent, and nothing proves what came of it."""
    RENTED = "rented"
    CLAIMING = "claiming"
    """The node was told that it may take the workspace over."""
    WINNER = "winner"
    KEPT = "kept"
    """A lost node that is kept for salvage until a deadline."""
    REAPING = "reaping"
    GONE = "gone"


_S: Final = IntentState
TRANSITIONS: Final[dict[IntentState, frozenset[IntentState]]] = {
    _S.WRITTEN: frozenset({_S.UNKNOWN, _S.RENTED, _S.REAPING, _S.GONE}),
    _S.UNKNOWN: frozenset({_S.RENTED, _S.WINNER, _S.REAPING, _S.GONE}),
    _S.RENTED: frozenset({_S.CLAIMING, _S.WINNER, _S.REAPING, _S.KEPT}),
    _S.CLAIMING: frozenset({_S.WINNER, _S.REAPING, _S.KEPT}),
    _S.WINNER: frozenset({_S.RENTED, _S.KEPT, _S.REAPING}),
    _S.KEPT: frozenset({_S.REAPING}),
    _S.REAPING: frozenset({_S.GONE}),
    _S.GONE: frozenset({_S.REAPING}),
}


@dataclass(frozen=True, slots=True)
class Intent:
    """What is about to be rented, and under which label."""

    ident: str
    """`<race, 8 hex>-<serial>`: unique for ever, since the race's part is random."""
    label: str
    provider: str
    offer_id: str
    market: Market
    gpu: str
    gpu_count: int
    location: str
    machine_id: str | None
    usd_h: float
    """All in, for the machine: what the budget counts."""
    compute_usd_h: float
    """What the provider may charge for compute (the bid, for spot); read back after create."""
    written_at_s: float


@dataclass(frozen=True, slots=True)
class IntentRecord:
    """The ledger's newest word on one intent."""

    intent: Intent
    state: IntentState
    at_s: float
    instances: tuple[str, ...] = ()
    """Every instance that was seen under its label, sorted; of a winner, the one that holds the workspace."""
    why: str = ""
    permitted_writer_epoch: int | None = None
    """What its node was told that it may claim; it can win exactly while the head is below."""
    won_at_s: float | None = None
    """When it was first known as the winner; kept after its end, for the report."""

    @property
    def settled(self) -> bool:
        """Tell whether nothing is left to do for it."""
        return self.state in (IntentState.WINNER, IntentState.GONE)


def label_of(job: str, race: str, serial: int) -> str:
    """Make the label of one intent, or raise BadWish for a job name that cannot stand in it.

    >>> label_of("llama-ft", "00c0ffee", 2)
    'sw-llama-ft-00c0ffee-2'
    """
    if not _JOB.fullmatch(job):
        raise BadWish(f"job name {job!r}: use 1 to {JOB_CHARS_MAX} of a-z, 0-9 and '-', with no '-' at either end")
    label = f"{LABEL_PREFIX}-{job}-{race}-{serial}"
    assert _LABEL.fullmatch(label), f"{label!r} would not be read back"
    return label


def parse_label(label: str) -> tuple[str, str] | None:
    """Return (job, intent ident) of one of our labels, or None: other people's instances are never touched.

    >>> parse_label("sw-llama-ft-00c0ffee-2"), parse_label("my-pod")
    (('llama-ft', '00c0ffee-2'), None)
    """
    found = _LABEL.fullmatch(label.strip())
    return (found[1], f"{found[2]}-{found[3]}") if found else None


def advanced(
    record: IntentRecord, state: IntentState, at_s: float, *, instances: tuple[str, ...] = (), why: str = ""
) -> IntentRecord:
    """Move *record* to *state*; instances only ever become more. Asserts that the picture above allows it."""
    allowed = state is record.state or state in TRANSITIONS[record.state]
    assert allowed, f"intent {record.intent.ident}: {record.state.value} cannot become {state.value}"
    known = tuple(sorted({*record.instances, *instances}))
    won_at_s = at_s if state is IntentState.WINNER and record.won_at_s is None else record.won_at_s
    return replace(record, state=state, at_s=at_s, instances=known, why=why or record.why, won_at_s=won_at_s)


def further(one: IntentRecord, other: IntentRecord) -> IntentRecord:
    """Return which of two records of one intent counts, ledger and mirror: states only move along the picture above.

    Where the picture has a circle (a rebid, an instance that was seen again after all), the later record counts; what
    either knows of instances counts too, except where one has won: then its own instance is the only one.
    """
    assert one.intent.ident == other.intent.ident, f"{one.intent.ident} and {other.intent.ident} are two intents"
    forth, back = other.state in _reach(one.state), one.state in _reach(other.state)
    if forth == back:
        first, last = sorted((one, other), key=lambda record: (record.at_s, encode(record)))
    else:
        first, last = (one, other) if forth else (other, one)
    if last.state is IntentState.WINNER:
        return last
    return replace(last, instances=tuple(sorted({*first.instances, *last.instances})))


def _reach(state: IntentState) -> frozenset[IntentState]:
    """Return every state that can come after *state*."""
    found: set[IntentState] = set()
    edge = [state]
    while edge:
        new = TRANSITIONS[edge.pop()] - found
        found |= new
        edge += new
    return frozenset(found)


def encode(record: IntentRecord) -> bytes:
    """Write a record; equal records give equal bytes."""
    document = asdict(record)
    document["state"] = record.state.value
    document["intent"]["market"] = record.intent.market.value
    return json.dumps({"version": VERSION, **document}, sort_keys=True, separators=(",", ":")).encode()


def decode(body: bytes) -> IntentRecord:
    """Read what `encode` wrote, or raise LedgerCorrupt. Fields of a newer program's same version are refused too."""
    try:
        document: dict[str, Any] = json.loads(body)
        version = document.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerCorrupt(f"a ledger record of {len(body)} bytes cannot be read: {error!r}") from error
    if version != VERSION:
        raise LedgerCorrupt(f"a ledger record has version {version}, this program reads {VERSION}: use a newer one")
    try:
        fields = dict(document.pop("intent"))
        intent = Intent(**{**fields, "market": Market(fields["market"])})
        state, instances = IntentState(document.pop("state")), tuple(document.pop("instances"))
        return IntentRecord(intent=intent, state=state, instances=instances, **document)
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerCorrupt(f"a ledger record is not what version {VERSION} says: {error!r}") from error
