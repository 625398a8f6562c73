"""How Vast says no (providers.md 1.1, 1.3, 1.5, 1.6): everything carries success, error and msg, more or less."""

from __future__ import annotations

from typing import Any

from provisioner.simulator.calls import Call
from provisioner.simulator.wire import Reply, json_reply, text_reply


def failure(status: int, error: str, msg: str, **more: Any) -> Reply:
    """Answer with Vast's error body."""
    return json_reply(status, {"success": False, "error": error, "msg": msg, **more})


def unauthorized(*, searching: bool) -> Reply:
    """Answer an unknown key: searches say 404 (search_offers.yaml), the rest 401 (show_instance.yaml)."""
    return failure(404 if searching else 401, "auth_error", "Invalid user key")


def invalid_args(detail: str, code: int = 3467) -> Reply:
    """Answer a request that breaks its contract (create_instance.yaml)."""
    return failure(400, "invalid_args", f"error 400/{code}: Invalid args: {detail}")


def no_such_ask(ask_id: object, variant: str = "404") -> Reply:
    """Answer that an offer is not there: 404, 410 under cancel_unavail, or 400 as seen in the field."""
    match variant:
        case "410":
            msg = f"error 410/3907: no_such_ask Instance type {ask_id} is no longer available."
            return failure(410, "no_such_ask", msg, ask_id=ask_id)
        case "400":
            msg = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
            return failure(400, "no_such_ask", msg, ask_id=ask_id)
        case _:
            msg = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
            return failure(404, "invalid_args", msg, ask_id=ask_id)


def no_such_instance() -> Reply:
    """Answer that an instance is not the caller's or not there."""
    return failure(404, "no_such_instance", "Instance not found")


def too_many(threshold_s: float, variant: str) -> Reply:
    """Answer 429 in one of the forms seen: plain text twice, JSON twice, with Retry-After, or the daily quota."""
    text = f"API requests too frequent endpoint threshold={threshold_s}"
    match variant:
        case "text":
            return text_reply(429, "API requests too frequent")
        case "text_threshold":
            return text_reply(429, f"API requests too frequent: endpoint threshold={threshold_s}")
        case "detail":
            return json_reply(429, {"detail": text})
        case "retry_after":
            body = {"success": False, "error": "rate_limit_exceeded", "msg": text, "retry_after": threshold_s}
            return json_reply(429, body, {"Retry-After": str(int(threshold_s) + 1)})
        case "search_quota_exceeded":
            body = {"success": False, "error": "search_quota_exceeded", "msg": "Daily search quota exceeded"}
            return json_reply(429, body, {"X-RateLimit-Reset": "86400"})
        case _:
            return failure(429, "rate_limit_exceeded", text)


def found_or_missing(call: Call) -> Any:
    """Return the caller's instance that the path names, or None."""
    return call.own("vast", call.params["id"])
