"""Is the simulated market fair? Priority, prices, bills, and the same world for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.simulator.latencies import Latencies, Latency
from provisioner.simulator.market.claims import Claim, granted, min_bid, room_on_demand
from provisioner.simulator.market.instances import Instance, Order, Phase, Refused, Why
from provisioner.simulator.market.machines import Machine
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.market.world import World
from tests.support.simulated import CALM

CLAIMS = st.lists(
    st.builds(Claim, st.integers(1, 4), st.none() | st.floats(0.01, 2.0), st.floats(0, 100)), max_size=6
)  # fmt: skip


@given(st.integers(1, 8), CLAIMS)
def test_nobody_gets_more_than_there_is_and_rank_decides(capacity: int, claims: list[Claim]) -> None:
    served = granted(capacity, claims)
    assert sum(claim.gpus for claim in served) <= capacity
    for claim in claims:
        if all(claim is not held for held in served):
            ahead = [held for held in served if held.bid is None or (claim.bid is not None and held.bid >= claim.bid)]
            assert sum(held.gpus for held in ahead) + claim.gpus > capacity


@given(st.integers(1, 8), CLAIMS, st.integers(1, 4), st.floats(0.01, 1.0))
def test_the_lowest_bid_is_served_and_one_below_it_is_not(
    capacity: int, claims: list[Claim], gpus: int, floor: float
) -> None:
    lowest = min_bid(capacity, claims, gpus=gpus, floor=floor)
    if lowest is None:
        assert gpus > room_on_demand(capacity, claims)
        return
    probe = Claim(gpus, lowest + 1e-6, 1e9)
    assert any(held is probe for held in granted(capacity, [*claims, probe]))
    if lowest > floor + 0.002:
        below = Claim(gpus, lowest - 0.0011, 1e9)
        assert all(held is not below for held in granted(capacity, [*claims, below]))


def world(**settings: object) -> World:
    return World(Scenario(**{**CALM, **settings}))  # type: ignore[arg-type]


def rent(
    world: World, *, bid_factor: float | None = 1.2, queue: bool = False, machine: Machine | None = None
) -> Instance:
    machine = machine or next(one for one in world.machines_of("vast") if one.gpus == 1)
    bid = None if bid_factor is None else machine.floor * bid_factor
    return world.rent(Order("vast", "me", machine, 1, bid, "sw-1", "image", 100.0, queue=queue))


def after(world: World, seconds: float) -> None:
    world.run_until(world.now + seconds)


def test_a_rental_boots_runs_and_is_billed_for_what_it_used() -> None:
    market = world()
    instance = rent(market)
    after(market, 600)
    assert instance.phase is Phase.RUNNING
    assert instance.started_at is not None
    ran_s = market.now - instance.started_at
    bill = market.ledger.of(instance.key, market.now)
    assert bill.gpu == pytest.approx(instance.gpu_rate() * ran_s / 3600)
    assert bill.storage == pytest.approx(instance.storage_rate() * 600 / 3600)
    market.destroy(instance)
    total = market.ledger.of(instance.key, market.now).total()
    after(market, 7200)
    assert market.ledger.of(instance.key, market.now).total() == total


def test_an_outbid_instance_stops_and_comes_back_by_itself() -> None:
    market = world()
    instance = rent(market)
    after(market, 600)
    market.rivals.take(instance.machine, 1, 900.0, bid=instance.machine.floor * 2)
    assert (instance.phase, instance.why) == (Phase.STOPPED, Why.OUTBID)
    assert market.ledger.of(instance.key, market.now).gpu_rate == 0
    after(market, 899)
    assert instance.phase is Phase.STOPPED
    after(market, 60)
    assert (instance.phase, instance.boots) == (Phase.RUNNING, 2)


def test_a_higher_bid_wins_the_gpus_back_at_once() -> None:
    market = world()
    instance = rent(market)
    after(market, 600)
    rival = instance.machine.floor * 2
    market.rivals.take(instance.machine, 1, 90_000.0, bid=rival)
    market.change_bid(instance, rival * 1.1)
    after(market, 60)
    assert instance.phase is Phase.RUNNING
    assert market.ledger.of(instance.key, market.now).gpu_rate == pytest.approx(rival * 1.1)


def test_a_queued_rental_waits_without_gpus_and_then_runs_and_bills() -> None:
    market = world()
    machine = next(one for one in market.machines_of("vast") if one.gpus == 1)
    market.rivals.take(machine, 1, 1000.0)
    with pytest.raises(Refused):
        rent(market, bid_factor=None, machine=machine)
    instance = rent(market, bid_factor=None, queue=True, machine=machine)
    after(market, 900)
    assert (instance.phase, instance.why) == (Phase.STOPPED, Why.QUEUED)
    after(market, 900)
    assert instance.phase is Phase.RUNNING
    assert market.ledger.of(instance.key, market.now).gpu > 0


def test_without_credit_everything_stops() -> None:
    market = world(credit=0.05)
    instance = rent(market)
    after(market, 3600)
    assert (instance.phase, instance.why) == (Phase.STOPPED, Why.CREDIT)
    with pytest.raises(Refused, match="no credit"):
        rent(market)


def lively(seed: int) -> World:
    market = world(seed=seed, rivals_per_hour=2.0, busy=0.3, drift=0.02)
    for machine in [one for one in market.machines_of("vast") if one.free()][:6]:
        rent(market, machine=machine)
    after(market, 6 * 3600)
    return market


def test_the_same_seed_gives_the_same_world_and_another_seed_another() -> None:
    one, same, other = lively(3), lively(3), lively(4)
    assert one.history == same.history
    assert one.ledger.report(one.now) == same.ledger.report(same.now)
    assert [machine.price for machine in one.machines] == [machine.price for machine in same.machines]
    assert one.history != other.history
    assert any(event["what"] == "outbid" for event in one.history)
    assert any(event["what"] == "resumes by itself" for event in one.history)


def test_draws_follow_the_table_of_latencies() -> None:
    latency = Latencies.load().of("vast", "boot_image_cold")
    stream = world().draws.stream("test")
    draws = sorted(stream.latency(latency) for _ in range(2001))
    assert latency.low <= draws[0]
    assert draws[-1] <= latency.high
    assert draws[1000] == pytest.approx(latency.p50, rel=0.05)
    with pytest.raises(ValueError, match="low <= p50 <= high"):
        Latency(5, 4, 6)
