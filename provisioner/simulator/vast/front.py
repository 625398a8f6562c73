"""The routes of Vast's API, what a request is about, and the API's own refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.limits import Intervals
from provisioner.simulator.market.machines import ASKS_PER_MACHINE
from provisioner.simulator.market.world import World
from provisioner.simulator.vast import create, listing, replies, search, verbs
from provisioner.simulator.wire import Reply, Request, text_reply

GPU_NAMES = "/api/v0/gpu_names/unique"
"""Asked without a key (providers.md 1.1)."""

SEARCHES = frozenset({"search"})
TOO_MANY_FORMS = ("text", "text_threshold", "json", "detail")
"""Vast does not set Retry-After by itself (providers.md 1.6); a fault may order it."""


class VastFront:
    """Vast's protocol over one world."""

    provider = "vast"
    prefixes = ("/api/",)

    def __init__(self, world: World) -> None:
        self._world = world
        self._intervals = Intervals(world.latencies)
        self._draws = world.draws.stream("vast refusals")
        one, all_of = "/api/v0/instances/{id}/", "/api/v0/instances/"
        self._routes = (
            route("POST", "/api/v0/bundles/", "search", search.search_post),
            route("GET", "/api/v0/bundles/", "search", search.search_get),
            route("PUT", "/api/v0/search/asks/", "search", search.search_put),
            route("POST", "/api/v0/asks/bulk/", "create", create.create_bulk),
            route("PUT", "/api/v0/asks/{id}/", "create", create.create),
            route("GET", "/api/v1/instances/", "list", listing.list_instances),
            route("GET", all_of, "list", listing.list_instances_v0),
            route("DELETE", all_of, "destroy", verbs.destroy_bulk),
            route("PUT", "/api/v0/instances/bid_price/{id}/", "bid", verbs.change_bid),
            route("PUT", "/api/v0/instances/reboot/{id}/", "reboot", verbs.reboot),
            route("PUT", "/api/v0/instances/recycle/{id}/", "reboot", verbs.reboot),
            route("PUT", "/api/v0/instances/request_logs/{id}/", "logs", verbs.request_later),
            route("PUT", "/api/v0/instances/command/{id}/", "execute", verbs.request_later),
            route("POST", "/api/v0/instances/{id}/ssh/", "attach", verbs.attach_key),
            route("GET", one, "show", listing.show_instance),
            route("PUT", one, "change", verbs.change),
            route("DELETE", one, "destroy", verbs.destroy),
            route("GET", "/api/v0/users/current/", "user", verbs.user),
            route("GET", "/api/v0/ssh/", "keys", verbs.keys),
        )

    def find(self, request: Request) -> tuple[Route, dict[str, str]] | Reply:
        """Return the route, or 404 with an HTML page as the real server gives."""
        if request.method == "GET" and request.path.rstrip("/") == GPU_NAMES:
            return search.gpu_names()
        return match(self._routes, request) or text_reply(
            404, "<html><body><h1>404 Not Found</h1></body></html>", media="text/html"
        )

    def target(self, request: Request, endpoint: str, params: Mapping[str, str]) -> Target:
        """Return the offer or instance of the path, and the label of either."""
        ident = params.get("id")
        if endpoint == "create":
            body = request.json()
            machine = str(int(ident) // ASKS_PER_MACHINE) if ident and ident.isdigit() else None
            return Target("vast", endpoint, offer=ident, machine=machine, label=str(body.get("label") or ""))
        if endpoint == "change":
            state = request.json().get("state")
            endpoint = {"running": "start", "stopped": "stop"}.get(str(state), "label")
        instance = self._world.find("vast", ident) if ident else None
        if instance is None:
            return Target("vast", endpoint)
        machine = str(instance.machine.machine_id)
        return Target("vast", endpoint, str(instance.order.asked.get("ask_id")), machine, instance.label)

    def limited(self, call: Call) -> Reply | None:
        """Refuse a request that follows its predecessor too soon, in one of the forms seen."""
        if not self._world.scenario.limits or self._intervals.accept(call.endpoint, call.key, self._world.now):
            return None
        return replies.too_many(self._intervals.threshold(call.endpoint), self._draws.one_of(TOO_MANY_FORMS))

    def refusal(self, request: Request, fault: Fault, target: Target) -> Reply:
        """Write what a fault orders (providers.md 7.3)."""
        params: Mapping[str, Any] = fault.params
        status = int(params.get("status", 500))
        match fault.kind:
            case "no_capacity":
                return replies.no_such_ask(int(target.offer or 0), str(params.get("form", "410")))
            case "rate_limited":
                return replies.too_many(self._intervals.threshold(target.endpoint), str(params.get("form", "json")))
            case "success_false":
                return replies.failure(200, "error", str(params.get("msg", "Something went wrong")))
            case "unauthorized":
                return replies.unauthorized(searching=target.endpoint in SEARCHES)
            case "no_credit":
                return replies.failure(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
            case "bad_request":
                return replies.invalid_args(str(params.get("detail")))
            case "retired" | "field_removed":
                return text_reply(410, "Gone")
            case _:
                return replies.failure(status, "server_error", "Internal server error")

    def finish(self, call: Call, reply: Reply) -> Reply:
        """Vast adds nothing to its answers."""
        return reply
