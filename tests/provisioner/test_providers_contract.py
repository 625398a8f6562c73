"""Does every adapter mean the same by the port, and does each rule of `ports.Provider`'s docstring hold for it?

Vast and RunPod run on the simulated market with their rate limits on: at the end of each test no request came too
early, no create was sent twice, and no key travelled in a body (`tests.support.providers.bench_of`).
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.core.errors import (
    NoCredit,
    ProviderDenied,
    ProviderRefused,
    ProviderUnavailable,
    ProvisionerError,
    RateLimited,
)
from provisioner.core.gpus import parse_gpu
from provisioner.core.offers import Market, with_bid
from provisioner.core.ports import Created, CreateRefused, CreateUnknown, Instance, InstanceStatus, Launch, RefusedWhy
from provisioner.core.wishes import Wish, sift, why_nothing
from provisioner.providers import http
from provisioner.providers.runpod import RunPod
from provisioner.providers.vast import Vast
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import simulating
from tests.support.providers import SECRET, Bench, each, each_simulated, on
from tests.support.simulated import CALM, GPU, KEY

LABEL = "sw-job-00c0ffee-1"


def market_of(bench: Bench) -> Market:
    return Market.SPOT if bench.wish.spot else Market.ON_DEMAND


def repeatable(bench: Bench) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Give every call that may be repeated, by the endpoint that faults name."""
    provider = bench.provider
    return {
        "search": lambda: provider.search(bench.wish),
        "list": provider.list_instances,
        "show": lambda: provider.show("4711"),
        "destroy": lambda: provider.destroy("4711"),
    }


@each()
async def test_a_search_gives_what_the_wish_allows(bench: Bench) -> None:
    offers = await bench.offers()
    assert offers
    assert {offer.market for offer in offers} == {market_of(bench)}
    for offer in offers:
        assert offer.provider == bench.provider.name
        assert offer.price.compute_usd_h > 0 or bench.service == "local"
        assert (offer.min_bid_usd_h is None) == (offer.market is Market.ON_DEMAND)
    assert len({offer.key for offer in offers}) == len(offers)
    assert await bench.alive() == [], "a search rents nothing"


@each_simulated()
async def test_what_fits_nothing_still_brings_offers_to_explain_it(bench: Bench) -> None:
    unknown = replace(bench.wish, gpu=parse_gpu("RTX 4009"))
    sifted = sift(await bench.provider.search(unknown), unknown, 0.0)
    assert sifted.rejected
    assert "RTX 4090" in why_nothing(sifted, unknown)[0]


@each()
async def test_a_created_node_is_listed_under_its_label_and_ends_verified(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, Created)
    row = await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    assert (row.label, row.provider, row.gpu, row.gpu_count) == (
        LABEL, bench.provider.name, launch.offer.gpu, launch.offer.gpu_count,
    )  # fmt: skip
    assert row.market in (launch.offer.market, None)
    assert row.usd_h == pytest.approx(launch.bid_usd_h or launch.offer.price.compute_usd_h, rel=0.01)
    shown = await bench.provider.show(outcome.instance_id)
    assert shown is not None
    assert (shown.instance_id, shown.label, shown.status) == (row.instance_id, LABEL, InstanceStatus.RUNNING)
    assert await bench.alive() == [outcome.instance_id]

    await bench.provider.destroy(outcome.instance_id)
    assert await bench.row(outcome.instance_id) is None
    gone = await bench.provider.show(outcome.instance_id)
    assert gone is None or gone.status is InstanceStatus.GONE
    assert await bench.alive() == []
    await bench.provider.destroy(outcome.instance_id)


@each()
async def test_what_never_was_is_none_and_destroyed_already(bench: Bench) -> None:
    assert await bench.provider.list_instances() == []
    for instance_id in ("4711", "0123456789ab"):
        assert await bench.provider.show(instance_id) is None
        await bench.provider.destroy(instance_id)


