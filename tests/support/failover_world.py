"""Whole failovers in virtual time: the real simulated market with its real adapters, small nodes, controllers that die.

The engine is the real one. A node is an agent of some forty lines: it reports, waits for a permit, takes a workspace
over by a conditional create, works, publishes, and ends; its boot takes as long as the simulator says. Everything
random comes from one seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import trio
from trio._core import _run as trio_run
from trio.testing import MockClock

from provisioner.core import happenings, intents, jobs
from provisioner.core.blocklist import Blocked, Blocklist
from provisioner.core.detect import Health
from provisioner.core.errors import StoreUnavailable
from provisioner.core.gpus import parse_gpu
from provisioner.core.happenings import Failover, Happening, JobEnd, Judged, Said, Spent
from provisioner.core.intents import TRANSITIONS, Intent, IntentRecord, parse_label
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Market, Offer
from provisioner.core.ports import Launch, Provider
from provisioner.core.rendezvous import (
    NodePhase,
    Orders,
    Report,
    Request,
    decode,
    encode,
    orders_key,
    report_key,
    request_key,
)
from provisioner.core.wishes import Wish
from provisioner.engine import EnginePorts, EngineSettings, Me, run_job
from provisioner.engine.ports import LaunchMaker
from provisioner.providers.runpod import RunPod
from provisioner.providers.vast import Vast
from provisioner.simulator import events, oracles
from provisioner.simulator.draws import Draws
from provisioner.simulator.market.instances import Instance, Phase
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import Simulator, simulating
from tests.support.failover_store import Bucket, Manifest, View
from tests.support.simulated import CALM, GPU, KEY

JOB = "job"
SECRET = "s3cret-of-the-job"
BEAT_S, PUBLISH_S = 5.0, 30.0


@dataclass
class MemoryLedger:
    """A ledger that outlives its controller; the bytes are the real ones."""

    kept: dict[str, bytes] = field(default_factory=dict)
    history: dict[int, bytes] = field(default_factory=dict)
    blocked: Blocklist = field(default_factory=Blocklist)
    specs: dict[str, bytes] = field(default_factory=dict)

    def records(self, job: str) -> Sequence[IntentRecord]:
        return [intents.decode(raw) for raw in self.kept.values()]

    def append(self, job: str, record: IntentRecord) -> None:
        old = self.kept.get(record.intent.ident)
        if old is not None:
            state = intents.decode(old).state
            assert record.state is state or record.state in TRANSITIONS[state], f"{state} to {record.state}"
        self.kept[record.intent.ident] = intents.encode(record)

    def failovers(self, job: str) -> Sequence[Failover]:
        return [happenings.decode_failover(self.history[number]) for number in sorted(self.history)]

    def add_failover(self, job: str, failover: Failover) -> None:
        self.history[failover.number] = happenings.encode_failover(failover)

    def blocklist(self) -> Blocklist:
        return self.blocked

    def block(self, entry: Blocked, now_s: float) -> None:
        self.blocked = self.blocked.with_entry(entry, now_s)

    def spec(self, job: str) -> JobSpec | None:
        raw = self.specs.get(job)
        return None if raw is None else jobs.decode_spec(raw)

    def keep_spec(self, spec: JobSpec) -> None:
        self.specs[spec.job] = jobs.encode_spec(spec)

    def jobs(self) -> Sequence[str]:
        return sorted(self.specs)


class Killed(Exception):
    """The node's process was killed."""


@dataclass
class Work:
    """The command: how long it takes, and what it ends with."""

    seconds: float = 1200.0
    exit_code: int = 0


