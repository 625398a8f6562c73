"""Find a machine for a pod: RunPod's callers name a kind of GPU and constraints, never a machine (providers.md 2.3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from provisioner.simulator.market.instances import Reason, Refused
from provisioner.simulator.market.machines import Machine
from provisioner.simulator.market.world import World

NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)
NO_CAPACITY_SPOT = "There are no instances available with the request specifications. Please try again later."
NO_DISK = "There are no longer any instances available with enough disk space."
NO_FREE_GPUS = "There are not enough free GPUs on the host machine to start this pod."
"""The texts as seen (providers.md 2.1); they are all that tells these refusals apart."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pod needs of its machine."""

    gpu_id: str
    count: int
    cloud: str
    """SECURE, COMMUNITY or ALL."""
    disk_gb: float
    centers: Collection[str] = ()
    cuda_allowed: Collection[str] = ()
    cuda_min: str | None = None
    bid: float | None = None
    """Dollars per GPU-hour."""


def suits(machine: Machine, wish: Wish) -> bool:
    """Return whether *machine* is of the kind that was asked for, free or not."""
    return (
        machine.gpu.runpod_id == wish.gpu_id
        and machine.gpus >= wish.count
        and in_cloud(machine, wish.cloud)
        and (not wish.centers or machine.place in wish.centers)
        and (not wish.cuda_allowed or machine.cuda in wish.cuda_allowed)
        and (wish.cuda_min is None or version(machine.cuda) >= version(wish.cuda_min))
    )


def place(world: World, wish: Wish) -> Machine:
    """Return the machine with most free GPUs that can take the pod now, or raise Refused."""
    suitable = [machine for machine in world.machines_of("runpod") if suits(machine, wish)]
    if suitable and all(machine.disk_gb < wish.disk_gb for machine in suitable):
        raise Refused(Reason.NO_DISK, f"{wish.disk_gb} GB of disk, {wish.gpu_id}")
    able = [machine for machine in suitable if machine.disk_gb >= wish.disk_gb and _takes(machine, wish)]
    if not able:
        raise Refused(Reason.NO_CAPACITY, f"{wish.count} of {wish.gpu_id} in {', '.join(wish.centers) or 'any center'}")
    return max(able, key=lambda machine: (machine.free(), -machine.machine_id))


def _takes(machine: Machine, wish: Wish) -> bool:
    if wish.bid is None:
        return machine.rentable(wish.count)
    lowest = machine.min_bid(wish.count)
    return lowest is not None and wish.bid >= lowest


def in_cloud(machine: Machine, cloud: str) -> bool:
    """Return whether *machine* belongs to that cloud."""
    return cloud == "ALL" or machine.secure == (cloud == "SECURE")


def version(text: str) -> tuple[int, ...]:
    """Return a CUDA version to compare: 12.11 is above 12.2.

    >>> version("12.11") > version("12.2")
    True
    """
    return tuple(int(part) for part in text.split("."))


def level(machines: Iterable[Machine], count: int) -> str:
    """Return the catalog's stock level of *count* GPUs on *machines*."""
    known = list(machines)
    free = sum(1 for machine in known if machine.rentable(count))
    if free == 0:
        return "NONE"
    share = free / len(known)
    return "LOW" if share <= 0.25 else "MEDIUM" if share <= 0.6 else "HIGH"


def refusal_text(error: Refused) -> str:
    """Return RunPod's text for a refusal."""
    match error.reason:
        case Reason.NO_DISK:
            return NO_DISK
        case Reason.NO_GPUS:
            return NO_FREE_GPUS
        case _:
            return NO_CAPACITY
