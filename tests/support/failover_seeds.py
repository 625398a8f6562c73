"""One seed, one failover story: mixed faults on both providers, controllers that die and come back, then oracles."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import trio

from provisioner.core.errors import StoreUnavailable
from provisioner.core.happenings import JobEnd
from provisioner.engine import EngineSettings
from tests.support.failover_world import MemoryLedger, View, Work, World, world

JOB_S_MAX = 6 * 3600.0
FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "lost_answer", "endpoint": "create", "how": "drop"},
    {"kind": "lost_answer", "endpoint": "create", "how": "delay", "for_s": 300},
    {"kind": "lost_answer", "endpoint": "create", "how": "error"},
    {"kind": "outbid_first", "endpoint": "create", "for_s": 300},
    {"kind": "no_capacity", "endpoint": "create"},
    {"kind": "reset", "endpoint": "create"},
    {"kind": "rate_limited", "endpoint": "create", "form": "retry_after", "wait_s": 9},
    {"kind": "hidden", "endpoint": "create", "for_s": 10},
    {"kind": "stuck", "endpoint": "create", "phase": "loading"},
    {"kind": "stuck", "endpoint": "create", "phase": "provisioning"},
    {"kind": "oci_failure", "endpoint": "create"},
    {"kind": "dies", "endpoint": "create", "after_s": 20},
    {"kind": "dies", "endpoint": "create", "after_s": 90},
    {"kind": "wrong_gpu", "endpoint": "create"},
    {"kind": "server_error", "endpoint": "list", "count": 3},
    {"kind": "server_error", "endpoint": "search", "count": 1},
    {"kind": "missing_row", "endpoint": "list"},
    {"kind": "stale", "endpoint": "list", "by_s": 8},
    {"kind": "rate_limited", "endpoint": "list", "form": "json", "wait_s": 7},
    {"kind": "destroy_ignored", "endpoint": "destroy", "for_s": 60},
    {"kind": "server_error", "endpoint": "destroy", "count": 2},
    {"kind": "lost_answer", "endpoint": "destroy", "how": "drop"},
    {"kind": "price", "factor": 1.6},
)
LOSSES: tuple[dict[str, Any], ...] = (
    {"kind": "preempt", "for_s": 300},
    {"kind": "preempt", "for_s": 3000},
    {"kind": "preempt", "for_s": 120, "how": "freeze"},
    {"kind": "host_fails"},
    {"kind": "host_fails", "phase": "unknown"},
)


@dataclass
class Story:
    """What is drawn from a seed."""

    seed: int
    draws: random.Random = field(init=False)
    end: JobEnd | None = None
    controllers: int = 0
    moved: bool = False

    def __post_init__(self) -> None:
        self.draws = random.Random(f"story {self.seed}")

    async def disturb(self, w: World) -> None:
        """Order faults, losses and outages until cancelled."""
        draws, losses = self.draws, self.draws.randint(1, 4)
        for _ in range(draws.randint(1, 5)):
            await w.order(**draws.choice(FAULTS))
        while True:
            await trio.sleep(draws.uniform(10, 200))
            for _ in range(draws.randint(0, 3)):
                await w.order(**draws.choice(FAULTS))
            if draws.random() < 0.1:
                now_s = trio.current_time()
                w.bucket.outages.append((now_s, now_s + draws.choice([3, 12, 60])))
            if losses and draws.random() < 0.55:
                losses -= 1
                loss = dict(draws.choice(LOSSES))
                holder = w.holder()
                # Now and then everything of a kind goes at once.
                if holder is not None and draws.random() < 0.8:
                    loss["instance"] = holder.key
                await w.order(**loss)

    async def control(self, w: World) -> None:
        """Run controllers one after the other; each but the last is killed somewhere."""
        draws, kills = self.draws, self.draws.choice([0, 1, 2, 4])
        while self.end is None:
            self.controllers += 1
            last = self.controllers > kills
            lives_s = JOB_S_MAX if last else draws.choice([2, 8, 25, 60, 200, 700]) * draws.random()
            try:
                self.end = await w.run_for(lives_s)
            except StoreUnavailable:
                # Started while the store is out: whoever starts it tries again.
                await trio.sleep(10)
                kills += 1
                continue
            if self.end is not None:
                return
            assert not last, "the job does not end"
            await trio.sleep(draws.choice([0.0, 1.0, 20.0, 200.0]))
            if draws.random() < 0.4:
                # On another machine, with nothing but the mirror, and account limits that nobody told it of.
                w.ledger, w.view, self.moved = MemoryLedger(), View(w.bucket), True
                w.dead.clear()


async def live(seed: int) -> Story:
    """Run one story to its end, and hold the oracles against it."""
    story = Story(seed)
    draws = story.draws
    scenario: dict[str, Any] = {
        "seed": seed,
        "rivals_per_hour": draws.choice([0.0, 0.5, 2.0]),
        "rival_hours": 0.3,
        "busy": draws.choice([0.0, 0.3]),
        "drift": 0.01,
        "image_cached": draws.choice([0.0, 0.5, 1.0]),
        "outbid_shows_exited": 0.3,
        "outbid_freezes": draws.random() < 0.2,
        "runpod_spot": draws.random() < 0.3,
        "search_rows_max": 64,
        "vast_machines": 60,
    }
    work = Work(draws.uniform(100, 900), draws.choice([0, 0, 0, 3]))
    settings = EngineSettings(teardown_s=3600.0)
    async with world(settings=settings, work=work, **scenario) as w:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(story.disturb, w)
                await story.control(w)
                nursery.cancel_scope.cancel()
            assert story.end is not None
            assert story.end.exit_code == work.exit_code, story.end.why
            assert story.end.orphans == (), story.end.orphans
            head = w.bucket.head
            assert head is not None
            assert head.progress_s >= work.seconds
            w.check_end(early=story.moved)
        except BaseException:
            print(f"SPOTWARP_SEED={seed}")
            print(w.story())
            raise
    return story
