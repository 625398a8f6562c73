"""A market, a store and a ledger around one race, for tests: every fault is a choice of the caller.

The world keeps what is true (which instances exist, who holds the head), the controller only sees what it is told. The
world itself asserts what must never happen: a second create of an intent, a create without its record, a ledger that
makes an impossible move, the destruction of the node that the controller knows to have won.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from provisioner.core import race as racing
from provisioner.core.gpus import Gpu
from provisioner.core.intents import TRANSITIONS, Intent, IntentRecord, IntentState, decode, encode, label_of
from provisioner.core.offers import Market, Offer, Price
from provisioner.core.ports import (
    Created,
    CreateOutcome,
    CreateRefused,
    CreateUnknown,
    Instance,
    InstanceStatus,
    RefusedWhy,
)
from provisioner.core.race.launching import worst_usd
from provisioner.core.race.messages import (
    Command,
    Create,
    CreateEnded,
    Destroy,
    DestroyAccepted,
    Event,
    HeadRead,
    Listed,
    NodeReported,
    OffersFound,
    Permit,
    Record,
    Report,
    Search,
    Tick,
)
from provisioner.core.race.state import Outcome, Phase, RaceSettings
from provisioner.core.ranking import RankSettings, race_order, rank

JOB = "job"
PROVIDERS = ("vast", "runpod")
INCUMBENT = "0badcafe-1"


@dataclass
class Box:
    """An instance that exists, or lingers in listings after its end."""

    instance_id: str
    provider: str
    label: str
    usd_h: float
    since_s: float
    visible_at_s: float
    status: InstanceStatus = InstanceStatus.RUNNING
    ended_s: float | None = None
    shown_until_s: float = 0.0
    omitted: bool = False

    @property
    def ident(self) -> str:
        return self.label.removeprefix(f"sw-{JOB}-")

    @property
    def alive(self) -> bool:
        return self.ended_s is None


def offer_of(provider: str, number: int, usd_h: float = 1.0, *, cached: bool = True) -> Offer:
    return Offer(
        provider=provider,
        offer_id=str(number),
        gpu=Gpu("A100 SXM", 80),
        gpu_count=1,
        market=Market.SPOT,
        price=Price(usd_h),
        location="EU",
        disk_gb_max=500,
        machine_id=f"m{number}",
        image_cached=cached,
    )


def incumbent_record() -> IntentRecord:
    intent = Intent(
        INCUMBENT, f"sw-{JOB}-{INCUMBENT}", "vast", "1", Market.SPOT, "A100 SXM 80GB", 1, "EU", "m0", 1.0, 1.0, 0.0
    )
    return IntentRecord(intent, IntentState.WINNER, 0.0, ("i0",))


@dataclass
class RaceWorld:
    """Everything outside the state machine, and the state machine."""

    settings: RaceSettings = field(default_factory=RaceSettings)
    now_s: float = 1000.0
    writer_epoch: int = 7
    holder: str | None = INCUMBENT
    holder_instance: str | None = "i0"
    starts: int = 0
    serial: int = 0

    def __post_init__(self) -> None:
        first = incumbent_record()
        self.boxes = {"i0": Box("i0", "vast", first.intent.label, 1.0, 0.0, 0.0)}
        self.ledger = {INCUMBENT: encode(first)}
        self.created: set[str] = set()
        self.labels: set[str] = set()
        self.holders = {INCUMBENT}
        self.permits: dict[str, int] = {}
        self.commands: deque[Command] = deque()
        self.creates: list[tuple[Create, int]] = []
        self.destroys: list[tuple[Destroy, int]] = []
        self.searching = False
        self.start()

    def records(self) -> list[IntentRecord]:
        return [decode(body) for body in self.ledger.values()]

    def start(self) -> None:
        """A new controller: nothing of the old one but the ledger."""
        self.starts += 1
        self.commands.clear()
        self.searching = False
        ident = f"{self.starts:08x}"
        self.race, commands = racing.start(JOB, ident, self.settings, self.head(), self.now_s, records=self.records())
        self.commands.extend(commands)

    def head(self) -> HeadRead:
        return HeadRead(self.now_s, self.writer_epoch, self.holder, self.holder_instance)

    def send(self, event: Event) -> None:
        before = self.race
        self.race, commands = racing.step(self.race, event, self.now_s)
        self.commands.extend(commands)
        if before.winner is not None and self.race.winner is not None:
            assert self.race.winner.ident == before.winner.ident, "the winner changed"
        if self.race.winner is not None:
            assert self.race.winner.ident in self.holders, "a winner that never took the workspace over"
        if any(isinstance(command, Create) for command in commands):
            worst = sum(worst_usd(self.race, c, self.now_s) for c in self.race.candidates.values())
            assert worst <= self.settings.budget_usd + 1e-6, f"${worst} may be spent"

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.send(Tick())

    def do_one(self) -> None:
        """Carry out the oldest command."""
        command = self.commands.popleft()
        match command:
            case Record(record):
                self._keep(record)
            case Create(intent, _):
                assert intent.ident not in self.created, f"{intent.ident} is created twice"
                assert intent.ident in self.ledger, "a create without an intent"
                assert intent.label not in self.labels, "a label is used again"
                assert intent.label == label_of(JOB, *_parts(intent.ident))
                self.created.add(intent.ident)
                self.labels.add(intent.label)
                self.creates.append((command, self.starts))
            case Destroy(ident, _, instance_id):
                winner = self.race.winner
                assert winner is None or winner.ident != ident or instance_id not in winner.record.instances
                self.destroys.append((command, self.starts))
            case Permit(ident, writer_epoch):
                assert decode(self.ledger[ident]).state is not IntentState.RENTED, "a permit before its record"
                self.permits[ident] = writer_epoch
            case Search():
                self.searching = True
            case _:
                pass

    def do_all(self) -> None:
        while self.commands:
            self.do_one()

    def _keep(self, record: IntentRecord) -> None:
        ident = record.intent.ident
        if ident in self.ledger:
            old = decode(self.ledger[ident])
            assert record.state is old.state or record.state in TRANSITIONS[old.state], f"{old.state}→{record.state}"
        self.ledger[ident] = encode(record)

    def offers(self, prices: list[float], *, cached: bool = True) -> None:
        self.searching = False
        found = []
        for index, price in enumerate(prices):
            self.serial += 1
            found.append(offer_of(PROVIDERS[index % 2], self.serial, price, cached=cached))
        self.send(OffersFound(race_order(rank(found, RankSettings())), () if found else ("nothing on the market",)))

    def rent(self, create: Create, *, lag_s: float = 0.0) -> Box:
        self.serial += 1
        name, intent = f"i{self.serial}", create.intent
        box = Box(name, intent.provider, intent.label, intent.usd_h, self.now_s, self.now_s + lag_s)
        self.boxes[name] = box
        return box

    def end_create(self, index: int, how: str, lag_s: float = 0.0) -> None:
        """Decide what becomes of a create that is on the way; its answer dies with the controller that sent it."""
        create, sender = self.creates.pop(index)
        outcome: CreateOutcome | None
        match how:
            case "created":
                outcome = Created(self.rent(create, lag_s=lag_s).instance_id)
            case "left behind":
                box = self.rent(create, lag_s=lag_s)
                box.status = InstanceStatus.STOPPED
                outcome = CreateRefused(_why("bid too low"), "low", (box.instance_id,))
            case "refused":
                outcome = CreateRefused(_why("no capacity"), "taken")
            case "denied":
                outcome = CreateRefused(_why("denied"), "key revoked")
            case "committed, unknown":
                self.rent(create, lag_s=lag_s)
                outcome = CreateUnknown("timed out")
            case "committed, silent":
                self.rent(create, lag_s=lag_s)
                outcome = None
            case "committed twice, unknown":
                self.rent(create, lag_s=lag_s)
                self.rent(create, lag_s=lag_s)
                outcome = CreateUnknown("timed out")
            case _:
                outcome = CreateUnknown("connection reset")
        if outcome is not None and sender == self.starts:
            self.send(CreateEnded(create.intent.ident, outcome))

    def end_destroy(self, index: int, how: str, lingers_s: float = 0.0) -> None:
        destroy, sender = self.destroys.pop(index)
        box = self.boxes.get(destroy.instance_id)
        if how not in ("failed", "ignored") and box is not None and box.alive:
            box.ended_s, box.shown_until_s = self.now_s, self.now_s + lingers_s
        if how in ("accepted", "ignored") and sender == self.starts:
            self.send(DestroyAccepted(destroy.ident, destroy.instance_id))

    def listing(self, provider: str, omit: str | None = None) -> Listed:
        """What the provider shows now; *omit* is left out unless it was left out of the listing before."""
        rows = []
        for box in self.boxes.values():
            shown = box.alive and self.now_s >= box.visible_at_s
            shown = shown or (not box.alive and self.now_s < box.shown_until_s)
            if box.provider != provider or not shown:
                continue
            if box.instance_id == omit and not box.omitted:
                box.omitted = True
                continue
            box.omitted = False
            rows.append(Instance(provider, box.instance_id, box.label, box.status, market=Market.SPOT))
        return Listed(provider, self.now_s, tuple(rows))

    def alive(self) -> list[Box]:
        return [box for box in self.boxes.values() if box.alive]

    def says(self, box: Box, report: Report) -> None:
        if box.alive:
            self.send(NodeReported(box.ident, report, report.value))

    def claims(self, box: Box) -> None:
        """The node on *box* claims what it was permitted to; only one can have a writer epoch."""
        wanted = self.permits.get(box.ident)
        if not box.alive or box.status is not InstanceStatus.RUNNING or wanted is None:
            return
        if wanted == self.writer_epoch + 1:
            self.writer_epoch, self.holder, self.holder_instance = wanted, box.ident, box.instance_id
            self.holders.add(box.ident)
        elif self.holder != box.ident:
            self.says(box, Report.LOST)

    def read_head(self) -> None:
        self.send(self.head())

    def settle(self, turns: int = 400) -> None:
        """From here on everything works: the race must come to its end."""
        for _ in range(turns):
            if self._finished():
                return
            self._everything_works()
            self.wait(5.0)
        raise AssertionError(f"the race does not end: {self.race}")

    def _finished(self) -> bool:
        """Tell whether it is done, and a last look at both providers brings up nothing."""
        if self.commands or self.creates or self.destroys or not self.race.done:
            return False
        for provider in PROVIDERS:
            self.send(self.listing(provider))
        return self.race.done and not self.commands

    def _everything_works(self) -> None:
        self.do_all()
        while self.creates:
            self.end_create(0, "created")
            self.do_all()
        while self.destroys:
            self.end_destroy(0, "accepted")
            self.do_all()
        if self.searching:
            self.offers([1.0, 1.1, 1.2])
        for box in self.alive():
            if box.status is InstanceStatus.RUNNING and box.ident != INCUMBENT:
                self.says(box, Report.READY)
                self.do_all()
                self.claims(box)
        self.send(self.head())
        for provider in PROVIDERS:
            self.send(self.listing(provider))

    def check_end(self) -> None:
        """No box without an owner, no intent unsettled."""
        for record in self.records():
            assert record.settled, f"{record.intent.ident} is left {record.state}"
        winners = {r.intent.ident for r in self.records() if r.state is IntentState.WINNER}
        assert len(winners) <= 1, f"two winners in the ledger: {winners}"
        for box in self.alive():
            assert box.ident in winners, f"{box.instance_id} of {box.ident} outlives the race"
        assert len(self.alive()) <= 1, f"two nodes of one winner: {self.alive()}"
        if self.race.outcome is Outcome.CANCELLED and self.race.candidates[INCUMBENT].phase is Phase.INCUMBENT:
            assert self.holder == INCUMBENT, f"cancelled, but {self.holder} has fenced the incumbent"
        if self.race.outcome is Outcome.WON:
            assert self.race.winner is not None
            assert winners == {self.race.winner.ident}
        assert all(c.phase in (Phase.WINNER, Phase.INCUMBENT, Phase.GONE) for c in self.race.candidates.values())


def _parts(ident: str) -> tuple[str, int]:
    race, serial = ident.split("-")
    return race, int(serial)


def _why(text: str) -> RefusedWhy:
    return RefusedWhy(text)
