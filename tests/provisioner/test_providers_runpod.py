"""Does the RunPod adapter use REST v2 first, and GraphQL only for what the probe has seen? (providers.md, section 2)"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.errors import ProviderDenied, ProviderRefused
from provisioner.core.offers import Market
from provisioner.core.ports import Created, CreateRefused, CreateUnknown, DeadMan, InstanceStatus, RefusedWhy
from provisioner.providers import runpod_graph
from provisioner.providers.runpod import RunPod
from tests.support.providers import SECRET, Bench, on

LABEL = "sw-job-00c0ffee-1"


def adapter(bench: Bench) -> RunPod:
    assert isinstance(bench.provider, RunPod)
    return bench.provider


async def created_over(bench: Bench) -> list[str]:
    return [one["path"] for one in await bench.sim.ask("journal") if one["endpoint"] == "create"]


@on("runpod")
async def test_without_spot_only_the_dead_man_comes_from_graphql(bench: Bench) -> None:
    found = await bench.provider.capabilities()
    assert (found.spot, found.rebid, found.dead_man) == (False, False, DeadMan.SERVER)
    asks = replace(bench.wish, spot=True, on_demand_max_usd_gpu_h=None)
    assert not [offer for offer in await bench.provider.search(asks) if offer.market is Market.SPOT]
    await bench.rented(LABEL)
    assert await created_over(bench) == ["/v2/pods"]


@on("runpod-spot")
async def test_spot_is_seen_by_the_probe_and_rented_over_graphql(bench: Bench) -> None:
    found = await bench.provider.capabilities()
    assert (found.spot, found.rebid, found.notice_s) == (True, True, 5.0)
    launch = await bench.launch(LABEL)
    assert isinstance(await bench.provider.create(launch), Created)
    assert await created_over(bench) == ["/graphql"]
    (truth,) = await bench.sim.ask("alive")
    assert (truth["spot"], truth["bid"]) == (True, launch.bid_usd_h)


@on("runpod")
async def test_a_node_with_an_end_is_ended_by_runpod_itself(bench: Bench) -> None:
    launch = await bench.launch(LABEL, ends_at_s=bench.sim.sim.world.now + 1800)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, Created)
    assert await created_over(bench) == ["/graphql"]
    await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    await trio.sleep(1800)
    assert await bench.alive() == []
    assert await bench.provider.list_instances() == []


@on("runpod", "runpod-spot")
@pytest.mark.parametrize("how", ["retired", "hidden"])
async def test_without_graphql_v2_does_everything_else(bench: Bench, how: str) -> None:
    hidden = {"errors": [{"message": "GraphQL introspection is not allowed"}]}
    fault = {"kind": "retired"} if how == "retired" else {"kind": "reply", "status": 400, "body": hidden}
    await bench.order(endpoint="graphql", count=None, **fault)
    found = await bench.provider.capabilities()
    assert (found.spot, found.dead_man) == (False, DeadMan.IN_BOX)
    assert await bench.provider.balance_usd() is None
    asks = replace(bench.wish, on_demand_max_usd_gpu_h=100.0)
    offers = [one for one in await bench.provider.search(asks) if one.market is Market.ON_DEMAND]
    launch = bench.launch_of(offers[0], LABEL, ends_at_s=bench.sim.sim.world.now + 1800)
    assert isinstance(await bench.provider.create(launch), Created)
    assert await created_over(bench) == ["/v2/pods"]


@on("runpod")
async def test_the_probe_is_cached_for_an_hour_and_a_failed_one_is_not(bench: Bench) -> None:
    async def probes() -> int:
        return sum(one["endpoint"] == "graphql" for one in await bench.sim.ask("journal"))

    await bench.order(kind="server_error", endpoint="graphql", status=502)
    assert (await bench.provider.capabilities()).dead_man is DeadMan.IN_BOX
    for _ in range(3):
        assert (await bench.provider.capabilities()).dead_man is DeadMan.SERVER
    assert await probes() == 2
    await trio.sleep(runpod_graph.PROBE_FRESH_S + 1)
    await bench.provider.capabilities()
    assert await probes() == 3
    await trio.sleep(runpod_graph.PROBE_FRESH_S + 1)
    await bench.order(kind="unauthorized", endpoint="graphql")
    with pytest.raises(ProviderDenied):
        await bench.provider.capabilities()


@on("runpod-spot")
async def test_spot_that_was_removed_meanwhile_is_no_capacity_and_probed_again(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="field_removed", endpoint="create")
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.NO_CAPACITY
    await bench.order(kind="reply", endpoint="graphql", status=200, body={"data": {"spot": None, "deploy": None}})
    assert not (await bench.provider.capabilities()).spot


@on("runpod-spot")
async def test_what_went_wrong_inside_runpod_is_unknown(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="success_false", endpoint="create")
    assert isinstance(await bench.provider.create(launch), CreateUnknown)


@on("runpod")
@pytest.mark.parametrize(
    ("status", "detail", "why"),
    [
        (400, "There are no longer any instances available with enough disk space.", RefusedWhy.NO_CAPACITY),
        (400, "some text that nobody has seen", RefusedWhy.NO_CAPACITY),
        (400, "allowedCudaVersions and minCudaVersion are mutually exclusive", RefusedWhy.BAD_REQUEST),
        (403, "your account cannot access the requested pool", RefusedWhy.NO_CAPACITY),
        (422, "request body does not match the schema", RefusedWhy.BAD_REQUEST),
    ],
)
async def test_a_problem_is_read_as_the_vendor_says(bench: Bench, status: int, detail: str, why: RefusedWhy) -> None:
    launch = await bench.launch(LABEL)
    body = {"title": "x", "status": status, "detail": detail}
    await bench.order(kind="reply", endpoint="create", status=status, body=body, type="application/problem+json")
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is why
    assert detail in outcome.message


@on("runpod-spot")
async def test_a_higher_bid_starts_a_stopped_pod(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, Created)
    await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    assert launch.bid_usd_h is not None
    (truth,) = await bench.sim.ask("alive")
    await bench.order(kind="busy", machine=truth["machine"], bid=launch.bid_usd_h * 1.2, for_s=36_000)
    await bench.until_status(outcome.instance_id, InstanceStatus.STOPPED)
    await adapter(bench).rebid(outcome.instance_id, launch.bid_usd_h * 2)
    await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    with pytest.raises(ProviderRefused):
        await adapter(bench).rebid("no-such-pod", 1.0)


@on("runpod")
async def test_stop_and_start(bench: Bench) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await adapter(bench).stop(instance_id)
    stopped = await bench.until_status(instance_id, InstanceStatus.STOPPED)
    assert not stopped.starts_by_itself
    await bench.order(kind="taken", endpoint="start", for_s=600)
    with pytest.raises(ProviderRefused):
        await adapter(bench).start(instance_id)
    await trio.sleep(900)
    assert (await bench.provider.show(instance_id) or stopped).status is InstanceStatus.STOPPED, "nothing was queued"
    await adapter(bench).start(instance_id)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)


@on("runpod", "runpod-spot")
async def test_what_is_sent_is_the_documented_order(bench: Bench) -> None:
    launch = await bench.launch(LABEL, script='echo "it\'s"\nsleep 9', environment={"TOKEN": f'{SECRET}"\n'})
    assert isinstance(await bench.provider.create(launch), Created)
    (entry,) = [one for one in await bench.sim.ask("journal") if one["endpoint"] == "create"]
    body = json.loads(entry["body"])
    if bench.service == "runpod":
        assert (body["env"], body["disk"], body["name"]) == ({"TOKEN": f'{SECRET}"\n'}, 20, LABEL)
        args = body["args"]
    else:
        order = body["variables"]["input"]
        assert order["env"] == [{"key": "TOKEN", "value": f'{SECRET}"\n'}]
        assert SECRET not in body["query"], "values are variables, so nothing has to be escaped"
        args = order["dockerArgs"]
    assert shlex.split(args) == ["/bin/sh", "-c", launch.script]


@on("runpod")
async def test_too_many_variables_are_not_sent(bench: Bench) -> None:
    outcome = await bench.provider.create(await bench.launch(LABEL, environment={f"A{n}": "" for n in range(51)}))
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.BAD_REQUEST
    assert await bench.sent(LABEL) == 0


@on("runpod")
async def test_a_pod_says_runs_only_with_its_runtime(bench: Bench) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    document = (await bench.sim.http.get("/v2/pods")).json()
    document["pods"][0]["runtime"] = None
    await bench.order(kind="reply", endpoint="list", status=200, body=document)
    (row,) = await bench.provider.list_instances()
    assert row.status is InstanceStatus.LOADING
    assert row.ssh is not None
