"""Make the plan of a job: what it needs, what the market has, and what of it would work.

Invariant: pure but for what it is given; the same answers of the market make the same plan, in text and as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from provisioner.cli.market import Found, on_demand_usd_h
from provisioner.cli.workload import Known
from provisioner.core.cost import AWS_S3, CLOUDFLARE_R2, OWN, StorePrices
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Market, Traffic
from provisioner.core.plan import Forecast, forecast, overall, verdict
from provisioner.core.ranking import RankSettings, disk_needed_gb, race_order, rank
from provisioner.core.timing import Comeback
from provisioner.core.wishes import sift, why_nothing

COMEBACKS_H: Final = 0.25
"""A loss every four hours (assumed, as in `ranking`)."""
OFFERS_MAX: Final = 200
LOW_BALANCE_H: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `plan` shows and `failover` asks about."""

    spec: JobSpec
    known: Known
    disk_gb: float
    forecasts: tuple[Forecast, ...]
    """Best first."""
    why: tuple[str, ...]
    """Why no offer fits; empty when some do."""
    offers_seen: int
    problems: tuple[str, ...]
    """Providers that are of no use now."""
    warnings: tuple[str, ...]
    stops: tuple[str, ...]
    """Why `failover` would not begin."""
    verdict: str
    feasible: bool
    on_demand_usd_h: float | None
    store: str
    has_state: bool

    @property
    def first_safe_s(self) -> float | None:
        """Of the best offer: until all that is there now is in the store."""
        return self.forecasts[0].first_safe_s if self.forecasts else None


def store_prices(url: str) -> StorePrices:
    """Take the list prices that fit the store."""
    if url.startswith("file:"):
        return OWN
    return CLOUDFLARE_R2 if "r2.cloudflarestorage" in url else AWS_S3


def make_plan(spec: JobSpec, known: Known, found: Found, *, now_s: float, store: str, endpoint: str = "") -> Plan:
    """Sift, rank and forecast what the market answered."""
    work = known.work
    directory_form = spec.form != "fuse"
    needed_gb = disk_needed_gb(known.logical_bytes, directory_form=directory_form, asked_gb=spec.wish.disk_gb)
    sifted = sift(found.offers, spec.wish, now_s)
    settings = RankSettings(
        comeback=Comeback(critical_gb=work.critical_gb),
        traffic=spec.wish.traffic,
        disk_gb=max(needed_gb, spec.wish.disk_gb),
        boots={name: able.boot for name, able in found.capabilities.items()},
    )
    ranked = race_order(rank(sifted.accepted, settings))[:OFFERS_MAX]
    prices = store_prices(endpoint or store)
    figures = tuple(forecast(one, work, settings.disk_gb, prices, COMEBACKS_H) for one in ranked)
    plan = Plan(
        spec=spec,
        known=known,
        disk_gb=settings.disk_gb,
        forecasts=figures,
        why=why_nothing(sifted, spec.wish),
        offers_seen=len(found.offers),
        problems=tuple(found.problems.values()),
        warnings=(),
        stops=(),
        verdict=overall(figures, work),
        feasible=any(one.feasible for one in figures),
        on_demand_usd_h=on_demand_usd_h(found, spec.wish),
        store=store,
        has_state=known.logical_bytes > 0 and work.published_gb > 0,
    )
    return _judged(plan, found)


