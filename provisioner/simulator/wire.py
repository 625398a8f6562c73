"""Requests and replies as plain values, so that a front end neither knows sockets nor needs them.

A reply also says how it travels: whole, dribbled, or not at all because the connection is cut. That is what lets
faults of the network be tested over loopback and, in virtual time, without any socket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

JSON_TYPE = "application/json"
"""Exactly this, without a charset: the vastai client compares the whole header (providers.md 1.1)."""


class BadJson(ValueError):
    """The request's body is not a JSON object."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @classmethod
    def parse(cls, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request:
        """Build one from a request line's target, such as `/v2/pods?includeClusterPods=true`."""
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return cls(method, parts.path, query, {name.lower(): value for name, value in headers.items()}, body)

    def json(self) -> dict[str, Any]:
        """Return the body's object (an empty body counts as {}), or raise BadJson."""
        if not self.body.strip():
            return {}
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise BadJson(f"the body of {self.method} {self.path} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadJson(f"the body of {self.method} {self.path} is a JSON {type(value).__name__}, not an object")
        return value

    def bearer(self) -> str | None:
        """Return the caller's key: the bearer token, else the `api_key` parameter (providers.md 1.1 and 2.1)."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return self.query.get("api_key") or None


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply and the way it travels."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    dropped: bool = False
    """The connection is cut instead of this reply being sent."""
    dribble_s: float = 0.0
    """Virtual seconds over which the body arrives, in pieces."""

    def document(self) -> Any:
        """Return the body's JSON value."""
        return json.loads(self.body)


def json_reply(
    status: int, value: object, headers: Mapping[str, str] | None = None, *, media: str = JSON_TYPE
) -> Reply:
    """Answer with *value* as JSON."""
    return Reply(status, json.dumps(value).encode(), {"Content-Type": media, **(headers or {})})


def text_reply(status: int, text: str, *, media: str = "text/plain") -> Reply:
    """Answer with plain text, or with HTML as gateways do."""
    return Reply(status, text.encode(), {"Content-Type": media})
