"""Listing and showing instances (providers.md 1.4): pages of 25, filters on stored columns, counts by label."""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.market.instances import Instance
from provisioner.simulator.vast.replies import failure
from provisioner.simulator.vast.rows import instance_row
from provisioner.simulator.vast.search import OPERATORS, alike
from provisioner.simulator.wire import Reply, json_reply

PAGE_MAX, PAGE_OF_NOTHING = 25, 5
"""The limit is capped at 25; zero or less counts as 5 (show_instances.yaml)."""

STORED = frozenset({
    "id", "actual_status", "intended_status", "gpu_name", "verification", "label", "machine_id", "host_id", "is_bid",
    "num_gpus", "start_date", "image_uuid", "geolocation",
})  # fmt: skip


def list_instances(call: Call) -> Reply:
    """`GET /api/v1/instances/`."""
    query = call.request.query
    try:
        filters = json.loads(query.get("select_filters") or "{}")
        order = json.loads(query.get("order_by") or '[{"col": "id", "dir": "asc"}]')
        limit = int(query.get("limit") or PAGE_MAX)
        after = _place(query.get("after_token"))
    except (ValueError, binascii.Error) as error:
        return failure(400, "invalid_request", f"Invalid request: {error}")
    if unknown := set(filters) - STORED:
        return failure(400, "invalid_request", f"Cannot filter on computed columns: {', '.join(sorted(unknown))}")

    every = [instance_row(instance, call.world.now) for instance in _visible(call)]
    rows = [row for row in every if all(_meets(row.get(name), wish) for name, wish in filters.items())]
    for term in reversed(order):
        rows.sort(key=lambda row: str(row.get(term["col"])).zfill(20), reverse=term.get("dir") == "desc")
    size = PAGE_OF_NOTHING if limit <= 0 else min(limit, PAGE_MAX)
    page, more = rows[after : after + size], len(rows) > after + size
    token = base64.urlsafe_b64encode(json.dumps({"after": after + size}).encode()).decode() if more else None
    body = {
        "success": True,
        "instances_found": len(page),
        "total_instances": len(rows),
        "label_counts": dict(Counter(row["label"] or "" for row in rows)),
        "next_token": token,
        "instances": page,
    }
    if columns := json.loads(query.get("select_cols") or "null"):
        body["instances"] = [{name: row.get(name) for name in columns} for row in page]
    return json_reply(200, body)


def list_instances_v0(call: Call) -> Reply:
    """`GET /api/v0/instances/`: the older list, without pages."""
    return json_reply(200, {"instances": [instance_row(instance, call.world.now) for instance in _visible(call)]})


def show_instance(call: Call) -> Reply:
    """`GET /api/v0/instances/{id}/`: an object; null with 200 when it is destroyed or was never there."""
    instance = call.own("vast", call.params["id"])
    hidden = instance is None or instance.hidden_until > call.world.now
    return json_reply(
        200, {"instances": None if hidden or instance is None else instance_row(instance, call.world.now)}
    )


def _visible(call: Call) -> list[Instance]:
    return [one for one in call.world.listed("vast", call.account) if call.scope in (None, one)]


def _meets(found: Any, wish: Any) -> bool:
    if not isinstance(wish, dict):
        return bool(found == wish)
    return all(
        OPERATORS[operator](found, alike(wanted, found)) for operator, wanted in wish.items() if operator in OPERATORS
    )


def _place(token: str | None) -> int:
    """Return where a page begins, or raise ValueError for a token that is not ours."""
    if not token:
        return 0
    try:
        return int(json.loads(base64.urlsafe_b64decode(token))["after"])
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"bad after_token {token!r}") from error
