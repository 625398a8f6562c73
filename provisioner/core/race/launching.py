"""When another candidate is launched: how many, how soon after each other, and for how much money.

The budgets count each candidate until the latest moment at which it can still exist: its `ends_by_s`, and the
allowance for reaping. So they hold whatever happens, as long as the provider destroys within the allowance.
"""

from __future__ import annotations

from dataclasses import replace

from provisioner.core.intents import Intent, label_of
from provisioner.core.race.messages import Search
from provisioner.core.race.state import LIVE, SETTLED, Candidate, Outcome, Phase, Race, RaceSettings
from provisioner.core.race.turn import Turn
from provisioner.core.ranking import Ranked


def life_s(settings: RaceSettings, ranked: Ranked) -> float:
    """Return the longest that a candidate may live without winning, from its launch on."""
    deadlines = settings.deadlines
    return deadlines.boot_s(ranked.ready_by_s) + deadlines.ready_s + deadlines.claiming_s


def worst_usd(race: Race, candidate: Candidate, now_s: float) -> float:
    """Return what *candidate* may still come to, all in."""
    if candidate.charged_from_s is None:
        return 0.0
    if candidate.charged_until_s is not None:
        return candidate.spent_usd(now_s)
    end_s = max(candidate.ends_by_s, now_s) if candidate.phase in LIVE else now_s
    worst_s = end_s + race.settings.reap_allowance_s - candidate.charged_from_s
    return candidate.record.intent.usd_h * worst_s / 3600


def candidates_max(settings: RaceSettings, ranked: Ranked) -> int:
    """Return how many may race when *ranked* would be one of them."""
    if ranked.usd_h > settings.dear_usd_h and not ranked.offer.image_likely:
        return min(settings.candidates_max, settings.dear_candidates_max)
    return settings.candidates_max


def unaffordable(race: Race, ranked: Ranked, now_s: float) -> str:
    """Say why the budgets forbid to launch *ranked* now; empty when they allow it.

    The dearest candidate that may still win is not a cost of racing: it would have been rented anyway. So the first
    one is bound by the job's budget only.
    """
    own_usd = ranked.usd_h * (life_s(race.settings, ranked) + race.settings.reap_allowance_s) / 3600
    worst = [worst_usd(race, candidate, now_s) for candidate in race.candidates.values()]
    total_usd = sum(worst) + own_usd
    if total_usd > race.settings.budget_usd:
        return f"budget: this race may come to ${total_usd:.2f}, ${race.settings.budget_usd:.2f} are left"
    live = [worst_usd(race, candidate, now_s) for candidate in race.live()]
    extra_usd = total_usd - max([*live, own_usd])
    if live and extra_usd > race.settings.race_budget_usd:
        return f"race budget: losers may come to ${extra_usd:.2f}, the budget is ${race.settings.race_budget_usd:.2f}"
    return ""


def plan_launches(turn: Turn) -> None:
    """Launch what may be launched now, and search when there is nothing left to launch."""
    if turn.race.outcome is not Outcome.RUNNING:
        return
    _forget_useless_offers(turn)
    while _wants_more(turn) and turn.race.offers and turn.now_s >= turn.race.launch_at_s:
        ranked = turn.race.offers[0]
        live = _live(turn)
        if len(live) >= candidates_max(turn.race.settings, ranked):
            return
        forbidden = unaffordable(replace(turn.race, candidates=turn.candidates), ranked, turn.now_s)
        if forbidden:
            _too_dear(turn, forbidden, alone=not live)
            if live:
                return
            continue
        _launch(turn, ranked)
        _forget_useless_offers(turn)
    if _wants_more(turn) and not turn.race.offers:
        _search(turn)


def _live(turn: Turn) -> list[Candidate]:
    return [c for c in turn.candidates.values() if c.phase in LIVE and not c.doomed]


def _wants_more(turn: Turn) -> bool:
    live = _live(turn)
    if any(c.phase in (Phase.READY, Phase.CLAIMING) for c in live):
        return False
    return turn.race.outcome is Outcome.RUNNING and len(live) < turn.race.settings.candidates_max


def _forget_useless_offers(turn: Turn) -> None:
    """Drop offers that are stale, blocked, barred, or on a machine that already races."""
    race, now_s = turn.race, turn.now_s
    if race.offers and now_s - race.offers_at_s > race.settings.deadlines.offers_fresh_s:
        turn.set(offers=())
        return
    racing = {(c.provider, c.record.intent.machine_id) for c in _live(turn) if c.record.intent.machine_id is not None}
    left = tuple(
        ranked
        for ranked in race.offers
        if ranked.offer.provider not in race.barred
        and (ranked.offer.provider, ranked.offer.machine_id) not in racing
        and race.blocklist.blocks(ranked.offer, now_s) is None
    )
    if left != race.offers:
        turn.set(offers=left)


def _launch(turn: Turn, ranked: Ranked) -> None:
    race, offer, now_s = turn.race, ranked.offer, turn.now_s
    serial = race.serial + 1
    intent = Intent(
        ident=f"{race.ident}-{serial}",
        label=label_of(race.job, race.ident, serial),
        provider=offer.provider,
        offer_id=offer.offer_id,
        market=offer.market,
        gpu=str(offer.gpu),
        gpu_count=offer.gpu_count,
        location=offer.location,
        machine_id=offer.machine_id,
        usd_h=ranked.usd_h,
        compute_usd_h=offer.price.compute_usd_h,
        written_at_s=now_s,
    )
    gap_s = 0.0 if len(_live(turn)) + 1 < race.settings.at_once else race.settings.stagger_s
    boot_by_s = now_s + race.settings.deadlines.boot_s(ranked.ready_by_s)
    turn.set(serial=serial, offers=race.offers[1:], launch_at_s=now_s + gap_s)
    turn.launch(intent, offer, boot_by_s=boot_by_s, ends_by_s=now_s + life_s(race.settings, ranked))


def _too_dear(turn: Turn, why: str, *, alone: bool) -> None:
    """No money for this one: fewer race; when nothing else can, the user must know."""
    if not alone:
        kind = why.split(":")[0]
        if not any(note.startswith(kind) for note in turn.race.notes):
            turn.note(why)
        return
    turn.set(offers=turn.race.offers[1:])
    if turn.race.offers:
        return
    turn.note(why)
    # What is being reaped still counts with its allowance; when it is gone there may be room again.
    if not any(c.phase not in SETTLED for c in turn.candidates.values()):
        turn.decide(Outcome.FAILED, why)


def _search(turn: Turn) -> None:
    """Ask for offers when it is time; the first time at once, later after a growing pause."""
    race, now_s = turn.race, turn.now_s
    if race.search_deadline_s is not None:
        if now_s < race.search_deadline_s:
            return
        turn.note("a search gave no answer in time")
    elif race.search_at_s is not None and now_s < race.search_at_s:
        return
    settings = race.settings
    on_demand = settings.on_demand and (not settings.spot or race.round >= settings.on_demand_after_rounds)
    turn.commands.append(Search(settings.spot, on_demand))
    turn.set(search_deadline_s=now_s + settings.deadlines.search_s, search_at_s=None)


def backoff_s(settings: RaceSettings, rounds: int) -> float:
    """Return the pause before the next search after *rounds* without a candidate.

    >>> [backoff_s(RaceSettings(), n) for n in (1, 2, 3, 9)]
    [15.0, 30.0, 60.0, 300.0]
    """
    return min(settings.backoff_max_s, settings.backoff_first_s * 2.0 ** min(rounds - 1, 20))
