"""What a job has cost, lost and saved: the figures of `spotwarp report`, from its records. Pure.

Invariant: equal facts at an equal moment give an equal report; what was not measured is None and shown as unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from provisioner.cli.facts import JobFacts
from provisioner.core.cost import Loss, Stay, recomputation_avoided_h, saved_percent, stay_of
from provisioner.core.happenings import Failover
from provisioner.core.intents import IntentState
from provisioner.core.rendezvous import NodePhase

LOST: Final = ("loss", "drill")
"""Kinds of failover that cost training; a launch begins it, and a planned move loses nothing."""
PHASES: Final = ("detect", "race", "boot", "checks", "claim", "first_read")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one candidate's life."""

    what: str
    """`create`, `boot`, `checks`, `ready`, `running` or `ending`."""
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One candidate on the timeline."""

    ident: str
    provider: str
    gpu: str
    market: str
    usd_h: float
    usd: float
    won: bool
    alive: bool
    """Not yet verified gone."""
    why: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Dollars until a moment."""

    at_s: float
    nodes_usd: float
    racing_usd: float
    on_demand_usd: float | None


@dataclass(frozen=True, slots=True)
class History:
    """Everything that a report shows."""

    job: str
    command: tuple[str, ...]
    made_at_s: float
    began_s: float
    ended_s: float
    """Now, for a job that runs."""
    running: bool
    exit_code: int | None
    failovers: tuple[Failover, ...]
    bars: tuple[Bar, ...]
    cost: tuple[CostPoint, ...]
    nodes_usd: float
    racing_usd: float
    useful_h: float
    recomputed_h: float
    avoided_h: float
    on_demand_usd_h: float | None
    saved_percent: float | None

    @property
    def total_usd(self) -> float:
        """All that providers billed, as far as is known."""
        return self.nodes_usd + self.racing_usd

    @property
    def wall_h(self) -> float:
        """From the first launch to the end."""
        return max(0.0, self.ended_s - self.began_s) / 3600

    @property
    def losses(self) -> tuple[Failover, ...]:
        """Failovers that began with a loss."""
        return tuple(one for one in self.failovers if one.kind in LOST)


def history(facts: JobFacts, now_s: float) -> History:
    """Work out a job's report."""
    stays = {s.ident: s for record in facts.records if (s := stay_of(record, now_s)) is not None}
    bars = tuple(_bar(facts, stay, now_s) for stay in stays.values())
    running = bool(facts.unsettled)
    moments = [bar.parts[0].from_s for bar in bars] + [one.lost_at_s for one in facts.failovers]
    began_s = min(moments, default=now_s)
    ended_s = now_s if running or not moments else max([stay.until_s for stay in stays.values()], default=now_s)
    spans = training_spans(facts.failovers, ended_s)
    recomputed_h = sum(one.state_age_s or 0.0 for one in facts.failovers if one.kind in LOST) / 3600
    useful_h = max(0.0, sum(until - begin for begin, until in spans) / 3600 - recomputed_h)
    on_demand = facts.spec.on_demand_usd_h if facts.spec else None
    nodes_usd = sum(stay.usd for stay in stays.values() if stay.won)
    racing_usd = sum(stay.usd for stay in stays.values() if not stay.won)
    saved = None if on_demand is None else saved_percent(nodes_usd + racing_usd, on_demand, useful_h)
    ended = facts.ended
    return History(
        job=facts.job,
        command=facts.spec.command if facts.spec else (),
        made_at_s=now_s,
        began_s=began_s,
        ended_s=max(began_s, ended_s),
        running=running,
        exit_code=None if ended is None else ended.exit_code,
        failovers=facts.failovers,
        bars=bars,
        cost=_cost(tuple(stays.values()), spans, on_demand, began_s, ended_s),
        nodes_usd=nodes_usd,
        racing_usd=racing_usd,
        useful_h=useful_h,
        recomputed_h=recomputed_h,
        avoided_h=recomputation_avoided_h(_losses(facts.failovers, spans)),
        on_demand_usd_h=on_demand,
        saved_percent=saved,
    )


def training_spans(failovers: Sequence[Failover], ended_s: float) -> tuple[tuple[float, float], ...]:
    """Return when the command ran: from each comeback to the next loss, the next node's start, or the end."""
    spans = []
    for at, one in enumerate(failovers):
        if one.winner is None:
            continue
        start_s = _running_from_s(one)
        stop_s = next((_stopped_s(after) for after in failovers[at + 1 :] if _stops(after)), ended_s)
        if stop_s > start_s:
            spans.append((start_s, stop_s))
    return tuple(spans)


