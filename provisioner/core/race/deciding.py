"""Who wins, who fails, and when the race is over: the node's word, the head of the workspace, the clock.

The winner is who the newest manifest says, never who says so itself: a claim's answer may be lost on the way to the
node, and a node that was destroyed a moment ago may have won before it died.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from provisioner.core.intents import IntentState
from provisioner.core.ports import Created, CreateRefused, CreateUnknown, RefusedWhy
from provisioner.core.race.launching import backoff_s
from provisioner.core.race.listings import failed
from provisioner.core.race.messages import (
    Cancel,
    ClaimsAllowed,
    CreateEnded,
    HeadRead,
    NodeReported,
    OffersFound,
    RaiseBid,
    ReadHead,
    Rebid,
    Report,
)
from provisioner.core.race.state import LIVE, Candidate, Outcome, Phase
from provisioner.core.race.turn import Turn

REASONS_SHOWN_MAX: Final = 3


def on_offers(turn: Turn, event: OffersFound) -> None:
    """A search ended; the next one comes after a pause that grows with each."""
    race = turn.race
    if race.outcome is not Outcome.RUNNING:
        return
    rounds = race.round + 1
    search_at_s = turn.now_s + backoff_s(race.settings, rounds)
    turn.set(offers=event.offers, offers_at_s=turn.now_s, round=rounds, search_at_s=search_at_s, search_deadline_s=None)
    if not event.offers:
        turn.note("; ".join(event.why) or "no offers")


def on_create_ended(turn: Turn, event: CreateEnded) -> None:
    """The create's answer; a listing may have been faster."""
    candidate = turn.candidates.get(event.ident)
    if candidate is None:
        return
    match event.outcome:
        case Created(instance_id):
            candidate = turn.put(turn.saw(candidate, instance_id))
            if candidate.phase in (Phase.REQUESTED, Phase.SETTLING):
                turn.boots(candidate)
            elif candidate.phase in (Phase.REAPING, Phase.GONE):
                turn.reap(candidate, candidate.record.why or "created after it was given up")
        case CreateUnknown(message):
            if candidate.phase is Phase.REQUESTED:
                turn.note(f"{candidate.ident} on {candidate.provider}: outcome of the create unknown ({message})")
                turn.settles(candidate, message)
        case CreateRefused() as refused:
            _refused(turn, candidate, refused)
        case _:
            assert_never(event.outcome)


def _refused(turn: Turn, candidate: Candidate, refused: CreateRefused) -> None:
    """Nothing runs; what the refusal left behind is destroyed, and providers that cannot help are left out."""
    text = f"{candidate.ident} on {candidate.provider}: {refused.why.value} ({refused.message})"
    candidate = turn.put(turn.saw(candidate, *refused.left_behind))
    if candidate.phase not in (Phase.REQUESTED, Phase.SETTLING):
        # A listing has shown an instance: whatever the provider says, something is there to be destroyed.
        if candidate.phase in LIVE or (candidate.phase is Phase.GONE and refused.left_behind):
            turn.drop(candidate, text)
        return
    turn.note(text)
    if refused.retryable:
        turn.block(candidate, refused.why.value, machine=False)
    else:
        turn.set(barred={**turn.race.barred, candidate.provider: text})
    if candidate.record.instances:
        turn.reap(candidate, refused.why.value)
    else:
        turn.gone(candidate, refused.why.value, existed=False)
    pause_s = turn.race.settings.stagger_s if refused.why is RefusedWhy.RATE_LIMITED else 0.0
    turn.set(launch_at_s=turn.now_s + pause_s)


def on_report(turn: Turn, event: NodeReported) -> None:
    """A node speaks, so it exists; what it says about winning is not believed."""
    candidate = turn.candidates.get(event.ident)
    if candidate is None:
        return
    match candidate.phase:
        case Phase.REQUESTED | Phase.SETTLING:
            candidate = turn.boots(candidate)
        case Phase.GONE:
            turn.reap(candidate, "reported after it was gone")
            return
        case _:
            pass
    if candidate.phase not in LIVE:
        return
    match event.report:
        case Report.BOOTED:
            pass
        case Report.READY:
            _ready(turn, candidate)
        case Report.UNFIT | Report.LOST:
            failed(turn, candidate, event.why or event.report.value)
        case _:
            assert_never(event.report)


def _ready(turn: Turn, candidate: Candidate) -> None:
    if candidate.phase is Phase.BOOTING:
        deadline_s = min(candidate.ends_by_s, turn.now_s + turn.race.settings.deadlines.ready_s)
        turn.put(replace(candidate, phase=Phase.READY, deadline_s=deadline_s))


