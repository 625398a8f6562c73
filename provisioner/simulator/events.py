"""Faults that are events of the world: preemptions, hosts that fail, prices that jump, keys that are revoked.

They strike machines and instances rather than calls, at their time (providers.md 7.3, 6 and 14 to 17). Selectors: the
fault's provider, machine and label, and the parameters `instance` (a key), `host` and `place`.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from provisioner.simulator.app import App
from provisioner.simulator.faults import EVENTS, Fault
from provisioner.simulator.market.instances import Instance, Phase
from provisioner.simulator.market.machines import Machine

AWAY_S = 1800.0
"""How long a preemption lasts, unless the fault says."""

# How often one event may come back before its order is taken for a mistake.
REPEATS_MAX = 1000


def plan(app: App, fault: Fault) -> None:
    """Plan an event for its time; other faults wait for a call. `every_s` repeats it, `count` times in all."""
    if fault.kind not in EVENTS:
        return
    times = min(fault.count or REPEATS_MAX, REPEATS_MAX) if "every_s" in fault.params else 1
    for turn in range(times):
        app.world.agenda.at(fault.at + turn * float(fault.params.get("every_s", 0.0)), lambda: strike(app, fault))


def strike(app: App, fault: Fault) -> None:
    """Let the event happen now."""
    fault.struck += 1
    if fault.count is not None:
        fault.count -= 1
    ACTS[fault.kind](app, fault)


def instances_of(app: App, fault: Fault) -> list[Instance]:
    """Return the living instances that the fault selects."""
    wanted = fault.params.get("instance")
    machines = {id(machine) for machine in machines_of(app, fault)}
    return [
        one
        for one in app.world.instances.values()
        if one.phase is not Phase.GONE
        and id(one.machine) in machines
        and (wanted is None or one.key == wanted)
        and (fault.label is None or fnmatchcase(one.label, fault.label))
    ]


def machines_of(app: App, fault: Fault) -> list[Machine]:
    """Return the machines that the fault selects, all if it names none."""
    host, place = fault.params.get("host"), fault.params.get("place")
    return [
        one
        for one in app.world.machines
        if (fault.provider is None or one.provider == fault.provider)
        and (fault.machine is None or str(one.machine_id) == fault.machine)
        and (host is None or str(one.host_id) == str(host))
        and (place is None or one.place == place)
    ]


def _preempt(app: App, fault: Fault) -> None:
    """Let another customer rent the whole machine; what runs there as spot is taken, with its provider's notice."""
    for_s = float(fault.params.get("for_s", AWAY_S))
    taken: dict[int, Machine] = {}
    for instance in instances_of(app, fault):
        if instance.is_spot and instance.wanted_running:
            if fault.params.get("how") == "freeze":
                instance.fate = {**instance.fate, "freezes": {}}
            taken[id(instance.machine)] = instance.machine
    for machine in taken.values():
        app.world.rivals.take(machine, machine.gpus, for_s)


def _come_back(app: App, fault: Fault) -> None:
    """Let the other customers leave: outbid instances resume by themselves, as zombies."""
    for machine in {id(one.machine): one.machine for one in instances_of(app, fault)}.values():
        machine.claims[:] = [claim for claim in machine.claims if claim.holder is not None]
        app.world.recheck(machine)


def _host_fails(app: App, fault: Fault) -> None:
    phase = Phase(fault.params.get("phase", Phase.OFFLINE))
    for instance in instances_of(app, fault):
        app.world.lives.lose(instance, phase)


def _price(app: App, fault: Fault) -> None:
    factor = float(fault.params.get("factor", 1.5))
    for machine in machines_of(app, fault):
        machine.price, machine.floor = round(machine.price * factor, 6), round(machine.floor * factor, 6)


def _listing(*, delisted: bool) -> Callable[[App, Fault], None]:
    def act(app: App, fault: Fault) -> None:
        for machine in machines_of(app, fault):
            machine.delisted = delisted

    return act


def _busy(app: App, fault: Fault) -> None:
    for machine in machines_of(app, fault):
        gpus = min(int(fault.params.get("gpus", machine.gpus)), machine.gpus)
        app.world.rivals.take(machine, gpus, float(fault.params.get("for_s", AWAY_S)), bid=fault.params.get("bid"))


def _revoke_key(app: App, fault: Fault) -> None:
    app.revoked.add(str(fault.params["key"]))


def _set_credit(app: App, fault: Fault) -> None:
    key = str(fault.params["key"])
    app.world.credit[key] = float(fault.params["dollars"]) + app.world.ledger.spent_by(key, app.world.now)


ACTS: dict[str, Callable[[App, Fault], None]] = {
    "preempt": _preempt,
    "come_back": _come_back,
    "host_fails": _host_fails,
    "price": _price,
    "delist": _listing(delisted=True),
    "relist": _listing(delisted=False),
    "busy": _busy,
    "revoke_key": _revoke_key,
    "set_credit": _set_credit,
}