def _judged(plan: Plan, found: Found) -> Plan:
    """Add what speaks against beginning, and what should be known."""
    stops = list(plan.why)
    if len(found.problems) == len(plan.spec.providers):
        stops = list(plan.problems)
    cheapest_usd_h = min((one.hourly.machine_usd_h for one in plan.forecasts), default=0.0)
    budget_usd = plan.spec.limits.budget_usd
    if budget_usd is not None and budget_usd < cheapest_usd_h:
        stops.append(
            f"--budget {budget_usd:g} is less than one hour of the cheapest offer (${cheapest_usd_h:.2f}): raise it"
        )
    warnings = []
    for name, balance_usd in found.balances_usd.items():
        if 0 < balance_usd < LOW_BALANCE_H * cheapest_usd_h:
            hours = balance_usd / cheapest_usd_h
            warnings.append(f"{name}: the account's ${balance_usd:.2f} last {hours:.1f} h of the cheapest offer")
    if plan.store.startswith("file:") and any(name in ("vast", "runpod") for name in plan.spec.providers):
        stops.append(f"the store {plan.store} is on this machine, where no rented node reaches it: set --store s3://…")
    if plan.disk_gb > plan.spec.wish.disk_gb:
        warnings.append(
            f"the plain directory needs {plan.disk_gb:.0f} GB of disk (1.1 x the workspace); "
            f"--disk {plan.spec.wish.disk_gb:.0f}G is raised to it"
        )
    return replace(plan, stops=tuple(stops), warnings=tuple(warnings))


def traffic_of(known: Known) -> Traffic:
    """Return what the job moves per hour, so that bandwidth counts in every price."""
    down_gb_h = COMEBACKS_H * known.work.critical_gb
    return Traffic(round(known.work.up_gb_h, 6), round(down_gb_h, 6))


def document(plan: Plan) -> dict[str, Any]:
    """Return the plan as one JSON document."""
    work, protection = plan.known.work, plan.known.protection
    return {
        "job": plan.spec.job,
        "workspace": plan.spec.workspace,
        "store": plan.store,
        "verdict": plan.verdict,
        "feasible": plan.feasible,
        "can_start": not plan.stops,
        "stops": list(plan.stops),
        "warnings": list(plan.warnings),
        "problems": list(plan.problems),
        "protected": {
            "files": protection.files if protection else None,
            "bytes": protection.size_bytes if protection else plan.known.logical_bytes,
            "not": list(protection.unsaved) if protection else [],
        },
        "workload": {
            "stored_gb": work.stored_gb,
            "published_gb": work.published_gb,
            "checkpoint_gb": work.checkpoint_gb,
            "checkpoint_every_s": work.checkpoint_every_s,
            "critical_gb": work.critical_gb,
            "up_gb_h": work.up_gb_h,
            "sources": list(plan.known.sources),
        },
        "disk_gb": plan.disk_gb,
        "first_safe_s": plan.first_safe_s,
        "on_demand_usd_h": plan.on_demand_usd_h,
        "offers_seen": plan.offers_seen,
        "offers": [_offer(one, plan) for one in plan.forecasts],
    }


def _offer(one: Forecast, plan: Plan) -> dict[str, Any]:
    offer = one.ranked.offer
    return {
        "provider": offer.provider,
        "offer": offer.offer_id,
        "market": offer.market.value,
        "gpu": str(offer.gpu),
        "gpus": offer.gpu_count,
        "location": offer.location,
        "up_mbps": offer.up_mbps,
        "down_mbps": offer.down_mbps,
        "reliability": offer.reliability,
        "usd_gpu_h": one.ranked.usd_h / offer.gpu_count,
        "usd_h": {
            "compute": one.hourly.compute_usd_h,
            "disk": one.hourly.disk_usd_h,
            "bandwidth": one.hourly.bandwidth_usd_h,
            "store": one.hourly.store_usd_h,
            "egress": one.hourly.egress_usd_h,
            "total": one.hourly.total_usd_h,
        },
        "store_usd_month": one.store_usd_month,
        "egress_usd_month": one.egress_usd_month,
        "phases_s": dict(one.phases.items()),
        "ready_s": one.phases.ready_s,
        "step_s": one.phases.step_s,
        "first_safe_s": one.first_safe_s,
        "loss_mean_s": one.loss_mean_s,
        "loss_max_s": one.loss_max_s,
        "feasible": one.feasible,
        "verdict": verdict(one, plan.known.work),
    }


def spot_share(figures: Sequence[Forecast]) -> str:
    """Say how many of the offers are spot."""
    spot = sum(one.ranked.offer.market is Market.SPOT for one in figures)
    return f"{spot} spot, {len(figures) - spot} on demand"
