"""The state of one race: its candidates, the offers that are left, and what has been decided.

Invariants, of which `Turn.finish` asserts the first two after each step: at most one winner; a race that is won has
one; a candidate that may be paid for knows its provider and label; every candidate that ever had an instance ends as
GONE, or is the winner or the incumbent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from provisioner.core.blocklist import Blocklist
from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.offers import Offer
from provisioner.core.ranking import Ranked

RACE_BUDGET_SHARE: Final = 0.02
"""Default of `--race-budget`: 2 % of what the job has spent."""
RACE_BUDGET_MIN_USD: Final = 1.0
"""At the first launch nothing has been spent, and 2 % of nothing would forbid any race."""


class Outcome(Enum):
    """What became of the race."""

    RUNNING = "running"
    WON = "won"
    CANCELLED = "cancelled"
    """The incumbent lives, or the user stopped it."""
    FAILED = "failed"


class Phase(Enum):
    """Where a candidate is."""

    REQUESTED = "requested"
    """Its intent is in the ledger and its create is on the way."""
    SETTLING = "settling"
    """The create's outcome is unknown: listings decide."""
    BOOTING = "booting"
    READY = "ready"
    """Has passed its checks, prefetches, and waits for the word that it may claim."""
    CLAIMING = "claiming"
    WINNER = "winner"
    INCUMBENT = "incumbent"
    """The node that this race replaces: left alone until there is a winner."""
    KEPT = "kept"
    REAPING = "reaping"
    GONE = "gone"


LIVE: Final = frozenset({Phase.REQUESTED, Phase.SETTLING, Phase.BOOTING, Phase.READY, Phase.CLAIMING})
"""May still win."""
SETTLED: Final = frozenset({Phase.WINNER, Phase.INCUMBENT, Phase.GONE})
PHASE_OF: Final = {
    IntentState.WRITTEN: Phase.SETTLING,
    IntentState.UNKNOWN: Phase.SETTLING,
    IntentState.RENTED: Phase.BOOTING,
    IntentState.CLAIMING: Phase.CLAIMING,
    IntentState.WINNER: Phase.INCUMBENT,
    IntentState.KEPT: Phase.KEPT,
    IntentState.REAPING: Phase.REAPING,
    IntentState.GONE: Phase.GONE,
}
"""What a ledger state means to a controller that has just started."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each phase may take, in seconds; a candidate that takes longer is reaped."""

    requested_s: float = 60.0
    boot_min_s: float = 120.0
    boot_max_s: float = 900.0
    boot_factor: float = 2.5
    """Of the expected boot and checks: cold pulls of 350-500 s once ran into a fixed 300 s (providers.md 1.9)."""
    ready_s: float = 180.0
    """Claims may be allowed a minute after the first candidate is ready (`detect`)."""
    claiming_s: float = 60.0
    reap_retry_s: float = 10.0
    search_s: float = 60.0
    offers_fresh_s: float = 60.0
    """Offers older than this are searched for again."""

    def boot_s(self, expected_s: float) -> float:
        """Return how long a candidate may take from its launch until it is ready."""
        return min(self.boot_max_s, max(self.boot_min_s, self.boot_factor * expected_s))


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """What the user and the engine decide before the race."""

    providers: frozenset[str] = frozenset()
    """All that may be used: when each is barred, the race has failed."""
    candidates_max: int = 3
    dear_usd_h: float = 10.0
    dear_candidates_max: int = 2
    """How many when the next one costs more than `dear_usd_h` and its image is not cached; the budget may say 1."""
    at_once: int = 2
    """Launched in the first moment; the others follow every `stagger_s` while none is ready."""
    stagger_s: float = 5.0
    race_budget_usd: float = RACE_BUDGET_MIN_USD
    """For everything but the dearest candidate that may still win: what racing itself may cost."""
    budget_usd: float = float("inf")
    """What is left of the job's own budget: for all candidates together."""
    spot: bool = True
    on_demand: bool = False
    """Whether on-demand has a cap at all."""
    on_demand_after_rounds: int = 1
    """Rounds of spot alone before on-demand joins."""
    backoff_first_s: float = 15.0
    backoff_max_s: float = 300.0
    give_up_after_s: float | None = None
    keep_lost_s: float = 0.0
    """How long the lost node stays for salvage after the race is won."""
    reap_allowance_s: float = 120.0
    """How long the end of a loser may take, as the budget counts it."""
    absences_needed: int = 2
    """Listings in a row without an instance that prove it gone: one row may be missing (providers.md 7.3, 12)."""
    visible_after_s: Mapping[str, float] = field(default_factory=dict)
    """By provider (`Capabilities.visible_after_s`)."""
    visible_after_default_s: float = 15.0
    deadlines: Deadlines = field(default_factory=Deadlines)

    def visible_s(self, provider: str) -> float:
        """Return how long a listing of *provider* may lag behind an accepted create."""
        return self.visible_after_s.get(provider, self.visible_after_default_s)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One intent in this race. Its ledger record is inside, so that the two cannot disagree."""

    record: IntentRecord
    phase: Phase
    deadline_s: float | None = None
    """When this phase must be over."""
    ends_by_s: float = 0.0
    """When it must have won or be reaped, whatever its phase; the budget counts on it."""
    boot_by_s: float = 0.0
    """When it must be ready, counted from its launch."""
    offer: Offer | None = None
    """None after a restart: the ledger keeps only what it needs."""
    doomed: str = ""
    """Why it must not go on, once an unknown create has been settled; empty = it may."""
    rebid: bool = False
    """The lost node itself, brought back by a higher bid; stopped is then no failure before the deadline."""
    absences: int = 0
    absent_asked_at_s: float = 0.0
    acked: frozenset[str] = frozenset()
    """Instances whose destruction the provider accepted."""
    acked_at_s: float = 0.0
    retry_at_s: float = 0.0
    charged_from_s: float | None = None
    """Since when this race pays for it; None = it does not (the incumbent, strays, proven never created)."""
    charged_until_s: float | None = None

    @property
    def ident(self) -> str:
        """The intent's name."""
        return self.record.intent.ident

    @property
    def permitted(self) -> int | None:
        """The writer epoch that it may claim, or None."""
        return self.record.permitted_writer_epoch

    @property
    def provider(self) -> str:
        """Where it was rented."""
        return self.record.intent.provider

    def spent_usd(self, now_s: float) -> float:
        """Return what it has cost this race until now, disk included."""
        if self.charged_from_s is None:
            return 0.0
        until_s = now_s if self.charged_until_s is None else self.charged_until_s
        return self.record.intent.usd_h * max(0.0, until_s - self.charged_from_s) / 3600