def permit_ready(turn: Turn) -> None:
    """Let every ready candidate claim, once claims are allowed: the store picks one."""
    if turn.race.outcome is Outcome.RUNNING and turn.race.claims_allowed:
        for candidate in tuple(turn.candidates.values()):
            if candidate.phase is Phase.READY:
                turn.permit(candidate)


def on_claims_allowed(turn: Turn, event: ClaimsAllowed) -> None:
    """Candidates that a dead controller had permitted may never have heard of it: they are told again."""
    if not turn.race.claims_allowed:
        turn.set(claims_allowed=True)
        for candidate in tuple(turn.candidates.values()):
            if candidate.phase is Phase.CLAIMING and turn.race.outcome is Outcome.RUNNING:
                turn.permit(candidate)


def on_head(turn: Turn, event: HeadRead) -> None:
    """The newest manifest decides who has won; its silence after a candidate's deadline says that this one has not."""
    newer = event.writer_epoch > turn.race.head_writer_epoch
    if newer:
        turn.set(head_writer_epoch=event.writer_epoch, head_holder=event.holder)
        if turn.race.outcome is Outcome.RUNNING:
            _taken_over(turn, event)
    if turn.race.outcome is not Outcome.RUNNING:
        return
    for candidate in tuple(turn.candidates.values()):
        if candidate.phase is Phase.GONE and event.asked_at_s > (candidate.charged_until_s or 0.0):
            # It is gone, and has not won: nothing comes of its permit any more.
            turn.put(replace(candidate, record=replace(candidate.record, permitted_writer_epoch=None)))
        if candidate.phase is not Phase.CLAIMING:
            continue
        late = candidate.deadline_s is not None and event.asked_at_s > candidate.deadline_s
        beaten = candidate.permitted is not None and candidate.permitted <= turn.race.head_writer_epoch
        if late or beaten:
            why = "another one took the workspace over" if beaten else "did not claim in time"
            turn.note(f"{candidate.ident} on {candidate.provider}: {why}")
            turn.drop(candidate, why)
            turn.set(launch_at_s=turn.now_s)


def _taken_over(turn: Turn, event: HeadRead) -> None:
    holder = turn.candidates.get(event.holder) if event.holder is not None else None
    if holder is None:
        whose = event.holder or "somebody else"
        turn.decide(Outcome.FAILED, f"writer epoch {event.writer_epoch} of the workspace belongs to {whose}")
    elif holder.phase is Phase.INCUMBENT:
        turn.decide(Outcome.CANCELLED, f"{holder.ident} lives: it has started writer epoch {event.writer_epoch}")
    elif holder.phase in LIVE and not holder.doomed:
        _won(turn, holder, event.instance_id)
    else:
        # It won and is being destroyed, or is gone: the next claim must go above it.
        turn.note(f"{holder.ident} took the workspace over, but is {holder.phase.value}: the race goes on")


def _won(turn: Turn, holder: Candidate, instance_id: str | None) -> None:
    won = replace(holder, phase=Phase.WINNER, deadline_s=None, charged_until_s=turn.now_s)
    if instance_id is not None:
        # A second instance under this label is nobody's from now on: the next listing that shows it has it reaped.
        won = replace(won, record=replace(won.record, instances=(instance_id,)))
    turn.put(won, IntentState.WINNER, why="took the workspace over")
    turn.decide(Outcome.WON, f"{holder.ident} on {holder.provider} took the workspace over")
    for candidate in tuple(turn.candidates.values()):
        if candidate.phase is Phase.INCUMBENT:
            replaced = f"replaced by {holder.ident}"
            if turn.race.settings.keep_lost_s > 0:
                turn.keep(candidate, replaced)
            else:
                turn.reap(candidate, replaced)


def on_rebid(turn: Turn, event: Rebid) -> None:
    """The lost node itself joins the race: its disk has everything."""
    if turn.race.outcome is not Outcome.RUNNING:
        return
    deadlines = turn.race.settings.deadlines
    for candidate in tuple(turn.candidates.values()):
        if candidate.phase is Phase.INCUMBENT and candidate.record.instances:
            by_s = turn.now_s + deadlines.boot_min_s
            joined = replace(
                candidate,
                phase=Phase.BOOTING,
                rebid=True,
                deadline_s=by_s,
                boot_by_s=by_s,
                ends_by_s=by_s + deadlines.ready_s + deadlines.claiming_s,
                charged_from_s=turn.now_s,
            )
            intent = replace(joined.record.intent, usd_h=event.usd_h, compute_usd_h=event.bid_usd_h)
            joined = replace(joined, record=replace(joined.record, intent=intent))
            turn.put(joined, IntentState.RENTED, why="rebid")
            for instance_id in joined.record.instances:
                turn.commands.append(RaiseBid(joined.provider, instance_id, event.bid_usd_h))


