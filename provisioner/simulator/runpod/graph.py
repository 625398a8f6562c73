"""RunPod's GraphQL, which the official SDK speaks and which alone has spot pods and terminateAfter (providers.md 2.1).

Refusals come with HTTP 200 and an `errors` list; a query that does not fit the schema gets 400. There is no rate limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from graphql import GraphQLError, GraphQLSchema, OperationDefinitionNode, build_schema, graphql_sync, parse
from graphql.language import FieldNode
from graphql.utilities import value_from_ast_untyped

from provisioner.simulator.calls import Call, Route, match, route
from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.market.world import World
from provisioner.simulator.runpod import placing
from provisioner.simulator.runpod.resolvers import Resolvers
from provisioner.simulator.runpod.schema import SPOT, TYPES
from provisioner.simulator.runpod.v2_front import target_of
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


@cache
def _schema(*, spot: bool) -> GraphQLSchema:
    return build_schema(TYPES + (SPOT if spot else ""))


class GraphFront:
    """GraphQL over one world."""

    provider = "runpod"
    prefixes = ("/graphql",)

    def __init__(self, world: World) -> None:
        self._world = world
        self._schema = _schema(spot=world.scenario.runpod_spot)
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
        return target_of(self._world, endpoint, asked.get("podId"))

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
            self._schema, str(body.get("query") or ""), Resolvers(call).root(),
            variable_values=body.get("variables"), operation_name=body.get("operationName"),
        )  # fmt: skip
        return json_reply(400 if result.data is None and _is_malformed(result.errors) else 200, result.formatted)


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
