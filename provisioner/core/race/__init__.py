"""The race for a replacement, as a pure state machine: `(state, event) -> (state, commands)`.

    REQUESTED ──▶ SETTLING ──▶ BOOTING ──▶ READY ──▶ CLAIMING ──▶ WINNER (the newest manifest says so)
        │            │            │          │           │
        └────────────┴────────────┴──────────┴───────────┴──▶ REAPING ──▶ GONE (verified)

Candidates boot in parallel on several providers; the takeover manifest is the finish line. `start` begins a race from
the ledger's records, after a crash too; `step` does everything else. Promises, whatever order events come in: at most
one winner; one create per intent, which the ledger has before; every intent ends as winner or gone; the budgets hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, get_args

from provisioner.core.blocklist import Blocklist
from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.race import deciding, launching, listings
from provisioner.core.race.messages import (
    Cancel,
    ClaimsAllowed,
    Command,
    CreateEnded,
    DestroyAccepted,
    Event,
    HeadRead,
    Listed,
    NodeReported,
    OffersFound,
    Rebid,
    Tick,
)
from provisioner.core.race.state import PHASE_OF, Candidate, Outcome, Phase, Race, RaceSettings
from provisioner.core.race.turn import Turn

__all__ = ["Outcome", "Phase", "Race", "RaceSettings", "start", "step"]


def step(race: Race, event: Event, now_s: float) -> tuple[Race, tuple[Command, ...]]:
    """Apply *event*, then what time alone decides, and return the new state with the commands in their order."""
    turn = Turn(race, now_s)
    _HANDLERS[type(event)](turn, event)
    deciding.on_deadlines(turn)
    deciding.permit_ready(turn)
    launching.plan_launches(turn)
    return turn.finish()


def _tick(turn: Turn, event: Tick) -> None:
    pass


_HANDLERS: Final[dict[type, Callable[[Turn, Any], None]]] = {
    Tick: _tick,
    OffersFound: deciding.on_offers,
    CreateEnded: deciding.on_create_ended,
    Listed: listings.on_listed,
    NodeReported: deciding.on_report,
    HeadRead: deciding.on_head,
    ClaimsAllowed: deciding.on_claims_allowed,
    Rebid: deciding.on_rebid,
    DestroyAccepted: listings.on_destroy_accepted,
    Cancel: deciding.on_cancel,
}
assert set(_HANDLERS) == set(get_args(Event)), "an event without a handler"


def start(
    job: str,
    ident: str,
    settings: RaceSettings,
    head: HeadRead,
    now_s: float,
    *,
    records: Iterable[IntentRecord] = (),
    blocklist: Blocklist | None = None,
) -> tuple[Race, tuple[Command, ...]]:
    """Begin a race, or take one up again after a crash; *ident* is 8 random hex digits, new at every start.

    *records* are the job's newest ledger records. What a dead controller left under way goes on as a candidate of this
    race: an intent whose create may or may not have been sent is settled by listings and never sent again. *head* must
    have been read after the ledger, so that a claim that nobody saw is not missed. What nodes have reported is not in
    the ledger: the engine reads it from the store again.
    """
    candidates = {r.intent.ident: _recovered(r, settings, now_s) for r in records if _matters(r)}
    holder = candidates.get(head.holder) if head.holder is not None else None
    unseen = holder is not None and holder.phase is not Phase.INCUMBENT
    known_writer_epoch = head.writer_epoch - 1 if unseen else head.writer_epoch
    race = Race(
        job,
        ident,
        settings,
        now_s,
        known_writer_epoch,
        head_holder=head.holder,
        candidates=candidates,
        blocklist=blocklist or Blocklist(),
    )
    turn = Turn(race, now_s)
    for candidate in tuple(candidates.values()):
        if candidate.phase is Phase.SETTLING and candidate.record.state is IntentState.WRITTEN:
            turn.settles(candidate, "the controller was started again")
        elif candidate.phase is Phase.REAPING:
            turn.destroy(candidate)
    _one_incumbent(turn, head)
    race, commands = turn.finish()
    race, more = step(race, head, now_s)
    return race, commands + more


def _one_incumbent(turn: Turn, head: HeadRead) -> None:
    """A controller that died between two records may leave two winners: the head says which one it is."""
    both = [c for c in turn.candidates.values() if c.phase is Phase.INCUMBENT]
    newest = max(both, key=lambda c: (c.ident == head.holder, c.record.at_s, c.ident), default=None)
    for candidate in both:
        if candidate is not newest:
            turn.reap(candidate, "replaced before the controller was started again")


def _matters(record: IntentRecord) -> bool:
    return record.state is not IntentState.GONE


def _recovered(record: IntentRecord, settings: RaceSettings, now_s: float) -> Candidate:
    """Derive a candidate from its record; its phase's time starts anew, since the controller was not watching."""
    deadlines, phase = settings.deadlines, PHASE_OF[record.state]
    boot_by_s = now_s + deadlines.boot_max_s
    deadline_s = {
        Phase.BOOTING: boot_by_s,
        Phase.CLAIMING: now_s + deadlines.ready_s,  # detection begins anew, and claims wait for its word
        Phase.KEPT: record.at_s + settings.keep_lost_s,
    }.get(phase)
    charged = phase not in (Phase.INCUMBENT, Phase.KEPT, Phase.REAPING)
    candidate = Candidate(
        record,
        phase,
        deadline_s=deadline_s,
        boot_by_s=boot_by_s,
        ends_by_s=boot_by_s + deadlines.ready_s + deadlines.claiming_s,
        charged_from_s=record.intent.written_at_s if charged else None,
    )
    if phase is Phase.SETTLING:
        candidate = replace(candidate, absent_asked_at_s=now_s + settings.visible_s(candidate.provider))
    return candidate
