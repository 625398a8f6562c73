"""RunPod's REST v2, the primary protocol (providers.md 2.3; RunPod's OpenAPI file, version 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.clock import rfc3339
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.limits import Windows
from provisioner.simulator.market.instances import Instance, Order, Phase, Reason, Refused
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod import catalog, checks, placing
from provisioner.simulator.runpod.pods import actions, pod
from provisioner.simulator.runpod.problems import not_found, problem, unprocessable
from provisioner.simulator.wire import Reply, Request, json_reply

ENV_MAX = 50
"""Variables per pod (providers.md 2.4)."""

NAME_CHARS_MAX = 191
SECONDS_PER_HOUR = 3600


def create(call: Call) -> Reply:
    """`POST /v2/pods`: one kind of GPU, no fallback, no idempotency key."""
    try:
        body = checks.CreatePod.model_validate(call.request.json())
    except ValidationError as error:
        return unprocessable(error)
    if (broken := checks.broken_rule(body)) or (broken := _beyond_limits(body)):
        return problem(400, broken)
    assert body.gpu is not None
    disk_gb = float(body.disk + (body.mounts.persistent.size if body.mounts.persistent else 0))
    wish = placing.Wish(
        body.gpu.id, body.gpu.count, body.cloud, disk_gb, body.dataCenterIds,
        body.gpu.allowedCudaVersions, body.gpu.minCudaVersion,
    )  # fmt: skip
    try:
        machine = placing.place(call.world, wish)
        order = Order(
            provider="runpod", account=call.account, machine=machine, gpus=body.gpu.count, bid=None, label=body.name,
            image=body.image or "template", disk_gb=float(body.disk), env=body.env, command=body.args,
            ports=tuple(body.ports),
            asked={"mounts": body.mounts.model_dump(exclude_none=True), "registry": body.registry},
        )  # fmt: skip
        instance = call.world.rent(order, call.fate)
    except Refused as error:
        return _no(error)
    call.entry.instance = instance.key
    return json_reply(201, pod(instance, call.world.now))


def list_pods(call: Call) -> Reply:
    """`GET /v2/pods`: a terminated pod is not in it."""
    found = [one for one in call.world.listed("runpod", call.account) if call.scope in (None, one)]
    return json_reply(200, {"pods": [pod(instance, call.world.now) for instance in found]})


def show(call: Call) -> Reply:
    """`GET /v2/pods/{id}`."""
    instance = _own(call)
    if instance is None or instance.hidden_until > call.world.now:
        return not_found(call.params["id"])
    return json_reply(200, pod(instance, call.world.now))


def update(call: Call) -> Reply:
    """`PATCH /v2/pods/{id}`: its name and its lock; a new container configuration is accepted and not applied."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    try:
        body = checks.UpdatePod.model_validate(call.request.json())
    except ValidationError as error:
        return unprocessable(error)
    if body.name is not None:
        instance.label = body.name
    if body.locked is not None:
        instance.locked = body.locked
    return json_reply(200, pod(instance, call.world.now))


def delete(call: Call) -> Reply:
    """`DELETE /v2/pods/{id}`: 204 without a body."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    destroy(call, instance)
    return Reply(204)


def act(call: Call) -> Reply:
    """`POST /v2/pods/{id}/action`: 409 for what the pod's status does not allow."""
    instance = _own(call)
    if instance is None:
        return not_found(call.params["id"])
    try:
        action = checks.PodActionBody.model_validate(call.request.json()).action
    except ValidationError as error:
        return unprocessable(error)
    if action not in actions(instance):
        return problem(
            409, f"action {action} is not valid for pod {instance.ident}; valid: {', '.join(actions(instance))}"
        )
    if action == "terminate":
        destroy(call, instance)
        return Reply(204)
    try:
        perform(call, instance, action)
    except Refused as error:
        return problem(400, placing.refusal_text(error))
    return json_reply(200, pod(instance, call.world.now))


def perform(call: Call, instance: Instance, action: str) -> None:
    """Start, stop or restart a pod, or raise Refused. A stop wipes the container's disk (providers.md 2.4)."""
    match action:
        case "stop":
            call.world.stop(instance)
            call.world.lives.nodes.wipe(instance)
        case "restart":
            call.world.lives.restart(instance)
        case _:
            if fault := call.struck_by("taken"):
                machine = instance.machine
                call.world.rivals.take(machine, machine.gpus, float(fault.params.get("for_s", 600.0)))
            if instance.phase is Phase.BROKEN:
                call.world.stop(instance)
            call.world.start(instance, queue=False)


def destroy(call: Call, instance: Instance) -> None:
    """End a pod, unless a fault says yes and does it later."""
    fault = call.struck_by("destroy_ignored")
    if fault is None:
        call.world.destroy(instance)
        return
    call.world.event("destroy ignored", instance)
    if (for_s := fault.params.get("for_s")) is not None:
        late = lambda: call.world.destroy(instance) if instance.phase is not Phase.GONE else None  # noqa: E731
        call.world.agenda.after(float(for_s), late)


def billing(call: Call) -> Reply:
    """`GET /v2/billing/pods`: one record per pod and hour begun (schema ListPodBillingResponse)."""
    world, wanted = call.world, call.request.query.get("podId")
    records: list[dict[str, Any]] = []
    for bill in world.ledger.settled(world.now):
        ident = bill.key.removeprefix("runpod:")
        if bill.provider != "runpod" or bill.owner != call.account or (wanted and ident != wanted):
            continue
        start = bill.opened_at - bill.opened_at % SECONDS_PER_HOUR
        end = world.now - world.now % SECONDS_PER_HOUR + SECONDS_PER_HOUR
        amounts = {"totalAmount": bill.total(), "gpuAmount": bill.gpu, "cpuAmount": 0.0, "diskAmount": bill.storage}
        records.append({"podId": ident, "startTime": rfc3339(start), "endTime": rfc3339(end), **amounts})
    names = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
    starts = [record["startTime"] for record in records]
    query = {"startTime": min(starts, default=rfc3339(world.now)), "endTime": rfc3339(world.now), "bucketSize": "hour"}
    metadata = {
        "query": query | ({"podId": wanted} if wanted else {}),
        "recordCount": len(records),
        "uniquePodCount": len({record["podId"] for record in records}),
        "totals": {name: sum(record[name] for record in records) for name in names},
    }
    return json_reply(200, {"records": records, "metadata": metadata})


