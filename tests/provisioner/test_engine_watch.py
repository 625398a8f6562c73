"""What does the engine do with a node that lives, is lost, moves, ends, or costs too much? In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.detect import Health
from provisioner.core.happenings import JobEnd
from provisioner.core.intents import IntentState
from provisioner.core.jobs import Limits
from provisioner.core.rendezvous import RequestKind, request_key
from provisioner.engine import EngineSettings, gc_nodes
from tests.support.failover_store import View
from tests.support.failover_world import JOB, SPEC, MemoryLedger, Work, World, in_virtual_time, world


@asynccontextmanager
async def controlled(w: World, ends: list[JobEnd]) -> AsyncIterator[None]:
    """Keep the job while the block runs, and wait for its end after it."""

    async def control() -> None:
        ends.append(await w.run())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(control)
        yield


def story(*, kinds: list[str], exit_code: int = 0, **how: Any) -> Any:
    """Run a test's body beside a controller; then the job must have ended so, with nothing left."""

    def decorate(body: Any) -> Any:
        def test() -> None:
            async def main() -> None:
                async with world(**how) as w:
                    ends: list[JobEnd] = []
                    async with controlled(w, ends):
                        await body(w)
                    (end,) = ends
                    assert end.exit_code == exit_code, end
                    assert end.orphans == ()
                    assert [one.kind for one in end.failovers] == kinds
                    assert tuple(w.failovers()) == end.failovers
                    w.check_end()

            in_virtual_time(main)

        test.__name__ = body.__name__
        return test

    return decorate


@story(kinds=["launch", "loss"], work=Work(900))
async def test_a_confirmed_loss_is_decided_within_15_s(w: World) -> None:
    first = await w.until_running()
    await trio.sleep(60)
    lost_s = w.now_s()
    await w.order(kind="host_fails", instance=first.key)
    w.sim.world.destroy(first)
    await w.until(lambda: Health.LOST in w.judged())
    assert w.now_s() - lost_s <= 15 + 1
    await w.until(lambda: len(w.failovers()) == 2)
    loss = w.failovers()[-1]
    assert loss.detect_s is not None
    assert loss.ready_s is not None
    assert loss.detect_s <= 16
    parts = [loss.detect_s, loss.race_s, loss.boot_s, loss.checks_s, loss.claim_s]
    assert None not in parts
    assert sum(part or 0.0 for part in parts) == pytest.approx(loss.ready_s, abs=6)
    assert (loss.lost, loss.winner) == (w.failovers()[0].winner, w.bucket.head and w.bucket.head.intent)


@story(kinds=["launch"], work=Work(1200))
async def test_a_store_outage_of_60_s_is_no_loss(w: World) -> None:
    await w.until_running()
    made = len(w.sim.world.instances)
    for _ in range(4):
        await trio.sleep(100)
        now_s = trio.current_time()
        w.bucket.outages.append((now_s, now_s + 60))
    await trio.sleep(100)
    assert Health.BLIND in w.judged()
    assert Health.LOST not in w.judged()
    assert len(w.sim.world.instances) == made, "nobody raced"


@story(kinds=["launch"], work=Work(900))
async def test_a_node_that_is_silent_for_40_s_keeps_the_workspace(w: World) -> None:
    first = await w.until_running()
    w.nodes.mute.add(first.key)
    await trio.sleep(40)
    w.nodes.mute.discard(first.key)
    await trio.sleep(100)
    assert Health.SUSPECT in w.judged()
    assert Health.LOST not in w.judged()
    assert w.holder() is first
    assert [one for one in w.alive() if one is not first] == [], "the candidates are gone"


@story(kinds=["launch", "loss"], work=Work(900))
async def test_a_node_that_stays_silent_is_replaced_after_75_s_and_fenced(w: World) -> None:
    first = await w.until_running()
    began_s = w.now_s()
    w.nodes.mute.add(first.key)
    await w.until(lambda: Health.LOST in w.judged())
    assert 70 <= w.now_s() - began_s <= 85
    await w.until_running(but=first.key)


@story(kinds=["launch", "move"], work=Work(900))
async def test_a_move_hands_over_and_loses_nothing(w: World) -> None:
    first = await w.until_running()
    await trio.sleep(100)
    w.ask(RequestKind.MOVE)
    second = await w.until_running(but=first.key)
    takeover = next(one for one in w.bucket.manifests if one.instance_id == second.ident)
    before = w.bucket.manifests[takeover.number - 2]
    assert before.instance_id == first.ident
    assert takeover.progress_s == before.progress_s
    assert request_key(JOB) not in w.bucket.objects
    assert takeover.at_s - before.at_s < 10, "the command stood still for a moment only"