def _stops(after: Failover) -> bool:
    return after.kind in LOST or after.winner is not None


def _stopped_s(after: Failover) -> float:
    # A planned move's node before runs until the handover, not until the move was decided.
    return after.lost_at_s if after.kind in LOST else _running_from_s(after)


def _running_from_s(one: Failover) -> float:
    if one.ready_s is not None:
        return one.lost_at_s + one.ready_s
    return one.won_at_s if one.won_at_s is not None else one.detected_at_s


def _losses(failovers: Sequence[Failover], spans: Sequence[tuple[float, float]]) -> list[Loss]:
    """Without SpotWarp each loss would throw away all training since the job's start."""
    losses = []
    for one in failovers:
        if one.kind in LOST:
            trained_s = sum(max(0.0, min(until, one.lost_at_s) - begin) for begin, until in spans)
            losses.append(Loss(since_other_copy_s=trained_s, recomputed_s=one.state_age_s or 0.0))
    return losses


def _bar(facts: JobFacts, stay: Stay, now_s: float) -> Bar:
    record = next(one for one in facts.records if one.intent.ident == stay.ident)
    intent = record.intent
    return Bar(
        ident=stay.ident,
        provider=intent.provider,
        gpu=f"{intent.gpu_count} x {intent.gpu}",
        market=intent.market.value,
        usd_h=intent.usd_h,
        usd=stay.usd,
        won=stay.won,
        alive=record.state is not IntentState.GONE,
        why=record.why,
        parts=_parts(facts, stay, record.won_at_s),
    )


def _parts(facts: JobFacts, stay: Stay, won_at_s: float | None) -> tuple[Part, ...]:
    """Cut a stay at the moments that its node reported, by the node's clock, kept within the stay."""
    report = facts.reports.get(stay.ident)
    times = {} if report is None else dict(report.times)
    cuts: list[tuple[str, float]] = [("boot", stay.from_s)]
    for after, phase in (("checks", NodePhase.BOOTED), ("ready", NodePhase.READY)):
        if (at_s := times.get(phase.value)) is not None:
            cuts.append((after, at_s))
    if won_at_s is not None:
        cuts.append(("running", won_at_s))
    inside = [(what, min(max(at_s, stay.from_s), stay.until_s)) for what, at_s in cuts]
    ordered = sorted(inside, key=lambda cut: cut[1])
    closed = [*ordered, ("", stay.until_s)]
    parts = tuple(Part(what, begin, until) for (what, begin), (_, until) in pairwise(closed) if until > begin)
    return parts or (Part("boot", stay.from_s, stay.until_s),)


def _cost(
    stays: Sequence[Stay], spans: Sequence[tuple[float, float]], on_demand: float | None, began_s: float, ended_s: float
) -> tuple[CostPoint, ...]:
    """Return dollars over time, at each moment where a slope changes."""
    moments = {began_s, ended_s}
    moments |= {min(max(at, began_s), ended_s) for stay in stays for at in (stay.from_s, stay.until_s)}
    moments |= {min(max(at, began_s), ended_s) for span in spans for at in span}

    def until(at_s: float, *, won: bool) -> float:
        return sum(
            max(0.0, min(stay.until_s, at_s) - stay.from_s) / 3600 * stay.usd_h for stay in stays if stay.won is won
        )

    def trained_h(at_s: float) -> float:
        return sum(max(0.0, min(stop, at_s) - start) for start, stop in spans) / 3600

    return tuple(
        CostPoint(
            at_s,
            until(at_s, won=True),
            until(at_s, won=False),
            None if on_demand is None else on_demand * trained_h(at_s),
        )
        for at_s in sorted(moments)
    )


def document(found: History) -> dict[str, Any]:
    """Return the report as one JSON document."""
    return {
        "job": found.job,
        "command": list(found.command),
        "running": found.running,
        "exit_code": found.exit_code,
        "began_at_s": found.began_s,
        "ended_at_s": found.ended_s,
        "wall_h": found.wall_h,
        "useful_h": found.useful_h,
        "recomputed_h": found.recomputed_h,
        "recomputation_avoided_h": found.avoided_h,
        "usd": {"total": found.total_usd, "nodes": found.nodes_usd, "racing": found.racing_usd},
        "on_demand_usd_h": found.on_demand_usd_h,
        "saved_percent": found.saved_percent,
        "failovers": [asdict(one) for one in found.failovers],
        "nodes": [asdict(bar) for bar in found.bars],
    }
