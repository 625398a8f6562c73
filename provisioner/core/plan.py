"""`spotwarp plan`: is it feasible, how long until it is safe, what a preemption costs, in time and money.

Bandwidth is physics. A checkpoint is protected when it has crossed the node's uplink, so the link must carry one in
less time than passes between two; with headroom, since a link is shared and never runs at its label. GB are as
stored, that is, after compression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from provisioner.core.cost import Hourly, StorePrices, hourly
from provisioner.core.offers import Traffic
from provisioner.core.ranking import Ranked
from provisioner.core.timing import BITS_PER_BYTE, LINK_MBPS_UNKNOWN, MBPS_PER_GBPS, Phases, transfer_s

HEADROOM: Final = 1.5
"""The link is planned at two thirds of its label: retries, metadata, a second upload that overlaps (assumed)."""
ROUND_MIN: Final = 5
"""Advice is rounded up to 5 minutes."""
LINK_STEPS_MBPS: Final = (100, 200, 500, 1000, 2000, 3000, 5000, 10_000, 20_000, 25_000, 40_000, 50_000, 100_000)
"""What `--min-up` is advised in."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is known of the job: measured from its history, or from its directory, or said by the user."""

    stored_gb: float
    """All of the workspace as the store keeps it: what must cross the link before the first state is safe."""
    checkpoint_gb: float
    """What one checkpoint adds."""
    checkpoint_every_s: float
    interval_s: float = 30.0
    """SpotWarp's own interval between cuts."""
    published_gb: float = 0.0
    """What the store has already."""
    critical_gb: float = 0.0
    """What a comeback reads before its first step."""

    @property
    def up_gb_h(self) -> float:
        """What the job publishes per hour."""
        return self.checkpoint_gb * 3600 / self.checkpoint_every_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """The figures for one offer."""

    ranked: Ranked
    first_safe_s: float
    """From the start of the command until everything that is there now is in the store."""
    publish_s: float
    """How long one checkpoint takes to become safe."""
    loss_mean_s: float
    loss_max_s: float
    """Training lost per preemption, at a random moment and at the worst one."""
    least_every_s: float
    """The shortest time between checkpoints that this link can carry."""
    feasible: bool
    hourly: Hourly
    egress_usd_month: float
    store_usd_month: float

    @property
    def phases(self) -> Phases:
        """The comeback, by phase."""
        return self.ranked.phases

    @property
    def up_mbps(self) -> float:
        """The uplink that the figures are for."""
        return link_mbps(self.ranked.offer.up_mbps)


def link_mbps(claimed_mbps: float | None) -> float:
    """Return the link to plan with."""
    return LINK_MBPS_UNKNOWN if claimed_mbps is None else claimed_mbps


def least_every_s(checkpoint_gb: float, up_mbps: float) -> float:
    """Return the shortest time between checkpoints of *checkpoint_gb*, with headroom."""
    return HEADROOM * transfer_s(checkpoint_gb, up_mbps)


def least_up_mbps(checkpoint_gb: float, every_s: float) -> int:
    """Return the link, in steps that people write, that carries a checkpoint of *checkpoint_gb* each *every_s*.

    >>> least_up_mbps(94, 600), least_up_mbps(2.2, 600)
    (2000, 100)
    """
    assert every_s > 0
    needed = HEADROOM * checkpoint_gb * BITS_PER_BYTE * MBPS_PER_GBPS / every_s
    return next((step for step in LINK_STEPS_MBPS if step >= needed), math.ceil(needed / MBPS_PER_GBPS) * MBPS_PER_GBPS)


def forecast(ranked: Ranked, work: Workload, disk_gb: float, prices: StorePrices, comebacks_h: float) -> Forecast:
    """Work out the figures for one offer; *comebacks_h* is how many losses an hour brings (0.25 = every 4 hours)."""
    assert work.checkpoint_every_s > 0
    up_mbps = link_mbps(ranked.offer.up_mbps)
    publish_s = transfer_s(work.checkpoint_gb, up_mbps) + work.interval_s
    least_s = least_every_s(work.checkpoint_gb, up_mbps)
    feasible = work.checkpoint_every_s >= least_s
    # Where the link cannot carry every checkpoint, cuts coalesce: one becomes safe each time one has crossed (P-17).
    every_s = work.checkpoint_every_s if feasible else max(work.checkpoint_every_s, 2 * publish_s)
    down_gb_h = (
        comebacks_h * ranked.phases.critical_s * link_mbps(ranked.offer.down_mbps) / BITS_PER_BYTE / MBPS_PER_GBPS
    )
    cost = hourly(ranked.offer, disk_gb, Traffic(work.up_gb_h, down_gb_h), work.stored_gb, prices)
    return Forecast(
        ranked=ranked,
        first_safe_s=transfer_s(max(0.0, work.stored_gb - work.published_gb), up_mbps) + work.interval_s,
        publish_s=publish_s,
        loss_mean_s=every_s / 2 + publish_s,
        loss_max_s=every_s + publish_s,
        least_every_s=least_s,
        feasible=feasible,
        hourly=cost,
        egress_usd_month=cost.per_month(cost.egress_usd_h),
        store_usd_month=cost.per_month(cost.store_usd_h),
    )


def rounded_up_min(seconds: float) -> int:
    """Round a duration up to what people would set, in minutes.

    >>> rounded_up_min(2256.0), rounded_up_min(61.0), rounded_up_min(20.0)
    (40, 2, 1)
    """
    minutes = math.ceil(seconds / 60)
    return max(1, minutes if minutes <= ROUND_MIN else math.ceil(minutes / ROUND_MIN) * ROUND_MIN)


def _mbps(mbps: float) -> str:
    """Write a link as `--min-up` takes it.

    >>> _mbps(2000), _mbps(500), _mbps(2500)
    ('2gbps', '500mbps', '2.5gbps')
    """
    return f"{mbps / MBPS_PER_GBPS:g}gbps" if mbps >= MBPS_PER_GBPS else f"{mbps:g}mbps"


def verdict(figures: Forecast, work: Workload) -> str:
    """Say in one line whether it works on this offer, and if not, what would."""
    gbits = f"{figures.up_mbps / MBPS_PER_GBPS:.3g} Gbit/s"
    if not figures.feasible:
        minutes = rounded_up_min(figures.least_every_s)
        wanted = _mbps(least_up_mbps(work.checkpoint_gb, work.checkpoint_every_s))
        return f"not at {gbits}: checkpoint every ≥ {minutes} min, or --min-up {wanted}"
    loss_min = rounded_up_min(figures.loss_max_s)
    return f"feasible at {gbits}: a preemption costs at most {loss_min} min of training"


def overall(figures: tuple[Forecast, ...], work: Workload) -> str:
    """Say whether the job is feasible at all: on the best offer that is, else what stops even the fastest link."""
    if not figures:
        return "no offer to plan with"
    for one in figures:
        if one.feasible:
            return verdict(one, work)
    return verdict(max(figures, key=lambda one: one.up_mbps), work)
