"""Machines and the offers on them: what a host has, what it asks, and who holds its GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from provisioner.simulator.draws import Draws
from provisioner.simulator.market.catalog import CUDA_VERSIONS, GPUS, RUNPOD_CENTERS, VAST_PLACES, Gpu
from provisioner.simulator.market.claims import Claim, granted, min_bid, room_on_demand

HOURS_PER_MONTH = 720
"""Storage is priced by the month of 720 hours (providers.md 1.2)."""

ASKS_PER_MACHINE = 8


@dataclass(slots=True)
class Machine:
    """One host's machine. Prices are dollars per GPU-hour unless their name says otherwise."""

    machine_id: int
    host_id: int
    provider: str
    gpu: Gpu
    gpus: int
    place: str
    """Vast's geolocation, RunPod's data centre."""
    price: float
    floor: float
    storage_cost: float
    """Dollars per GB and month."""
    reliability: float
    up_mbps: float
    down_mbps: float
    up_cost: float
    """Dollars per GB sent."""
    down_cost: float
    disk_gb: float
    cuda: str
    secure: bool
    contract_end: float
    """When the host takes the machine back."""
    delisted: bool = False
    claims: list[Claim] = field(default_factory=list)
    images: set[str] = field(default_factory=set)
    """Images that a container was started from here."""

    def served(self) -> list[Claim]:
        """Return the claims that hold GPUs now."""
        return granted(self.gpus, self.claims)

    def serves(self, claim: Claim) -> bool:
        """Return whether *claim* holds its GPUs now."""
        return any(held is claim for held in self.served())

    def free(self) -> int:
        """Return how many GPUs nobody holds."""
        return self.gpus - sum(claim.gpus for claim in self.served())

    def min_bid(self, gpus: int) -> float | None:
        """Return the lowest bid per GPU that gets *gpus* now."""
        return min_bid(self.gpus, self.claims, gpus=gpus, floor=self.floor)

    def rentable(self, gpus: int) -> bool:
        """Return whether *gpus* can be rented on-demand now."""
        return not self.delisted and room_on_demand(self.gpus, self.claims) >= gpus


@dataclass(frozen=True, slots=True)
class Offer:
    """Some GPUs of one machine, as Vast lists them: an ask contract."""

    ask_id: int
    machine: Machine
    gpus: int


def offers_on(machine: Machine) -> Iterator[Offer]:
    """Yield the asks of *machine*: its GPUs in powers of two, as hosts cut them."""
    for index in range(ASKS_PER_MACHINE):
        gpus = 1 << index
        if gpus > machine.gpus:
            return
        yield Offer(machine.machine_id * ASKS_PER_MACHINE + index, machine, gpus)


def make_machines(draws: Draws, provider: str, count: int, *, first_id: int) -> list[Machine]:
    """Draw *count* machines; the kinds of GPU take turns, so that each is there."""
    return [
        _machine(draws.stream(index), provider, GPUS[index % len(GPUS)], first_id + index) for index in range(count)
    ]


def _machine(draws: Draws, provider: str, gpu: Gpu, machine_id: int) -> Machine:
    vast = provider == "vast"
    secure = draws.chance(0.6)
    # A host of Vast asks what it likes; RunPod has one list price per kind of GPU and cloud.
    price = round(gpu.price * (draws.between(0.85, 1.30) if vast else 1.35 if secure else 1.15), 4)
    link = draws.one_of((500.0, 1000.0, 2500.0, 10_000.0))
    return Machine(
        machine_id=machine_id,
        host_id=50_000 + draws.whole(0, 400),
        provider=provider,
        gpu=gpu,
        gpus=draws.one_of((1, 2, 4, 8)),
        place=draws.one_of(VAST_PLACES) if vast else draws.one_of(RUNPOD_CENTERS)[0],
        price=price,
        floor=round(price * draws.between(0.40, 0.65), 4),
        storage_cost=round(draws.between(0.10, 0.25), 3),
        reliability=round(draws.between(0.93, 0.9995), 4),
        up_mbps=round(link * draws.between(0.5, 0.95), 1),
        down_mbps=round(link * draws.between(0.6, 0.98), 1),
        up_cost=round(draws.between(0.0, 0.03), 4) if vast else 0.0,
        down_cost=round(draws.between(0.0, 0.03), 4) if vast else 0.0,
        disk_gb=float(draws.whole(200, 4000)),
        cuda=draws.one_of(CUDA_VERSIONS),
        secure=secure,
        contract_end=draws.between(3, 60) * 86_400,
    )