@on("vast-spot", "vast-on-demand", "runpod", "runpod-spot", vast_machines=80, runpod_machines=80)
async def test_prices_and_bids_are_for_the_whole_machine(bench: Bench) -> None:
    (two, *_) = await bench.offers(gpu_count=2)
    launch = bench.launch_of(with_bid(two), LABEL)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, Created), outcome
    (truth,) = await bench.sim.ask("alive")
    asked_usd_h = launch.bid_usd_h or two.price.compute_usd_h
    assert truth["gpus"] == 2
    if launch.bid_usd_h is not None:
        assert truth["bid"] * 2 == pytest.approx(launch.bid_usd_h, abs=1e-4)
    row = await bench.until_status(outcome.instance_id, InstanceStatus.RUNNING)
    assert row.usd_h == pytest.approx(asked_usd_h, rel=0.02)


@pytest.mark.parametrize("how", ["drop", "delay", "error"])
@each_simulated()
async def test_a_lost_answer_is_unknown_and_settled_by_label(bench: Bench, how: str) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="lost_answer", endpoint="create", how=how, for_s=300)
    await bench.order(kind="hidden", endpoint="create", for_s=8)
    assert isinstance(await bench.provider.create(launch), CreateUnknown)
    assert await bench.sent(LABEL) == 1
    await trio.sleep((await bench.provider.capabilities()).visible_after_s)
    (row,) = await bench.provider.list_instances()
    assert row.label == LABEL
    await bench.provider.destroy(row.instance_id)
    assert await bench.alive() == []


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "reset"},
        {"kind": "bad_body"},
        {"kind": "server_error", "status": 503},
        {"kind": "reply", "status": 404, "type": "text/html", "body": "<html>Not Found</html>"},
        {"kind": "reply", "status": 200, "type": "text/html", "body": "<html>Sign in</html>"},
        {"kind": "reply", "status": 302, "body": "", "headers": {"Location": "https://example.com/"}},
        {"kind": "dribble", "for_s": 500},
        {"kind": "slow", "for_s": 500},
        {"kind": "null_instance"},
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('status', '')}",
)
@each_simulated()
async def test_no_useful_answer_is_unavailable_and_for_a_create_unknown(bench: Bench, fault: dict[str, Any]) -> None:
    launch = await bench.launch(LABEL)
    calls = repeatable(bench)
    if fault["kind"] == "null_instance":
        calls = {name: call for name, call in calls.items() if name in ("search", "list")}
    if bench.service == "runpod-spot" and fault["kind"] == "null_instance":
        calls.pop("search")
    for endpoint, call in calls.items():
        await bench.order(endpoint=endpoint, **fault)
        with pytest.raises(ProviderUnavailable):
            await call()
    if fault["kind"] != "null_instance":
        await bench.order(endpoint="create", **fault)
        assert isinstance(await bench.provider.create(launch), CreateUnknown)
        assert await bench.sent(LABEL) == 1


@each_simulated()
async def test_a_429_names_its_pause_and_the_next_call_keeps_it(bench: Bench) -> None:
    await bench.order(kind="rate_limited", endpoint="list", form="retry_after", wait_s=7)
    with pytest.raises(RateLimited) as refused:
        await bench.provider.list_instances()
    pause_s = refused.value.retry_after_s
    assert pause_s is not None
    assert pause_s > 0
    began_s = trio.current_time()
    await bench.provider.list_instances()
    assert trio.current_time() - began_s >= pause_s - 0.01


@each_simulated()
async def test_a_create_is_not_sent_before_its_turn(bench: Bench) -> None:
    offers = await bench.offers()
    launches = [bench.launch_of(with_bid(offers[0]), f"sw-job-00c0ffee-{n}") for n in (1, 2, 3)]
    await bench.order(kind="rate_limited", endpoint="create", form="text", wait_s=9)
    outcomes = [await bench.provider.create(launch) for launch in launches[:2]]
    assert [one.why for one in outcomes if isinstance(one, CreateRefused)] == [RefusedWhy.RATE_LIMITED] * 2
    assert (await bench.sent(launches[0].label), await bench.sent(launches[1].label)) == (1, 0)
    assert await bench.alive() == []
    await trio.sleep(15)
    assert isinstance(await bench.provider.create(launches[2]), Created)


