"""Does the Vast adapter know Vast's own traps? providers.md 1.3 to 1.9, each against the simulated market."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.errors import ProviderRefused, ProviderUnavailable
from provisioner.core.offers import Market
from provisioner.core.ports import Created, CreateRefused, CreateUnknown, InstanceStatus, RefusedWhy, SshAddress
from provisioner.providers import vast
from provisioner.providers.vast import Vast
from provisioner.providers.vast_rows import instance_of, offer_of
from tests.support.providers import Bench, on
from tests.support.simulated import KEY
from tests.support.simulated import Market as Simulated

LABEL = "sw-job-00c0ffee-1"


def adapter(bench: Bench) -> Vast:
    assert isinstance(bench.provider, Vast)
    return bench.provider


@on("vast-spot")
async def test_a_low_bid_leaves_a_stopped_instance_that_the_refusal_names(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="outbid_first", endpoint="create", for_s=36_000)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.BID_TOO_LOW
    assert list(outcome.left_behind) == await bench.alive()
    (row,) = await bench.provider.list_instances()
    assert (row.status, row.label, row.starts_by_itself) == (InstanceStatus.STOPPED, LABEL, True)
    await bench.provider.destroy(outcome.left_behind[0])
    assert await bench.alive() == []


@on("vast-spot", "vast-on-demand")
@pytest.mark.parametrize("form", ["404", "410", "400"])
async def test_a_taken_offer_is_no_capacity_in_all_its_words(bench: Bench, form: str) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="no_capacity", endpoint="create", form=form)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.NO_CAPACITY


@on("vast-on-demand")
async def test_a_taken_offer_never_queues(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="taken", endpoint="create", for_s=600)
    assert isinstance(await bench.provider.create(launch), CreateRefused)
    await trio.sleep(3600)
    assert await bench.alive() == []


@on("vast-spot")
async def test_success_that_is_none_proves_nothing(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="success_false", endpoint="create")
    assert isinstance(await bench.provider.create(launch), CreateUnknown)
    await bench.order(kind="success_false", endpoint="list")
    with pytest.raises(ProviderUnavailable):
        await bench.provider.list_instances()


@on("vast-spot")
async def test_a_higher_bid_brings_an_outbid_node_back(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, Created)
    await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    assert launch.bid_usd_h is not None
    await bench.order(kind="busy", machine=launch.offer.machine_id, bid=launch.bid_usd_h * 1.3, for_s=36_000)
    lost = await bench.until_status(outcome.instance_id, InstanceStatus.STOPPED)
    assert lost.min_bid_usd_h is not None
    assert lost.min_bid_usd_h > launch.bid_usd_h
    await adapter(bench).rebid(outcome.instance_id, lost.min_bid_usd_h * 1.15)
    back = await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    assert back.usd_h == pytest.approx(lost.min_bid_usd_h * 1.15, rel=0.01)
    with pytest.raises(ProviderRefused):
        await adapter(bench).rebid("4711", 1.0)


@on("vast-spot", outbid_shows_exited=1.0)
async def test_a_preemption_that_only_says_exited_is_one_too(bench: Bench) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await bench.order(kind="preempt", for_s=36_000)
    lost = await bench.until_status(instance_id, InstanceStatus.STOPPED)
    assert lost.status_text.startswith("exited")
    assert lost.starts_by_itself


@on("vast-on-demand")
async def test_a_start_that_would_queue_is_taken_back(bench: Bench) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await adapter(bench).stop(instance_id)
    await bench.until_status(instance_id, InstanceStatus.STOPPED)
    await bench.order(kind="taken", endpoint="start", for_s=600)
    with pytest.raises(ProviderRefused):
        await adapter(bench).start(instance_id)
    await trio.sleep(3600)
    row = await bench.row(instance_id)
    assert row is not None
    assert (row.status, row.starts_by_itself) == (InstanceStatus.STOPPED, False)
    await adapter(bench).start(instance_id)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)


@on("vast-spot", "vast-on-demand")
@pytest.mark.parametrize(
    ("fate", "status"),
    [("oci_failure", InstanceStatus.FAILED), ("manifest_unknown", InstanceStatus.FAILED)],
)
async def test_a_boot_that_can_never_end_has_failed(bench: Bench, fate: str, status: InstanceStatus) -> None:
    await bench.order(kind=fate, endpoint="create")
    assert (await bench.until_status(await bench.rented(LABEL), status)).status_text


@on("vast-on-demand")
@pytest.mark.parametrize("phase", ["offline", "unknown"])
async def test_a_host_that_is_gone_is_not_known(bench: Bench, phase: str) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await bench.order(kind="host_fails", phase=phase)
    await bench.until_status(instance_id, InstanceStatus.UNKNOWN)


@on("vast-on-demand", vast_machines=120, credit=1e6)
async def test_a_listing_has_all_pages_or_is_none(bench: Bench) -> None:
    offers = [offer for offer in await bench.offers() if offer.gpu_count == 1][:30]
    made = []
    for number, offer in enumerate({one.machine_id: one for one in offers}.values()):
        outcome = await bench.provider.create(bench.launch_of(offer, f"sw-job-00c0ffee-{number}"))
        assert isinstance(outcome, Created)
        made.append(outcome.instance_id)
    await fill_up(bench, made)
    listed = [one.instance_id for one in await bench.provider.list_instances()]
    assert sorted(listed) == sorted(made)
    assert len(made) > vast.LIST_ROWS
    await bench.order(kind="missing_row", endpoint="list")
    assert len(await bench.provider.list_instances()) == len(made), "asked once more"
    await bench.order(kind="missing_row", endpoint="list", count=None)
    with pytest.raises(ProviderUnavailable):
        await bench.provider.list_instances()


async def fill_up(bench: Bench, made: list[str]) -> None:
    """Rent through the plain API until there is more than a page."""
    market: Simulated = bench.sim
    while len(made) <= vast.LIST_ROWS + 1:
        await trio.sleep(60)
        body = {"type": "on-demand", "rentable": {"eq": True}, "num_gpus": {"eq": 1}}
        (offer, *_) = (await market.http.post("/api/v0/bundles/", json=body)).json()["offers"]
        answer = await market.rent(offer, label=f"sw-job-0badcafe-{len(made)}")
        made.append(str(answer.json()["new_contract"]))


@on("vast-spot", vast_machines=900)
async def test_a_search_goes_past_the_rows_of_one_answer(bench: Bench) -> None:
    offers = await bench.offers()
    assert len(offers) > vast.SEARCH_ROWS
    assert {offer.gpu_count for offer in offers} == {1}


@on("vast-spot", search_ignores=("inet_up", "num_gpus", "disk_space"))
async def test_filters_that_the_server_forgets_are_ours_to_check(bench: Bench) -> None:
    found = await bench.provider.search(bench.wish)
    assert {offer.gpu_count for offer in found} != {1}
    assert {offer.gpu_count for offer in await bench.offers()} == {1}


@on("vast-spot")
async def test_what_is_sent_is_the_documented_order(bench: Bench) -> None:
    launch = await bench.launch(LABEL, script="echo 'a \"quoted\" word'", image_login="-u me -p pass-word docker.io")
    assert isinstance(await bench.provider.create(launch), Created)
    (entry,) = [one for one in await bench.sim.ask("journal") if one["endpoint"] == "create"]
    body: dict[str, Any] = json.loads(entry["body"])
    assert (body["cancel_unavail"], body["price"], body["runtype"]) == (True, launch.bid_usd_h, "args")
    assert (body["onstart"], body["args"]) == ("/bin/sh", ["-c", launch.script])
    assert body["env"] == {**launch.environment, "-p 22:22": "1"}
    assert KEY not in entry["body"]


@on("vast-on-demand")
async def test_on_demand_has_no_price(bench: Bench) -> None:
    await bench.rented(LABEL)
    (entry,) = [one for one in await bench.sim.ask("journal") if one["endpoint"] == "create"]
    assert "price" not in json.loads(entry["body"])


@on("vast-spot")
async def test_a_bid_that_became_on_demand_is_seen(bench: Bench) -> None:
    await bench.rented(LABEL)
    document = (await bench.sim.http.get("/api/v1/instances/")).json()
    document["instances"][0] |= {"is_bid": False, "dph_base": 9.5}
    await trio.sleep(5)
    await bench.order(kind="reply", endpoint="list", status=200, body=document)
    (row,) = await bench.provider.list_instances()
    assert (row.market, row.usd_h) == (Market.ON_DEMAND, 9.5)


@on("vast-spot")
async def test_a_script_that_is_too_long_is_not_sent(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    outcome = await bench.provider.create(replace(launch, script="x" * (vast.SCRIPT_BYTES_MAX + 1)))
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.BAD_REQUEST
    assert await bench.sent(LABEL) == 0


@on("vast-on-demand")
async def test_an_address_inside_the_host_leads_to_the_proxy(bench: Bench) -> None:
    direct = await bench.until_status(await bench.rented("sw-job-00c0ffee-1"), InstanceStatus.RUNNING)
    assert direct.ssh is not None
    assert direct.ssh.host.startswith("203.0.113.")
    await bench.order(kind="private_ip", endpoint="create")
    inside = await bench.until_status(await bench.rented("sw-job-00c0ffee-2"), InstanceStatus.RUNNING)
    assert inside.ssh is not None
    assert inside.ssh.host.endswith(".vast.ai")


def test_rows_may_lack_anything() -> None:
    assert offer_of({}, Market.SPOT, "vast") is None
    assert instance_of({"label": "x"}, "vast") is None
    bare = instance_of({"id": 7, "actual_status": None, "is_bid": None, "ports": {"22/tcp": []}}, "vast")
    assert bare is not None
    assert (bare.instance_id, bare.status, bare.market, bare.ssh) == ("7", InstanceStatus.CREATING, None, None)
    row = {"id": 7, "ssh_host": "ssh5.vast.ai", "ssh_port": "2222", "public_ipaddr": "192.168.1.4\n",
           "ports": {"22/tcp": [{"HostPort": "20022"}]}}  # fmt: skip
    inside = instance_of(row, "vast")
    assert inside is not None
    assert inside.ssh == SshAddress("ssh5.vast.ai", 2222)
