"""The other customers, and the hosts' prices: why offers vanish, bids rise and instances are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from provisioner.simulator.draws import Draws
from provisioner.simulator.market.agenda import Agenda
from provisioner.simulator.market.claims import Claim
from provisioner.simulator.market.machines import Machine
from provisioner.simulator.market.scenario import Scenario

DRIFT_TOTAL = 0.5
"""A price stays within this share of where it began."""


class Rivals:
    """Plan arrivals and departures of other customers, and move prices at each tick."""

    def __init__(self, agenda: Agenda, scenario: Scenario, draws: Draws, changed: Callable[[Machine], None]) -> None:
        self._agenda = agenda
        self._scenario = scenario
        self._draws = draws
        self._changed = changed

    def settle_in(self, machines: Sequence[Machine]) -> None:
        """Let some machines begin busy, and plan what comes."""
        for machine in machines:
            draws = self._draws.stream(f"rivals/{machine.provider}/{machine.machine_id}")
            if draws.chance(self._scenario.busy):
                self._arrive(machine, draws)
            if self._scenario.rivals_per_hour > 0:
                self._plan_arrival(machine, draws)
        if self._scenario.drift > 0:
            # RunPod's are list prices, which stand for months; Vast's hosts move theirs.
            moving = [machine for machine in machines if machine.provider == "vast"]
            began = {machine.machine_id: machine.price for machine in moving}
            self._plan_tick(moving, began, self._draws.stream("prices"))

    def take(self, machine: Machine, gpus: int, for_s: float, *, bid: float | None = None) -> None:
        """Let another customer have *gpus* of *machine* for a while."""
        claim = Claim(gpus, bid, self._agenda.now)
        machine.claims.append(claim)
        self._changed(machine)
        self._agenda.after(for_s, lambda: self._leave(machine, claim))

    def _plan_arrival(self, machine: Machine, draws: Draws) -> None:
        def come() -> None:
            self._arrive(machine, draws)
            self._plan_arrival(machine, draws)

        self._agenda.after(draws.gap(self._scenario.rivals_per_hour), come)

    def _arrive(self, machine: Machine, draws: Draws) -> None:
        gpus = draws.whole(1, machine.gpus)
        stays_s = draws.gap(1 / self._scenario.rival_hours)
        if draws.chance(self._scenario.rival_on_demand) or machine.provider == "runpod":
            if machine.rentable(gpus):
                self.take(machine, gpus, stays_s)
        else:
            self.take(machine, gpus, stays_s, bid=round(machine.floor * draws.between(1.0, 1.6), 4))

    def _leave(self, machine: Machine, claim: Claim) -> None:
        machine.claims[:] = [held for held in machine.claims if held is not claim]
        self._changed(machine)

    def _plan_tick(self, machines: Sequence[Machine], began: dict[int, float], draws: Draws) -> None:
        def tick() -> None:
            for machine in machines:
                factor = 1 + draws.between(-self._scenario.drift, self._scenario.drift)
                start = began[machine.machine_id]
                price = min(max(machine.price * factor, start * (1 - DRIFT_TOTAL)), start * (1 + DRIFT_TOTAL))
                machine.floor = round(machine.floor * price / machine.price, 6)
                machine.price = round(price, 6)
            self._plan_tick(machines, began, draws)

        self._agenda.after(self._scenario.tick_s, tick)
