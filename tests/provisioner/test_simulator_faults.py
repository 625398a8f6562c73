"""Does every fault of providers.md 7.3 strike as ordered, and do the oracles see what it hides?"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.simulator.faults import KINDS
from tests.support.simulated import KEY, Market, market
from tests.tidy.sources import ROOT

VAST_ROWS = "/api/v1/instances/"


def test_the_page_names_every_kind_of_fault() -> None:
    page = (ROOT / "docs" / "SIMULATOR.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == KINDS


async def first_offer(m: Market) -> dict[str, Any]:
    return (await m.offers(num_gpus={"eq": 1}))[0]


@pytest.mark.parametrize("how", ["drop", "delay", "error"])
async def test_a_create_whose_answer_is_lost_has_happened(autojump_clock: MockClock, how: str) -> None:
    async with market() as m:
        offer = await first_offer(m)
        await m.order(kind="lost_answer", endpoint="create", how=how)
        await m.order(kind="hidden", endpoint="create", for_s=8)
        m.http.timeout = httpx.Timeout(30)
        if how == "error":
            answer = await m.rent(offer)
            assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html")
        else:
            with pytest.raises(httpx.RemoteProtocolError if how == "drop" else httpx.ReadTimeout):
                await m.rent(offer)
        seen = (await m.http.get(VAST_ROWS)).json()["total_instances"]
        assert seen == (1 if how == "delay" else 0), "hidden for the visibility lag"
        await trio.sleep(9)
        assert (await m.http.get(VAST_ROWS)).json()["label_counts"] == {"sw-job-1": 1}
        calls = (await m.ask("creates"))["sw-job-1"]
        assert (calls["sent"], len(calls["made"])) == (1, 1)
        assert await m.ask("violations") == []


async def test_a_create_that_is_sent_again_is_a_violation(autojump_clock: MockClock) -> None:
    async with market() as m:
        first, second = (await m.offers(num_gpus={"eq": 1}))[:2]
        await m.order(kind="lost_answer", endpoint="create", how="error")
        await m.rent(first)
        await m.rent(second)
        rules = {violation["rule"] for violation in await m.ask("violations")}
        assert rules == {"several instances for one label", "create sent again though its outcome was unknown"}


async def test_a_create_that_was_refused_may_be_sent_again(autojump_clock: MockClock) -> None:
    async with market() as m:
        await m.order(kind="no_capacity", endpoint="create")
        offer = await first_offer(m)
        assert (await m.rent(offer)).status_code == 410
        assert (await m.rent(offer)).status_code == 200
        assert await m.ask("violations") == []


async def test_somebody_bids_more_between_search_and_create(autojump_clock: MockClock) -> None:
    async with market() as m:
        offer = await first_offer(m)
        await m.order(kind="outbid_first", endpoint="create", for_s=600)
        answer = (await m.rent(offer, price=offer["min_bid"] * 1.15)).json()
        assert answer["success"] is False
        assert await m.status(answer["new_contract"]) == "stopped"
        await trio.sleep(900)
        assert await m.status(answer["new_contract"]) == "running", "left alone, it starts and bills"


async def test_some_filters_are_not_applied_by_the_server(autojump_clock: MockClock) -> None:
    async with market(search_ignores=("inet_up",)) as m:
        rows = await m.offers(inet_up={"gte": 1e9})
        assert rows
        assert all(row["inet_up"] < 1e9 for row in rows)


async def test_secrets_that_travel_are_found(autojump_clock: MockClock) -> None:
    async with market() as m:
        await m.rent(await first_offer(m), env={"TOKEN": "s3cret-value", "KEY": KEY}, label="")
        (entry,) = (await m.http.post("/__sim/leaks", json={"needles": ["s3cret-value"]})).json()
        assert entry["endpoint"] == "create"
        rules = [violation["rule"] for violation in await m.ask("violations")]
        assert rules == ["create without a label", "account key in a body"]


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ({"kind": "no_capacity", "form": "404"}, 404),
        ({"kind": "no_capacity", "form": "400"}, 400),
        ({"kind": "rate_limited", "form": "text"}, 429),
        ({"kind": "rate_limited", "form": "search_quota_exceeded"}, 429),
        ({"kind": "success_false"}, 200),
        ({"kind": "server_error", "status": 502}, 502),
        ({"kind": "unauthorized"}, 401),
        ({"kind": "no_credit"}, 400),
        ({"kind": "reply", "status": 418, "body": {"odd": True}}, 418),
    ],
)
async def test_vast_refuses_in_each_form(autojump_clock: MockClock, fault: dict[str, Any], status: int) -> None:
    async with market() as m:
        offer = await first_offer(m)
        await m.order(provider="vast", endpoint="create", **fault)
        answer = await m.rent(offer)
        assert answer.status_code == status
        assert "new_contract" not in answer.text
        assert await m.ask("alive") == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [("no_capacity", 400), ("no_credit", 402), ("success_false", 403), ("rate_limited", 429), ("server_error", 500)],
)
async def test_runpod_refuses_in_each_form(autojump_clock: MockClock, kind: str, status: int) -> None:
    async with market() as m:
        await m.order(kind=kind, provider="runpod", endpoint="create", html=False)
        answer = await m.pod()
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert ("retry-after" in answer.headers) == (status == 429)
        assert await m.ask("alive") == []


async def test_the_network_breaks_in_each_way(autojump_clock: MockClock) -> None:
    async with market() as m:
        m.http.timeout = httpx.Timeout(20)
        await m.order(kind="reset", endpoint="list")
        with pytest.raises(httpx.RemoteProtocolError):
            await m.http.get(VAST_ROWS)
        await m.order(kind="bad_body", endpoint="list")
        with pytest.raises(ValueError, match=r"(?i)expecting"):
            (await m.http.get(VAST_ROWS)).json()
        await m.order(kind="slow", endpoint="list", for_s=60)
        with pytest.raises(httpx.ReadTimeout):
            await m.http.get(VAST_ROWS)
        assert (await m.http.get(VAST_ROWS)).status_code == 200


async def test_listings_are_stale_short_doubled_or_null(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        await m.http.get(VAST_ROWS)
        await trio.sleep(100)
        await m.http.get(VAST_ROWS)
        await m.order(kind="stale", endpoint="list", by_s=60)
        rows = (await m.http.get(VAST_ROWS)).json()["instances"]
        assert rows[0]["actual_status"] is None, "as it was at first"
        for kind, count in (("missing_row", 0), ("duplicate_row", 2)):
            await m.order(kind=kind, endpoint="list")
            assert len((await m.http.get(VAST_ROWS)).json()["instances"]) == count
        await m.order(kind="null_instance", endpoint="show")
        assert await m.row(contract) is None
        assert await m.row(contract) is not None


async def test_a_destroy_that_says_yes_and_does_not(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        path = f"/api/v0/instances/{contract}/"
        await m.order(kind="destroy_ignored", endpoint="destroy")
        assert (await m.http.delete(path)).json()["success"] is True
        await trio.sleep(3600)
        assert await m.row(contract) is not None, "still there, and billed"
        await m.order(kind="destroy_ignored", endpoint="destroy", for_s=30)
        await m.http.delete(path)
        assert await m.row(contract) is not None
        await trio.sleep(31)
        assert await m.row(contract) is None


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ({"kind": "stuck", "phase": "loading"}, "loading", ""),
        ({"kind": "stuck", "phase": "provisioning"}, None, ""),
        ({"kind": "oci_failure"}, "created", "OCI runtime create failed"),
        ({"kind": "manifest_unknown"}, "loading", "manifest unknown"),
        ({"kind": "dies", "after_s": 20}, "exited", ""),
        ({"kind": "dies", "after_s": 20, "phase": "offline"}, "offline", ""),
    ],
)
async def test_boots_end_badly(
    autojump_clock: MockClock, fault: dict[str, Any], status: str | None, message: str
) -> None:
    async with market() as m:
        await m.order(endpoint="create", label="sw-*", **fault)
        contract = await m.rented()
        await trio.sleep(1500)
        row = await m.row(contract)
        assert row is not None
        assert row["actual_status"] == status
        assert message in (row["status_msg"] or "")


async def test_addresses_and_ports_deceive(autojump_clock: MockClock) -> None:
    async with market() as m:
        await m.order(kind="private_ip", endpoint="create")
        await m.order(kind="no_ports", endpoint="create")
        contract = await m.rented()
        await m.until_status(contract, "running")
        row = await m.row(contract)
        assert row is not None
        assert row["public_ipaddr"].startswith("10.")
        assert "ports" not in row


async def test_a_fault_meets_only_what_it_names(autojump_clock: MockClock) -> None:
    async with market() as m:
        first, second = (await m.offers(num_gpus={"eq": 1}))[:2]
        await m.order(kind="no_capacity", endpoint="create", offer=first["id"], count=None)
        await m.order(kind="server_error", provider="runpod", endpoint="list", in_s=100, during_s=100, count=None)
        assert (await m.rent(first)).status_code == 410
        assert (await m.rent(second)).status_code == 200
        assert (await m.rent(first)).status_code == 410
        codes = []
        for _ in range(3):
            codes.append((await m.http.get("/v2/pods")).status_code)
            await trio.sleep(101)
        assert codes == [200, 500, 200]
        assert [fault["struck"] for fault in await m.ask("faults")] == [2, 1]
        assert (await m.http.delete("/__sim/faults")).json() == {"removed": 2}
        assert (await m.http.post("/__sim/faults", json={"kind": "nonsense"})).status_code == 400


async def test_half_of_the_calls_fail_with_the_probability_of_a_half(autojump_clock: MockClock) -> None:
    async with market() as m:
        await m.order(kind="server_error", endpoint="list", probability=0.5, count=None)
        failed = sum([(await m.http.get("/v2/pods")).status_code == 500 for _ in range(200)])
        assert 60 < failed < 140


async def test_a_place_loses_all_its_instances_at_once(autojump_clock: MockClock) -> None:
    async with market(lag=False) as m:
        by_place: dict[str, list[int]] = {}
        for offer in await m.offers(num_gpus={"eq": 1}, gpu_name={"neq": ""}):
            answer = await m.rent(offer, price=offer["min_bid"] * 1.2, label=f"sw-{offer['id']}")
            by_place.setdefault(offer["geolocation"], []).append(answer.json()["new_contract"])
        place = max(by_place, key=lambda name: len(by_place[name]))
        await m.order(kind="preempt", place=place, in_s=2000)
        await trio.sleep(1999)
        assert {one["phase"] for one in await m.ask("alive")} == {"running"}
        await trio.sleep(2)
        stopped = {int(one["id"]) for one in await m.ask("alive") if one["phase"] == "stopped"}
        assert stopped == set(by_place[place])


async def test_hosts_fail_prices_jump_and_keys_are_revoked(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        await m.until_status(contract, "running")
        await m.order(kind="host_fails", label="sw-job-1", phase="unknown")
        assert await m.status(contract) == "unknown"
        before = await first_offer(m)
        await m.order(kind="price", machine=before["machine_id"], factor=3.0)
        (after,) = await m.offers(ask_contract_id={"eq": before["id"]})
        assert after["min_bid"] == pytest.approx(before["min_bid"] * 3)
        await m.order(kind="delist", machine=before["machine_id"])
        assert not await m.offers(ask_contract_id={"eq": before["id"]})
        await m.order(kind="set_credit", key=KEY, dollars=0)
        assert (await m.rent(await first_offer(m))).json()["error"] == "insufficient_credit"
        assert (await m.pod()).status_code == 402
        await m.order(kind="revoke_key", key=KEY)
        assert (await m.http.get("/v2/pods")).status_code == 401


async def test_traffic_is_charged_at_the_hosts_rates(autojump_clock: MockClock) -> None:
    async with market() as m:
        offer = await first_offer(m)
        await m.rent(offer)
        (living,) = await m.ask("alive")
        body = {"instance": living["key"], "up_gb": 100, "down_gb": 10}
        charged = (await m.http.post("/__sim/traffic", json=body)).json()["charged"]
        assert charged == pytest.approx(100 * offer["inet_up_cost"] + 10 * offer["inet_down_cost"])
        assert (await m.ask("billed"))["total"] >= charged


async def test_time_can_be_moved(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        before = (await m.ask("clock"))["now"]
        moved = (await m.http.post("/__sim/clock", json={"advance_s": 600})).json()["now"]
        assert moved == pytest.approx(before + 600, abs=1)
        assert await m.status(contract) == "running"
        assert (await m.http.post("/__sim/clock", json={"advance_s": -1})).status_code == 400