def on_cancel(turn: Turn, event: Cancel) -> None:
    """Stop: the incumbent lives, unless a candidate may already have claimed; or everything goes."""
    if event.everything:
        turn.decide(Outcome.CANCELLED, event.why)
        for candidate in tuple(turn.candidates.values()):
            if candidate.phase in (Phase.WINNER, Phase.INCUMBENT, Phase.KEPT):
                turn.reap(replace(candidate, phase=Phase.INCUMBENT), event.why)
        return
    if turn.race.outcome is not Outcome.RUNNING:
        return
    too_late = _too_late_to_cancel(turn)
    if too_late:
        turn.note(f"not cancelled ({event.why}): {too_late}")
        return
    for candidate in tuple(turn.candidates.values()):
        if candidate.rebid and candidate.phase in LIVE:
            back = replace(candidate, phase=Phase.INCUMBENT, deadline_s=None, charged_until_s=turn.now_s)
            turn.put(back, IntentState.WINNER, why=event.why)
    turn.decide(Outcome.CANCELLED, event.why)


def _too_late_to_cancel(turn: Turn) -> str:
    """Say why the incumbent may be fenced already, so that the race must go on; empty when it is not."""
    head = turn.race.head_writer_epoch
    for candidate in turn.candidates.values():
        if candidate.permitted is not None and candidate.permitted > head:
            return f"{candidate.ident} may have taken the workspace over"
    incumbents = [c.ident for c in turn.candidates.values() if c.phase is Phase.INCUMBENT or c.rebid]
    if incumbents and turn.race.head_holder not in incumbents:
        return f"writer epoch {head} belongs to {turn.race.head_holder or 'somebody else'}"
    return ""


def on_deadlines(turn: Turn) -> None:
    """Time passed: candidates that took too long, kept nodes whose time is over, destroys that need another try."""
    for candidate in tuple(turn.candidates.values()):
        if candidate.phase is Phase.REAPING:
            _retry(turn, candidate)
        elif candidate.deadline_s is not None and turn.now_s > candidate.deadline_s:
            _overdue(turn, candidate)
    _hopeless(turn)


def _hopeless(turn: Turn) -> None:
    """Give up when the time is over or no provider is left, never while a candidate may have claimed."""
    race = turn.race
    live = [c for c in turn.candidates.values() if c.phase in LIVE and not c.doomed]
    if race.outcome is not Outcome.RUNNING or any(c.phase is Phase.CLAIMING for c in live):
        return
    waited_s = turn.now_s - race.started_at_s
    if race.settings.give_up_after_s is not None and waited_s > race.settings.give_up_after_s:
        reasons = "; ".join(race.notes[-REASONS_SHOWN_MAX:]) or "no offers"
        turn.decide(Outcome.FAILED, f"no winner after {waited_s:.0f} s: {reasons}")
    elif race.settings.providers and race.settings.providers <= race.barred.keys() and not live:
        turn.decide(Outcome.FAILED, "no provider is left: " + "; ".join(race.barred.values()))


def _retry(turn: Turn, candidate: Candidate) -> None:
    if turn.now_s >= candidate.retry_at_s and not set(candidate.record.instances) <= candidate.acked:
        turn.destroy(candidate)
        retry_at_s = turn.now_s + turn.race.settings.deadlines.reap_retry_s
        turn.put(replace(candidate, retry_at_s=retry_at_s))


def _overdue(turn: Turn, candidate: Candidate) -> None:
    match candidate.phase:
        case Phase.REQUESTED:
            turn.settles(candidate, "the create gave no answer")
        case Phase.BOOTING | Phase.READY:
            waited_s = turn.now_s - candidate.record.intent.written_at_s
            failed(turn, candidate, f"still {candidate.phase.value} {waited_s:.0f} s after its launch")
        case Phase.CLAIMING if turn.now_s >= candidate.retry_at_s:
            turn.commands.append(ReadHead())
            turn.put(replace(candidate, retry_at_s=turn.now_s + turn.race.settings.deadlines.reap_retry_s))
        case Phase.KEPT:
            turn.reap(candidate, "kept long enough")
        case _:
            pass
