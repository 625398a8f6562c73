"""What the user asks for, checked again on our side, with a reason for each offer that is rejected.

Providers do not apply every filter they accept (providers.md 1.2), so a search's answer is only a proposal. Invariant:
an offer is either accepted or has at least one rejection, and a rejection names both values that disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from provisioner.core.gpus import Gpu, GpuWish, nearest
from provisioner.core.offers import Market, Offer, Traffic

MBPS_PER_GBPS: Final = 1000
REASONS_SHOWN_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Wish:
    """One set of options of `plan` and `failover`; caps are per GPU-hour, all in."""

    gpu: GpuWish
    gpu_count: int = 1
    disk_gb: float = 50.0
    """What is rented; `ranking.disk_needed_gb` gives the least for the directory form."""
    max_price_usd_gpu_h: float | None = None
    on_demand_max_usd_gpu_h: float | None = None
    """On-demand has its own cap; None = on-demand is never rented."""
    spot: bool = True
    regions: tuple[str, ...] = ()
    """Any of these must be a part of the offer's location, without case."""
    up_mbps_min: float = 0.0
    down_mbps_min: float = 0.0
    reliability_min: float = 0.0
    cuda_min: tuple[int, int] | None = None
    lasts_s_min: float = 0.0
    """How long the contract must last from now."""
    traffic: Traffic = field(default_factory=Traffic)

    def cap_usd_gpu_h(self, market: Market) -> float | None:
        """Return the cap of *market*, or None for none."""
        return self.max_price_usd_gpu_h if market is Market.SPOT else self.on_demand_max_usd_gpu_h


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why an offer is not taken: the option that excludes it, and a sentence with both values."""

    option: str
    text: str


@dataclass(frozen=True, slots=True)
class Sifted:
    """A search's answer, divided."""

    accepted: tuple[Offer, ...]
    rejected: tuple[tuple[Offer, tuple[Rejection, ...]], ...]


