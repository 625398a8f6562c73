"""What a test may ask about the truth, which no provider would tell: who lives, who pays, who broke a rule.

providers.md 7.4: the billing ledger, the journal of requests, one create per intent, no key in a body.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from provisioner.simulator.app import App
from provisioner.simulator.journal import Entry
from provisioner.simulator.market.instances import Instance, Phase

KEY_CHARS_MIN = 8
"""A shorter key could be part of any word."""


def alive(app: App, *, label: str | None = None, provider: str | None = None) -> list[dict[str, Any]]:
    """Return every instance that is not gone: whatever its state, it costs money."""
    return [
        instance_view(app, one)
        for one in app.world.instances.values()
        if one.phase is not Phase.GONE
        and (label is None or one.label == label)
        and (provider is None or one.order.provider == provider)
    ]


def instance_view(app: App, one: Instance) -> dict[str, Any]:
    """Return the truth about one instance."""
    bill = app.world.ledger.of(one.key, app.world.now)
    return {
        "key": one.key,
        "provider": one.order.provider,
        "id": one.ident,
        "account": one.order.account,
        "label": one.label,
        "ordered_as": one.order.label,
        "phase": one.phase.value,
        "shown": one.shown.value,
        "why": one.why.value,
        "spot": one.is_spot,
        "bid": one.claim.bid,
        "gpus": one.order.gpus,
        "machine": one.machine.machine_id,
        "host": one.machine.host_id,
        "place": one.machine.place,
        "created_at": one.created_at,
        "started_at": one.started_at,
        "ended_at": one.ended_at,
        "boots": one.boots,
        "gpu_rate": bill.gpu_rate,
        "storage_rate": bill.storage_rate,
        "spent": round(bill.total(), 8),
        "instance_key": one.instance_key,
    }


def billed(app: App) -> dict[str, Any]:
    """Return all bills and their sums by account and by provider."""
    bills = app.world.ledger.report(app.world.now)
    by_account: Counter[str] = Counter()
    by_provider: Counter[str] = Counter()
    for bill in bills:
        by_account[bill["owner"]] += bill["total"]
        by_provider[bill["provider"]] += bill["total"]
    return {
        "bills": bills,
        "total": sum(bill["total"] for bill in bills),
        "by_account": dict(by_account),
        "by_provider": dict(by_provider),
        "open": [bill["key"] for bill in bills if bill["billing"]],
    }


def creates(app: App) -> dict[str, Any]:
    """Return every create call by label: how often it was sent, what each came to, and what it made."""
    return {
        label: {
            "sent": len(entries),
            "made": [entry.instance for entry in entries if entry.instance],
            "calls": [entry.report() | {"body": None} for entry in entries],
        }
        for label, entries in app.journal.creates().items()
    }


def violations(app: App) -> list[dict[str, Any]]:
    """Return what no client of ours may do, as (rule, what, detail)."""
    found: list[dict[str, Any]] = []
    for label, entries in app.journal.creates().items():
        if not label:
            found.append(_violation("create without a label", "", [entry.number for entry in entries]))
            continue
        made = [entry.instance for entry in entries if entry.instance]
        if len(made) > 1:
            found.append(_violation("several instances for one label", label, made))
        if again := [later.number for earlier, later in pairwise(entries) if not _refused(earlier)]:
            found.append(_violation("create sent again though its outcome was unknown", label, again))
    for entry in app.journal:
        if entry.key and len(entry.key) >= KEY_CHARS_MIN and entry.key in entry.body:
            found.append(_violation("account key in a body", entry.path, entry.number))
    early = Counter(entry.endpoint for entry in app.journal if entry.limited)
    found += [_violation("sent too early", endpoint, count) for endpoint, count in sorted(early.items())]
    return found


def _violation(rule: str, what: str, detail: object) -> dict[str, Any]:
    return {"rule": rule, "what": what, "detail": detail}


def _refused(entry: Entry) -> bool:
    """Return whether the caller could know that nothing had been created."""
    return entry.status is not None and not entry.dropped and 400 <= entry.status < 500 and entry.instance is None


def state(app: App) -> dict[str, Any]:
    """Return the whole world in short."""
    world = app.world
    return {
        "seed": world.scenario.seed,
        "now": world.now,
        "since_start_s": world.now - world.scenario.start_unix_s,
        "instances": [instance_view(app, one) for one in world.instances.values()],
        "faults": app.faults.report(),
        "requests": sum(1 for _ in app.journal),
        "total_billed": sum(bill["total"] for bill in world.ledger.report(world.now)),
    }


def machines(app: App) -> list[dict[str, Any]]:
    """Return every machine and who holds its GPUs."""
    return [
        {
            "machine": one.machine_id,
            "host": one.host_id,
            "provider": one.provider,
            "gpu": one.gpu.vast_name,
            "gpus": one.gpus,
            "free": one.free(),
            "place": one.place,
            "price": one.price,
            "min_bid": one.min_bid(1),
            "delisted": one.delisted,
            "claims": [{"gpus": claim.gpus, "bid": claim.bid, "holder": claim.holder} for claim in one.claims],
        }
        for one in app.world.machines
    ]
