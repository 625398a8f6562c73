"""Offers of all providers at once: asked for in parallel, priced at our bid, checked again, ranked.

Invariant: what comes out costs at most the caps with the bid that would be made; a provider that does not answer in
time costs its offers, not the race's time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import trio

from provisioner.core.blocklist import Blocklist
from provisioner.core.errors import NoCredit, ProviderDenied, ProvisionerError
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import BID_STEP_USD_H, Market, Offer, bid_above, with_bid
from provisioner.core.ranking import Ranked, RankSettings, disk_needed_gb, launch_order, race_order, rank
from provisioner.core.wishes import Wish, sift, why_nothing
from provisioner.engine.accounts import Account
from provisioner.engine.ports import EngineSettings

BLOCKED_SHOWN_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to."""

    ranked: tuple[Ranked, ...]
    fitting: Mapping[str, int]
    """By provider."""
    why: tuple[str, ...]
    """What excluded the rest, and who did not answer."""
    denied: frozenset[str] = frozenset()
    """Who refused the account's key, or its credit."""


def spec_for(spec: JobSpec, logical_bytes: int) -> JobSpec:
    """Return *spec* with the disk raised to what the workspace needs: in the directory form it lies there whole."""
    disk_gb = disk_needed_gb(logical_bytes, directory_form=spec.form != "fuse", asked_gb=spec.wish.disk_gb)
    return replace(spec, wish=replace(spec.wish, disk_gb=disk_gb))


def bid_for(offer: Offer, spec: JobSpec) -> float | None:
    """Return what to bid for *offer*: the factor over the minimum or the fixed bid, and never more than the cap."""
    if offer.market is not Market.SPOT or offer.min_bid_usd_h is None:
        return None
    beside_usd_h = offer.usd_h(spec.wish.disk_gb, spec.wish.traffic) - offer.price.compute_usd_h
    bid_usd_h = bid_within(offer.min_bid_usd_h, beside_usd_h, offer.gpu_count, spec)
    return offer.min_bid_usd_h if bid_usd_h is None else bid_usd_h


def bid_within(min_bid_usd_h: float, beside_usd_h: float, gpu_count: int, spec: JobSpec) -> float | None:
    """Return the bid for a machine whose disk and traffic cost *beside_usd_h*, or None when the cap forbids any."""
    wanted = spec.bid_usd_h if spec.bid_usd_h is not None else bid_above(min_bid_usd_h, spec.bid_factor)
    wanted = max(wanted, min_bid_usd_h)
    cap_usd_gpu_h = spec.wish.cap_usd_gpu_h(Market.SPOT)
    if cap_usd_gpu_h is None:
        return wanted
    most = math.floor((cap_usd_gpu_h * gpu_count - beside_usd_h) / BID_STEP_USD_H + 1e-9) * BID_STEP_USD_H
    return min(wanted, round(most, 3)) if round(most, 3) >= min_bid_usd_h else None


async def search(
    accounts: Sequence[Account],
    spec: JobSpec,
    wish: Wish,
    blocklist: Blocklist,
    now_s: float,
    settings: EngineSettings,
    *,
    ours: Collection[tuple[str, str | None]] = (),
    seen: Collection[tuple[str, str | None]] = (),
) -> Found:
    """Ask every account for what *wish* allows; *spec* says how to bid, *ours* are machines that we rent already.

    A machine of ours is offered to us too, for a bid that would take it from ourselves. *seen* are machines that have
    run the image.
    """
    answers: dict[str, Sequence[Offer] | str] = {}
    denied: set[str] = set()

    async def ask(account: Account) -> None:
        try:
            with trio.fail_after(settings.search_s):
                answers[account.name] = await account.provider.search(wish)
        except trio.TooSlowError:
            answers[account.name] = f"{account.name} gave no offers within {settings.search_s:.0f} s"
        except ProvisionerError as error:
            answers[account.name] = str(error)
            if isinstance(error, (ProviderDenied, NoCredit)):
                denied.add(account.name)

    async with trio.open_nursery() as nursery:
        for account in accounts:
            nursery.start_soon(ask, account)
    names = [account.name for account in accounts]
    offers = [offer for name in names if not isinstance(found := answers[name], str) for offer in found]
    failures = tuple(failure for name in names if isinstance(failure := answers[name], str))
    others = [_known(offer, seen) for offer in offers if offer.machine_id is None or _machine(offer) not in ours]
    sifted = sift([with_bid(offer, bid_for(offer, spec)) for offer in others], wish, now_s)
    free = blocklist.allowed(sifted.accepted, now_s)
    blocked = [entry.why for offer in sifted.accepted if (entry := blocklist.blocks(offer, now_s)) is not None]
    ranks = RankSettings(
        comeback=settings.comeback,
        traffic=wish.traffic,
        disk_gb=wish.disk_gb,
        boots={account.name: account.capabilities.boot for account in accounts},
    )
    nothing = why_nothing(sifted, wish) if len(failures) < len(accounts) else ()
    why = failures + nothing + ((_blocked(blocked),) if blocked else ())
    order = launch_order(race_order(rank(free, ranks)), spec.candidates_max)
    return Found(order, dict(Counter(offer.provider for offer in free)), why, frozenset(denied))


def _machine(offer: Offer) -> tuple[str, str | None]:
    return offer.provider, offer.machine_id


def _known(offer: Offer, seen: Collection[tuple[str, str | None]]) -> Offer:
    return replace(offer, image_seen=offer.machine_id is not None and _machine(offer) in seen)


def _blocked(reasons: Sequence[str]) -> str:
    shown = "; ".join(sorted(set(reasons))[:BLOCKED_SHOWN_MAX])
    return f"{len(reasons)} offers are left alone for a while: {shown}"
