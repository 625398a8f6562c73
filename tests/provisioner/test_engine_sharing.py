"""Do many jobs on one machine keep one account's limits, and ask once for what they all need?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.errors import ProviderUnavailable, RateLimited
from provisioner.core.happenings import JobEnd
from provisioner.core.ports import Provider
from provisioner.engine import EnginePorts, Me, SharedAccount, SharedListings, run_job
from provisioner.providers.runpod import RunPod
from provisioner.providers.vast import Vast
from provisioner.simulator import oracles
from tests.support.failover_store import Bucket, View
from tests.support.failover_world import (
    SPEC,
    MemoryLedger,
    SeededEntropy,
    SimWall,
    Work,
    World,
    in_virtual_time,
    launch_of,
    world,
)
from tests.support.simulated import KEY

JOBS = 20


def ports_of(w: World, bucket: Bucket, state: Path) -> EnginePorts:
    """One job's ports, with adapters of its own, as in a process of its own."""
    wall, sim = SimWall(w.sim), w.sim
    providers: dict[str, Provider] = {
        "vast": SharedAccount(Vast(KEY, base_url=sim.url, transport=sim.transport), state, wall),
        "runpod": SharedAccount(RunPod(KEY, base_url=sim.url, transport=sim.transport), state, wall),
    }
    view = View(bucket)
    return EnginePorts(
        providers, view, view, MemoryLedger(), wall, SeededEntropy(w.draws), launch_of, Me("here", 1), w.settings,
        SharedListings(state, wall),
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_twenty_jobs_share_one_poll_and_one_limit_per_account(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(work=Work(150), vast_machines=150, runpod_machines=100) as w:
            ends: dict[str, JobEnd] = {}

            async def control(job: str) -> None:
                bucket = w.nodes.buckets[job] = Bucket()
                spec = replace(SPEC, job=job, workspace=job)
                ends[job] = await run_job(spec, ports_of(w, bucket, tmp_path), w.observe)
                bucket.check()

            began_s = w.now_s()
            async with trio.open_nursery() as nursery:
                for number in range(JOBS):
                    nursery.start_soon(control, f"job-{number}")
            assert {end.exit_code for end in ends.values()} == {0}
            assert len(ends) == JOBS
            calls = Counter((entry.provider, entry.endpoint) for entry in w.sim.app.journal)
            lasted_s = w.now_s() - began_s
            assert calls["vast", "list"] <= lasted_s / 1.0, "no more than one job alone may ask"
            early = [one for one in oracles.violations(w.sim.app) if one["rule"] == "sent too early"]
            assert early == []
            assert oracles.alive(w.sim.app) == []

    in_virtual_time(main)


def test_a_listing_is_asked_for_once_and_keeps_its_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with world() as w:
            shared, provider = [SharedListings(tmp_path, SimWall(w.sim)) for _ in range(3)], w.providers["vast"]
            times = []

            async def ask(one: SharedListings) -> None:
                times.append((await one.listing(provider, 5.0)).asked_at_s)

            async with trio.open_nursery() as nursery:
                for one in shared:
                    nursery.start_soon(ask, one)
            assert len(set(times)) == 1
            await trio.sleep(4)
            await ask(shared[0])
            assert len(set(times)) == 1
            await trio.sleep(4)
            await ask(shared[0])
            assert times[-1] == pytest.approx(times[0] + 8, abs=0.5)

    in_virtual_time(main)


def test_what_was_listed_is_read_back_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with world() as w:
            await w.run_for(60)
            shared = SharedListings(tmp_path, SimWall(w.sim))
            for provider in w.providers.values():
                first = await shared.listing(provider, 30.0)
                assert await shared.listing(provider, 30.0) == first
                assert first.instances == tuple(await provider.list_instances())

    in_virtual_time(main)


def test_a_failure_is_shared_and_a_broken_file_is_asked_for_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with world() as w:
            shared, provider = SharedListings(tmp_path, SimWall(w.sim)), w.providers["vast"]
            await w.order(kind="server_error", endpoint="list")
            for _ in range(2):
                with pytest.raises(ProviderUnavailable):
                    await shared.listing(provider, 5.0)
            await trio.sleep(6)
            await w.order(kind="rate_limited", endpoint="list", form="retry_after", wait_s=7)
            for _ in range(2):
                with pytest.raises(RateLimited) as refused:
                    await shared.listing(provider, 5.0)
                assert refused.value.retry_after_s
            (tmp_path / "accounts" / "vast.listing").write_text('{"asked_at_s": ')
            assert (await shared.listing(provider, 5.0)).instances == ()

    in_virtual_time(main)