@dataclass(frozen=True, slots=True)
class Race:
    """Everything that the next decision depends on; nothing else does."""

    job: str
    ident: str
    """8 hex, random: the race's part of labels."""
    settings: RaceSettings
    started_at_s: float
    head_writer_epoch: int
    """Of the newest manifest that was read; the race claims the next."""
    head_holder: str | None = None
    """The intent whose node started that writer; None when it is not one of ours."""
    outcome: Outcome = Outcome.RUNNING
    why: str = ""
    claims_allowed: bool = False
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    serial: int = 0
    offers: tuple[Ranked, ...] = ()
    offers_at_s: float = 0.0
    round: int = 0
    search_at_s: float | None = None
    """When to search next; None while a search is on the way."""
    search_deadline_s: float | None = None
    launch_at_s: float = 0.0
    barred: Mapping[str, str] = field(default_factory=dict)
    """Providers that are of no use in this race, and why."""
    blocklist: Blocklist = field(default_factory=Blocklist)
    notes: tuple[str, ...] = ()
    """Why there is no winner yet, newest last."""

    @property
    def winner(self) -> Candidate | None:
        """The candidate that took the workspace over."""
        return next((c for c in self.candidates.values() if c.phase is Phase.WINNER), None)

    @property
    def done(self) -> bool:
        """Tell whether it is decided and every intent is settled, a kept node too."""
        decided = self.outcome is not Outcome.RUNNING
        return decided and all(c.phase in SETTLED for c in self.candidates.values())

    @property
    def watches(self) -> frozenset[str]:
        """The providers whose listings it needs."""
        return frozenset(c.provider for c in self.candidates.values() if c.phase not in SETTLED)

    def live(self) -> tuple[Candidate, ...]:
        """Return the candidates that may still win."""
        return tuple(c for c in self.candidates.values() if c.phase in LIVE and not c.doomed)

    def spent_usd(self, now_s: float) -> float:
        """Return what all candidates have cost until now."""
        return sum(c.spent_usd(now_s) for c in self.candidates.values())

    def wake_at_s(self, now_s: float) -> float | None:
        """Return when, after *now_s*, a Tick can next change something by itself, or None."""
        times = [c.deadline_s for c in self.candidates.values() if c.deadline_s is not None]
        times += [c.ends_by_s for c in self.live()]
        times += [c.retry_at_s for c in self.candidates.values() if c.phase is Phase.REAPING]
        if self.outcome is Outcome.RUNNING:
            times += [t for t in (self.search_at_s, self.search_deadline_s) if t is not None]
            times += [self.launch_at_s] if self.offers else []
        return min((t for t in times if t > now_s), default=None)
