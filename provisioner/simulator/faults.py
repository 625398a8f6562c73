"""Faults that a test orders: which calls, offers, machines or instances they meet, how often, and when.

Every kind of providers.md 7.3 that a client of the control plane can notice has a name here. Fair faults only: a
fault never makes the market contradict itself, it makes an answer late, lost, wrong or unwelcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from provisioner.simulator.draws import Draws

FAULTS_MAX = 1000

# Instead of the call: nothing happens behind it.
REFUSALS = frozenset({
    "reply", "server_error", "rate_limited", "no_capacity", "success_false", "bad_body", "reset", "unauthorized",
    "no_credit", "retired", "field_removed",
})  # fmt: skip
# Before the call, which then goes on.
BEFORE = frozenset({"slow", "taken", "outbid_first"})
# The call has happened; its answer suffers.
AFTER = frozenset({"lost_answer", "dribble", "stale", "missing_row", "duplicate_row", "null_instance"})
# What will go wrong with the instance that a create call makes.
FATES = frozenset({
    "hidden", "stuck", "oci_failure", "manifest_unknown", "dies", "no_ports", "private_ip", "moving_ports", "wrong_gpu",
    "slow_network",
})  # fmt: skip
# A destroy that says yes and does it later, or never.
DESTROYS = frozenset({"destroy_ignored"})
# Events of the world, at their time, without any call.
EVENTS = frozenset(
    {"preempt", "come_back", "host_fails", "price", "delist", "relist", "busy", "revoke_key", "set_credit"}
)

KINDS = REFUSALS | BEFORE | AFTER | FATES | DESTROYS | EVENTS


@dataclass(frozen=True, slots=True)
class Target:
    """What one call is about, as far as it is known before it happens."""

    provider: str
    endpoint: str
    offer: str | None = None
    """Vast's ask id, RunPod's GPU id."""
    machine: str | None = None
    label: str | None = None


@dataclass(slots=True)
class Fault:
    """One order. A selector that is None matches everything; `label` is a glob."""

    ident: str
    kind: str
    provider: str | None = None
    endpoint: str | None = None
    offer: str | None = None
    machine: str | None = None
    label: str | None = None
    count: int | None = 1
    """How many times it still strikes; None is for ever."""
    probability: float = 1.0
    at: float = 0.0
    until: float | None = None
    params: dict[str, Any] = field(default_factory=dict)
    struck: int = 0

    def meets(self, target: Target, now: float) -> bool:
        """Return whether it may strike this call now."""
        if self.count == 0 or now < self.at or (self.until is not None and now >= self.until):
            return False
        exact = (
            (self.provider, target.provider),
            (self.endpoint, target.endpoint),
            (self.offer, target.offer),
            (self.machine, target.machine),
        )
        if any(wanted is not None and wanted != found for wanted, found in exact):
            return False
        return self.label is None or (target.label is not None and fnmatchcase(target.label, self.label))

    def report(self) -> dict[str, Any]:
        """Return what the control endpoint shows."""
        names = ("kind", "provider", "endpoint", "offer", "machine", "label", "count", "probability", "at", "until")
        return {"id": self.ident, **{name: getattr(self, name) for name in names}, **self.params, "struck": self.struck}


class Faults:
    """All orders, in the order in which they were given."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._faults: list[Fault] = []
        self._count = 0

    def add(self, order: dict[str, Any], now: float) -> Fault:
        """Add one from its JSON form, or raise ValueError. `after_s` counts from now; other fields are parameters."""
        order = dict(order)
        kind = order.pop("kind", None)
        if kind not in KINDS:
            raise ValueError(f"unknown kind of fault {kind!r}: known are {', '.join(sorted(KINDS))}")
        if len(self._faults) >= FAULTS_MAX:
            raise ValueError(f"{FAULTS_MAX} faults are set: delete some first")
        selectors = {name: order.pop(name, None) for name in ("provider", "endpoint", "label")}
        selectors |= {
            name: None if (value := order.pop(name, None)) is None else str(value) for name in ("offer", "machine")
        }
        at = float(order.pop("at", now)) + float(order.pop("in_s", 0.0))
        until = order.pop("until", None)
        if (for_s := order.pop("during_s", None)) is not None:
            until = at + float(for_s)
        self._count += 1
        fault = Fault(
            f"f{self._count}", kind, **selectors, count=order.pop("count", 1), at=at, until=until,
            probability=float(order.pop("probability", 1.0)), params=order,
        )  # fmt: skip
        self._faults.append(fault)
        return fault

    def strike(self, kinds: frozenset[str], target: Target, now: float) -> Iterator[Fault]:
        """Yield the faults of these kinds that strike this call; each strike is counted."""
        for fault in self._faults:
            if fault.kind in kinds and fault.meets(target, now) and self._draws.chance(fault.probability):
                fault.struck += 1
                if fault.count is not None:
                    fault.count -= 1
                yield fault

    def remove(self, ident: str | None = None) -> int:
        """Remove one fault, or all; return how many were removed."""
        kept = [] if ident is None else [fault for fault in self._faults if fault.ident != ident]
        removed = len(self._faults) - len(kept)
        self._faults = kept
        return removed

    def report(self) -> list[dict[str, Any]]:
        """Return all of them as the control endpoint shows them."""
        return [fault.report() for fault in self._faults]
