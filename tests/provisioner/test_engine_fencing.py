"""Can two controllers hold one job? The second refuses, adopts, or replaces one that stands still; the first stops."""

from __future__ import annotations

from typing import Any

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.errors import LedgerCorrupt, StoreUnavailable
from provisioner.core.rendezvous import Controller, alive_key, controller_key, decode, intent_key
from provisioner.engine import ControllerAlive, Superseded
from tests.support.failover_store import View
from tests.support.failover_world import JOB, MemoryLedger, Work, World, in_virtual_time, world


async def first_controls(w: World, nursery: trio.Nursery, into: list[Any]) -> None:
    async def control() -> None:
        try:
            into.append(await w.run(host="first"))
        except Superseded as error:
            into.append(error)

    nursery.start_soon(control)
    await w.until_running()


def test_a_second_controller_refuses_and_says_whose_job_it_is() -> None:
    async def main() -> None:
        async with world(work=Work(300)) as w, trio.open_nursery() as nursery:
            ends: list[Any] = []
            await first_controls(w, nursery, ends)
            began_s = trio.current_time()
            with pytest.raises(ControllerAlive, match=r"process \d+ on first since .* --adopt"):
                await w.run(host="second")
            assert trio.current_time() - began_s < 10
            await w.until(lambda: bool(ends))
            assert ends[0].exit_code == 0
            w.check_end()

    in_virtual_time(main)


@pytest.mark.promise("P-14")
def test_an_adopted_job_goes_on_and_the_first_controller_stops_at_once() -> None:
    async def main() -> None:
        async with world(work=Work(300)) as w, trio.open_nursery() as nursery:
            ends: list[Any] = []
            await first_controls(w, nursery, ends)
            old, w.ledger = w.ledger, MemoryLedger()
            end = await w.run(host="second", adopt=True)
            assert isinstance(ends[0], Superseded)
            assert end.exit_code == 0
            assert [one.kind for one in end.failovers] == ["launch"]
            assert sorted(old.kept) == sorted(w.ledger.kept), "the mirror has every intent"
            w.check_end()

    in_virtual_time(main)


def test_a_controller_whose_heartbeat_stands_still_is_replaced() -> None:
    async def main() -> None:
        async with world(work=Work(600)) as w:
            assert await w.run_for(100, host="first") is None
            w.dead.clear()
            began_s = trio.current_time()
            w.ledger = MemoryLedger()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first_controls, w, nursery, [])
                await w.until(lambda: controller_key(JOB, 2) in w.bucket.objects)
                assert 30 <= trio.current_time() - began_s < 40
            w.check_end()

    in_virtual_time(main)


def test_a_dead_process_of_this_machine_is_replaced_at_once() -> None:
    async def main() -> None:
        async with world(work=Work(300)) as w:
            assert await w.run_for(100) is None
            began_s = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first_controls, w, nursery, [])
                await w.until(lambda: controller_key(JOB, 2) in w.bucket.objects)
                assert trio.current_time() - began_s < 5
            w.check_end()
            assert decode(Controller, w.bucket.objects[alive_key(JOB)]).seq == -1

    in_virtual_time(main)


def test_of_two_that_start_at_once_one_controls() -> None:
    async def main() -> None:
        async with world(work=Work(200)) as w:
            outcomes: list[str] = []

            async def control(host: str) -> None:
                try:
                    outcomes.append(f"ended {(await w.run(host=host, view=View(w.bucket))).exit_code}")
                except ControllerAlive:
                    outcomes.append("refused")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(control, "a")
                nursery.start_soon(control, "b")
            assert sorted(outcomes) == ["ended 0", "refused"]
            w.check_end()

    in_virtual_time(main)


def test_a_controller_that_was_cut_off_stops_when_it_sees_the_store_again() -> None:
    """It rents nothing meanwhile: a create needs its intent in the store first."""

    async def main() -> None:
        async with world(work=Work(900)) as w, trio.open_nursery() as nursery:
            ends: list[Any] = []
            await first_controls(w, nursery, ends)
            w.view.cut = True
            holder = w.holder()
            assert holder is not None
            made = len(w.sim.world.instances)
            await w.order(kind="host_fails", instance=holder.key)
            await trio.sleep(120)
            assert len(w.sim.world.instances) == made
            old, w.view, w.ledger = w.view, View(w.bucket), MemoryLedger()

            async def reconnect() -> None:
                await trio.sleep(60)
                old.cut = False

            nursery.start_soon(reconnect)
            end = await w.run(host="second")
            assert isinstance(ends[0], Superseded)
            assert (end.exit_code, [one.kind for one in end.failovers]) == (0, ["launch", "loss"])
            w.check_end()

    in_virtual_time(main)


def test_without_a_store_nothing_begins() -> None:
    async def main() -> None:
        async with world() as w:
            w.view.cut = True
            with pytest.raises(StoreUnavailable):
                await w.run()
            assert not w.sim.world.instances

    in_virtual_time(main)


def test_a_mirror_that_cannot_be_read_is_named() -> None:
    async def main() -> None:
        async with world() as w:
            w.bucket.objects[intent_key(JOB, "00c0ffee-1")] = b"{}"
            with pytest.raises(LedgerCorrupt, match="00c0ffee-1"):
                await w.run()
            assert not w.sim.world.instances

    in_virtual_time(main)
