"""RunPod's REST v2, the primary protocol: its routes, its quota and its own refusals (providers.md 2.3)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.limits import Windows
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod import catalog, checks, placing, v2
from provisioner.simulator.runpod.problems import problem, unprocessable
from provisioner.simulator.wire import Reply, Request, json_reply


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
            route("POST", "/v2/pods", "create", v2.create),
            route("GET", "/v2/pods", "list", v2.list_pods),
            route("GET", one, "show", v2.show),
            route("PATCH", one, "change", v2.update),
            route("DELETE", one, "destroy", v2.delete),
            route("POST", "/v2/pods/{id}/action", "action", v2.act),
            route("GET", "/v2/catalog/gpus", "search", catalog.list_gpus),
            route("GET", "/v2/catalog/gpus/{id}", "search", catalog.show_gpu),
            route("GET", "/v2/catalog/datacenters", "search", catalog.list_centers),
            route("GET", "/v2/billing/pods", "billing", v2.billing),
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