class NodeWorld:
    """`simulator.market.nodes.Nodes`: an agent behind each instance."""

    def __init__(self, bucket: Bucket, nursery: trio.Nursery, seed: int, work: Work) -> None:
        self.bucket = bucket
        self.buckets: dict[str, Bucket] = {}
        """Of jobs that have a workspace of their own."""
        self.work = work
        self.sim: Simulator
        self.lives: dict[str, trio.CancelScope] = {}
        self.frozen: dict[str, trio.Event] = {}
        self.seqs: dict[str, int] = {}
        self.mute: set[str] = set()
        """Nodes that are cut off from the store."""
        self.started: list[str] = []
        self._nursery = nursery
        self._draws = Draws(seed)

    def start(self, instance: Instance) -> None:
        self.kill(instance)
        scope = self.lives[instance.key] = trio.CancelScope()
        self.started.append(instance.key)
        self._nursery.start_soon(self._live, instance, scope)

    def kill(self, instance: Instance) -> None:
        scope = self.lives.pop(instance.key, None)
        if scope is not None:
            scope.cancel()
        self.frozen.pop(instance.key, None)

    def warn(self, instance: Instance) -> None:
        pass

    def freeze(self, instance: Instance) -> None:
        self.frozen.setdefault(instance.key, trio.Event())

    def thaw(self, instance: Instance) -> None:
        frozen = self.frozen.pop(instance.key, None)
        if frozen is not None:
            frozen.set()

    def wipe(self, instance: Instance) -> None:
        pass

    async def _live(self, instance: Instance, scope: trio.CancelScope) -> None:
        with scope:
            agent = Agent(self, instance)
            try:
                code = await agent.live()
            finally:
                if self.lives.get(instance.key) is scope:
                    del self.lives[instance.key]
            self.sim.app.catch_up()
            self.sim.world.exited(instance.key, code)
            self.sim.clock.poke()

    def draw(self, name: str) -> float:
        return self._draws.latency(self.sim.world.latencies.of("node", name))


class Agent:
    """What runs in one container."""

    def __init__(self, world: NodeWorld, instance: Instance) -> None:
        self.world = world
        self.instance = instance
        parsed = parse_label(instance.order.label)
        assert parsed is not None, instance.order.label
        self.job, self.ident = parsed
        self.times: dict[str, float] = {}
        self.bucket = world.buckets.get(self.job, world.bucket)
        self.view = View(self.bucket)
        self.epoch = 0

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)
        while (frozen := self.world.frozen.get(self.instance.key)) is not None:
            await frozen.wait()
        self.view.cut = self.instance.key in self.world.mute

    async def say(self, phase: NodePhase, **more: Any) -> None:
        self.times.setdefault(phase.value, self.world.sim.clock.now())
        seq = self.world.seqs[self.instance.key] = self.world.seqs.get(self.instance.key, 0) + 1
        report = Report(
            self.ident, seq, phase, self.instance.ident, writer_epoch=self.epoch or None, times=dict(self.times), **more
        )
        await self.insist(lambda: self.view.put(report_key(self.job, self.ident), encode(report)))

    async def insist(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await self.sleep(2.0)

    async def orders(self) -> Orders | None:
        raw = await self.insist(lambda: self.view.get(orders_key(self.job, self.ident)))
        return None if raw is None else decode(Orders, raw)

    async def live(self) -> int:
        await self.sleep(self.world.draw("agent_install"))
        await self.say(NodePhase.BOOTED)
        await self.sleep(self.world.draw("cuda_probe") + self.world.draw("store_probe"))
        if "wrong_gpu" in self.instance.fate:
            await self.say(NodePhase.UNFIT, why="another GPU than rented")
            return 1
        await self.say(NodePhase.READY)
        if not await self.claimed():
            return 12
        return await self.runs()

    async def claimed(self) -> bool:
        first = await self.insist(self.view.head)
        known = 0 if first is None else first.writer_epoch
        while True:
            orders = await self.orders()
            if orders is not None and orders.end:
                return False
            head = await self.insist(self.view.head)
            writer_epoch = 0 if head is None else head.writer_epoch
            if writer_epoch > known:
                await self.say(NodePhase.LOST, why="another one took the workspace over")
                return False
            permit = None if orders is None else orders.permit_writer_epoch
            if permit == writer_epoch + 1:
                await self.insist(self.view.bucket.call)
                if self.publish(permit, takeover=True):
                    self.epoch = permit
                    self.times["claimed"] = self.world.sim.clock.now()
                    return True
            await self.sleep(1.0)

    def publish(self, writer_epoch: int, *, progress_s: float | None = None, takeover: bool = False) -> bool:
        """Create the next manifest, unless somebody with another writer epoch has the head."""
        head = self.bucket.head
        if head is not None and not takeover and head.writer_epoch != writer_epoch:
            return False
        if takeover and writer_epoch != (0 if head is None else head.writer_epoch) + 1:
            return False
        done_s = 0.0 if head is None else head.progress_s
        number = 1 if head is None else head.number + 1
        now_s = self.world.sim.clock.now()
        return self.bucket.create_manifest(
            Manifest(number, writer_epoch, now_s, self.ident, self.instance.ident, progress_s or done_s, takeover)
        )

    async def runs(self) -> int:
        bucket, now = self.bucket, self.world.sim.clock.now
        bucket.beats[self.epoch] = 1
        # The head was followed and its metadata is there: what is left is to serve it.
        await self.sleep(0.5)
        self.times["first_read"] = self.times["started"] = now()
        await self.say(NodePhase.RUNNING)
        assert bucket.head is not None
        progress_s, began_s, published_s = bucket.head.progress_s, now(), now()
        while True:
            await self.sleep(BEAT_S if self.world.work.seconds > BEAT_S else 1.0)
            done_s = progress_s + now() - began_s
            try:
                await self.view.bucket.call(cut=self.view.cut)
            except StoreUnavailable:
                continue
            head = bucket.head
            if head is None or head.writer_epoch != self.epoch:
                await self.say(NodePhase.LOST, why="fenced")
                return 12
            bucket.beats[self.epoch] += 1
            orders = await self.orders()
            ends = done_s >= self.world.work.seconds
            asked = orders is not None and (orders.hand_over or orders.end)
            if ends or asked or now() - published_s >= PUBLISH_S:
                if not self.publish(self.epoch, progress_s=done_s):
                    await self.say(NodePhase.LOST, why="fenced")
                    return 12
                published_s = now()
            if ends:
                await self.say(NodePhase.ENDED, exit_code=self.world.work.exit_code)
                return self.world.work.exit_code
            if asked:
                await self.say(NodePhase.ENDED, why="handed over")
                return 0


@dataclass
class SimWall:
    """`Clock` by the simulator's time."""

    sim: Simulator

    def now_s(self) -> float:
        return self.sim.clock.now()


@dataclass
class SeededEntropy:
    random: random.Random

    def token_bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)


