"""What is on the screen while a job runs, made of happenings: pure, so that it is tested without a terminal.

Invariant: `reduced` is total over happenings in any order; the screen holds at most what its limits say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, assert_never

from provisioner.core.detect import Health
from provisioner.core.happenings import (
    CandidateMoved,
    Failover,
    FailoverEnded,
    Happening,
    Judged,
    NodeSaid,
    OffersSeen,
    Said,
    Spent,
)
from provisioner.core.race.state import Phase

SAID_MAX: Final = 6
GONE_MAX: Final = 6
HOLDING: Final = frozenset({Phase.WINNER, Phase.INCUMBENT})


@dataclass(frozen=True, slots=True)
class Line:
    """One candidate."""

    ident: str
    provider: str
    phase: Phase
    usd_h: float
    since_s: float
    """In this phase."""
    began_s: float
    text: str = ""
    node: str = ""
    """What its node said last."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Everything that is shown."""

    job: str
    started_s: float
    now_s: float
    offers: Mapping[str, int] = field(default_factory=dict)
    """By provider, of the newest search."""
    why: tuple[str, ...] = ()
    candidates: Mapping[str, Line] = field(default_factory=dict)
    gone: tuple[Line, ...] = ()
    """What was reaped and verified gone, newest last."""
    reaped: int = 0
    health: Health | None = None
    health_why: str = ""
    nodes_usd: float = 0.0
    racing_usd: float = 0.0
    usd_h: float = 0.0
    said: tuple[tuple[float, str], ...] = ()
    failovers: tuple[Failover, ...] = ()

    @property
    def holder(self) -> Line | None:
        """The node that holds the workspace."""
        return next((line for line in self.candidates.values() if line.phase in HOLDING), None)


def reduced(screen: Screen, happening: Happening) -> Screen:
    """Apply one happening."""
    screen = replace(screen, now_s=max(screen.now_s, happening.at_s))
    match happening:
        case OffersSeen():
            return replace(screen, offers=dict(happening.fitting), why=happening.why)
        case CandidateMoved():
            return _moved(screen, happening)
        case Judged():
            return replace(screen, health=happening.health, health_why=happening.why)
        case NodeSaid():
            line = screen.candidates.get(happening.ident)
            if line is None:
                return screen
            words = f"{happening.phase}: {happening.why}" if happening.why else happening.phase
            return replace(screen, candidates={**screen.candidates, line.ident: replace(line, node=words)})
        case Said():
            return replace(screen, said=(*screen.said, (happening.at_s, happening.text))[-SAID_MAX:])
        case Spent():
            return replace(
                screen, nodes_usd=happening.nodes_usd, racing_usd=happening.racing_usd, usd_h=happening.usd_h
            )
        case FailoverEnded():
            known = {one.number: one for one in (*screen.failovers, happening.failover)}
            return replace(screen, failovers=tuple(known[number] for number in sorted(known)), health=Health.HEALTHY)
        case _:
            assert_never(happening)


def _moved(screen: Screen, moved: CandidateMoved) -> Screen:
    before = screen.candidates.get(moved.ident)
    others = {ident: line for ident, line in screen.candidates.items() if ident != moved.ident}
    same = before is not None and before.phase is moved.phase
    line = Line(
        ident=moved.ident,
        provider=moved.provider,
        phase=moved.phase,
        usd_h=moved.usd_h,
        since_s=before.since_s if before is not None and same else moved.at_s,
        began_s=moved.at_s if before is None else before.began_s,
        text=moved.text,
        node="" if before is None else before.node,
    )
    if moved.phase is not Phase.GONE:
        return replace(screen, candidates={**others, line.ident: line})
    gone = tuple(one for one in screen.gone if one.ident != line.ident)
    reaped = screen.reaped + (len(gone) == len(screen.gone))
    return replace(screen, candidates=others, gone=(*gone, line)[-GONE_MAX:], reaped=reaped)


def clock(at_s: float) -> str:
    """Write a moment as people see it on their clock.

    >>> clock(0.0)
    '00:00:00'
    """
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def plain(happening: Happening) -> str:
    """Say a happening in one line, for logs and pipes."""
    return f"{clock(happening.at_s)} {_words(happening)}"


def _words(happening: Happening) -> str:
    match happening:
        case OffersSeen():
            fitting = ", ".join(f"{name} {count}" for name, count in sorted(happening.fitting.items())) or "none"
            why = f" ({'; '.join(happening.why)})" if happening.why else ""
            return f"offers: {fitting}{why}"
        case CandidateMoved():
            text = f" ({happening.text})" if happening.text else ""
            price = f" at ${happening.usd_h:.3f}/h" if happening.phase is Phase.REQUESTED else ""
            return f"{happening.provider} {happening.ident}: {happening.phase.value}{price}{text}"
        case Judged():
            return f"node {happening.ident}: {happening.health.value} ({happening.why})"
        case NodeSaid():
            why = f" ({happening.why})" if happening.why else ""
            return f"node {happening.ident} says {happening.phase}{why}"
        case Said():
            return happening.text
        case Spent():
            total = happening.nodes_usd + happening.racing_usd
            return f"spent ${total:.2f}, of it ${happening.racing_usd:.2f} for racing; ${happening.usd_h:.3f}/h now"
        case FailoverEnded():
            return summary(happening.failover)
        case _:
            assert_never(happening)


def summary(failover: Failover) -> str:
    """Say one failover in a line."""
    ready = "" if failover.ready_s is None else f" in {failover.ready_s:.1f} s"
    if failover.winner is None:
        return f"{failover.kind} {failover.number}: no winner ({failover.why})"
    where = f"{failover.provider} {failover.winner}"
    return f"{failover.kind} {failover.number}: {where} runs{ready}; {failover.reaped} of {failover.candidates} reaped"


def event(happening: Happening) -> dict[str, Any]:
    """Return a happening as a JSON document."""
    fields = {name: _jsonable(value) for name, value in asdict(happening).items()}
    return {"event": type(happening).__name__, **fields}


def _jsonable(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
