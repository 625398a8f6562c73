"""How soon is a replacement ready, with the latencies that are known? Detection and race together, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from provisioner.core import race as racing
from provisioner.core import timing
from provisioner.core.detect import HeartbeatRead, ProviderSaid, Watch, judge
from provisioner.core.ports import Created, InstanceStatus
from provisioner.core.race.messages import (
    ClaimsAllowed,
    Command,
    Create,
    CreateEnded,
    Event,
    HeadRead,
    NodeReported,
    OffersFound,
    Permit,
    Report,
    Search,
    Tick,
)
from provisioner.core.race.state import Race, RaceSettings
from provisioner.core.ranking import RankSettings, race_order, rank
from provisioner.core.timing import BOOT_RUNPOD, BOOT_VAST, Range
from tests.support.race_world import INCUMBENT, JOB, incumbent_record, offer_of

RUNS = 100
RUNS_COLD = 30
STATE_VISIBLE = Range(1, 10, 60)
"""How long a provider may go on showing a lost instance as running (assumed: latencies.json)."""
LOOK_S = 0.5
"""How often the controller looks at permits, heads and reports in the store."""


class Market:
    """A loss at time 0 and everything after it, from one seed."""

    def __init__(self, seed: int, candidates: int, cached: list[bool]) -> None:
        self.drawn = random.Random(seed)
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.now_s = -6.0
        self.candidates, self.cached = candidates, cached
        self.dead_shown_s = self.draw(STATE_VISIBLE)
        self.last_beat_s = -self.drawn.uniform(0, 5)
        self.watch = Watch()
        self.race: Race | None = None
        self.head = HeadRead(0.0, 7, INCUMBENT)
        self.ready_s: float | None = None

    def draw(self, known: Range) -> float:
        """Draw so that the median is the known one: evenly below it, with a long tail above."""
        share = self.drawn.random()
        if share < 0.5:
            return known.low_s + 2 * share * (known.p50_s - known.low_s)
        return float(known.p50_s * (known.high_s / known.p50_s) ** (2 * share - 1))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + seconds, next(self.order), call))

    def run(self) -> float:
        for each_s, call in ((2.0, self.read_heartbeat), (3.0, self.list_instances), (LOOK_S, self.look)):
            self.later(self.drawn.uniform(0, each_s), self.repeated(each_s, call))
        while self.ready_s is None:
            self.now_s, _, call = heapq.heappop(self.queue)
            assert self.now_s < 1500, "no winner"
            call()
        return self.ready_s

    def repeated(self, each_s: float, call: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            call()
            self.later(each_s, again)

        return again

    def read_heartbeat(self) -> None:
        beat = (min(self.now_s, self.last_beat_s) - self.last_beat_s) // 5
        self.watch = self.watch.observe(HeartbeatRead(self.now_s, str(beat)))

    def list_instances(self) -> None:
        lost = self.now_s > self.dead_shown_s
        status = InstanceStatus.STOPPED if lost else InstanceStatus.RUNNING
        self.watch = self.watch.observe(ProviderSaid(self.now_s, status))

    def look(self) -> None:
        verdict = judge(self.watch, self.now_s)
        if verdict.race and self.race is None:
            settings = RaceSettings(candidates_max=self.candidates, race_budget_usd=100.0)
            started = racing.start(JOB, "00c0ffee", settings, self.head, self.now_s, records=[incumbent_record()])
            self.race = started[0]
            self.obey(started[1])
        if self.race is not None:
            self.send(ClaimsAllowed() if verdict.claim else Tick())
            self.send(replace(self.head, asked_at_s=self.now_s))

    def send(self, event: Event) -> None:
        assert self.race is not None
        self.race, commands = racing.step(self.race, event, self.now_s)
        self.obey(commands)

    def obey(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Search():
                    # A controller that searches now and then while all is well has offers at hand.
                    self.later(0.0, self.offers)
                case Create(intent, offer):
                    boot = BOOT_VAST if intent.provider == "vast" else BOOT_RUNPOD
                    create_s = self.draw(boot.create)
                    boot_s = self.draw(boot.image_cached if offer.image_cached else boot.image_cold)
                    checks_s = self.draw(timing.AGENT_INSTALL) + max(
                        self.draw(timing.CUDA_PROBE), self.draw(timing.STORE_PROBE)
                    )
                    created, ready = self.created(intent.ident), self.reports(intent.ident)
                    self.later(create_s, created)
                    self.later(create_s + boot_s + checks_s, ready)
                case Permit(ident, writer_epoch):
                    self.later(self.draw(timing.CLAIM), self.claims(ident, writer_epoch))
                case _:
                    pass

    def offers(self) -> None:
        found = [
            replace(offer_of(("vast", "runpod")[number % 2], number, 1.0 + number / 100), image_cached=cached)
            for number, cached in enumerate(self.cached)
        ]
        self.send(OffersFound(race_order(rank(found, RankSettings()))))

    def created(self, ident: str) -> Callable[[], None]:
        return lambda: self.send(CreateEnded(ident, Created(f"i-{ident}")))

    def reports(self, ident: str) -> Callable[[], None]:
        return lambda: self.send(NodeReported(ident, Report.READY))

    def claims(self, ident: str, writer_epoch: int) -> Callable[[], None]:
        def claim() -> None:
            if self.head.writer_epoch == writer_epoch - 1:
                self.head = HeadRead(self.now_s, writer_epoch, ident)
                self.ready_s = self.now_s

        return claim


def quantiles(candidates: int, cached: list[bool], runs: int = RUNS) -> tuple[float, float]:
    seconds = sorted(Market(seed, candidates, cached).run() for seed in range(runs))
    return seconds[runs // 2], seconds[runs * 95 // 100]


def test_with_a_cached_image_half_are_ready_in_45_s_and_nearly_all_in_90_s() -> None:
    p50_s, p95_s = quantiles(3, [True] * 4)
    assert p50_s <= 45, f"p50 {p50_s:.0f} s, p95 {p95_s:.0f} s"
    assert p95_s <= 90, f"p50 {p50_s:.0f} s, p95 {p95_s:.0f} s"


def test_racing_three_beats_racing_one() -> None:
    one, three = (quantiles(candidates, [False] * 4, RUNS_COLD) for candidates in (1, 3))
    assert three[0] < one[0]
    assert three[1] < one[1]
