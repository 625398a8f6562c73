"""What a provider would rent: one model for all of them, its price split into compute, disk and bandwidth.

Invariant: prices are per hour for the whole machine; only `usd_gpu_h` divides by the GPU count, so that a bid per
machine (Vast) and a bid per GPU (RunPod) never mix (dstack once overbid eightfold: providers.md 5, row 10).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from provisioner.core.gpus import Gpu

HOURS_PER_MONTH: Final = 720
"""Vast's own divisor from $/GB/month to $/h (providers.md 1.2)."""
BID_AUTO_FACTOR: Final = 1.15
"""`--bid auto`: exactly the minimum is outbid soon; about 10 % more cuts interruptions (providers.md 1.7)."""
BID_STEP_USD_H: Final = 0.001
"""Vast's smallest price; bids are rounded up to it."""


class Market(Enum):
    """How long a rental is ours."""

    SPOT = "spot"
    """May be taken away at any moment."""
    ON_DEMAND = "on-demand"


class Fuse(Enum):
    """Whether the node can mount; the form of the workspace follows from a real test mount, this is a forecast."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the job moves while it trains, measured or estimated."""

    up_gb_h: float = 0.0
    """To the store: what is published."""
    down_gb_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """What the machine costs; bandwidth by the GB, in both directions, at rates the host sets."""

    compute_usd_h: float
    """For spot: the bid, which is what is paid."""
    disk_usd_gb_month: float = 0.0
    up_usd_gb: float = 0.0
    down_usd_gb: float = 0.0

    def disk_usd_h(self, disk_gb: float) -> float:
        """Return what *disk_gb* cost per hour; billed from creation, also while stopped."""
        return disk_gb * self.disk_usd_gb_month / HOURS_PER_MONTH

    def bandwidth_usd_h(self, traffic: Traffic) -> float:
        """Return what *traffic* costs per hour at this host's rates (store charges are apart)."""
        return traffic.up_gb_h * self.up_usd_gb + traffic.down_gb_h * self.down_usd_gb

    def usd_h(self, disk_gb: float, traffic: Traffic) -> float:
        """Return the all-in price of the machine per hour."""
        return self.compute_usd_h + self.disk_usd_h(disk_gb) + self.bandwidth_usd_h(traffic)


@dataclass(frozen=True, slots=True)
class Offer:
    """One thing that can be rented now."""

    provider: str
    """The name of the provider port that gave it: `vast`, `runpod`, `local-a`."""
    offer_id: str
    """What `create` takes; means nothing to us."""
    gpu: Gpu
    gpu_count: int
    market: Market
    price: Price
    location: str
    """As the provider says it (`Sweden, SE`, `EU-SE-1`); compared without case by `--region`."""
    disk_gb_max: float
    """The largest disk that can be had with it."""
    up_mbps: float | None = None
    """The machine's claimed link, megabit per second; None where the provider says nothing."""
    down_mbps: float | None = None
    machine_id: str | None = None
    """The physical machine, for the blocklist; None where the provider hides it (RunPod v2)."""
    reliability: float | None = None
    """0 to 1, the provider's own figure."""
    fuse: Fuse = Fuse.UNKNOWN
    image_cached: bool | None = None
    """Whether the image is on the host already; None = not known, and then counted as cold."""
    image_seen: bool = False
    """Whether a node of ours has run the image on this machine: likely still there, and no provider says so."""
    min_bid_usd_h: float | None = None
    """For spot: the lowest bid that would run now, for the machine."""
    contract_ends_at_s: float | None = None
    """When the host ends the contract, seconds since the epoch."""
    cuda_max: tuple[int, int] | None = None
    """The newest CUDA the driver supports, (major, minor)."""

    def usd_h(self, disk_gb: float, traffic: Traffic) -> float:
        """Return the all-in price of the machine per hour."""
        return self.price.usd_h(disk_gb, traffic)

    def usd_gpu_h(self, disk_gb: float, traffic: Traffic) -> float:
        """Return the all-in price per GPU-hour, which the user's caps speak of."""
        assert self.gpu_count > 0
        return self.usd_h(disk_gb, traffic) / self.gpu_count

    @property
    def image_likely(self) -> bool:
        """Tell whether the image need not be pulled, as far as anybody knows; the provider's own word counts first."""
        return self.image_seen if self.image_cached is None else self.image_cached

    @property
    def key(self) -> tuple[str, str, str]:
        """Name the offer for ties and sets: the same offer as spot and on demand are two."""
        return (self.provider, self.offer_id, self.market.value)


def bid_above(min_bid_usd_h: float, factor: float = BID_AUTO_FACTOR) -> float:
    """Return the bid for a machine, rounded up to the provider's step.

    >>> bid_above(0.1), bid_above(1.0, 1.0)
    (0.115, 1.0)
    """
    assert min_bid_usd_h >= 0
    assert factor >= 1
    steps = min_bid_usd_h * factor / BID_STEP_USD_H
    whole = round(steps)
    if whole < steps - 1e-6:
        whole += 1
    return round(max(1, whole) * BID_STEP_USD_H, 3)


def with_bid(offer: Offer, bid_usd_h: float | None = None) -> Offer:
    """Price a spot offer at what would be bid (`--bid auto` when None); on-demand offers stay as they are.

    A bid below the minimum creates a stopped instance that is billed for its disk, so it is never made.
    """
    if offer.market is not Market.SPOT or offer.min_bid_usd_h is None:
        return offer
    bid = bid_above(offer.min_bid_usd_h) if bid_usd_h is None else max(bid_usd_h, offer.min_bid_usd_h)
    return replace(offer, price=replace(offer.price, compute_usd_h=bid))
