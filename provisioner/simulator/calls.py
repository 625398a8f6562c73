"""One call on its way through a front end: what the routes match, and what handlers get to see."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from provisioner.simulator.faults import Fault, Target
from provisioner.simulator.journal import Entry
from provisioner.simulator.market.instances import Instance, Phase
from provisioner.simulator.market.world import World
from provisioner.simulator.wire import Reply, Request

SELF_ENDPOINTS = frozenset({"show", "destroy", "stop", "start", "list"})
"""What a container's own key may do, with its own instance only (providers.md 1.3, 1.7, 2.4)."""


@dataclass(slots=True)
class Call:
    """A request whose endpoint and caller are known."""

    request: Request
    world: World
    entry: Entry
    params: Mapping[str, str]
    endpoint: str
    account: str
    scope: Instance | None = None
    """The only instance that the caller's key may touch, or None for an account's key."""
    fate: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    """The faults before the call and of a destroy that struck it."""

    @property
    def key(self) -> str:
        """Return the caller's key, which is whom Vast's limits count."""
        return self.entry.key or self.account

    def struck_by(self, kind: str) -> Fault | None:
        """Return the fault of that kind that struck this call."""
        return next((fault for fault in self.faults if fault.kind == kind), None)

    def own(self, provider: str, ident: str) -> Instance | None:
        """Return the caller's instance of that id; others' instances do not exist for a caller."""
        instance = self.world.find(provider, ident)
        if instance is None or instance.order.account != self.account:
            return None
        return instance if self.scope in (None, instance) else None

    def destroy(self, instance: Instance) -> None:
        """End a rental, unless a fault lets the answer say so and does it late, or never (providers.md 7.3, 13)."""
        fault = self.struck_by("destroy_ignored")
        if fault is None:
            self.world.destroy(instance)
            return
        self.world.event("destroy ignored", instance)

        def late() -> None:
            if instance.phase is not Phase.GONE:
                self.world.destroy(instance)

        if (for_s := fault.params.get("for_s")) is not None:
            self.world.agenda.after(float(for_s), late)


Handler = Callable[[Call], Reply]


@dataclass(frozen=True, slots=True)
class Route:
    """One documented path. The endpoint's name is ours, and the same at all providers."""

    method: str
    pattern: re.Pattern[str]
    endpoint: str
    handler: Handler


def route(method: str, path: str, endpoint: str, handler: Handler) -> Route:
    """Build a route from a path such as `/api/v0/asks/{id}/`; a slash at its end is optional."""
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path.rstrip("/"))
    return Route(method, re.compile(f"{pattern}/?"), endpoint, handler)


class FrontEnd(Protocol):
    """One provider's protocol over the market."""

    @property
    def provider(self) -> str:
        """Return whose protocol it is."""

    @property
    def prefixes(self) -> Sequence[str]:
        """Return how the paths begin that belong to it."""

    def find(self, request: Request) -> tuple[Route, dict[str, str]] | Reply:
        """Return the route and its parameters, or the provider's answer to an unknown path."""

    def target(self, request: Request, endpoint: str, params: Mapping[str, str]) -> Target:
        """Return what the request is about, for faults and the journal."""

    def limited(self, call: Call) -> Reply | None:
        """Count the call; return the refusal if it comes too early."""

    def refusal(self, request: Request, fault: Fault, target: Target) -> Reply:
        """Write a refusal that a fault orders in the provider's words."""

    def finish(self, call: Call, reply: Reply) -> Reply:
        """Add what every authenticated answer carries."""


def match(routes: Sequence[Route], request: Request) -> tuple[Route, dict[str, str]] | None:
    """Return the first route for *request*, and its parameters."""
    for candidate in routes:
        if candidate.method == request.method and (found := candidate.pattern.fullmatch(request.path)):
            return candidate, found.groupdict()
    return None