@each_simulated()
async def test_limits_are_kept_by_waiting(bench: Bench) -> None:
    for _ in range(12):
        await bench.provider.search(bench.wish)
    for _ in range(4):
        for call in repeatable(bench).values():
            await call()
    # The bench itself asserts at the end that nothing was sent too early.


@pytest.mark.parametrize(
    ("fault", "error", "why"),
    [
        ({"kind": "unauthorized"}, ProviderDenied, RefusedWhy.DENIED),
        ({"kind": "no_credit"}, NoCredit, RefusedWhy.NO_CREDIT),
        ({"kind": "no_capacity"}, ProviderRefused, RefusedWhy.NO_CAPACITY),
        ({"kind": "reply", "status": 400, "body": {"error": "invalid_args", "msg": "'image' is invalid"}},
         ProviderRefused, RefusedWhy.BAD_REQUEST),
    ],
    ids=["401", "402", "capacity", "400"],
)  # fmt: skip
@each_simulated()
async def test_refusals_are_told_apart(
    bench: Bench, fault: dict[str, Any], error: type[ProvisionerError], why: RefusedWhy
) -> None:
    launch = await bench.launch(LABEL)
    for endpoint in ("search", "list"):
        await bench.order(endpoint=endpoint, **fault)
        with pytest.raises(error):
            await repeatable(bench)[endpoint]()
    await bench.order(endpoint="create", **fault)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert (outcome.why, outcome.left_behind) == (why, ())
    assert await bench.alive() == []


@each_simulated()
async def test_an_account_without_credit_is_told(bench: Bench) -> None:
    await bench.order(kind="set_credit", key=KEY, dollars=0)
    launch = await bench.launch(LABEL)
    outcome = await bench.provider.create(launch)
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.NO_CREDIT
    assert await bench.provider.balance_usd() == pytest.approx(0, abs=1e-6)


@each_simulated()
async def test_a_stale_listing_is_passed_on_and_not_kept(bench: Bench) -> None:
    assert await bench.provider.list_instances() == []
    await trio.sleep(60)
    instance_id = await bench.rented(LABEL)
    await trio.sleep(10)
    await bench.order(kind="stale", endpoint="list", by_s=60)
    assert await bench.provider.list_instances() == []
    assert [one.instance_id for one in await bench.provider.list_instances()] == [instance_id]
    await bench.order(kind="duplicate_row", endpoint="list")
    assert [one.instance_id for one in await bench.provider.list_instances()] == [instance_id]


@each_simulated()
async def test_a_word_that_nobody_knows_is_unknown(bench: Bench) -> None:
    await bench.rented(LABEL)
    path, word = ("/api/v1/instances/", "actual_status") if "vast" in bench.service else ("/v2/pods", "status")
    document = (await bench.sim.http.get(path)).json()
    (row,) = document["instances" if "vast" in bench.service else "pods"]
    row[word] = "levitating"
    await bench.order(kind="reply", endpoint="list", status=200, body=document)
    await trio.sleep(5)
    (seen,) = await bench.provider.list_instances()
    assert (seen.status, seen.status_text.split(":")[0]) == (InstanceStatus.UNKNOWN, "levitating")


@each_simulated()
async def test_a_cancelled_create_is_not_sent_again(bench: Bench) -> None:
    launch = await bench.launch(LABEL)
    await bench.order(kind="lost_answer", endpoint="create", how="delay", for_s=30)
    with trio.move_on_after(10) as scope:
        await bench.provider.create(launch)
    assert scope.cancelled_caught
    await trio.sleep(60)
    assert await bench.sent(LABEL) == 1
    assert len(await bench.alive()) == 1


