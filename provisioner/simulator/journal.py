"""The journal of requests: who asked what, what came of it, and which fault had a hand in it (providers.md 7.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from provisioner.simulator.wire import Request

ENTRIES_MAX = 200_000


@dataclass(slots=True)
class Entry:
    """One request, from its arrival to its answer."""

    number: int
    at: float
    method: str
    path: str
    query: dict[str, str]
    body: str
    provider: str = ""
    endpoint: str = ""
    key: str | None = None
    label: str | None = None
    status: int | None = None
    dropped: bool = False
    instance: str | None = None
    """The instance that a create call made, whatever its answer said."""
    faults: list[str] = field(default_factory=list)
    limited: bool = False
    ended_at: float | None = None

    def report(self) -> dict[str, Any]:
        """Return it as the oracle shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


class Journal:
    """The latest requests, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self._count = 0

    def begin(self, request: Request, now: float) -> Entry:
        """Note that *request* has arrived."""
        self._count += 1
        body = request.body.decode("utf-8", "replace")
        entry = Entry(self._count, now, request.method, request.path, dict(request.query), body)
        self._entries.append(entry)
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def creates(self) -> dict[str, list[Entry]]:
        """Return every create call, by label."""
        found: dict[str, list[Entry]] = {}
        for entry in self._entries:
            if entry.endpoint == "create":
                found.setdefault(entry.label or "", []).append(entry)
        return found

    def holding(self, needles: list[str]) -> list[Entry]:
        """Return the requests whose path, query or body hold one of *needles*: secrets that must not travel."""
        return [
            entry
            for entry in self._entries
            if any(needle and needle in part for needle in needles for part in _text_of(entry))
        ]


def _text_of(entry: Entry) -> tuple[str, ...]:
    return (entry.path, entry.body, *entry.query.values())
