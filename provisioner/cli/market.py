"""Ask all providers at once what they offer; free of charge, and in a time that people wait.

Invariant: one provider that fails or hangs takes nothing from the others, and is named with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from provisioner.core.errors import NoCredit, ProviderDenied, ProvisionerError
from provisioner.core.offers import Market, Offer, with_bid
from provisioner.core.ports import Capabilities, Provider
from provisioner.core.wishes import Wish

SEARCH_S: Final = 9.0
"""A plan takes about 10 s."""
ANY_PRICE_USD: Final = 1e6


@dataclass(frozen=True, slots=True)
class Found:
    """What the market said."""

    offers: tuple[Offer, ...] = ()
    """Priced at what would be bid."""
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict)
    balances_usd: Mapping[str, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    """Providers that are of no use now, and why."""


async def search_all(
    providers: Mapping[str, Provider], wish: Wish, bid_usd_h: float | None = None, *, patience_s: float = SEARCH_S
) -> Found:
    """Search every provider of *providers*, on demand too, whose price is what a saving is measured against."""
    offers: list[Offer] = []
    capabilities: dict[str, Capabilities] = {}
    balances: dict[str, float] = {}
    problems: dict[str, str] = {}
    on_demand_usd = wish.on_demand_max_usd_gpu_h
    asked = replace(wish, on_demand_max_usd_gpu_h=ANY_PRICE_USD if on_demand_usd is None else on_demand_usd)

    async def ask(name: str, provider: Provider) -> None:
        try:
            with trio.move_on_after(patience_s) as scope:
                capabilities[name] = await provider.capabilities()
                found = await provider.search(asked)
                offers.extend(_priced(offer, bid_usd_h) for offer in found)
                if (balance := await provider.balance_usd()) is not None:
                    balances[name] = balance
            if scope.cancelled_caught and name not in {offer.provider for offer in offers}:
                problems[name] = f"{name}: no answer within {patience_s:g} s"
        except ProvisionerError as error:
            problems[name] = _told(name, error)

    async with trio.open_nursery() as nursery:
        for name, provider in providers.items():
            nursery.start_soon(ask, name, provider)
    for name, balance in balances.items():
        if balance <= 0:
            problems[name] = f"{name}: the account has no credit (${balance:.2f}): add some before it can rent"
    ordered = tuple(sorted(offers, key=lambda offer: offer.key))
    return Found(ordered, capabilities, balances, problems)


def _told(name: str, error: ProvisionerError) -> str:
    words = str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}"
    if isinstance(error, ProviderDenied):
        return f"{words} (the key was revoked, or is another account's)"
    return f"{words} (the account cannot pay)" if isinstance(error, NoCredit) else words


def _priced(offer: Offer, bid_usd_h: float | None) -> Offer:
    """Price an offer at what would be bid; a fixed bid below the lowest stays visible, so that it can be refused."""
    if bid_usd_h is None or offer.market is not Market.SPOT or offer.min_bid_usd_h is None:
        return with_bid(offer)
    return replace(offer, price=replace(offer.price, compute_usd_h=bid_usd_h))


def on_demand_usd_h(found: Found, wish: Wish) -> float | None:
    """Return what the cheapest machine like the wish costs on demand per hour, without a cap; None if none is seen."""
    alike = [
        offer.usd_h(wish.disk_gb, wish.traffic)
        for offer in found.offers
        if offer.market is Market.ON_DEMAND and offer.gpu_count == wish.gpu_count and wish.gpu.means(offer.gpu)
    ]
    least = min(alike, default=math.inf)
    return None if math.isinf(least) else least
