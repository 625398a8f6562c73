"""Vast's search: filters, order and limit of `POST /api/v0/bundles/` and its two relatives (providers.md 1.2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.market.catalog import GPUS
from provisioner.simulator.market.machines import offers_on
from provisioner.simulator.vast.offers import offer_row
from provisioner.simulator.vast.replies import invalid_args
from provisioner.simulator.wire import BadJson, Reply, json_reply

NOT_FILTERS = frozenset(
    {"type", "order", "limit", "allocated_storage", "disable_bundling", "select_cols", "q", "api_key"}
)
STORAGE_GB_DEFAULT = 8.0

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda found, wanted: bool(found == wanted),
    "neq": lambda found, wanted: bool(found != wanted),
    "gt": lambda found, wanted: found is not None and bool(found > wanted),
    "gte": lambda found, wanted: found is not None and bool(found >= wanted),
    "lt": lambda found, wanted: found is not None and bool(found < wanted),
    "lte": lambda found, wanted: found is not None and bool(found <= wanted),
    "in": lambda found, wanted: found in wanted,
    "notin": lambda found, wanted: found not in wanted,
}


def search_post(call: Call) -> Reply:
    """`POST /api/v0/bundles/`: the query is the body."""
    return _search(call, call.request.json())


def search_get(call: Call) -> Reply:
    """`GET /api/v0/bundles/?q=…`: the query is a JSON parameter."""
    try:
        query = json.loads(call.request.query.get("q", "{}"))
    except ValueError as error:
        raise BadJson(f"the parameter q is not JSON: {error}") from error
    return _search(call, query)


def search_put(call: Call) -> Reply:
    """`PUT /api/v0/search/asks/`: the query is in `q`."""
    return _search(call, call.request.json().get("q", {}))


def gpu_names() -> Reply:
    """`GET /api/v0/gpu_names/unique/`: what the command line completes names from."""
    return json_reply(200, {"gpu_names": sorted(gpu.vast_name for gpu in GPUS)})


def _search(call: Call, query: Mapping[str, Any]) -> Reply:
    world = call.world
    bid = query.get("type") in {"bid", "interruptible"}
    storage = float(query.get("allocated_storage") or STORAGE_GB_DEFAULT)
    ignored = NOT_FILTERS | set(world.scenario.search_ignores)
    filters = {name: wish for name, wish in query.items() if name not in ignored}
    for name, wish in filters.items():
        if not isinstance(wish, dict):
            return invalid_args(f"filter {name!r} is {wish!r}; it must be an object such as {{'eq': value}}")
    rows = [
        row
        for machine in world.machines_of("vast")
        for offer in offers_on(machine)
        if _passes(row := offer_row(offer, now=world.now, bid=bid, storage_gb=storage), filters)
    ]
    for field, direction in reversed(query.get("order") or [["score", "desc"]]):
        rows.sort(key=lambda row: _sortable(row.get(field)), reverse=direction == "desc")
    limit = min(int(query.get("limit") or world.scenario.search_rows_max), world.scenario.search_rows_max)
    return json_reply(200, {"offers": rows[:limit]})


def _passes(row: Mapping[str, Any], filters: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(
        OPERATORS[operator](found := _value(row, name), alike(wanted, found))
        for name, wish in filters.items()
        for operator, wanted in wish.items()
        if operator in OPERATORS
    )


def alike(wanted: Any, found: Any) -> Any:
    """Return *wanted* as the kind of value that *found* is: the command line sends numbers as text.

    >>> alike("1", 2), alike(["1", "2"], 2), alike("true", False), alike("8", "8")
    (1.0, [1.0, 2.0], True, '8')
    """
    if isinstance(wanted, list):
        return [alike(one, found) for one in wanted]
    if not isinstance(wanted, str) or isinstance(found, str):
        return wanted
    if isinstance(found, bool):
        return wanted.lower() == "true"
    try:
        return float(wanted)
    except ValueError:
        return wanted


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Return what a filter of that name looks at: not always the column of the same name."""
    match name:
        case "id":
            return None  # a filter on it matches nothing; ask_contract_id does (seen in the field)
        case "verified":
            return row["verification"] == "verified"
        case "external":
            return bool(row["external"])
        case "geolocation":
            return row["geolocode"]
        case "driver_version":
            return row["driver_vers"]
        case _:
            return row.get(name)


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (0, 0.0, str(value))