@pytest.mark.promise("P-14")
@pytest.mark.parametrize("ordered", [False, True], ids=["while the replacement boots", "after the order to hand over"])
def test_a_controller_that_dies_in_mid_move_loses_neither_work_nor_a_node(ordered: bool) -> None:
    words = "a replacement is ready" if ordered else "move: "

    async def main() -> None:
        async with world(work=Work(900)) as w:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.run)
                first = await w.until_running()
                await trio.sleep(100)
                assert w.bucket.head is not None
                # As the command does: a node is named, so the request means nothing any more once that one is replaced.
                w.ask(RequestKind.MOVE, w.bucket.head.intent or "")
                await w.until(lambda: words in w.said())
                await w.until(lambda: ordered or len(w.alive()) > 1)
                nursery.cancel_scope.cancel()
            w.dead.add(w.pid)
            await trio.sleep(20)
            end = await w.run()
            assert (end.exit_code, end.orphans) == (0, ())
            holders = {one.instance_id for one in w.bucket.manifests}
            assert len(holders) == 2, "the next controller makes the move that was asked for"
            assert first.ident in holders
            assert request_key(JOB) not in w.bucket.objects
            progress = [one.progress_s for one in w.bucket.manifests]
            assert progress == sorted(progress), "no work was lost"
            w.check_end()

    in_virtual_time(main)


@story(kinds=["launch", "move"], work=Work(2500), spec=replace(SPEC, limits=Limits(move_below=0.3)))
async def test_a_much_cheaper_offer_starts_a_move(w: World) -> None:
    first = await w.until_running()
    await trio.sleep(700)
    assert w.holder() is first, "nothing is cheaper"
    for machine in w.sim.world.machines:
        if machine is not first.machine:
            machine.price, machine.floor = machine.price / 3, machine.floor / 3
    second = await w.until_running(but=first.key)
    assert second.gpu_rate() < 0.7 * first.gpu_rate()


@story(kinds=["launch", "move"], work=Work(2500), spec=replace(SPEC, providers=("vast",)))
async def test_a_node_whose_contract_ends_is_left_in_time_for_one_that_lasts(w: World) -> None:
    first = await w.until_running()
    await trio.sleep(100)
    assert w.holder() is first, "its contract lasts for days"
    first.machine.contract_end = w.now_s() + 3000
    for machine in w.sim.world.machines[::2]:
        machine.contract_end = min(machine.contract_end, w.now_s() + 5000)
    second = await w.until_running(but=first.key)
    assert w.now_s() < first.machine.contract_end
    assert second.machine.contract_end - w.now_s() > 6500
    assert "move: its contract ends in" in w.said()


@story(kinds=["launch", "move"], work=Work(2500))
async def test_an_account_that_runs_dry_is_left_for_another_provider(w: World) -> None:
    first = await w.until_running()
    dry = first.order.provider

    async def little() -> float:
        return first.gpu_rate() / 2

    with patch.object(w.providers[dry], "balance_usd", little):
        second = await w.until_running(but=first.key)
        assert second.order.provider != dry
        assert f"move: {dry}: the account's $" in w.said()


@story(kinds=["launch"], work=Work(1500), spec=replace(SPEC, providers=("vast",)))
async def test_an_account_that_runs_dry_is_said_once_where_there_is_no_other_provider(w: World) -> None:
    first = await w.until_running()
    with patch.object(w.providers["vast"], "balance_usd", AsyncMock(return_value=0.01)) as asked:
        await trio.sleep(1300)
        assert asked.await_count >= 2
    assert w.holder() is first
    assert w.said().count("add credit") == 1


@story(kinds=["launch", "drill"], work=Work(600))
async def test_a_drill_destroys_the_node_and_is_done_once(w: World) -> None:
    first = await w.until_running()
    w.ask(RequestKind.DRILL, w.bucket.head.intent or "" if w.bucket.head else "")
    second = await w.until_running(but=first.key)
    await trio.sleep(100)
    assert w.holder() is second


@story(kinds=["launch"], exit_code=143, work=Work(5000))
async def test_down_lets_the_node_publish_and_leaves_nothing(w: World) -> None:
    await w.until_running()
    await trio.sleep(47)
    w.ask(RequestKind.DOWN)
    await w.until(lambda: not w.alive())
    assert w.bucket.head is not None
    assert w.bucket.head.progress_s >= 47


@story(kinds=["launch"], exit_code=3, work=Work(200, exit_code=3))
async def test_a_command_that_fails_ends_the_job_with_its_code(w: World) -> None:
    await w.until_running()


@story(
    kinds=["launch"],
    exit_code=1,
    work=Work(50_000),
    spec=replace(SPEC, limits=Limits(budget_usd=0.25)),
)
async def test_a_budget_that_is_used_up_ends_the_job(w: World) -> None:
    await w.until_running()
    await w.until(lambda: not w.alive(), at_most_s=20_000)
    total_usd = sum(bill["total"] for bill in w.sim.world.ledger.report(w.now_s()))
    assert 0.18 < total_usd < 0.27