class V2Front:
    """REST v2 over one world."""

    provider = "runpod"
    prefixes = ("/v2/",)

    def __init__(self, world: World) -> None:
        self._world = world
        self._windows = Windows(world.latencies)
        self._keys: dict[str, list[str]] = {}
        one = "/v2/pods/{id}"
        self._routes = (
            route("POST", "/v2/pods", "create", create),
            route("GET", "/v2/pods", "list", list_pods),
            route("GET", one, "show", show),
            route("PATCH", one, "change", update),
            route("DELETE", one, "destroy", delete),
            route("POST", "/v2/pods/{id}/action", "action", act),
            route("GET", "/v2/catalog/gpus", "search", catalog.list_gpus),
            route("GET", "/v2/catalog/gpus/{id}", "search", catalog.show_gpu),
            route("GET", "/v2/catalog/datacenters", "search", catalog.list_centers),
            route("GET", "/v2/billing/pods", "billing", billing),
            route("GET", "/v2/account/ssh-keys", "keys", self._show_keys),
            route("PUT", "/v2/account/ssh-keys", "keys", self._set_keys),
        )

    def find(self, request: Request) -> tuple[Route, dict[str, str]] | Reply:
        """Return the route, 405 for another method of a known path, or 404."""
        if found := match(self._routes, request):
            return found
        methods = sorted({known.method for known in self._routes if known.pattern.fullmatch(request.path)})
        if methods:
            return problem(405, f"{request.method} is not supported here", headers={"Allow": ", ".join(methods)})
        return problem(404, f"{request.path} not found")

    def target(self, request: Request, endpoint: str, params: Mapping[str, str]) -> Target:
        """Return the kind of GPU, the machine and the name that a request is about."""
        if endpoint == "create":
            body = request.json()
            gpu = body.get("gpu")
            return Target(
                "runpod", endpoint, offer=str(gpu.get("id")) if isinstance(gpu, dict) else None,
                label=str(body.get("name") or ""),
            )  # fmt: skip
        if endpoint == "action":
            action = str(request.json().get("action"))
            endpoint = {"terminate": "destroy"}.get(action, action)
        return target_of(self._world, endpoint, params.get("id"))

    def limited(self, call: Call) -> Reply | None:
        """Refuse beyond a window's quota, with Retry-After in whole seconds."""
        if not self._world.scenario.limits:
            return None
        wait_s = self._windows.accept(call.account, self._world.now)
        return None if wait_s is None else _too_many(wait_s)

    def refusal(self, request: Request, fault: Fault, target: Target) -> Reply:
        """Write what a fault orders (providers.md 7.3)."""
        status = int(fault.params.get("status", 500))
        match fault.kind:
            case "no_capacity":
                return problem(400, placing.NO_CAPACITY)
            case "rate_limited":
                return _too_many(int(fault.params.get("wait_s", 7)))
            case "unauthorized":
                return problem(401, "the bearer token is missing, malformed, expired, or invalid")
            case "no_credit":
                return problem(402, "insufficient balance")
            case "success_false":
                return problem(403, "your account cannot access the requested pool")
            case "bad_request":
                return problem(422, str(fault.params.get("detail")))
            case "retired" | "field_removed":
                return problem(410, "gone")
            case _:
                return problem(status, "upstream failure")

    def finish(self, call: Call, reply: Reply) -> Reply:
        """Add the quota's headers, which come with every authenticated answer."""
        headers = {**reply.headers, **self._windows.headers(call.account, self._world.now)}
        return Reply(reply.status, reply.body, headers, reply.dropped, reply.dribble_s)

    def _show_keys(self, call: Call) -> Reply:
        return json_reply(200, {"keys": self._keys.get(call.account, [])})

    def _set_keys(self, call: Call) -> Reply:
        try:
            self._keys[call.account] = checks.SshKeysBody.model_validate(call.request.json()).keys
        except ValidationError as error:
            return unprocessable(error)
        return self._show_keys(call)


def target_of(world: World, endpoint: str, ident: str | None) -> Target:
    """Return what a call about the pod *ident* is about."""
    instance = world.find("runpod", ident) if ident else None
    if instance is None:
        return Target("runpod", endpoint)
    machine = instance.machine
    return Target("runpod", endpoint, machine.gpu.runpod_id, str(machine.machine_id), instance.label)


def _too_many(wait_s: int) -> Reply:
    return problem(429, f"rate limit exceeded, retry in {wait_s} s", headers={"Retry-After": str(wait_s)})


def _no(error: Refused) -> Reply:
    return (
        problem(402, "insufficient balance")
        if error.reason is Reason.NO_CREDIT
        else problem(400, placing.refusal_text(error))
    )


def _beyond_limits(body: checks.CreatePod) -> str | None:
    if len(body.env) > ENV_MAX:
        return f"env has {len(body.env)} variables, at most {ENV_MAX} are allowed"
    return f"name is longer than {NAME_CHARS_MAX}" if len(body.name) > NAME_CHARS_MAX else None


def _own(call: Call) -> Instance | None:
    return call.own("runpod", call.params["id"])
