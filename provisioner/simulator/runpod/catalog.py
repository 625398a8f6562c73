"""REST v2's catalog: kinds of GPU with prices and stock, and data centres (providers.md 2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.market.catalog import CUDA_VERSIONS, GPUS, RUNPOD_CENTERS, Gpu
from provisioner.simulator.market.machines import Machine
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod.placing import in_cloud, level, version
from provisioner.simulator.runpod.problems import problem
from provisioner.simulator.wire import Reply, json_reply


def list_gpus(call: Call) -> Reply:
    """`GET /v2/catalog/gpus`; AVAILABILITY needs `product`."""
    query = call.request.query
    if "AVAILABILITY" in query.get("include", "").split(",") and not query.get("product"):
        return problem(400, "include=AVAILABILITY requires product")
    return json_reply(200, {"gpus": [_gpu(call, gpu) for gpu in GPUS]})


def show_gpu(call: Call) -> Reply:
    """`GET /v2/catalog/gpus/{id}`."""
    wanted = call.params["id"].replace("%20", " ")
    found = next((gpu for gpu in GPUS if gpu.runpod_id == wanted), None)
    return problem(404, f"GPU type {wanted} not found") if found is None else json_reply(200, _gpu(call, found))


def list_centers(call: Call) -> Reply:
    """`GET /v2/catalog/datacenters`, filtered by regions."""
    query = call.request.query
    regions = set(filter(None, query.get("regions", "").split(",")))
    wants_stock = "GPU_AVAILABILITY" in query.get("include", "").split(",")
    centers = []
    for ident, name, region in RUNPOD_CENTERS:
        if regions and region not in regions:
            continue
        here = [machine for machine in call.world.machines_of("runpod") if machine.place == ident]
        center: dict[str, Any] = {
            "id": ident, "name": name, "region": region, "globalNetwork": True, "networkVolumeTypes": ["STANDARD"],
            "compliance": ["SOC_2_TYPE_2"],
        }  # fmt: skip
        if wants_stock and here:
            center["gpuAvailability"] = [
                {"id": gpu.runpod_id, "name": gpu.display_name, "availability": level(_of(here, gpu), 1)}
                for gpu in GPUS
                if _of(here, gpu)
            ]
        centers.append(center)
    return json_reply(200, {"dataCenters": centers})


def prices(world: World, gpu: Gpu) -> tuple[float, float]:
    """Return the list prices per GPU-hour in the secure and the community cloud, 0 where there is none."""
    machines = _of(world.machines_of("runpod"), gpu)
    secure = [machine.price for machine in machines if machine.secure]
    community = [machine.price for machine in machines if not machine.secure]
    return min(secure, default=0.0), min(community, default=0.0)


def _gpu(call: Call, gpu: Gpu) -> dict[str, Any]:
    query, world = call.request.query, call.world
    every = _of(world.machines_of("runpod"), gpu)
    secure, community = prices(world, gpu)
    row: dict[str, Any] = {
        "id": gpu.runpod_id,
        "name": gpu.display_name,
        "pool": gpu.pool,
        "manufacturer": "NVIDIA",
        "memory": gpu.memory_gb,
        "secure": any(machine.secure for machine in every),
        "community": any(not machine.secure for machine in every),
        "price": {"secure": secure, "community": community},
        "maxCount": {
            "secure": max((machine.gpus for machine in every if machine.secure), default=0),
            "community": max((machine.gpus for machine in every if not machine.secure), default=0),
        },
    }
    if "AVAILABILITY" not in query.get("include", "").split(","):
        return row
    count = int(query.get("count") or 1)
    kept = [machine for machine in every if machine.gpus >= count and _asked(machine, query)]
    row["availability"] = level(kept, count)
    if centers := _stock_by_center(kept, count):
        row["dataCenters"] = centers
    row["cudaVersions"] = [
        {"version": cuda, "available": any(machine.rentable(count) for machine in kept if machine.cuda == cuda)}
        for cuda in CUDA_VERSIONS
        if any(machine.cuda == cuda for machine in kept)
    ]
    return row


def _asked(machine: Machine, query: Any) -> bool:
    allowed = [cuda for cuda in query.get("cudaVersions", "").split(",") if cuda]
    lowest = query.get("minCudaVersion")
    return (
        in_cloud(machine, query.get("cloud") or "ALL")
        and (not allowed or machine.cuda in allowed)
        and (not lowest or version(machine.cuda) >= version(lowest))
    )


def _stock_by_center(machines: Sequence[Machine], count: int) -> list[dict[str, Any]]:
    found = []
    for ident, name, _ in RUNPOD_CENTERS:
        here = [machine for machine in machines if machine.place == ident]
        if here:
            found.append({"id": ident, "name": name, "availability": level(here, count)})
    return found if any(center["availability"] != "NONE" for center in found) else []


def _of(machines: Any, gpu: Gpu) -> list[Machine]:
    return [machine for machine in machines if machine.gpu is gpu]
