"""RunPod's GraphQL, which the official SDK speaks and which alone has spot pods and terminateAfter (providers.md 2.1).

Refusals come with HTTP 200 and an `errors` list; a query that does not fit the schema gets 400. There is no rate limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graphql import GraphQLError, GraphQLSchema, OperationDefinitionNode, build_schema, graphql_sync, parse
from graphql.language import FieldNode
from graphql.utilities import value_from_ast_untyped

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.clock import from_rfc3339
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.market.catalog import GPUS
from provisioner.simulator.market.instances import Instance, Order, Reason, Refused
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod import placing, v2
from provisioner.simulator.runpod.graph_views import gpu_view, pod_view
from provisioner.simulator.runpod.schema import SPOT, TYPES
from provisioner.simulator.wire import Reply, Request, json_reply

ENDPOINTS = {
    "podFindAndDeployOnDemand": "create",
    "podRentInterruptable": "create",
    "podTerminate": "destroy",
    "podStop": "stop",
    "podResume": "start",
    "podBidResume": "bid",
    "pod": "show",
    "myself": "list",
    "gpuTypes": "search",
}
WENT_WRONG = "Something went wrong. Please try again later or contact support."
NO_POD_TO_TERMINATE = "pod not found to terminate"
SPOT_IS_NO_ON_DEMAND = "Cannot resume a spot pod as an on demand pod."


class GraphFront:
    """GraphQL over one world."""

    provider = "runpod"
    prefixes = ("/graphql",)

    def __init__(self, world: World) -> None:
        self._world = world
        self._schema: GraphQLSchema = build_schema(TYPES + (SPOT if world.scenario.runpod_spot else ""))
        self._routes = (route("POST", "/graphql", "graphql", self._execute),)

    def find(self, request: Request) -> tuple[Route, dict[str, str]] | Reply:
        """Return the only route, or 405."""
        return match(self._routes, request) or json_reply(405, {"errors": [{"message": "POST a query"}]})

    def target(self, request: Request, endpoint: str, params: Mapping[str, str]) -> Target:
        """Return what the query's first field is about; a query that cannot be read is about nothing."""
        field, arguments = _first_field(request.json())
        endpoint = ENDPOINTS.get(field, "graphql")
        asked = arguments.get("input") or {}
        if endpoint == "create":
            gpu, name = asked.get("gpuTypeId"), asked.get("name")
            return Target("runpod", endpoint, offer=gpu and str(gpu), label=str(name or ""))
        return v2.target_of(self._world, endpoint, asked.get("podId"))

    def limited(self, call: Call) -> Reply | None:
        """No rate limit of GraphQL is documented."""
        return None

    def refusal(self, request: Request, fault: Fault, target: Target) -> Reply:
        """Write what a fault orders (providers.md 7.3)."""
        match fault.kind:
            case "no_capacity":
                spot = "podRentInterruptable" in request.body.decode("utf-8", "replace")
                return _errors(placing.NO_CAPACITY_SPOT if spot else placing.NO_CAPACITY, "RUNPOD")
            case "unauthorized":
                return json_reply(401, {"errors": [{"message": "Unauthorized"}]})
            case "rate_limited":
                return json_reply(429, {"errors": [{"message": "Too many requests"}]})
            case "no_credit":
                return _errors("You do not have enough balance to deploy this pod.", "RUNPOD")
            case "field_removed":
                field = fault.params.get("field", _first_field(request.json())[0])
                message = f'Cannot query field "{field}" on type "Mutation".'
                return json_reply(
                    400, {"errors": [{"message": message, "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}]}
                )
            case "bad_request":
                return json_reply(400, {"errors": [{"message": str(fault.params.get("detail"))}]})
            case "retired":
                return json_reply(410, {"errors": [{"message": "GraphQL is retired"}]})
            case "server_error":
                return json_reply(int(fault.params.get("status", 500)), {"errors": [{"message": WENT_WRONG}]})
            case _:
                return _errors(WENT_WRONG, "INTERNAL_SERVER_ERROR")

    def finish(self, call: Call, reply: Reply) -> Reply:
        """GraphQL's answers carry nothing more."""
        return reply

    def _execute(self, call: Call) -> Reply:
        body = call.request.json()
        result = graphql_sync(
            self._schema, str(body.get("query") or ""), _Resolvers(call).root(),
            variable_values=body.get("variables"), operation_name=body.get("operationName"),
        )  # fmt: skip
        return json_reply(400 if result.data is None and _is_malformed(result.errors) else 200, result.formatted)


class _Resolvers:
    """The fields of Query and Mutation for one call."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._world = call.world

    def root(self) -> dict[str, Any]:
        """Return the resolvers by field; each takes the field's arguments by keyword."""
        return {
            "myself": lambda _info: self._myself(),
            "pod": lambda _info, input=None: self._pod(input),
            "gpuTypes": lambda _info, input=None: self._gpu_types(input or {}),
            "podFindAndDeployOnDemand": lambda _info, input=None: self._deploy(input or {}),
            "podRentInterruptable": lambda _info, input: self._deploy(input, float(input["bidPerGpu"])),
            "podStop": lambda _info, input: self._perform(input, "stop"),
            "podResume": lambda _info, input: self._resume(input),
            "podBidResume": lambda _info, input: self._bid_resume(input),
            "podTerminate": lambda _info, input: self._terminate(input),
        }

    def _myself(self) -> dict[str, Any]:
        listed = self._world.listed("runpod", self._call.account)
        return {
            "id": "user_simulated",
            "email": "simulated@example.com",
            "pubKey": None,
            "clientBalance": self._world.credit_left(self._call.account),
            "pods": [self._view(one) for one in listed if self._call.scope in (None, one)],
            "networkVolumes": [],
        }

    def _pod(self, wish: dict[str, Any] | None) -> dict[str, Any] | None:
        instance = self._call.own("runpod", str((wish or {}).get("podId")))
        hidden = instance is None or instance.hidden_until > self._world.now
        return None if instance is None or hidden else self._view(instance)

    def _gpu_types(self, wish: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = wish.get("ids") or ([wish["id"]] if wish.get("id") else None)
        return [gpu_view(self._world, gpu) for gpu in GPUS if wanted is None or gpu.runpod_id in wanted]

    def _deploy(self, asked: dict[str, Any], bid: float | None = None) -> dict[str, Any]:
        disk_gb = float(asked.get("containerDiskInGb") or 20)
        volume_gb = float(asked.get("volumeInGb") or 0)
        wish = placing.Wish(
            str(asked.get("gpuTypeId")), int(asked.get("gpuCount") or 1), str(asked.get("cloudType") or "ALL"),
            disk_gb + volume_gb, [asked["dataCenterId"]] if asked.get("dataCenterId") else [],
            asked.get("allowedCudaVersions") or [], asked.get("minCudaVersion"), bid,
        )  # fmt: skip
        try:
            order = Order(
                provider="runpod", account=self._call.account, machine=placing.place(self._world, wish),
                gpus=wish.count, bid=bid, label=str(asked.get("name") or ""),
                image=str(asked.get("imageName") or "template"),
                disk_gb=disk_gb + volume_gb, env={one["key"]: one["value"] for one in asked.get("env") or []},
                command=str(asked.get("dockerArgs") or ""),
                ports=tuple(port for port in str(asked.get("ports") or "").split(",") if port),
                asked={**asked}, lifetime_s=self._lifetime(asked.get("terminateAfter")),
            )  # fmt: skip
            instance = self._world.rent(order, self._call.fate)
        except Refused as error:
            raise _refused(error, spot=bid is not None) from error
        self._call.entry.instance = instance.key
        return self._view(instance)

    def _lifetime(self, moment: str | None) -> float | None:
        try:
            return None if moment is None else from_rfc3339(moment) - self._world.now
        except ValueError as error:
            raise GraphQLError(f"terminateAfter {moment!r} is not a time") from error

    def _perform(self, asked: dict[str, Any], action: str) -> dict[str, Any]:
        instance = self._own(asked)
        try:
            v2.perform(self._call, instance, action)
        except Refused as error:
            raise _refused(error) from error
        return self._view(instance)

    def _resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._own(asked).is_spot:
            raise GraphQLError(SPOT_IS_NO_ON_DEMAND, extensions={"code": "RUNPOD"})
        return self._perform(asked, "start")

    def _bid_resume(self, asked: dict[str, Any]) -> dict[str, Any]:
        instance = self._own(asked)
        instance.claim.bid = float(asked["bidPerGpu"])
        return self._perform(asked, "start")

    def _terminate(self, asked: dict[str, Any]) -> None:
        instance = self._call.own("runpod", str(asked.get("podId")))
        if instance is None:
            raise GraphQLError(NO_POD_TO_TERMINATE, extensions={"code": "RUNPOD"})
        v2.destroy(self._call, instance)

    def _own(self, asked: dict[str, Any]) -> Instance:
        instance = self._call.own("runpod", str(asked.get("podId")))
        if instance is None:
            raise GraphQLError("pod not found", extensions={"code": "RUNPOD"})
        return instance

    def _view(self, instance: Instance) -> dict[str, Any]:
        return pod_view(instance, self._world.now)


def _refused(error: Refused, *, spot: bool = False) -> GraphQLError:
    if error.reason is Reason.NO_CREDIT:
        text = "You do not have enough balance to deploy this pod."
    else:
        text = placing.refusal_text(error)
        text = placing.NO_CAPACITY_SPOT if spot and text == placing.NO_CAPACITY else text
    return GraphQLError(text, extensions={"code": "RUNPOD"})


def _errors(message: str, code: str) -> Reply:
    return json_reply(200, {"errors": [{"message": message, "extensions": {"code": code}}], "data": None})


def _is_malformed(errors: list[GraphQLError] | None) -> bool:
    """Return whether a query failed before it was carried out: such errors have no path."""
    return bool(errors) and all(error.path is None for error in errors or [])


def _first_field(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the query's first field, or nothing if it cannot be read."""
    try:
        document = parse(str(body.get("query") or ""))
    except GraphQLError:
        return "", {}
    for definition in document.definitions:
        if isinstance(definition, OperationDefinitionNode):
            field = definition.selection_set.selections[0]
            if isinstance(field, FieldNode):
                variables = json.loads(json.dumps(body.get("variables") or {}))
                found = {one.name.value: value_from_ast_untyped(one.value, variables) for one in field.arguments or ()}
                return field.name.value, found
    return "", {}