def _gpu(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    if not wish.gpu.means(offer.gpu):
        yield Rejection("--gpu", f"is a {offer.gpu}, wanted {wish.gpu}")
    # More GPUs than asked for would be paid for and not used: the command was written for this many.
    if offer.gpu_count != wish.gpu_count:
        yield Rejection("--gpus", f"has {offer.gpu_count} GPUs, wanted {wish.gpu_count}")


def _market(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    if offer.market is Market.SPOT and not wish.spot:
        yield Rejection("--spot", "is spot, wanted on-demand only")
    if offer.market is Market.ON_DEMAND and wish.on_demand_max_usd_gpu_h is None:
        yield Rejection("--on-demand-max", "is on-demand, for which no cap is set")


def _price(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    cap = wish.cap_usd_gpu_h(offer.market)
    price = offer.usd_gpu_h(wish.disk_gb, wish.traffic)
    option = "--max-price" if offer.market is Market.SPOT else "--on-demand-max"
    # A price that is no number would pass every comparison, and one below zero is a provider's mistake.
    if not price >= 0:
        yield Rejection("price", f"has a price of {price}, which is no price")
    elif cap is not None and price > cap:
        yield Rejection(option, f"costs ${price:.3f} per GPU-hour all in, the cap is ${cap:.3f}")
    if offer.min_bid_usd_h is not None and offer.price.compute_usd_h < offer.min_bid_usd_h:
        low, least = offer.price.compute_usd_h, offer.min_bid_usd_h
        yield Rejection("--bid", f"needs a bid of ${least:.3f}/h, ours is ${low:.3f}/h")


def _place(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    here = offer.location.casefold()
    if wish.regions and not any(region.casefold() in here for region in wish.regions):
        yield Rejection("--region", f"is in {offer.location or 'an unknown place'}, wanted {', '.join(wish.regions)}")


def _machine(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    if offer.disk_gb_max < wish.disk_gb:
        yield Rejection("--disk", f"has {offer.disk_gb_max:.0f} GB of disk, wanted {wish.disk_gb:.0f}")
    # An unknown link is accepted: the node measures the store's throughput before it may claim.
    if offer.up_mbps is not None and offer.up_mbps < wish.up_mbps_min:
        yield Rejection("--min-up", f"uploads {offer.up_mbps:.0f} Mbit/s, wanted {wish.up_mbps_min:.0f}")
    if offer.down_mbps is not None and offer.down_mbps < wish.down_mbps_min:
        yield Rejection("--min-down", f"downloads {offer.down_mbps:.0f} Mbit/s, wanted {wish.down_mbps_min:.0f}")
    if offer.reliability is not None and offer.reliability < wish.reliability_min:
        yield Rejection("--min-reliability", f"is {offer.reliability:.3f} reliable, wanted {wish.reliability_min:.3f}")
    if wish.cuda_min is not None and offer.cuda_max is not None and offer.cuda_max < wish.cuda_min:
        has, wanted = (".".join(map(str, version)) for version in (offer.cuda_max, wish.cuda_min))
        yield Rejection("--cuda", f"supports CUDA up to {has}, wanted {wanted}")


def _contract(offer: Offer, wish: Wish, now_s: float) -> Iterator[Rejection]:
    if offer.contract_ends_at_s is not None and offer.contract_ends_at_s - now_s < wish.lasts_s_min:
        left_h, wanted_h = (offer.contract_ends_at_s - now_s) / 3600, wish.lasts_s_min / 3600
        yield Rejection("contract end", f"ends in {left_h:.1f} h, wanted {wanted_h:.1f} h")


_CHECKS: Final[tuple[Callable[[Offer, Wish, float], Iterator[Rejection]], ...]] = (
    _gpu,
    _market,
    _price,
    _place,
    _machine,
    _contract,
)


def rejections(offer: Offer, wish: Wish, now_s: float) -> tuple[Rejection, ...]:
    """Return every reason why *offer* is not what *wish* asks for; none means accepted."""
    return tuple(rejection for check in _CHECKS for rejection in check(offer, wish, now_s))


def sift(offers: Iterable[Offer], wish: Wish, now_s: float) -> Sifted:
    """Divide *offers*; a second row for the same offer (pages that shift) is dropped."""
    accepted: list[Offer] = []
    rejected: list[tuple[Offer, tuple[Rejection, ...]]] = []
    seen: set[tuple[str, str, str]] = set()
    for offer in offers:
        if offer.key in seen:
            continue
        seen.add(offer.key)
        reasons = rejections(offer, wish, now_s)
        if reasons:
            rejected.append((offer, reasons))
        else:
            accepted.append(offer)
    return Sifted(tuple(accepted), tuple(rejected))


def why_nothing(sifted: Sifted, wish: Wish) -> tuple[str, ...]:
    """Say why no offer is left, most useful first; empty when some are accepted.

    Options that alone exclude offers come first: loosening one of them would bring an offer in.
    """
    if sifted.accepted:
        return ()
    if not sifted.rejected:
        return (f"no provider has any offer for {wish.gpu_count} x {wish.gpu}; {_meant(wish, frozenset())}",)
    if not any(wish.gpu.means(offer.gpu) for offer, _ in sifted.rejected):
        seen = frozenset(str(offer.gpu) for offer, _ in sifted.rejected)
        return (f"no offer of {len(sifted.rejected)} is a {wish.gpu}; {_meant(wish, seen)}",)
    alone = Counter(reasons[0].option for _, reasons in sifted.rejected if len(_options(reasons)) == 1)
    lines = [f"{count} offers fail only {option}, e.g. one {_example(sifted, option)}" for option, count in _top(alone)]
    total = Counter(option for _, reasons in sifted.rejected for option in _options(reasons))
    excluding = [option for option, count in sorted(total.items()) if count == len(sifted.rejected)]
    lines += [f"{option} excludes every one of {len(sifted.rejected)} offers" for option in excluding]
    if not lines:
        lines = [f"{option} excludes {count} of {len(sifted.rejected)} offers" for option, count in _top(total)]
    return tuple(lines)


def _options(reasons: tuple[Rejection, ...]) -> set[str]:
    return {reason.option for reason in reasons}


def _top(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:REASONS_SHOWN_MAX]


def _example(sifted: Sifted, option: str) -> str:
    """Quote the cheapest offer that fails *option* alone."""
    alone = [(offer, reasons) for offer, reasons in sifted.rejected if _options(reasons) == {option}]
    offer, reasons = min(alone, key=lambda pair: (pair[0].price.compute_usd_h, pair[0].key))
    return f"of {offer.provider} {reasons[0].text}"


def _meant(wish: Wish, seen: frozenset[str]) -> str:
    names = nearest(wish.gpu, seen)
    return f"nearest names: {', '.join(names)}" if names else "check the name with --gpu"


def gpus_seen(offers: Iterable[Offer]) -> frozenset[Gpu]:
    """Return the models on the market, for `--gpu` help."""
    return frozenset(offer.gpu for offer in offers)
