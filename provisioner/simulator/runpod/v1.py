"""RunPod's REST v1, deprecated and to be retired on 2026-11-15: for callers that have not moved (providers.md 2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.clock import rfc3339
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.market.instances import ACTIVE, Instance, Order, Phase, Refused
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod import placing, pods, v2
from provisioner.simulator.runpod.v2_front import target_of
from provisioner.simulator.wire import Reply, Request, json_reply

NO_CAPACITY = "create pod: There are no instances currently available"
OVER_CONSTRAINED = "create pod: could not find any pods with required specifications"


def create(call: Call) -> Reply:
    """`POST /v1/pods`: several kinds of GPU, tried in their order."""
    body = call.request.json()
    kinds = body.get("gpuTypeIds") or []
    known = {machine.gpu.runpod_id for machine in call.world.machines_of("runpod")}
    for index, kind in enumerate(kinds):
        if kind not in known:
            return _error(400, f"body/gpuTypeIds/{index} must be one of the allowed values")
    spot = bool(body.get("interruptible"))
    for kind in kinds:
        wish = placing.Wish(
            kind, int(body.get("gpuCount") or 1), str(body.get("cloudType") or "SECURE"),
            float(body.get("containerDiskInGb") or 50), body.get("dataCenterIds") or [],
            body.get("allowedCudaVersions") or [], None, 1e9 if spot else None,
        )  # fmt: skip
        try:
            return json_reply(201, _pod(_rent(call, wish, body, spot=spot), call.world.now))
        except Refused:
            continue
    return _error(500, OVER_CONSTRAINED if body.get("dataCenterIds") else NO_CAPACITY)


def _rent(call: Call, wish: placing.Wish, body: Mapping[str, Any], *, spot: bool) -> Instance:
    machine = placing.place(call.world, wish)
    order = Order(
        provider="runpod", account=call.account, machine=machine, gpus=wish.count,
        bid=machine.min_bid(wish.count) if spot else None, label=str(body.get("name") or "my pod"),
        image=str(body.get("imageName") or "template"), disk_gb=wish.disk_gb, env=dict(body.get("env") or {}),
        command=" ".join(body.get("dockerStartCmd") or []), ports=tuple(body.get("ports") or ()), asked={**body},
    )  # fmt: skip
    instance = call.world.rent(order, call.fate)
    call.entry.instance = instance.key
    return instance


def list_pods(call: Call) -> Reply:
    """`GET /v1/pods`: a bare array."""
    return json_reply(200, [_pod(one, call.world.now) for one in call.world.listed("runpod", call.account)])


def show(call: Call) -> Reply:
    """`GET /v1/pods/{id}`."""
    instance = call.own("runpod", call.params["id"])
    return _missing() if instance is None else json_reply(200, _pod(instance, call.world.now))


def delete(call: Call) -> Reply:
    """`DELETE /v1/pods/{id}`."""
    instance = call.own("runpod", call.params["id"])
    if instance is None:
        return _missing()
    call.destroy(instance)
    return Reply(204)


def act(call: Call) -> Reply:
    """`POST /v1/pods/{id}/start`, `stop`, `reset` and `restart`."""
    instance, action = call.own("runpod", call.params["id"]), call.params["action"]
    if instance is None:
        return _missing()
    try:
        v2.perform(call, instance, "restart" if action == "reset" else action)
    except Refused as error:
        return _error(500, placing.refusal_text(error))
    return json_reply(200, _pod(instance, call.world.now))


class V1Front:
    """REST v1 over one world; where it is retired, every path is gone."""

    provider = "runpod"
    prefixes = ("/v1/",)

    def __init__(self, world: World) -> None:
        self._world = world
        self._routes = (
            route("POST", "/v1/pods", "create", create),
            route("GET", "/v1/pods", "list", list_pods),
            route("GET", "/v1/pods/{id}", "show", show),
            route("DELETE", "/v1/pods/{id}", "destroy", delete),
            *(
                route("POST", f"/v1/pods/{{id}}/{verb}", verb, _bound(verb))
                for verb in ("start", "stop", "reset", "restart")
            ),
        )

    def find(self, request: Request) -> tuple[Route, dict[str, str]] | Reply:
        """Return the route, or the answer of a retired API."""
        if not self._world.scenario.runpod_v1:
            return _error(410, "REST API v1 has been retired; see https://docs.runpod.io/api-reference-v2")
        return match(self._routes, request) or _error(404, "Not found")

    def target(self, request: Request, endpoint: str, params: Mapping[str, str]) -> Target:
        """Return the first kind of GPU and the name, or the pod that the path names."""
        if endpoint == "create":
            body = request.json()
            kinds = body.get("gpuTypeIds") or [None]
            return Target("runpod", endpoint, offer=kinds[0], label=str(body.get("name") or ""))
        return target_of(self._world, endpoint, params.get("id"))

    def limited(self, call: Call) -> Reply | None:
        """No rate limit of v1 is documented."""
        return None

    def refusal(self, request: Request, fault: Fault, target: Target) -> Reply:
        """Write what a fault orders."""
        match fault.kind:
            case "no_capacity":
                return _error(500, NO_CAPACITY)
            case "unauthorized":
                return _error(401, "Unauthorized")
            case "rate_limited":
                return _error(429, "Too many requests")
            case "no_credit":
                return _error(402, "Insufficient balance")
            case "bad_request":
                return _error(400, str(fault.params.get("detail")))
            case "retired" | "field_removed":
                return _error(int(fault.params.get("status", 410)), "Gone")
            case _:
                return _error(int(fault.params.get("status", 500)), "Internal server error")

    def finish(self, call: Call, reply: Reply) -> Reply:
        """v1 adds nothing to its answers."""
        return reply


def _bound(verb: str) -> Any:
    def handler(call: Call) -> Reply:
        call.params = {**call.params, "action": verb}
        return act(call)

    return handler


def _pod(instance: Instance, now: float) -> dict[str, Any]:
    order = instance.order
    live = pods.runtime_ports(instance) if instance.shown is Phase.RUNNING else []
    return {
        "id": instance.ident,
        "name": instance.label,
        "desiredStatus": "RUNNING" if instance.shown in ACTIVE else "EXITED",
        "lastStatusChange": f"{instance.phase.value}: {rfc3339(instance.changed_at)}",
        "lastStartedAt": None if instance.started_at is None else rfc3339(instance.started_at),
        "costPerHr": f"{instance.gpu_rate():.2f}",
        "adjustedCostPerHr": round(instance.gpu_rate(), 4),
        "interruptible": instance.is_spot,
        "machineId": f"m{instance.machine.machine_id}",
        "machine": {"dataCenterId": instance.machine.place, "gpuTypeId": instance.machine.gpu.runpod_id},
        "publicIp": pods.public_ip(instance) if live else "",
        "portMappings": {str(port["private"]): port["public"] for port in live if port["public"]},
        "gpu": {"id": instance.machine.gpu.runpod_id, "count": order.gpus},
        "image": order.image,
        "env": dict(order.env),
        "ports": list(order.ports),
        "containerDiskInGb": int(order.disk_gb),
    }


def _error(status: int, text: str) -> Reply:
    return json_reply(status, {"error": text, "message": text, "status": status})


def _missing() -> Reply:
    return _error(404, "Pod not found")