@story(kinds=["launch", "loss"], work=Work(900), spec=replace(SPEC, providers=("vast",)))
async def test_a_higher_bid_brings_the_outbid_node_itself_back(w: World) -> None:
    """Every other machine is taken: only its own can come back."""
    first = await w.until_running()
    for machine in w.sim.world.machines:
        machine.delisted = machine is not first.machine
    w.sim.world.rivals.take(
        first.machine, first.machine.gpus, 100_000, bid=first.claim.bid + 0.01 if first.claim.bid else None
    )
    await w.until(lambda: Health.LOST in w.judged())
    assert await w.until_running() is first
    await w.until(lambda: len(w.failovers()) == 2)


@story(kinds=["launch", "loss"], work=Work(900), spec=replace(SPEC, limits=Limits(keep_lost_s=300)))
async def test_a_lost_node_is_kept_for_salvage_and_then_destroyed(w: World) -> None:
    first = await w.until_running()
    await w.order(kind="preempt", instance=first.key, for_s=100_000)
    await w.until_running(but=first.key)
    await trio.sleep(200)
    assert first in w.alive()
    await trio.sleep(200)
    assert first not in w.alive()


def test_a_workspace_that_somebody_else_takes_over_is_left_to_them() -> None:
    async def main() -> None:
        async with world(work=Work(5000)) as w:
            ends: list[JobEnd] = []
            async with controlled(w, ends):
                await w.until_running()
                head = w.bucket.head
                assert head is not None
                w.bucket.create_manifest(
                    replace(
                        head, number=head.number + 1, writer_epoch=head.writer_epoch + 1, intent=None, instance_id=None
                    )
                )
            assert ends[0].exit_code == 12
            w.check_end()

    in_virtual_time(main)


def test_a_job_that_has_ended_is_not_started_again_unless_asked() -> None:
    async def main() -> None:
        async with world(work=Work(100)) as w:
            assert (await w.run()).exit_code == 0
            made = len(w.sim.world.instances)
            w.ledger = MemoryLedger()
            assert (await w.run()).exit_code == 0
            assert len(w.sim.world.instances) == made
            w.nodes.work.seconds = 300
            w.settings = EngineSettings(again=True)
            end = await w.run()
            assert end.exit_code == 0
            assert len(end.failovers) == 2
            w.check_end()

    in_virtual_time(main)


def test_a_refused_key_ends_a_job_that_never_ran_and_says_why() -> None:
    async def main() -> None:
        async with world() as w:
            await w.order(kind="unauthorized", count=None)
            end = await w.run()
            assert end.exit_code == 1
            assert "key" in end.why or "key" in w.said()
            w.check_end()

    in_virtual_time(main)


def test_nodes_that_nobody_owns_are_collected_from_an_empty_ledger() -> None:
    async def main() -> None:
        async with world(work=Work(5000)) as w:
            await w.run_for(9)
            assert w.alive(), "killed while candidates boot"
            got = await gc_nodes(w.providers, View(w.bucket), MemoryLedger())
            assert got.destroyed
            assert (got.kept, got.failed) == ((), ())
            assert not w.alive()
            await w.run_for(200)
            holder = w.holder()
            got = await gc_nodes(w.providers, None, MemoryLedger())
            assert len(got.kept) == len(w.alive()) > 0, "without the store nobody knows"
            got = await gc_nodes(w.providers, View(w.bucket), MemoryLedger())
            assert w.alive() == [holder]
            assert "node of its job" in got.kept[0]
            w.dead.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.run_for, 100)
                await trio.sleep(70)
                got = await gc_nodes(w.providers, View(w.bucket), MemoryLedger())
                assert "controller that lives" in got.kept[0]
            assert [r.state for r in w.ledger.records(JOB)].count(IntentState.WINNER) == 1

    in_virtual_time(main)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_24_hours_of_outages_and_lag_give_no_false_takeover() -> None:
    a_day_without_loss(24 * 3600)


def test_an_hour_of_outages_and_lag_gives_no_false_takeover() -> None:
    a_day_without_loss(3600)


def a_day_without_loss(seconds: float) -> None:
    async def main() -> None:
        async with world(work=Work(seconds), seed=3) as w:

            async def disturb() -> None:
                await w.until_running()
                while True:
                    await trio.sleep(w.draws.uniform(60, 600))
                    now_s = trio.current_time()
                    w.bucket.outages.append((now_s, now_s + w.draws.choice([5, 30, 60])))
                    fault = w.draws.choice(["stale", "missing_row", "server_error", "rate_limited", "slow"])
                    await w.order(kind=fault, endpoint="list", by_s=30, for_s=20, wait_s=10, form="json", count=2)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                end = await w.run()
                nursery.cancel_scope.cancel()
            assert end.exit_code == 0
            assert [one.kind for one in end.failovers] == ["launch"]
            assert Health.LOST not in w.judged()[:-1]
            assert {one.writer_epoch for one in w.bucket.manifests} == {1}
            # A request that the simulator holds back is processed late, just before the next one.
            w.check_end(early=True)

    in_virtual_time(main)
