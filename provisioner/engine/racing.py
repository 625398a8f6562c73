"""Carry out what the race wants done, and bring it what became of it.

Invariant: commands are carried out in their order; a record is durable before the next command begins; a task ends in
an event for the race, and while one is under way for an instance no second one is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

import trio

from provisioner.core import cost
from provisioner.core import race as racing
from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.happenings import CandidateMoved, Observer, OffersSeen, Said
from provisioner.core.intents import IntentRecord
from provisioner.core.jobs import JobSpec
from provisioner.core.race import Outcome, Phase, Race, RaceSettings
from provisioner.core.race.messages import (
    Announce,
    Block,
    Command,
    Create,
    CreateEnded,
    Destroy,
    DestroyAccepted,
    Event,
    HeadRead,
    OffersFound,
    Permit,
    RaiseBid,
    ReadHead,
    Record,
    Search,
)
from provisioner.core.race.state import RACE_BUDGET_MIN_USD
from provisioner.core.rendezvous import BadMessage, Orders, Request, decode, encode, orders_key, request_key
from provisioner.core.wishes import Wish
from provisioner.engine.accounts import Account, Creator
from provisioner.engine.books import Books
from provisioner.engine.eyes import Around, Eyes, RaceSaid, Send, Shut, Told
from provisioner.engine.fencing import Fence, answered
from provisioner.engine.outbox import Outbox
from provisioner.engine.ports import EnginePorts
from provisioner.engine.searching import Found, search


@dataclass(frozen=True, slots=True)
class Kit:
    """What the parts of one running job share."""

    spec: JobSpec
    ports: EnginePorts
    accounts: Mapping[str, Account]
    books: Books
    outbox: Outbox
    fence: Fence
    eyes: Eyes
    send: Send
    observe: Observer
    nursery: trio.Nursery

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return self.ports.clock.now_s()

    def say(self, text: str) -> None:
        """Tell the user."""
        self.observe(Said(self.now_s(), text))

    async def forget_request(self, request: Request | None = None) -> None:
        """Delete *request*, unless something else was asked for since then; None deletes whatever is there.

        Should that fail, it is seen again, and left out again.
        """
        key, shelf = request_key(self.spec.job), self.ports.shelf
        with contextlib.suppress(StoreUnavailable, StoreDenied, BadMessage):
            raw = await answered(self.ports.settings, lambda: shelf.get(key))
            if raw is not None and (request is None or decode(Request, raw) == request):
                await answered(self.ports.settings, lambda: shelf.delete([key]))


class NodeOrders:
    """The newest word to each node, written into the store until it is there."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._orders: dict[str, Orders] = {}

    def change(
        self, ident: str, *, permit: int | None = None, hand_over: bool | None = None, end: bool | None = None
    ) -> None:
        """Change a part of the orders of *ident*; what is None stays."""
        old = self._orders.get(ident) or Orders(self._kit.fence.controller_epoch, 0)
        new = Orders(
            old.controller_epoch,
            old.seq + 1,
            old.permit_writer_epoch if permit is None else permit,
            old.hand_over if hand_over is None else hand_over,
            old.end if end is None else end,
        )
        self._orders[ident] = new
        self._kit.outbox.post(orders_key(self._kit.spec.job, ident), encode(new))


