"""Which offers race first: the least expected cost of an hour of training, waiting included.

A cheap machine that needs ten minutes to pull an image is dear when it is lost every few hours. So an offer's figure
is what an hour of *useful* training costs: price, plus the price of the hours in which it only comes back, plus what
the user's waiting is worth. Invariant: the order depends on the offers and settings only, never on the order in which
they came; ties are broken by provider and offer id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from provisioner.core import timing
from provisioner.core.offers import Market, Offer, Traffic
from provisioner.core.timing import BOOT_VAST, BootTimes, Comeback, Phases, transfer_s

DIRECTORY_DISK_FACTOR: Final = 1.1
"""The directory form keeps every file whole on the node's disk (design.md 8); a tenth more for what is new."""
RELIABILITY_UNKNOWN: Final = 0.9
"""Assumed where the provider gives none; dstack's own lower bound for Vast (providers.md 4.2)."""
RELIABILITY_MIN: Final = 0.2


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a comparison needs beyond the offers."""

    comeback: Comeback = field(default_factory=Comeback)
    traffic: Traffic = field(default_factory=Traffic)
    disk_gb: float = 50.0
    boots: Mapping[str, BootTimes] = field(default_factory=dict)
    """By provider; Vast's figures for one that is not in it."""
    spot_held_h: float = 4.0
    """Mean time to the next loss of a spot machine (assumed until the job's own history says otherwise)."""
    on_demand_held_h: float = 100.0
    waiting_usd_h: float = 2.0
    """What an hour of waiting is worth to the user, beyond what the machine costs."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """An offer with the figures that decided its place."""

    offer: Offer
    phases: Phases
    usd_h: float
    """All in, for the machine: what is really paid per hour."""
    useful_usd_h: float
    """Expected cost of an hour of useful training; the order."""
    slow_boot_s: float = 0.0
    """The boot's median if our own history of the image is no longer true: deadlines go by the slower of the two."""

    @property
    def ready_by_s(self) -> float:
        """Seconds from the launch until it should be ready, with patience for an image that was thrown away."""
        return max(self.phases.boot_s, self.slow_boot_s) + self.phases.checks_s


def disk_needed_gb(logical_bytes: int, *, directory_form: bool, asked_gb: float = 0.0) -> float:
    """Return the disk to rent: what was asked, and at least 1.1 times the workspace where it lies there whole.

    >>> disk_needed_gb(100_000_000_000, directory_form=True), disk_needed_gb(10**12, directory_form=False, asked_gb=50)
    (110.0, 50)
    """
    if not directory_form:
        return asked_gb
    return max(asked_gb, round(DIRECTORY_DISK_FACTOR * logical_bytes / 1e9, 3))


def phases_of(offer: Offer, settings: RankSettings) -> Phases:
    """Estimate a median comeback on *offer*, from the loss on."""
    boot = settings.boots.get(offer.provider, BOOT_VAST)
    comeback = settings.comeback
    start_s = comeback.starts_s + (timing.NCCL_FSDP_INIT.p50_s if offer.gpu_count > 1 else 0.0)
    return Phases(
        detect_s=timing.DETECT_S,
        race_s=timing.SEARCH.p50_s + boot.create.p50_s,
        boot_s=_boot_s(offer, settings, cached=offer.image_likely),
        checks_s=timing.AGENT_INSTALL.p50_s + timing.CUDA_PROBE.p50_s + timing.STORE_PROBE.p50_s,
        claim_s=timing.CLAIM.p50_s,
        first_read_s=transfer_s(comeback.eager_gb, offer.down_mbps),
        critical_s=transfer_s(comeback.critical_gb, offer.down_mbps),
        start_s=start_s,
    )


def _boot_s(offer: Offer, settings: RankSettings, *, cached: bool) -> float:
    boot, image_gb = settings.boots.get(offer.provider, BOOT_VAST), settings.comeback.image_gb
    return timing.boot_s(boot, cached=cached, image_gb=image_gb, down_mbps=offer.down_mbps)


def useful_usd_h(offer: Offer, phases: Phases, settings: RankSettings) -> float:
    """Return the expected cost of one hour of useful training on *offer*.

    One stay is `held_h` of training after one comeback; an unreliable host needs more than one try for it.
    """
    held_h = settings.spot_held_h if offer.market is Market.SPOT else settings.on_demand_held_h
    reliability = RELIABILITY_UNKNOWN if offer.reliability is None else offer.reliability
    comeback_h = phases.step_s / 3600 / min(1.0, max(RELIABILITY_MIN, reliability))
    usd_h = offer.usd_h(settings.disk_gb, settings.traffic)
    # What is fetched at each comeback is billed by the GB as well.
    fetched_usd = (settings.comeback.critical_gb + settings.comeback.eager_gb) * offer.price.down_usd_gb
    return usd_h + ((usd_h + settings.waiting_usd_h) * comeback_h + fetched_usd) / held_h


def rank(offers: Iterable[Offer], settings: RankSettings) -> tuple[Ranked, ...]:
    """Order *offers*, best first."""
    ranked = []
    for offer in offers:
        phases = phases_of(offer, settings)
        usd_h = offer.usd_h(settings.disk_gb, settings.traffic)
        slow_boot_s = _boot_s(offer, settings, cached=offer.image_cached is True)
        ranked.append(Ranked(offer, phases, usd_h, useful_usd_h(offer, phases, settings), slow_boot_s))
    return tuple(sorted(ranked, key=lambda r: (r.useful_usd_h, r.phases.step_s, r.usd_h, r.offer.key)))


def race_order(ranked: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Spread the front of the order over providers: best first, then the best of each other provider, and so on.

    Candidates of one provider fail together (no capacity, a rate limit, an outage), and two on one machine always do:
    each turn takes one per provider, and a second offer of a machine comes after everything else.
    """
    first: list[Ranked] = []
    later: list[Ranked] = []
    machines: set[tuple[str, str]] = set()
    for entry in ranked:
        machine = entry.offer.machine_id
        known = machine is not None and (entry.offer.provider, machine) in machines
        (later if known else first).append(entry)
        if machine is not None:
            machines.add((entry.offer.provider, machine))
    return tuple(_in_turns(first)) + tuple(_in_turns(later))


def launch_order(ranked: Sequence[Ranked], candidates_max: int) -> tuple[Ranked, ...]:
    """Return *ranked* (a `race_order`) with the images that need no pull first among those that will race.

    A provider's gap between creates (Vast 4.5 s) and the stagger delay whoever comes later, and such a candidate is
    ready minutes before the others. Who races is left as it is: a dear machine is not rented for its image alone.
    """
    racing = sorted(ranked[:candidates_max], key=lambda entry: not entry.offer.image_likely)
    return (*racing, *ranked[candidates_max:])


def _in_turns(ranked: Sequence[Ranked]) -> list[Ranked]:
    turn_of: dict[str, int] = {}
    turns: list[tuple[int, int, Ranked]] = []
    for place, entry in enumerate(ranked):
        turn = turn_of.get(entry.offer.provider, 0)
        turn_of[entry.offer.provider] = turn + 1
        turns.append((turn, place, entry))
    return [entry for _, _, entry in sorted(turns, key=lambda item: item[:2])]
