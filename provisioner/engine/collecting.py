"""Destroy what our labels name and no live job owns: after a lost ledger, a deleted job, a create that came late.

Invariant: an instance is destroyed only when the store was read and says that it has no owner: its job has no intent
for it, or one that is over, and no controller of the job lives. Without a store, only what this machine's ledger knows
to be over is destroyed. Instances without one of our labels are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from provisioner.core.errors import ProvisionerError, StoreUnavailable
from provisioner.core.intents import IntentRecord, IntentState, further, parse_label
from provisioner.core.ports import Instance, InstanceStatus, Provider, Shelf
from provisioner.core.rendezvous import alive_key
from provisioner.engine.books import mirrored_records
from provisioner.engine.fencing import LEFT, answered, read_heartbeat
from provisioner.engine.ports import EngineSettings, LedgerPort

TRIES_MAX: Final = 12
TRY_GAP_S: Final = 10.0
ABSENCES_NEEDED: Final = 2
_OVER: Final = frozenset({IntentState.REAPING, IntentState.GONE})
_OWNS: Final = {
    IntentState.WINNER: "it is the node of its job: `spotwarp down` ends that",
    IntentState.CLAIMING: "it may hold the workspace of its job: start its controller again, or `spotwarp down`",
    IntentState.KEPT: "it is kept for salvage: start its controller again, or `spotwarp down`",
}


@dataclass(frozen=True, slots=True)
class Collected:
    """What `gc_nodes` did."""

    destroyed: tuple[str, ...]
    """`<provider> <instance> (<label>)`, each verified gone."""
    kept: tuple[str, ...]
    """The same, with the reason why it has an owner or may have one."""
    failed: tuple[str, ...]
    """The same, with why it could not be verified gone; and providers that could not be listed."""


async def gc_nodes(
    providers: Mapping[str, Provider],
    shelf: Shelf | None,
    ledger: LedgerPort,
    settings: EngineSettings | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Collected:
    """Destroy every instance of ours that no live job owns, and verify that it is gone."""
    settings = settings or EngineSettings()
    kept: list[str] = []
    failed: list[str] = []
    doomed: list[tuple[Provider, Instance]] = []
    owners: dict[str, dict[str, str]] = {}
    for name in sorted(providers):
        try:
            instances = await providers[name].list_instances()
        except ProvisionerError as error:
            failed.append(f"{name}: {error}")
            continue
        for instance in instances:
            parsed = parse_label(instance.label)
            if parsed is None or instance.status is InstanceStatus.GONE:
                continue
            job, ident = parsed
            if job not in owners:
                owners[job] = await _owned(job, shelf, ledger, settings)
            reason = owners[job].get(ident, owners[job].get("", ""))
            if reason:
                kept.append(f"{_named(instance)}: {reason}")
            else:
                doomed.append((providers[name], instance))
    destroyed: list[str] = []

    async def end(provider: Provider, instance: Instance) -> None:
        say(f"destroying {_named(instance)}: no live job owns it")
        why = await _verified_gone(provider, instance)
        if why:
            failed.append(f"{_named(instance)}: {why}")
        else:
            destroyed.append(_named(instance))

    async with trio.open_nursery() as nursery:
        for provider, instance in doomed:
            nursery.start_soon(end, provider, instance)
    return Collected(tuple(sorted(destroyed)), tuple(kept), tuple(sorted(failed)))


async def _owned(job: str, shelf: Shelf | None, ledger: LedgerPort, settings: EngineSettings) -> dict[str, str]:
    """Return why each intent of *job* is left alone, by intent; under "" why all that are not named are."""
    records: dict[str, IntentRecord] = {record.intent.ident: record for record in ledger.records(job)}
    if shelf is None:
        over = {ident: "" for ident, record in records.items() if record.state in _OVER}
        return over | {"": "without the store nobody knows whether it has an owner"}
    try:
        if await _controlled(job, shelf, settings):
            return {"": "its job has a controller that lives, which destroys what it does not need"}
        for ident, mirrored in (await mirrored_records(shelf, job, settings)).items():
            records[ident] = further(records[ident], mirrored) if ident in records else mirrored
    except ProvisionerError as error:
        return {"": f"the store does not say whether it has an owner ({error})"}
    # A node that holds the workspace works on without a controller: its job waits for one to come back.
    return {ident: _OWNS[record.state] for ident, record in records.items() if record.state in _OWNS}


async def _controlled(job: str, shelf: Shelf, settings: EngineSettings) -> bool:
    """Watch a job's controller for as long as it takes to see whether it lives."""
    first = await answered(settings, lambda: shelf.get(alive_key(job)))
    if first is None or read_heartbeat(first) == LEFT:
        return False
    began_s = trio.current_time()
    while trio.current_time() - began_s < settings.stopped_s:
        await trio.sleep(settings.beat_s / 2)
        try:
            if await answered(settings, lambda: shelf.get(alive_key(job))) != first:
                return True
        except StoreUnavailable:
            began_s = trio.current_time()
    return False


async def _verified_gone(provider: Provider, instance: Instance) -> str:
    """Destroy one, again and again, until listings prove it; return why that failed."""
    why, absences = "", 0
    for _ in range(TRIES_MAX):
        try:
            if not absences:
                await provider.destroy(instance.instance_id)
            shown = any(
                one.instance_id == instance.instance_id and one.status is not InstanceStatus.GONE
                for one in await provider.list_instances()
            )
        except ProvisionerError as error:
            why, absences = str(error), 0
        else:
            why, absences = ("it is still shown", 0) if shown else ("", absences + 1)
            if absences >= ABSENCES_NEEDED:
                return ""
        await trio.sleep(TRY_GAP_S if not absences else 1.0)
    return why or "it comes and goes"


def _named(instance: Instance) -> str:
    return f"{instance.provider} {instance.instance_id} ({instance.label.strip()})"
