"""What a complete listing proves: that an instance exists, what it is, or that it is gone.

A listing shows an accepted create late, may miss a row, and may show a destroyed instance for a while. So presence
counts at once and absence only after several listings in a row, each asked for after the moment from which the
instance must be shown (or, for a destroyed one, must be gone). Instances without one of this job's labels are never
touched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from provisioner.core.intents import Intent, IntentRecord, IntentState, parse_label
from provisioner.core.offers import Market
from provisioner.core.ports import Instance, InstanceStatus
from provisioner.core.race.messages import DestroyAccepted, Listed, ReadHead, Record
from provisioner.core.race.state import LIVE, Candidate, Outcome, Phase
from provisioner.core.race.turn import Turn

PRICE_SLACK: Final = 1.02
"""Prices are rounded differently by search and by listing."""
PRICE_SLACK_USD_H: Final = 0.01
_DEAD: Final = frozenset({InstanceStatus.STOPPED, InstanceStatus.FAILED})


def on_listed(turn: Turn, event: Listed) -> None:
    """Compare a listing with what this race knows."""
    present: dict[str, list[Instance]] = {}
    for instance in event.instances:
        if instance.status is InstanceStatus.GONE:
            continue
        candidate = _whose(turn, instance)
        if candidate is not None:
            present.setdefault(candidate.ident, []).append(instance)
    for candidate in tuple(turn.candidates.values()):
        if candidate.provider != event.provider:
            continue
        rows = present.get(candidate.ident)
        if rows:
            _shown(turn, candidate, rows, event.asked_at_s)
        else:
            _absent(turn, candidate, event.asked_at_s)


def _whose(turn: Turn, instance: Instance) -> Candidate | None:
    """Find the candidate an instance belongs to; one of ours that nobody knows becomes a stray to be reaped."""
    for candidate in turn.candidates.values():
        if candidate.provider == instance.provider and instance.instance_id in candidate.record.instances:
            return candidate
    parsed = parse_label(instance.label)
    if parsed is None or parsed[0] != turn.race.job:
        return None
    known = turn.candidates.get(parsed[1])
    if known is None:
        return _stray(turn, instance, parsed[1])
    if known.provider != instance.provider or _is_double(known, instance):
        return _stray(turn, instance, f"{known.ident}@{instance.provider}:{instance.instance_id}")
    return known


def _is_double(known: Candidate, instance: Instance) -> bool:
    """Tell whether *instance* is a second one under the label of the node that holds the workspace."""
    holds = known.phase in (Phase.WINNER, Phase.INCUMBENT) and bool(known.record.instances)
    return holds and instance.instance_id not in known.record.instances


def _stray(turn: Turn, instance: Instance, ident: str) -> Candidate:
    """Take up an instance with our label that no intent explains (a lost ledger, another controller's leftovers).

    The one that holds the head is the incumbent, whatever the ledger has forgotten; every other is reaped.
    """
    intent = Intent(
        ident=ident,
        label=instance.label.strip(),
        provider=instance.provider,
        offer_id="",
        market=instance.market or Market.ON_DEMAND,
        gpu=str(instance.gpu or ""),
        gpu_count=instance.gpu_count or 0,
        location=instance.location,
        machine_id=instance.machine_id,
        usd_h=instance.usd_h or 0.0,
        compute_usd_h=instance.usd_h or 0.0,
        written_at_s=turn.now_s,
    )
    if ident == turn.race.head_holder and turn.race.outcome is Outcome.RUNNING:
        why, state = "holds the head of the workspace", IntentState.WINNER
        record = IntentRecord(intent, state, turn.now_s, (instance.instance_id,), why)
        turn.commands.append(Record(record))
        return turn.put(Candidate(record, Phase.INCUMBENT))
    record = IntentRecord(intent, IntentState.REAPING, turn.now_s, (instance.instance_id,), "no intent explains it")
    turn.commands.append(Record(record))
    stray = turn.put(Candidate(record, Phase.REAPING))
    return turn.reap(stray, f"{instance.provider} shows {instance.label.strip()}, which no intent explains")


def _shown(turn: Turn, candidate: Candidate, rows: list[Instance], asked_at_s: float) -> None:
    """At least one instance of *candidate* exists."""
    ids = [row.instance_id for row in rows]
    candidate = replace(turn.saw(candidate, *ids), absences=0)
    turn.put(candidate)
    match candidate.phase:
        case Phase.SETTLING:
            candidate = turn.boots(candidate)
        case Phase.GONE:
            turn.reap(candidate, "seen again after it was gone")
            return
        case Phase.REAPING:
            _still_there(turn, candidate, asked_at_s)
            return
        case _:
            pass
    if candidate.phase in LIVE:
        wrong = _wrong(candidate, rows)
        if wrong:
            failed(turn, candidate, wrong)


def _still_there(turn: Turn, candidate: Candidate, asked_at_s: float) -> None:
    """A loser is shown: again, if its end was accepted before this listing was asked for, that came to nothing."""
    settled_s = candidate.acked_at_s + turn.race.settings.deadlines.reap_retry_s
    known = set(candidate.record.instances)
    if known <= candidate.acked and asked_at_s > settled_s:
        turn.put(replace(candidate, acked=frozenset()))
    elif not known <= candidate.acked:
        turn.put(replace(candidate, retry_at_s=min(candidate.retry_at_s, turn.now_s)))


def _wrong(candidate: Candidate, rows: list[Instance]) -> str:
    """Say what is wrong with the instances of a live candidate; empty when nothing is."""
    if len(rows) > 1:
        return f"{len(rows)} instances run under one label: {', '.join(row.instance_id for row in rows)}"
    row, intent = rows[0], candidate.record.intent
    if row.status in _DEAD and not (candidate.rebid and row.status is InstanceStatus.STOPPED):
        return f"its instance {row.instance_id} is {row.status.value} ({row.status_text or 'no reason given'})"
    if row.market is not None and row.market is not intent.market:
        return f"asked for {intent.market.value}, got {row.market.value}"
    most_usd_h = intent.compute_usd_h * PRICE_SLACK + PRICE_SLACK_USD_H
    if row.usd_h is not None and row.usd_h > most_usd_h and row.status is not InstanceStatus.STOPPED:
        return f"costs ${row.usd_h:.3f}/h, the offer said ${intent.compute_usd_h:.3f}/h"
    return ""


def failed(turn: Turn, candidate: Candidate, why: str, *, preempted: bool = False) -> None:
    """A candidate is of no use: block its machine, reap it; one that may have claimed is judged by the head first.

    One that was taken away says nothing about its machine: only its offer is left alone, from the second time on.
    """
    if candidate.phase is Phase.CLAIMING and candidate.deadline_s is not None and candidate.deadline_s > turn.now_s:
        turn.put(replace(candidate, deadline_s=turn.now_s))
        turn.commands.append(ReadHead())
        return
    if candidate.phase is Phase.CLAIMING:
        return
    turn.note(f"{candidate.ident} on {candidate.provider}: {why}")
    if not preempted or _failed_before(turn, candidate):
        turn.block(candidate, why, machine=not preempted)
    turn.drop(candidate, why)
    turn.set(launch_at_s=turn.now_s)
    if turn.race.round == 1 and turn.race.search_at_s is not None:
        # The pause is for a market without offers; here there were some, and they may all be in use.
        turn.set(search_at_s=turn.now_s)


def _failed_before(turn: Turn, candidate: Candidate) -> bool:
    """Tell whether this race has lost a candidate of the same offer already."""
    intent = candidate.record.intent
    return any(
        other.phase in (Phase.REAPING, Phase.GONE) and other.record.instances
        for other in turn.candidates.values()
        if (other.provider, other.record.intent.offer_id) == (intent.provider, intent.offer_id)
    )


def _absent(turn: Turn, candidate: Candidate, asked_at_s: float) -> None:
    """A complete listing does not show *candidate*; enough of these prove that it does not exist."""
    if asked_at_s <= _counts_from_s(turn, candidate) or asked_at_s <= candidate.absent_asked_at_s:
        return
    candidate = replace(candidate, absences=candidate.absences + 1, absent_asked_at_s=asked_at_s)
    turn.put(candidate)
    if candidate.absences < turn.race.settings.absences_needed:
        return
    match candidate.phase:
        case Phase.SETTLING:
            turn.gone(candidate, "never created", existed=False)
            turn.set(launch_at_s=turn.now_s)
        case Phase.REAPING:
            turn.gone(candidate, "verified gone", existed=True)
        case Phase.BOOTING | Phase.READY | Phase.CLAIMING:
            failed(turn, candidate, "its instance vanished", preempted=True)
        case Phase.KEPT:
            turn.reap(candidate, "the kept node vanished")
        case _:
            pass


def _counts_from_s(turn: Turn, candidate: Candidate) -> float:
    """Return from when on a listing must show the candidate, or must not; infinity while absence proves nothing."""
    shown_by_s = candidate.record.intent.written_at_s + turn.race.settings.visible_s(candidate.provider)
    match candidate.phase:
        case Phase.REAPING:
            accepted = set(candidate.record.instances) <= candidate.acked
            return max(shown_by_s, candidate.acked_at_s) if accepted else float("inf")
        case Phase.SETTLING:
            return candidate.absent_asked_at_s
        case Phase.BOOTING | Phase.READY | Phase.CLAIMING | Phase.KEPT:
            return shown_by_s
        case _:
            return float("inf")


def on_destroy_accepted(turn: Turn, event: DestroyAccepted) -> None:
    """The provider took a destroy: from now on a listing may prove it."""
    candidate = turn.candidates.get(event.ident)
    if candidate is None or candidate.phase is not Phase.REAPING:
        return
    acked = candidate.acked | {event.instance_id}
    turn.put(replace(candidate, acked=acked, acked_at_s=turn.now_s, absences=0))