class Driver:
    """The one race of the job, and the tasks that it started."""

    def __init__(self, kit: Kit, orders: NodeOrders, moved: Callable[[Race | None, Race], None]) -> None:
        self._kit = kit
        self._orders = orders
        self._moved = moved
        self._creator = Creator(kit.ports, kit.books, kit.fence)
        self._busy: set[tuple[str, str]] = set()
        self._in_the_way: dict[str, str] = {}
        """Why an instance is not destroyed yet, as it was told last."""
        self._wish: Wish = kit.spec.wish
        self._needed: JobSpec = kit.spec
        self.held = False
        """While a recovered race waits for a verdict on the incumbent it searches for nobody."""
        self.race: Race

    def begin(
        self,
        settings: RaceSettings,
        head: HeadRead,
        needed: JobSpec,
        *,
        held: bool = False,
    ) -> None:
        """Begin a race from the ledger's records; *needed* is the spec with the disk that the workspace needs."""
        ident = self._kit.ports.entropy.token_bytes(4).hex()
        before = getattr(self, "race", None)
        self.held, self._needed = held, needed
        race, commands = racing.start(
            self._kit.spec.job,
            ident,
            settings,
            head,
            self._kit.now_s(),
            records=self._kit.books.unsettled(),
            blocklist=self._kit.books.blocklist(),
        )
        self.race = race
        self._changed(before, race)
        self._do_all(commands)

    def step(self, event: Event) -> None:
        """Let the race hear of *event*, and do what it wants."""
        before = self.race
        self.race, commands = racing.step(before, event, self._kit.now_s())
        self._changed(before, self.race)
        self._do_all(commands)

    def lose(self, record: IntentRecord) -> None:
        """Destroy a node that holds the workspace, as if its provider had taken it: the ledger does not hear of it."""
        for instance_id in record.instances:
            command = Destroy(record.intent.ident, record.intent.provider, instance_id)
            self._once(("destroy", instance_id), self._destroy, command)

    def release(self) -> None:
        """The incumbent is in doubt: a race that was held goes on, and searches when it is time."""
        if self.held:
            self.held = False
            if self.race.search_deadline_s is not None:
                self._start_search(Search(self.race.settings.spot, self.race.settings.on_demand))

    @property
    def running(self) -> bool:
        """Whether it is open who wins."""
        return self.race.outcome is Outcome.RUNNING

    def _changed(self, before: Race | None, after: Race) -> None:
        """Tell of every candidate that is in another phase; then the keeper looks at who won."""
        known = {} if before is None else before.candidates
        for ident, candidate in after.candidates.items():
            old = known.get(ident)
            if old is None or old.phase is not candidate.phase:
                intent = candidate.record.intent
                moved = CandidateMoved(
                    self._kit.now_s(), ident, intent.provider, candidate.phase, intent.usd_h, candidate.record.why
                )
                self._kit.observe(moved)
        self._moved(before, after)

    def _do_all(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        kit = self._kit
        match command:
            case Record(record):
                kit.books.keep(record)
            case Create():
                kit.nursery.start_soon(self._create, command)
            case RaiseBid():
                self._once(("bid", command.instance_id), self._raise_bid, command)
            case Permit(ident, writer_epoch):
                self._orders.change(ident, permit=writer_epoch)
                kit.eyes.read_head_soon()
            case ReadHead():
                kit.eyes.read_head_soon()
            case Destroy():
                self._once(("destroy", command.instance_id), self._destroy, command)
            case Search():
                self._start_search(command)
            case Block(entry):
                kit.books.block(entry)
            case Announce(text):
                kit.say(text)
            case _:
                assert_never(command)

    def _once(self, key: tuple[str, str], task: Callable[[Any], Awaitable[None]], command: Command) -> None:
        if key not in self._busy:
            self._busy.add(key)
            self._kit.nursery.start_soon(self._busily, key, task, command)

    async def _busily(self, key: tuple[str, str], task: Callable[[Any], Awaitable[None]], command: Command) -> None:
        try:
            await task(command)
        finally:
            self._busy.discard(key)

    async def _create(self, command: Create) -> None:
        account = self._kit.accounts[command.intent.provider]
        race, needed = self.race.ident, self._needed
        outcome = await self._creator.create(account, command.intent, command.offer, needed)
        await self._kit.send(RaceSaid(race, CreateEnded(command.intent.ident, outcome)))

    async def _raise_bid(self, command: RaiseBid) -> None:
        failure = await self._kit.accounts[command.provider].rebid(command.instance_id, command.bid_usd_h)
        if failure:
            await self._kit.send(Told(f"the bid for {command.instance_id} on {command.provider}: {failure}"))

    async def _destroy(self, command: Destroy) -> None:
        account = self._kit.accounts.get(command.provider)
        if account is None:
            why = f"{command.provider} is not among this controller's providers"
        else:
            why = await account.destroy(command.instance_id)
        if why:
            # It is asked for again every few seconds: said once, until something else stands in the way.
            if self._in_the_way.get(command.instance_id) != why:
                self._in_the_way[command.instance_id] = why
                await self._kit.send(Told(f"{command.instance_id} on {command.provider} is not destroyed yet: {why}"))
        else:
            self._in_the_way.pop(command.instance_id, None)
            await self._kit.send(RaceSaid(self.race.ident, DestroyAccepted(command.ident, command.instance_id)))

    def _start_search(self, command: Search) -> None:
        if not self.held and ("search", self.race.ident) not in self._busy:
            self._once(("search", self.race.ident), self._search, command)

    def look_around(self) -> None:
        """Ask what would race first now, in all markets; the answer is a message."""
        self._once(("look", ""), self._look, Search(self._kit.spec.wish.spot, True))

    async def _look(self, command: Search) -> None:
        _, found = await self._found(command)
        if found.ranked:
            await self._kit.send(Around(found.ranked[0]))

    async def _search(self, command: Search) -> None:
        race = self.race
        accounts, found = await self._found(command)
        self._kit.observe(OffersSeen(self._kit.now_s(), found.fitting, found.why))
        if found.denied >= accounts:
            await self._kit.send(Shut("; ".join(found.why)))
        await self._kit.send(RaceSaid(race.ident, OffersFound(found.ranked, found.why)))

    async def _found(self, command: Search) -> tuple[frozenset[str], Found]:
        """Return whom was asked, and what there is."""
        kit, race, needed = self._kit, self.race, self._needed
        on_demand = needed.wish.on_demand_max_usd_gpu_h if command.on_demand else None
        wish = replace(needed.wish, spot=command.spot, on_demand_max_usd_gpu_h=on_demand)
        accounts = [
            account
            for name, account in kit.accounts.items()
            if name in race.settings.providers and name not in race.barred
        ]
        ours = {(one.intent.provider, one.intent.machine_id) for one in kit.books.unsettled()}
        found = await search(
            accounts, needed, wish, kit.books.blocklist(), kit.now_s(), kit.ports.settings, ours=ours,
            seen=kit.books.machines_with_image(),
        )  # fmt: skip
        return frozenset(account.name for account in accounts), found


def race_settings(kit: Kit, names: Iterable[str]) -> RaceSettings:
    """Return what a race that begins now may do and cost."""
    spec, settings, spend = kit.spec, kit.ports.settings, kit.books.spend()
    race_budget_usd = cost.race_budget_usd(
        spend.total_usd, spec.limits.race_budget_usd, share=settings.race_budget_share, least_usd=RACE_BUDGET_MIN_USD
    )
    budget_usd = spec.limits.budget_usd
    return RaceSettings(
        providers=frozenset(names),
        candidates_max=spec.candidates_max,
        at_once=settings.at_once,
        stagger_s=settings.stagger_s,
        race_budget_usd=race_budget_usd,
        budget_usd=float("inf") if budget_usd is None else max(0.0, budget_usd - spend.total_usd),
        spot=spec.wish.spot,
        on_demand=spec.wish.on_demand_max_usd_gpu_h is not None,
        give_up_after_s=settings.give_up_after_s,
        keep_lost_s=spec.limits.keep_lost_s,
        visible_after_s={name: account.capabilities.visible_after_s for name, account in kit.accounts.items()},
        deadlines=settings.deadlines,
    )


PHASES_THAT_SPEAK: Final = frozenset({Phase.REQUESTED, Phase.SETTLING, Phase.BOOTING, Phase.READY, Phase.CLAIMING})
"""Whose reports are read."""
