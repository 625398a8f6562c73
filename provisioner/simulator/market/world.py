"""The one market behind all front ends: machines, rentals, other customers, bills, and a history of what happened.

Everything here is plain and immediate: a caller first brings the world up to the present, then asks or acts. Whatever
takes time is planned on the agenda. The same seed and the same calls at the same times give the same world.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from provisioner.simulator.draws import Draws
from provisioner.simulator.latencies import Latencies
from provisioner.simulator.market.agenda import Agenda
from provisioner.simulator.market.claims import Claim
from provisioner.simulator.market.instances import (
    ACTIVE,
    RESUMES_BY_ITSELF,
    Instance,
    Order,
    Phase,
    Reason,
    Refused,
    Why,
)  # fmt: skip
from provisioner.simulator.market.ledger import Account, Ledger
from provisioner.simulator.market.lives import Lives
from provisioner.simulator.market.machines import Machine, Offer, make_machines, offers_on
from provisioner.simulator.market.nodes import NoNodes
from provisioner.simulator.market.rivals import Rivals
from provisioner.simulator.market.scenario import Scenario

FIRST_CONTRACT = 27_000_000
PORTS_FROM, PORTS_EACH = 20_000, 64


class World:
    """All state of the simulated market."""

    def __init__(self, scenario: Scenario, latencies: Latencies | None = None) -> None:
        self.scenario = scenario
        self.latencies = latencies or Latencies.load()
        self.draws = Draws(scenario.seed)
        self.agenda = Agenda(scenario.start_unix_s)
        self.ledger = Ledger()
        self.history: list[dict[str, Any]] = []
        self.credit: dict[str, float] = {}
        self.instances: dict[str, Instance] = {}
        self.lives = Lives(self.agenda, self.ledger, self.latencies, scenario, self.draws.stream("lives"), self)
        self.lives.nodes = NoNodes()
        machines = self.draws.stream("machines")
        self.machines = [
            *make_machines(machines.stream("vast"), "vast", scenario.vast_machines, first_id=11_000),
            *make_machines(machines.stream("runpod"), "runpod", scenario.runpod_machines, first_id=31_000),
        ]
        for machine in self.machines:
            machine.contract_end += self.now
        self.rivals = Rivals(self.agenda, scenario, self.draws.stream("market"), self.recheck)
        self.rivals.settle_in(self.machines)
        self._plan_credit_check()

    @property
    def now(self) -> float:
        """Return the virtual time that the world has reached."""
        return self.agenda.now

    def run_until(self, time_s: float) -> None:
        """Let everything happen that is due by *time_s*."""
        self.agenda.run_until(time_s)

    def machines_of(self, provider: str) -> Iterator[Machine]:
        """Yield the machines that a provider lists."""
        return (machine for machine in self.machines if machine.provider == provider and not machine.delisted)

    def offer(self, ask_id: int) -> Offer | None:
        """Return Vast's offer of that number, rentable or not."""
        for machine in self.machines_of("vast"):
            for offer in offers_on(machine):
                if offer.ask_id == ask_id:
                    return offer
        return None

    def rent(self, order: Order, fate: dict[str, dict[str, Any]] | None = None) -> Instance:
        """Create an instance, or raise Refused and leave no trace.

        A bid that is too low leaves a stopped instance behind, and so does an order that queues: the caller looks at
        `why` (providers.md 1.3).
        """
        machine = order.machine
        if machine.delisted:
            raise Refused(Reason.NO_SUCH_OFFER, f"machine {machine.machine_id} is not listed")
        if order.disk_gb > machine.disk_gb:
            raise Refused(Reason.NO_DISK, f"{order.disk_gb} GB asked, {machine.disk_gb} GB there")
        if self.credit_left(order.account) <= 0:
            raise Refused(Reason.NO_CREDIT, f"account has {self.credit_left(order.account):.2f} dollars")
        if order.bid is None and not order.queue and not machine.rentable(order.gpus):
            raise Refused(Reason.TAKEN, f"machine {machine.machine_id} has no {order.gpus} GPUs to rent on-demand")
        if order.bid is not None and machine.min_bid(order.gpus) is None and not order.queue:
            raise Refused(Reason.TAKEN, f"machine {machine.machine_id} has no {order.gpus} GPUs at any bid")

        instance = self._new(order, fate or {})
        machine.claims.append(instance.claim)
        self.instances[instance.key] = instance
        bill = Account(instance.key, order.provider, order.account, order.label, self.now, self.now)
        self.ledger.open(bill)
        self.event("created", instance, bid=order.bid, image=order.image)
        if order.bid is not None and order.bid < machine.floor:
            # Below the floor nobody outbids it, and yet it gets nothing.
            self._drop_claim(instance)
        if self._serves(instance):
            self.lives.boot(instance)
        else:
            self.lives.stop(instance, Why.QUEUED if order.bid is None else Why.LOW_BID)
        self.recheck(machine)
        self._plan_end(instance)
        return instance

    def find(self, provider: str, ident: str) -> Instance | None:
        """Return the instance that a provider calls *ident*, unless it is gone."""
        instance = self.instances.get(f"{provider}:{ident}")
        return instance if instance and instance.phase is not Phase.GONE else None

    def listed(self, provider: str, account: str) -> list[Instance]:
        """Return an account's instances as a list call shows them, oldest first; new ones may be hidden for a while."""
        return [
            instance
            for instance in self.instances.values()
            if instance.order.provider == provider
            and instance.order.account == account
            and instance.phase is not Phase.GONE
            and instance.hidden_until <= self.now
        ]

    def destroy(self, instance: Instance) -> None:
        """End a rental for good."""
        self._drop_claim(instance)
        self.lives.end(instance)
        self.recheck(instance.machine)

    def stop(self, instance: Instance, why: Why = Why.USER) -> None:
        """Stop an instance and give its GPUs back; its disk stays, and costs."""
        self._drop_claim(instance)
        self.lives.stop(instance, why)
        self.recheck(instance.machine)

    def start(self, instance: Instance, *, queue: bool) -> bool:
        """Start a stopped instance. Return False if it was queued, or raise Refused where that is not wanted."""
        if instance.phase in ACTIVE:
            return True
        instance.claim.since = self.now
        self._drop_claim(instance)
        instance.machine.claims.append(instance.claim)
        if self._serves(instance):
            self.lives.resume(instance)
            self.recheck(instance.machine)
            return True
        if not queue:
            self._drop_claim(instance)
            raise Refused(
                Reason.NO_GPUS, f"machine {instance.machine.machine_id} has no {instance.order.gpus} free GPUs"
            )
        self.lives.stop(instance, Why.QUEUED)
        return False

    def change_bid(self, instance: Instance, bid: float) -> None:
        """Bid *bid* dollars per GPU-hour: it may win the GPUs back at once, or lose them."""
        instance.claim.bid = bid
        held = any(claim is instance.claim for claim in instance.machine.claims)
        if not held and instance.why is Why.LOW_BID and bid >= instance.machine.floor:
            instance.machine.claims.append(instance.claim)
        self.lives.bill(instance)
        self.recheck(instance.machine)

    def recheck(self, machine: Machine) -> None:
        """Take GPUs from those who lost priority, and give them back to those who have it again."""
        for instance in [held for held in self.instances.values() if held.machine is machine]:
            served = self._serves(instance)
            if instance.phase in ACTIVE and not served and instance.why is not Why.OUTBID:
                self._take_from(instance)
            elif served and instance.phase is Phase.STOPPED and instance.why in RESUMES_BY_ITSELF:
                self.event("resumes by itself", instance)
                self.lives.resume(instance)

    def exited(self, key: str, code: int) -> None:
        """Take note that an instance's program ended by itself."""
        instance = self.instances[key]
        if instance.phase is Phase.RUNNING:
            self.lives.exited(instance, code)

    def credit_left(self, account: str) -> float:
        """Return an account's dollars."""
        return self.credit.get(account, self.scenario.credit) - self.ledger.spent_by(account, self.now)

    def event(self, what: str, instance: Instance, **more: object) -> None:
        """Note what happened, for the oracles."""
        self.history.append({"at": self.now, "what": what, "instance": instance.key, "label": instance.label, **more})

    def _new(self, order: Order, fate: dict[str, dict[str, Any]]) -> Instance:
        number = len(self.instances) + 1
        draws = self.draws.stream(f"instance/{number}")
        ident = str(FIRST_CONTRACT + number) if order.provider == "vast" else draws.hex(14)
        key = f"{order.provider}:{ident}"
        return Instance(
            key=key,
            number=number,
            ident=ident,
            order=order,
            claim=Claim(order.gpus, order.bid, self.now, key),
            label=order.label,
            created_at=self.now,
            changed_at=self.now,
            instance_key=f"sim-instance-{draws.hex(24)}",
            port_base=PORTS_FROM + (number * PORTS_EACH) % 40_000,
            hidden_until=self.now + float(fate.get("hidden", {}).get("for_s", 0.0)),
            fate=fate,
        )

    def _serves(self, instance: Instance) -> bool:
        return instance.machine.serves(instance.claim)

    def _drop_claim(self, instance: Instance) -> None:
        claims = instance.machine.claims
        claims[:] = [claim for claim in claims if claim is not instance.claim]

    def _take_from(self, instance: Instance) -> None:
        if instance.order.provider == "vast":
            self.lives.outbid(instance, freeze=self.scenario.outbid_freezes or "freezes" in instance.fate)
        else:
            self._drop_claim(instance)
            self.lives.evict(instance)

    def _plan_end(self, instance: Instance) -> None:
        def expire() -> None:
            if instance.phase is not Phase.GONE:
                self.stop(instance, Why.EXPIRED)

        def terminate() -> None:
            if instance.phase is not Phase.GONE:
                self.event("terminateAfter", instance)
                self.destroy(instance)

        self.agenda.at(instance.machine.contract_end, expire)
        if instance.order.lifetime_s is not None:
            self.agenda.after(instance.order.lifetime_s, terminate)

    def _plan_credit_check(self) -> None:
        """Stop what an account can no longer pay: Vast keeps the disk, RunPod ends the pod (providers.md 2.4)."""

        def check() -> None:
            for instance in list(self.instances.values()):
                if instance.phase in ACTIVE and self.credit_left(instance.order.account) <= 0:
                    if instance.order.provider == "vast":
                        self.stop(instance, Why.CREDIT)
                    else:
                        self.destroy(instance)
            self._plan_credit_check()

        self.agenda.after(self.scenario.tick_s, check)
