"""One simulated world per seed: nodes, clients, a bad network, kills at any moment, and a strict oracle.

Everything random comes from the seed, trio's scheduler included; time is virtual.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from spotwarp_fs.core import sections
from spotwarp_fs.core.errors import Corrupt, Fenced, Unavailable
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.core.types import BLOCK_BYTES
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.store.faults import FaultSchedule
from spotwarp_fs.store.memory import MemoryStore
from tests.support.oracle import StoreReader, Tree, differences, in_flight_outcome
from tests.support.sim_client import Client, History, metadata, observe, short
from tests.support.sim_node import SITES, Killed, NodeNetwork, SimNode, SimWorkers
from tests.support.world import WORKSPACE_ID, start

ROOT = workspace_root("test", WORKSPACE_ID)


@dataclass(frozen=True)
class Plan:
    """What a world is like; drawn from its seed."""

    settings: EngineSettings
    faults: FaultSchedule
    clients: int
    requests: int
    lives: int
    late_s: float
    outages: bool
    ends: tuple[str, ...]
    observe: float
    sections: bool
    """Metadata is cut into tiny sections, so that block maps load late."""

    @property
    def quiet(self) -> bool:
        """The network is slow at most."""
        schedule = self.faults
        return not (self.may_fail or schedule.fail_before or schedule.lose_answer or schedule.throttle)

    @property
    def rpo_s(self) -> float:
        """Bound of P-04, and what a few slow requests in a row may take."""
        return self.settings.interval_s + 5 + 6 * self.faults.slow_s

    @property
    def may_fail(self) -> bool:
        return self.outages or self.faults.flip_bit > 0 or self.faults.short_body > 0

    @classmethod
    def draw(cls, rng: random.Random) -> Plan:
        small = rng.random() < 0.6
        settings = EngineSettings(
            interval_s=rng.choice((0.5, 2.0, 5.0)),
            heartbeat_s=3.0,
            disk_reserve_bytes=0,
            cache_bytes_max=rng.choice((4, 6, 9)) * BLOCK_BYTES if small else 1 << 62,
            cold_after_s=rng.choice((0.0, 0.2, 1.0)),
            early_upload_period_s=rng.choice((0.05, 0.25)),
            pack_bytes_target=rng.choice((1 << 16, 1 << 20, 1 << 24)),
            pack_linger_s=rng.choice((0.1, 1.0)),
            frames_in_memory_max=rng.choice((2, 8, 96)),
            rebase_manifests_max=rng.choice((1, 3, 256)),
            hydrate_run_blocks=rng.choice((1, 8)),
            readahead_blocks_max=rng.choice((2, 64)),
            inode_batch=rng.choice((1, 4)),
            retry_max_s=rng.choice((1.0, 10.0)),
            drain_s=30.0,
            warm_bytes_max=rng.choice((0, 1 << 40)),
        )
        bad = rng.random() < 0.6
        faults = FaultSchedule(
            fail_before=rng.choice((0.0, 0.1)) if bad else 0.0,
            lose_answer=rng.choice((0.0, 0.15)) if bad else 0.0,
            throttle=rng.choice((0.0, 0.1)) if bad else 0.0,
            short_body=rng.choice((0.0, 0.02)) if bad else 0.0,
            flip_bit=rng.choice((0.0, 0.02)) if bad else 0.0,
            slow=rng.choice((0.2, 1.0)),
            slow_s=rng.choice((0.01, 0.3, 2.0)),
        )
        return cls(
            settings, faults,
            clients=rng.choice((1, 1, 2, 3)), requests=rng.choice((15, 30, 60)), lives=rng.choice((2, 3, 4)),
            late_s=rng.choice((0.0, 3.0)), outages=bad and rng.random() < 0.3,
            ends=rng.choice((("kill",), ("cut short",), ("lost",), ("zombie",), ("drain",),
                             ("kill", "cut short", "lost", "zombie", "drain"))),
            observe=rng.choice((0.0, 0.5, 1.0)), sections=rng.random() < 0.5,
        )  # fmt: skip


class World:
    """Runs one seed."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = plan or Plan.draw(self.rng)
        self.store = MemoryStore()
        self.reader = StoreReader(self.store, ROOT)
        self.histories: dict[str, History] = {}
        """By session: what its manifests must come from."""
        self.trace: list[str] = []
        self.claims: list[Claim] = []
        self.zombies: set[Life] = set()
        """Sessions that serve on while another node has the workspace."""
        self.over_budget_max = 0
        self.current: tuple[str, History] | None = None
        """The node that served last, and its history."""
        self.newest = Tree({}, {})
        self.newest_number = 0
        self._nodes = 0

    def child(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            node = self.new_node()
            for _ in range(self.plan.lives):
                end = self.rng.choice(self.plan.ends)
                node = await Life(self, node, end).run()
            await self.last_look(node)
            nursery.cancel_scope.cancel()
        assert not self.zombies, "a zombie was never fenced"

    async def last_look(self, node: SimNode) -> None:
        """On a fresh node, with a good network, everything that was published is there."""
        self.check_store()
        quiet = NodeNetwork(self.store, self.child(), FaultSchedule(), self.nursery, 0.0)
        async with self.serving(self.new_node(), quiet) as session:
            self.check_store()
            seen = await observe(session)
            # By its heartbeat at the latest, an older writer learns that it is fenced (P-06).
            with trio.move_on_after(60):
                while self.zombies:
                    await trio.sleep(1)
            self.check_store()
            found = differences(self.newest, seen)
            assert not found, f"a fresh node shows something else than manifest {self.newest_number}: {found[:8]}"
            self.check_local(session)

    def new_node(self) -> SimNode:
        self._nodes += 1
        return SimNode(f"node{self._nodes}")

    @asynccontextmanager
    async def serving(self, node: SimNode, network: NodeNetwork) -> AsyncIterator[Session]:
        network.switch = node.switch
        workers = SimWorkers(self.child())
        async with start(
            network, node, rng=self.child(), settings=self.plan.settings, workers=workers, claims=self.claims
        ) as session:
            yield session

    def check_store(self) -> None:
        """Each manifest's tree is a state of its writer's history, and none is older than the one before it."""
        for manifest, tree in self.reader:
            history = self.histories.get(manifest.session)
            if manifest.takeover is not None or history is None:
                if manifest.number > 1:
                    found = differences(self.newest, tree)
                    assert not found, f"takeover {manifest.number} changes the tree: {found[:8]}"
            else:
                history.published = history.index_of(tree, history.published)
            self.newest, self.newest_number = tree, manifest.number

    def check_local(self, session: Session) -> None:
        """The node's own map is in order."""
        with session.workspace.kv.read() as view:
            problems = check(view)
        assert not problems, problems[:5]


class Life:
    """One session of one node, and how it ends."""

    def __init__(self, world: World, node: SimNode, end: str) -> None:
        self.world = world
        self.node = node
        self.end = end
        self.rng = world.child()
        self.network = NodeNetwork(world.store, world.child(), world.plan.faults, world.nursery, world.plan.late_s)
        self.history: History | None = None
        self.scope = trio.CancelScope()
        self.ready = trio.Event()
        self.over = trio.Event()
        self.failed = False
        """It never served."""

    async def run(self) -> SimNode:
        """Live to the end; returns the node that the next life starts on."""
        world = self.world
        world.trace.append(f"life on {self.node.name}, end {self.end}")
        if self.end == "cut short":
            switch = self.node.switch
            if self.rng.random() < 0.5:
                switch.countdown = int(2 ** (self.rng.random() * 9))
            else:
                switch.countdown, switch.only = int(2 ** (self.rng.random() * 4)), self.rng.choice(SITES)
                switch.then = self.rng.choice((0, 1, 1, 2))
        world.nursery.start_soon(self._session)
        # With a store that is away for a minute at a time, and a cache of a few blocks, writers wait for long.
        limit = 3000.0 if world.plan.outages else 400.0
        with trio.move_on_after(limit) as patience:
            if self.end == "zombie":
                await self._first_of(self.ready, self.over)
                await trio.sleep(self.rng.random() * 5)
            elif self.end in ("kill", "lost"):
                if self.rng.random() < 0.8:
                    await self._first_of(self.ready, self.over)
                with trio.move_on_after(self.rng.random() * self.rng.choice((0.5, 5.0, 20.0))):
                    await self.over.wait()
                self.node.switch.dead = True
                self.scope.cancel()
                await self.over.wait()
            else:
                await self.over.wait()
        assert not patience.cancelled_caught, f"life with end {self.end!r} hangs"
        if self.end == "zombie" and not self.over.is_set():
            self.network.schedule = replace(self.network.schedule, fail_before=0.0, throttle=0.0)
            world.zombies.add(self)
        if self.end in ("lost", "zombie", "drain") and not self.failed:
            return world.new_node()
        self.node.switch.dead = True
        return self.node.restarted()

    async def _first_of(self, *events: trio.Event) -> None:
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            for event in events:
                nursery.start_soon(wait, event)

    async def _session(self) -> None:
        try:
            with self.scope:
                async with self.world.serving(self.node, self.network) as session:
                    await self._serve(session)
        except* Killed:
            self.world.trace.append(f"killed at {self.node.switch.site}")
        except* (Unavailable, Corrupt, Fenced) as group:
            # A start may give up on a bad network; whoever started it tries again.
            assert not self.ready.is_set(), "a session that serves never ends by what the store does"
            self.world.trace.append(f"no start: {group.exceptions}")
            self.failed = True
        finally:
            if self.history is not None:
                self.history.died_ns = self.node.switch.died_ns
                self.history.ended_s = trio.current_time() if self.end == "lost" else None
            self.over.set()
            self.world.zombies.discard(self)

    async def _serve(self, session: Session) -> None:
        world = self.world
        await self._begin(session)
        self.ready.set()
        assert self.history is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, session)
            if world.plan.outages:
                nursery.start_soon(self._outages)
            async with trio.open_nursery() as clients:
                for number in range(world.plan.clients):
                    client = Client(
                        session, self.history, world.child(),
                        number=number, requests=world.plan.requests, may_fail=world.plan.may_fail,
                    )  # fmt: skip
                    clients.start_soon(client.run)
            nursery.cancel_scope.cancel()
        self.network.partitioned = False
        if session.workspace.fenced is not None:
            assert self in world.zombies, f"fenced, though nobody took over: {session.workspace.fenced}"
        world.check_store()
        world.check_local(session)
        if self.end == "drain":
            await self._drain(session)
        if self.end == "zombie":
            await session.fenced.wait()

    async def _drain(self, session: Session) -> None:
        assert self.history is not None
        self.network.schedule = replace(self.network.schedule, fail_before=0.0, throttle=0.0)
        drained = await session.drain(trio.current_time() + 300)
        assert drained.saved, drained
        self.world.check_store()
        lost = differences(self.history.tree, self.world.newest)
        assert not lost, f"a drain that says it saved everything lost {lost[:8]}"

    async def _watch(self, session: Session) -> None:
        """Look at the budget (P-10) and at the age of what is unpublished (P-04) all the time."""
        while True:
            over = session.budget.used_bytes - session.workspace.settings.cache_bytes_max
            self.world.over_budget_max = max(self.world.over_budget_max, over)
            await trio.sleep(0.5)

    async def _outages(self) -> None:
        while True:
            await trio.sleep(self.rng.random() * 10)
            self.network.partitioned = True
            await trio.sleep(self.rng.random() * 60)
            self.network.partitioned = False

    async def _begin(self, session: Session) -> None:
        """Check what this session found, and begin its history there."""
        world = self.world
        mine = world.claims[-1].session
        before = world.current
        world.check_store()
        head = session.claimed.resumed_from
        same_node = before is not None and before[0] == self.node.name
        if before is None:
            history = History([await metadata(session, None)], [trio.current_time()])
        elif same_node:
            history = await self._resumed(session, before[1])
        else:
            history = before[1]
            promised = max([0, *history.barriers])
            world.check_store()
            kept = history.published
            assert kept >= promised, f"barrier promised state {promised}, the store has {kept}"
            if world.plan.quiet and history.ended_s is not None:
                due = history.acked_before(history.ended_s - world.plan.rpo_s)
                assert kept >= due, f"lost at {history.ended_s:.2f} s: state {due} was due in the store, it has {kept}"
            tree = history.states[kept].visible()
            found = differences(tree, world.newest)
            assert not found, f"{head}: {found[:8]}"
            kept_of = f"-- {kept} kept of {len(history.states) - 1}"
            history = History([tree], [trio.current_time()], trace=[*history.trace, kept_of])
            await self._look(session, history)
        self.history = history
        world.histories[mine] = history
        world.current = self.node.name, history

    async def _resumed(self, session: Session, history: History) -> History:
        """A restart on the same node: every acknowledged request is there, the one in flight is or is not (P-01)."""
        tree = history.tree.visible()
        self.world.histories[self.world.claims[-1].session] = history
        pending = [replace(op, now_ns=history.died_ns) for op in history.pending.values()]
        history.pending = {}
        history.trace.append(f"-- restarted, in flight: {[short(op) for op in pending]}")
        if not pending:
            history.states.append(tree)
            history.acked_s.append(trio.current_time())
            await self._look(session, history)
            return history
        seen = await observe(session)
        found = differences(tree, seen)
        assert not found or any(in_flight_outcome(history.tree, seen, op) for op in pending), found[:8]
        history.states.append(seen)
        history.acked_s.append(trio.current_time())
        return history

    async def _look(self, session: Session, history: History) -> None:
        """Compare names and attributes, sometimes also all bytes (which hydrates everything)."""
        if self.rng.random() < self.world.plan.observe:
            seen = await observe(session)
        else:
            seen = await metadata(session, history.tree)
        found = differences(history.tree, seen)
        assert not found, f"at the start of a session on {self.node.name}: {found[:8]}"


def run_world(seed: int, plan: Plan | None = None) -> World:
    """Run a world, or fail with its seed and what happened in it."""
    world = World(seed, plan)
    inline, section = (0, 256) if world.plan.sections else (sections.INLINE_BYTES_MAX, sections.SECTION_BYTES)
    trio_run._r.seed(seed)
    try:
        with (
            patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            patch.multiple(sections, INLINE_BYTES_MAX=inline, SECTION_BYTES=section),
        ):
            trio.run(world.run, clock=MockClock(autojump_threshold=0))
    except BaseException as error:
        steps = world.current[1].trace[-25:] if world.current is not None else []
        tail = "\n".join(["", *world.trace, *steps])
        error.add_note(f"SPOTWARP_SEED={seed}{tail}")
        raise
    return world
