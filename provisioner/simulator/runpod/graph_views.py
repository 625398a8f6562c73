"""Pods and kinds of GPU as GraphQL shows them (providers.md 2.1): desiredStatus is the intent, runtime the fact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from provisioner.simulator.clock import rfc3339
from provisioner.simulator.market.catalog import Gpu
from provisioner.simulator.market.instances import ACTIVE, Instance, Phase
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod.catalog import prices
from provisioner.simulator.runpod.placing import Wish, level, suits
from provisioner.simulator.runpod.pods import runtime_ports

GPU_COUNTS = (1, 2, 4, 8)
STOCK = {"NONE": None, "LOW": "Low", "MEDIUM": "Medium", "HIGH": "High"}


def pod_view(instance: Instance, now: float) -> dict[str, Any]:
    """Return the fields of a Pod."""
    order, running = instance.order, instance.shown is Phase.RUNNING
    return {
        "id": instance.ident,
        "name": instance.label,
        "imageName": order.image,
        "env": [f"{name}={value}" for name, value in order.env.items()],
        "machineId": f"m{instance.machine.machine_id}",
        "machine": {
            "podHostId": f"{instance.ident}-{instance.instance_key[-8:]}",
            "gpuDisplayName": instance.machine.gpu.display_name,
            "location": instance.machine.place,
        },
        "containerDiskInGb": int(order.disk_gb),
        "costPerHr": round(instance.gpu_rate(), 6),
        "desiredStatus": "RUNNING" if instance.shown in ACTIVE else "EXITED",
        "dockerArgs": order.command,
        "dockerId": None,
        "gpuCount": order.gpus,
        "lastStatusChange": f"{instance.phase.value}: {rfc3339(instance.changed_at)}",
        "memoryInGb": 62 * order.gpus,
        "podType": "INTERRUPTABLE" if instance.is_spot else "RESERVED",
        "port": None,
        "ports": ",".join(order.ports) or None,
        "uptimeSeconds": int(now - (instance.started_at or now)) if running else 0,
        "vcpuCount": 16 * order.gpus,
        "volumeInGb": order.asked.get("volumeInGb") or 0,
        "volumeMountPath": order.asked.get("volumeMountPath"),
        "runtime": _runtime(instance, now) if running else None,
    }


def _runtime(instance: Instance, now: float) -> dict[str, Any]:
    ports = [
        {
            "ip": port["ip"] or "100.65.0.7",
            "isIpPublic": port["ip"] is not None and not port["ip"].startswith("100.65."),
            "privatePort": port["private"],
            "publicPort": port["public"] or port["private"],
            "type": port["type"],
        }
        for port in runtime_ports(instance)
    ]
    return {"uptimeInSeconds": int(now - (instance.started_at or now)), "ports": ports}


def gpu_view(world: World, gpu: Gpu) -> dict[str, Any]:
    """Return the fields of a GpuType; `lowestPrice` depends on its arguments."""
    secure, community = prices(world, gpu)
    machines = [machine for machine in world.machines_of("runpod") if machine.gpu is gpu]
    spot = world.scenario.runpod_spot
    return {
        "id": gpu.runpod_id,
        "displayName": gpu.display_name,
        "memoryInGb": gpu.memory_gb,
        "maxGpuCount": max((machine.gpus for machine in machines), default=0),
        "manufacturer": "Nvidia",
        "cudaCores": 0,
        "secureCloud": secure > 0,
        "communityCloud": community > 0,
        "securePrice": secure or None,
        "communityPrice": community or None,
        "oneMonthPrice": None,
        "threeMonthPrice": None,
        "oneWeekPrice": None,
        "communitySpotPrice": round(community / 2, 4) if spot and community else None,
        "secureSpotPrice": round(secure / 2, 4) if spot and secure else None,
        "lowestPrice": _lowest_price(world, gpu),
    }


def _lowest_price(world: World, gpu: Gpu) -> Callable[..., dict[str, Any]]:
    def resolve(_info: object, input: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = input or {}
        count = int(asked.get("gpuCount") or 1)
        cloud = {None: "ALL", True: "SECURE", False: "COMMUNITY"}[asked.get("secureCloud")]
        wish = Wish(gpu.runpod_id, count, cloud, 0.0)
        machines = [machine for machine in world.machines_of("runpod") if suits(machine, wish)]
        bids = [bid for machine in machines if (bid := machine.min_bid(count)) is not None]
        return {
            "minimumBidPrice": min(bids, default=None) if world.scenario.runpod_spot else None,
            "uninterruptablePrice": min((one.price for one in machines if one.rentable(count)), default=None),
            "stockStatus": STOCK[level(machines, count)],
            "availableGpuCounts": [n for n in GPU_COUNTS if any(one.rentable(n) for one in machines)],
        }

    return resolve
