"""Does the fake stay true to itself when everything happens at once? Seeded calls and faults in lively markets."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")
pytest.importorskip("jsonschema", reason="the test extra is not installed: pip install -e '.[test]'")

from provisioner.simulator.market.instances import Phase
from provisioner.simulator.market.world import World
from tests.support.runpod_schemas import conforms
from tests.support.simulated import Market, market

LIVELY: dict[str, Any] = {
    "rivals_per_hour": 3.0, "rival_hours": 0.3, "busy": 0.4, "drift": 0.02, "image_cached": 0.5, "limits": True,
    "call_latency": True, "outbid_shows_exited": 0.5, "credit": 1e6, "runpod_spot": True,
}  # fmt: skip
STEPS = 60


def hold_true(world: World) -> None:
    """Check what must hold at any moment of any world."""
    for machine in world.machines:
        assert sum(claim.gpus for claim in machine.served()) <= machine.gpus
        holders = [world.instances[claim.holder] for claim in machine.claims if claim.holder]
        assert all(holder.phase is not Phase.GONE for holder in holders), "the dead hold no GPUs"
        assert len({holder.key for holder in holders}) == len(holders)
    for instance in world.instances.values():
        bill = world.ledger.of(instance.key, world.now)
        gone = instance.phase is Phase.GONE
        assert (bill.closed_at is not None) == gone
        assert not (gone and (bill.gpu_rate or bill.storage_rate))
        if instance.phase in {Phase.STOPPED, Phase.GONE}:
            assert bill.gpu_rate == 0
        if instance.phase is Phase.RUNNING:
            assert bill.gpu_rate > 0
        if instance.phase is Phase.RUNNING and instance.order.provider == "vast":
            assert machine_serves(world, instance.key), f"{instance.key} runs without GPUs"


def machine_serves(world: World, key: str) -> bool:
    return any(claim.holder == key for machine in world.machines for claim in machine.served())


async def vast_rent(m: Market, draws: random.Random) -> None:
    answer = await m.http.post("/api/v0/bundles/", json={"type": draws.choice(["bid", "on-demand"])})
    rows = answer.json()["offers"] if answer.status_code == 200 else []
    if rows:
        offer = draws.choice(rows)
        price = draws.choice([None, offer["min_bid"] * draws.uniform(0.8, 1.5)])
        await m.rent(offer, price=price, label=f"sw-{draws.random()}", cancel_unavail=draws.random() < 0.5)


async def vast_change(m: Market, draws: random.Random) -> None:
    answer = await m.http.get("/api/v1/instances/")
    rows = answer.json()["instances"] if answer.status_code == 200 else []
    if rows:
        path = f"/api/v0/instances/{draws.choice(rows)['id']}/"
        await draws.choice([
            lambda: m.http.delete(path),
            lambda: m.http.put(path, json={"state": "stopped"}),
            lambda: m.http.put(path, json={"state": "running"}),
            lambda: m.http.put(path.replace("s/", "s/bid_price/"), json={"price": draws.uniform(0.1, 3)}),
        ])()  # fmt: skip


async def runpod_rent(m: Market, draws: random.Random) -> None:
    gpus = await m.http.get("/v2/catalog/gpus", params={"include": "AVAILABILITY", "product": "POD"})
    if gpus.status_code != 200:
        return
    gpu = draws.choice(conforms(gpus, "ListGpuTypesResponse")["gpus"])["id"]
    answer = await m.pod(name=f"sw-{draws.random()}", gpu={"id": gpu}, cloud=draws.choice(["SECURE", "COMMUNITY"]))
    if answer.status_code == 201:
        conforms(answer, "Pod", status=201)
    else:
        conforms(answer, "ErrorResponse", status=answer.status_code)


async def runpod_change(m: Market, draws: random.Random) -> None:
    answer = await m.http.get("/v2/pods")
    pods = conforms(answer, "ListPodsResponse")["pods"] if answer.status_code == 200 else []
    if pods:
        pod = draws.choice(pods)
        action = draws.choice(pod["actions"] or ["stop"])
        done = await m.http.post(f"/v2/pods/{pod['id']}/action", json={"action": action})
        if done.status_code not in {200, 204}:
            conforms(done, "ErrorResponse", status=done.status_code)


async def fault(m: Market, draws: random.Random) -> None:
    await m.order(**draws.choice([
        {"kind": "preempt", "for_s": 300},
        {"kind": "come_back"},
        {"kind": "lost_answer", "endpoint": "create", "how": "drop"},
        {"kind": "dies", "endpoint": "create", "after_s": 60},
        {"kind": "destroy_ignored", "endpoint": "destroy", "for_s": 100},
        {"kind": "outbid_first", "endpoint": "create", "for_s": 300},
        {"kind": "host_fails", "provider": draws.choice(["vast", "runpod"])},
        {"kind": "stuck", "endpoint": "create", "phase": "loading"},
    ]))  # fmt: skip


ACTIONS: list[Callable[[Market, random.Random], Any]] = [vast_rent, vast_change, runpod_rent, runpod_change, fault]


async def live(seed: int) -> tuple[list[dict[str, Any]], str]:
    """Run one world, and return its history and its bills."""
    draws = random.Random(seed)
    async with market(**{**LIVELY, "seed": seed}) as m:
        for _ in range(STEPS):
            with contextlib.suppress(httpx.RemoteProtocolError):  # an answer was lost, as ordered
                await draws.choices(ACTIONS, weights=[4, 4, 3, 3, 1])[0](m, draws)
            await trio.sleep(draws.uniform(1, 120))
            m.sim.app.catch_up()
            hold_true(m.sim.world)
        return m.sim.world.history, json.dumps(m.sim.world.ledger.report(m.sim.world.now))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_bills_and_gpus_add_up(seed: int) -> None:
    history, _ = trio.run(live, seed, clock=MockClock(autojump_threshold=0))
    assert {"created", "running", "gone"} <= {event["what"] for event in history}


def test_the_same_seed_and_calls_give_the_same_history_and_the_same_bills() -> None:
    runs = [trio.run(live, 11, clock=MockClock(autojump_threshold=0)) for _ in range(2)]
    assert runs[0] == runs[1]
