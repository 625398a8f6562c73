"""When what happened in one failover, as the controller saw it; what it did not see stays None.

Of the node's own times only differences are used. The age of the restored state is the one figure that compares the
store's clock with the controller's: it is off by as much as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from provisioner.core.happenings import Failover
from provisioner.core.race.state import Candidate, Phase, Race
from provisioner.core.rendezvous import NodePhase, Report

NOTES_KEPT_MAX = 10


@dataclass(slots=True)
class Timeline:
    """A failover under way."""

    kind: str
    why: str
    lost: str | None
    lost_at_s: float
    detected_at_s: float
    state_at_s: float | None = None
    """When the state was published that the next node begins with, by the store's clock."""
    allowed_at_s: float | None = None
    rented_at_s: dict[str, float] = field(default_factory=dict)
    booted_at_s: dict[str, float] = field(default_factory=dict)
    ready_at_s: dict[str, float] = field(default_factory=dict)
    running_at_s: dict[str, float] = field(default_factory=dict)
    won_at_s: float | None = None
    winner: Candidate | None = None
    raced: int = 0
    racing_usd: float = 0.0
    notes: tuple[str, ...] = ()

    def moved(self, candidate: Candidate, now_s: float) -> None:
        """A candidate is in another phase."""
        if candidate.phase in (Phase.BOOTING, Phase.READY, Phase.CLAIMING, Phase.WINNER):
            self.rented_at_s.setdefault(candidate.ident, now_s)

    def reported(self, report: Report, now_s: float) -> None:
        """A node spoke."""
        self.booted_at_s.setdefault(report.ident, now_s)
        if report.phase in (NodePhase.READY, NodePhase.RUNNING, NodePhase.ENDED):
            self.ready_at_s.setdefault(report.ident, now_s)
        if report.phase in (NodePhase.RUNNING, NodePhase.ENDED):
            self.running_at_s.setdefault(report.ident, now_s)

    def won(self, race: Race, winner: Candidate, now_s: float) -> None:
        """The head says who it is."""
        self.won_at_s, self.winner = now_s, winner
        self.raced = race.serial
        self.notes = race.notes[-NOTES_KEPT_MAX:]

    def ended(self, number: int, report: Report | None, reaped: int, racing_usd: float) -> Failover:
        """Write it down, once the winner's command runs or the winner is lost itself."""
        assert self.winner is not None, "nobody has won"
        assert self.won_at_s is not None
        ident, intent = self.winner.ident, self.winner.record.intent
        times = {} if report is None else report.times
        rented, booted, ready = (
            times_of.get(ident) for times_of in (self.rented_at_s, self.booted_at_s, self.ready_at_s)
        )
        allowed = [time_s for time_s in (ready, self.allowed_at_s) if time_s is not None]
        running_s = _since_claim(times, "started", self.won_at_s) or self.running_at_s.get(ident)
        return Failover(
            number=number,
            kind=self.kind,
            why=self.why,
            lost_at_s=self.lost_at_s,
            detected_at_s=self.detected_at_s,
            won_at_s=self.won_at_s,
            winner=ident,
            provider=intent.provider,
            gpu=f"{intent.gpu_count} x {intent.gpu}",
            usd_h=intent.usd_h,
            lost=self.lost,
            candidates=self.raced,
            reaped=reaped,
            detect_s=self.detected_at_s - self.lost_at_s,
            race_s=_between(self.detected_at_s, rented),
            boot_s=_between(rented, booted),
            checks_s=_between(booted, ready),
            claim_s=_between(max(allowed, default=None), self.won_at_s),
            first_read_s=_between(times.get("claimed"), times.get("first_read")),
            ready_s=_between(self.lost_at_s, running_s),
            state_age_s=None if self.state_at_s is None else max(0.0, self.lost_at_s - self.state_at_s),
            racing_usd=racing_usd,
            notes=self.notes,
        )


def _since_claim(times: Mapping[str, float], name: str, won_at_s: float) -> float | None:
    """Put one of the node's moments on the controller's clock: both know when the workspace was taken over."""
    claimed, moment = times.get("claimed"), times.get(name)
    return None if claimed is None or moment is None else won_at_s + max(0.0, moment - claimed)


def _between(first_s: float | None, last_s: float | None) -> float | None:
    return None if first_s is None or last_s is None else max(0.0, last_s - first_s)
