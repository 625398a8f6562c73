"""What a job costs per hour, what each intent has cost, and what SpotWarp has saved.

Rates are in US dollars. Store prices are the user's own (`StorePrices`); the presets are list prices as of 2026 and
only a start. A saving is against renting the same GPUs on demand for the same useful hours, without any failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.offers import HOURS_PER_MONTH, Offer, Traffic


@dataclass(frozen=True, slots=True)
class StorePrices:
    """What the object store takes."""

    usd_gb_month: float
    egress_usd_gb: float
    """For what leaves the store: each comeback's critical set, and everything hydrated."""
    put_usd_1000: float


# List prices as of 2026, US regions; assumed to hold: check them against your bill.
AWS_S3: Final = StorePrices(usd_gb_month=0.023, egress_usd_gb=0.09, put_usd_1000=0.005)
CLOUDFLARE_R2: Final = StorePrices(usd_gb_month=0.015, egress_usd_gb=0.0, put_usd_1000=0.0045)
OWN: Final = StorePrices(0.0, 0.0, 0.0)
PACK_GB: Final = 0.032
"""Packs are 16 to 64 MiB, so a GB is about 31 PUTs."""


@dataclass(frozen=True, slots=True)
class Hourly:
    """Dollars per hour, by part."""

    compute_usd_h: float
    disk_usd_h: float
    bandwidth_usd_h: float
    """What the host takes for traffic in both directions."""
    store_usd_h: float
    egress_usd_h: float

    @property
    def machine_usd_h(self) -> float:
        """What the provider bills."""
        return self.compute_usd_h + self.disk_usd_h + self.bandwidth_usd_h

    @property
    def total_usd_h(self) -> float:
        """Everything."""
        return self.machine_usd_h + self.store_usd_h + self.egress_usd_h

    def per_month(self, usd_h: float) -> float:
        """Return one part's price for a month of training around the clock."""
        return usd_h * HOURS_PER_MONTH


def hourly(offer: Offer, disk_gb: float, traffic: Traffic, stored_gb: float, prices: StorePrices) -> Hourly:
    """Split what an hour on *offer* costs; *traffic* is what the job moves, *stored_gb* what the store keeps."""
    puts_usd_h = traffic.up_gb_h / PACK_GB / 1000 * prices.put_usd_1000
    return Hourly(
        compute_usd_h=offer.price.compute_usd_h,
        disk_usd_h=offer.price.disk_usd_h(disk_gb),
        bandwidth_usd_h=offer.price.bandwidth_usd_h(traffic),
        store_usd_h=stored_gb * prices.usd_gb_month / HOURS_PER_MONTH + puts_usd_h,
        egress_usd_h=traffic.down_gb_h * prices.egress_usd_gb,
    )


@dataclass(frozen=True, slots=True)
class Stay:
    """One intent's time on the bill."""

    ident: str
    usd_h: float
    """All in, for the machine."""
    from_s: float
    until_s: float
    won: bool
    """Whether it was the job's node; what the others cost is the price of racing."""

    @property
    def hours(self) -> float:
        """How long it was paid for."""
        return max(0.0, self.until_s - self.from_s) / 3600

    @property
    def usd(self) -> float:
        """What it cost."""
        return self.hours * self.usd_h


def stay_of(record: IntentRecord, now_s: float) -> Stay | None:
    """Return what an intent's record says about its time on the bill; None when it never had an instance.

    A kept node counts in full, though only its disk is billed: the report errs on the dear side.
    """
    if not record.instances and record.won_at_s is None and record.state is IntentState.GONE:
        return None
    until_s = record.at_s if record.state is IntentState.GONE else now_s
    intent = record.intent
    return Stay(intent.ident, intent.usd_h, intent.written_at_s, until_s, won=record.won_at_s is not None)


@dataclass(frozen=True, slots=True)
class Spend:
    """What a job has cost until now."""

    by_intent: tuple[tuple[str, float], ...]
    nodes_usd: float
    racing_usd: float

    @property
    def total_usd(self) -> float:
        """Everything that providers have billed, as far as the ledger knows."""
        return self.nodes_usd + self.racing_usd


def spend(stays: Iterable[Stay]) -> Spend:
    """Add up *stays*; an intent with several (a rebid) counts with all of them."""
    by_intent: dict[str, float] = {}
    nodes_usd = racing_usd = 0.0
    for stay in stays:
        by_intent[stay.ident] = by_intent.get(stay.ident, 0.0) + stay.usd
        if stay.won:
            nodes_usd += stay.usd
        else:
            racing_usd += stay.usd
    return Spend(tuple(sorted(by_intent.items())), nodes_usd, racing_usd)


def race_budget_usd(spent_usd: float, asked_usd: float | None, *, share: float, least_usd: float) -> float:
    """Return what one race may cost: what was asked, else a share of what was spent, with a floor for the start.

    >>> race_budget_usd(500.0, None, share=0.02, least_usd=1.0), race_budget_usd(0.0, None, share=0.02, least_usd=1.0)
    (10.0, 1.0)
    """
    return asked_usd if asked_usd is not None else max(least_usd, share * spent_usd)


def saved_percent(total_usd: float, on_demand_usd_h: float, useful_hours: float) -> float | None:
    """Return by how much the job was cheaper than on demand, in percent; negative when dearer, None without hours.

    >>> saved_percent(30.0, 4.0, 10.0)
    25.0
    """
    would_cost_usd = on_demand_usd_h * useful_hours
    if would_cost_usd <= 0:
        return None
    return 100.0 * (1.0 - total_usd / would_cost_usd)


@dataclass(frozen=True, slots=True)
class Loss:
    """One failover, in training time."""

    since_other_copy_s: float
    """Training since the newest state that would have survived without SpotWarp: since the start of the job, unless
    the user named another place for checkpoints."""
    recomputed_s: float
    """Training that was done again: from the restored checkpoint to the loss."""


def recomputation_avoided_h(losses: Iterable[Loss]) -> float:
    """Return the hours of training that would have been done again, and were not."""
    return sum(max(0.0, loss.since_other_copy_s - loss.recomputed_s) for loss in losses) / 3600
