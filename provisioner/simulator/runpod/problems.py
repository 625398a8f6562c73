"""REST v2's errors: RFC 9457 problem documents (schema ErrorResponse; providers.md 2.3)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from provisioner.simulator.wire import Reply, json_reply

PROBLEM_TYPE = "application/problem+json"


def problem(status: int, detail: str, errors: list[str] | None = None, headers: dict[str, str] | None = None) -> Reply:
    """Answer with a problem document."""
    body: dict[str, Any] = {"title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    return json_reply(status, body, headers, media=PROBLEM_TYPE)


def unprocessable(error: ValidationError) -> Reply:
    """Answer a body that does not match the contract: 422, with each violation."""
    places = [f"{'.'.join(str(part) for part in one['loc']) or 'body'}: {one['msg']}" for one in error.errors()]
    return problem(422, "request body does not match the schema", places)


def not_found(ident: str) -> Reply:
    """Answer that a pod is not there, or another account's."""
    return problem(404, f"pod {ident} not found")