@pytest.mark.parametrize("form", ["application/json", "text/plain"])
@pytest.mark.promise("P-15")
@each_simulated()
async def test_no_secret_in_any_error_or_log(bench: Bench, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """The service echoes the key and a secret of the job in everything it says."""
    caplog.set_level(logging.DEBUG)
    offer = with_bid((await bench.offers())[0])
    said = [repr(bench.provider)]
    for number, status in enumerate((200, 400, 401, 402, 403, 404, 422, 429, 500)):
        before = len(said)
        spilt = f"key {KEY} header Bearer {KEY}"
        body = {"success": False, "msg": spilt, "detail": spilt, "errors": [{"message": spilt}], "error": spilt}
        fault = {"kind": "reply", "status": status, "type": form, "body": body if "json" in form else spilt}
        for endpoint, call in repeatable(bench).items():
            await bench.order(endpoint=endpoint, **fault)
            with suppress_refusals(said):
                await call()
        assert len(said) > before
        launch = bench.launch_of(offer, f"sw-job-00c0ffee-{number}")
        echo = json.dumps(fault["body"]).replace(f"header Bearer {KEY}", f"token {SECRET}")
        await bench.order(endpoint="create", label=launch.label, **{**fault, "body": echo})
        await trio.sleep(30)
        outcome = await bench.provider.create(launch)
        assert await bench.sent(launch.label) == 1
        assert not isinstance(outcome, Created)
        said += [repr(launch), str(launch), outcome.message, repr(outcome)]
    for text in (*said, caplog.text):
        assert KEY not in text
        assert SECRET not in text


@contextmanager
def suppress_refusals(said: list[str]) -> Iterator[None]:
    """Collect what an error says, with everything that it was raised from."""
    try:
        yield
    except ProvisionerError as error:
        said += [str(error), repr(error), *traceback.format_exception(error)]


@pytest.mark.parametrize("key", ["", "line\nbreak-key", "ünicode-key", "two words-key"])
@pytest.mark.promise("P-15")
def test_a_key_that_is_none_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(ProviderDenied) as refused:
        http.Http("vast", "http://127.0.0.1", key, {})
    assert not key or key not in str(refused.value)


@each()
async def test_capabilities_are_what_the_adapter_has(bench: Bench) -> None:
    found = await bench.provider.capabilities()
    assert found.rebid <= hasattr(bench.provider, "rebid")
    assert found.stop_start <= (hasattr(bench.provider, "stop") and hasattr(bench.provider, "start"))
    assert found.spot or not bench.wish.spot
    assert len(LABEL) <= found.label_chars_max
    assert found.visible_after_s >= 0
    await bench.provider.balance_usd()


@pytest.mark.parametrize("make", [Vast, RunPod])
@pytest.mark.parametrize("how", ["drop", "error"])
async def test_over_a_real_socket_a_create_is_sent_once_too(make: type[Vast] | type[RunPod], how: str) -> None:
    scenario = Scenario(**{**CALM, "limits": True})
    async with simulating(scenario, port=0, scale=600) as sim, httpx.AsyncClient(base_url=sim.url) as http_client:
        provider = make(KEY, base_url=sim.url)
        wish = Wish(parse_gpu(GPU), spot=False, on_demand_max_usd_gpu_h=100.0, disk_gb=20.0)
        (offer, *_) = sift(await provider.search(wish), wish, 0.0).accepted
        await http_client.post("/__sim/faults", json={"kind": "lost_answer", "endpoint": "create", "how": how})
        outcome = await provider.create(Launch(LABEL, offer, "some/image:1", 20.0, "sleep 600"))
        assert isinstance(outcome, CreateUnknown)
        (row,) = await provider.list_instances()
        assert row.label == LABEL
        await provider.destroy(row.instance_id)
        assert (await http_client.get("/__sim/creates")).json()[LABEL]["sent"] == 1
        assert (await http_client.get("/__sim/alive")).json() == []
        await provider.aclose()


@on("vast-spot")
async def test_an_outbid_node_stops_and_may_come_back_as_a_zombie(bench: Bench) -> None:
    instance_id = await bench.rented(LABEL)
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await bench.order(kind="preempt", for_s=36_000)
    lost: Instance = await bench.until_status(instance_id, InstanceStatus.STOPPED)
    assert lost.starts_by_itself
    assert lost.market is Market.SPOT
    await bench.order(kind="come_back")
    await bench.until_status(instance_id, InstanceStatus.RUNNING)
    await bench.provider.destroy(instance_id)
    assert await bench.alive() == []
