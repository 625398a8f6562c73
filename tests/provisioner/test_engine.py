"""Does the whole engine keep a job running? The real adapters on the simulated market, in virtual time."""

from __future__ import annotations

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.happenings import JobEnd
from tests.support.failover_world import Work, in_virtual_time, world


def test_a_job_is_launched_and_everything_ends_with_its_command() -> None:
    async def main() -> None:
        async with world(work=Work(600)) as w:
            end = await w.run()
            assert (end.exit_code, end.orphans) == (0, ())
            (launch,) = end.failovers
            assert (launch.kind, launch.number) == ("launch", 1)
            w.check_end()

    in_virtual_time(main)


def test_a_preempted_node_is_replaced() -> None:
    async def main() -> None:
        async with world(work=Work(900)) as w:
            ends: list[JobEnd] = []

            async def control() -> None:
                ends.append(await w.run())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(control)
                first = await w.until_running()
                await trio.sleep(100)
                await w.order(kind="preempt", instance=first.key, for_s=100_000)
                second = await w.until_running(but=first.key)
                assert second.key != first.key
            (end,) = ends
            assert end.exit_code == 0
            assert [one.kind for one in end.failovers] == ["launch", "loss"]
            w.check_end()

    in_virtual_time(main)