SPEC = JobSpec(
    job=JOB,
    workspace="ws",
    command=("python", "train.py"),
    providers=("vast", "runpod"),
    wish=Wish(parse_gpu(GPU), disk_gb=20.0, max_price_usd_gpu_h=100.0, on_demand_max_usd_gpu_h=100.0),
    image="some/image:1",
    form="fuse",
)


async def launch_of(intent: Intent, offer: Offer, spec: JobSpec) -> Launch:
    bid_usd_h = offer.price.compute_usd_h if offer.market is Market.SPOT else None
    return Launch(intent.label, offer, spec.image, spec.wish.disk_gb, "true", {"TOKEN": SECRET}, bid_usd_h=bid_usd_h)


@dataclass
class World:
    """One market, one store, one job, and the controllers that keep it."""

    sim: Simulator
    bucket: Bucket
    nodes: NodeWorld
    providers: dict[str, Provider]
    draws: random.Random
    spec: JobSpec = SPEC
    settings: EngineSettings = field(default_factory=EngineSettings)
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    view: View = field(init=False)
    seen: list[Happening] = field(default_factory=list)
    launch_maker: LaunchMaker = launch_of
    pid: int = 1
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.view = View(self.bucket)

    def now_s(self) -> float:
        return self.sim.clock.now()

    async def order(self, **fault: Any) -> None:
        app = self.sim.app
        app.catch_up()
        events.plan(app, app.faults.add(fault, self.now_s()))
        app.catch_up()
        self.sim.clock.poke()

    def ports(self, *, view: View | None = None, host: str = "here", adopt: bool = False) -> EnginePorts:
        mine = view or self.view
        self.pid += 1
        return EnginePorts(
            self.providers,
            mine,
            mine,
            self.ledger,
            SimWall(self.sim),
            SeededEntropy(self.draws),
            self.launch_maker,
            Me(host, self.pid, lambda _host, pid: pid not in self.dead),
            replace(self.settings, adopt=adopt),
        )

    def observe(self, happening: Happening) -> None:
        self.seen.append(happening)

    async def run(self, **how: Any) -> JobEnd:
        return await run_job(self.spec, self.ports(**how), self.observe)

    async def run_for(self, seconds: float, **how: Any) -> JobEnd | None:
        """Run a controller and kill it after *seconds*; None if it was killed."""
        with trio.move_on_after(seconds):
            return await self.run(**how)
        self.dead.add(self.pid)
        return None

    def ask(self, kind: Any, of: str = "") -> None:
        self.bucket.objects[request_key(JOB)] = encode(Request(kind, of))

    def alive(self) -> list[Instance]:
        return [one for one in self.sim.world.instances.values() if one.phase is not Phase.GONE]

    def holder(self) -> Instance | None:
        head = self.bucket.head
        found = [one for one in self.alive() if head is not None and one.ident == head.instance_id]
        return found[0] if found else None

    async def until(self, there: Callable[[], bool], at_most_s: float = 7200.0) -> None:
        with trio.fail_after(at_most_s):
            while not there():
                await trio.sleep(1.0)

    async def until_running(self, but: str | None = None) -> Instance:
        """Wait until a node runs the command, another one than *but*."""

        def running() -> bool:
            holder = self.holder()
            raw = (
                None
                if self.bucket.head is None
                else self.bucket.objects.get(report_key(JOB, self.bucket.head.intent or ""))
            )
            return (
                holder is not None
                and holder.key != but
                and raw is not None
                and decode(Report, raw).phase is NodePhase.RUNNING
            )

        await self.until(running)
        holder = self.holder()
        assert holder is not None
        return holder

    def report_of(self, instance: Instance) -> Report:
        """Read the newest word of the node on *instance*."""
        parsed = parse_label(instance.label)
        assert parsed is not None
        return decode(Report, self.bucket.objects[report_key(*parsed)])

    def story(self) -> str:
        """What happened, for whoever looks for the reason of a failure."""
        start_s = self.sim.world.scenario.start_unix_s
        lines = [(one.at_s, str(one)) for one in self.seen if not isinstance(one, Spent)]
        lines += [(event["at"], f"sim {event}") for event in self.sim.world.history]
        lines += [(one.at_s, f"ws  {one}") for one in self.bucket.manifests if one.takeover]
        return "\n".join(
            f"{at_s - start_s:8.1f} {text[:300]}" for at_s, text in sorted(lines, key=lambda line: line[0])
        )

    def said(self) -> str:
        return "\n".join(one.text for one in self.seen if isinstance(one, Said))

    def judged(self) -> list[Health]:
        return [one.health for one in self.seen if isinstance(one, Judged)]

    def failovers(self) -> list[Failover]:
        return list(self.ledger.failovers(JOB))

    def check_end(self, *, early: bool = False) -> None:
        """The oracles: nothing left that costs money, one create per intent, no secret anywhere."""
        app = self.sim.app
        app.catch_up()
        left = oracles.alive(app)
        assert left == [], f"orphans: {[(one['key'], one['label'], one['phase'], one['why']) for one in left]}"
        assert oracles.billed(app)["open"] == []
        bad = [one for one in oracles.violations(app) if not (early and one["rule"] == "sent too early")]
        assert bad == [], bad
        self.bucket.check()
        for record in self.ledger.records(JOB):
            assert record.settled, f"{record.intent.ident} is left {record.state}"
        for key, body in self.bucket.objects.items():
            assert SECRET.encode() not in body, key
            assert KEY.encode() not in body, key
        assert SECRET not in repr(self.seen)
        assert KEY not in repr(self.seen)
        for entry in app.journal:
            assert SECRET not in entry.path
            assert SECRET not in json.dumps(entry.report() | {"body": None}, default=str)


@asynccontextmanager
async def world(
    *,
    seed: int = 7,
    work: Work | None = None,
    settings: EngineSettings | None = None,
    spec: JobSpec = SPEC,
    **scenario: Any,
) -> AsyncIterator[World]:
    draws = random.Random(seed)
    bucket = Bucket()
    async with trio.open_nursery() as nursery:
        nodes = NodeWorld(bucket, nursery, seed, work or Work())
        chosen = Scenario(**{**CALM, "limits": True, "call_latency": True, "credit": 1e5, "seed": seed, **scenario})
        async with simulating(chosen, nodes=nodes) as sim:
            nodes.sim = sim
            providers: dict[str, Provider] = {
                "vast": Vast(KEY, base_url=sim.url, transport=sim.transport),
                "runpod": RunPod(KEY, base_url=sim.url, transport=sim.transport),
            }
            yield World(sim, bucket, nodes, providers, draws, spec=spec, settings=settings or EngineSettings())
            for provider in providers.values():
                await provider.aclose()
        nursery.cancel_scope.cancel()


def in_virtual_time(main: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """Run *main*; the same seed gives the same order of tasks."""
    trio_run._r.seed(seed)
    with patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        return trio.run(main, *args, clock=MockClock(autojump_threshold=0))
