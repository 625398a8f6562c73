"""Does the fake say what Vast says? Search, the ways a create ends, lives, lists, limits (providers.md, section 1)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from tests.support.simulated import KEY, market, until

# What is documented of an offer and of an instance and read by some client (providers.md 1.2 and 1.4).
OFFER_FIELDS = {
    "id", "ask_contract_id", "bundle_id", "machine_id", "host_id", "gpu_name", "num_gpus", "gpu_frac", "gpu_ram",
    "gpu_total_ram", "compute_cap", "cuda_max_good", "driver_version", "cpu_cores", "cpu_cores_effective", "cpu_ram",
    "disk_space", "inet_down", "inet_up", "inet_down_cost", "inet_up_cost", "dph_base", "dph_total", "min_bid",
    "is_bid",
    "storage_cost", "reliability2", "rentable", "rented", "verification", "geolocation", "direct_port_count",
    "public_ipaddr", "hosting_type", "duration", "end_date", "score", "dlperf", "search",
}  # fmt: skip
INSTANCE_FIELDS = {
    "id", "actual_status", "intended_status", "cur_state", "next_state", "status_msg", "label", "is_bid", "min_bid",
    "dph_base", "dph_total", "start_date", "end_date", "duration", "uptime_mins", "machine_id", "host_id",
    "public_ipaddr", "ssh_host", "ssh_port", "direct_port_count", "extra_env", "onstart", "image_uuid", "image_args",
    "image_runtype", "gpu_name", "num_gpus", "disk_space", "geolocation",
}  # fmt: skip


async def test_search_filters_orders_and_caps(autojump_clock: MockClock) -> None:
    async with market(search_rows_max=3) as m:
        rows = await m.offers(order=[["dph_total", "asc"]])
        assert rows[0].keys() >= OFFER_FIELDS
        assert len(rows) == 3
        assert [row["dph_total"] for row in rows] == sorted(row["dph_total"] for row in rows)
        assert {row["gpu_name"] for row in rows} == {"RTX 4090"}
        assert all(row["is_bid"] and row["dph_base"] == row["min_bid"] for row in rows)
        assert not await m.offers(id={"eq": rows[0]["id"]}), "a filter on id matches nothing"
        assert len(await m.offers(ask_contract_id={"eq": rows[0]["id"]})) == 1
        assert {row["num_gpus"] for row in await m.offers(num_gpus={"eq": "2"})} == {2}, "numbers come as text"
        assert {row["geolocation"][-2:] for row in await m.offers(geolocation={"in": ["US", "CA"]})} <= {"US", "CA"}
        bad = await m.http.post("/api/v0/bundles/", json={"gpu_name": "RTX 4090"})
        assert (bad.status_code, bad.json()["error"]) == (400, "invalid_args")


async def test_the_disk_is_part_of_the_price(autojump_clock: MockClock) -> None:
    async with market() as m:
        small, big = [(await m.offers(order=[["id", "asc"]], allocated_storage=gb))[0] for gb in (10.0, 730.0)]
        assert big["dph_total"] - small["dph_total"] == pytest.approx(720 * small["storage_cost"] / 720)


async def test_an_instance_boots_through_the_documented_states(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented(env={"A": "1", "-p 8080:8080": "1"}, onstart="echo", runtype="ssh_direc ssh_proxy")
        seen: list[str | None] = []
        while not seen or seen[-1] != "running":
            row = await m.row(contract)
            assert row is not None
            assert ("ports" in row) == (row["actual_status"] == "running")
            if row["actual_status"] not in seen:
                seen.append(row["actual_status"])
            await trio.sleep(0.2)
        assert seen == [None, "created", "loading", "running"]
        assert row is not None
        assert row.keys() >= INSTANCE_FIELDS
        assert row["is_bid"] is True
        assert isinstance(row["start_date"], float)
        assert row["extra_env"] == [["A", "1"], ["-p 8080:8080", "1"]]
        assert row["public_ipaddr"].endswith("\n")
        assert set(row["ports"]) == {"22/tcp", "8080/tcp"}
        assert row["status_msg"].startswith("success, running some/image:1")


async def test_without_a_price_it_is_silently_on_demand(autojump_clock: MockClock) -> None:
    async with market() as m:
        offer = (await m.offers(num_gpus={"eq": 1}))[0]
        answer = await m.rent(offer, price=None)
        assert answer.json().keys() == {"success", "new_contract", "instance_api_key"}
        row = await m.row(answer.json()["new_contract"])
        assert row is not None
        assert row["is_bid"] is False
        assert row["dph_base"] > offer["min_bid"]


async def test_a_bid_that_is_too_low_leaves_a_stopped_instance_behind_the_error(autojump_clock: MockClock) -> None:
    async with market() as m:
        offer = (await m.offers(num_gpus={"eq": 1}))[0]
        answer = await m.rent(offer, price=offer["min_bid"] * 0.5)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        contract = answer.json()["new_contract"]
        assert await m.status(contract) == "stopped"
        await trio.sleep(3600)
        (living,) = await m.ask("alive")
        assert living["spent"] > 0
        assert (await m.http.delete(f"/api/v0/instances/{contract}/")).json()["success"] is True
        assert await m.ask("alive") == []


async def test_a_taken_offer_is_410_or_a_contract_that_waits(autojump_clock: MockClock) -> None:
    async with market() as m:
        offer = (await m.offers(bid=False, num_gpus={"eq": 1}))[0]
        await m.order(kind="taken", endpoint="create", for_s=1000)
        gone = await m.rent(offer)
        assert (gone.status_code, gone.json()["error"]) == (410, "no_such_ask")
        assert await m.ask("alive") == []
        queued = await m.rent(offer, cancel_unavail=False)
        assert queued.json()["success"] is True
        assert await m.status(queued.json()["new_contract"]) == "scheduling"
        await trio.sleep(1200)
        assert await m.status(queued.json()["new_contract"]) == "running"
        unknown = await m.rent({"id": 999})
        assert (unknown.status_code, unknown.json()["error"]) == (404, "invalid_args")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"image": None}, "invalid_args"),
        ({"image": "x" * 1025}, "invalid_args"),
        ({"label": "x" * 257}, "invalid_args"),
        ({"onstart": "x" * 4097}, "invalid_args"),
        ({"disk": 5}, "invalid_args"),
        ({"runtype": "jupyter_ssl"}, "invalid_args"),
        ({"env": {"A": "x" * 33_000}}, "invalid_args"),
        ({"price": 0.0}, "invalid_price"),
        ({"price": 200}, "invalid_price"),
    ],
)
async def test_create_checks_its_limits(autojump_clock: MockClock, fields: dict[str, Any], error: str) -> None:
    async with market() as m:
        answer = await m.rent((await m.offers())[0], **fields)
        assert (answer.status_code, answer.json()["error"]) == (400, error)
        assert await m.ask("alive") == []


async def test_docker_flags_as_text_have_no_effect(autojump_clock: MockClock) -> None:
    async with market() as m:
        row = await m.row(await m.rented(env="-e A=1 -p 8080:8080"))
        assert row is not None
        assert row["extra_env"] == []


async def test_a_preemption_shows_late_and_the_zombie_returns(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        await m.until_status(contract, "running")
        await m.order(kind="preempt", label="sw-job-1", for_s=600)
        (truth,) = await m.ask("alive")
        assert truth["phase"] == "stopped"
        assert await m.status(contract) == "running", "the API has not noticed yet"
        await m.until_status(contract, "stopped")
        row = await m.row(contract)
        assert row is not None
        assert [row[name] for name in ("intended_status", "cur_state", "next_state")] == ["stopped"] * 3
        await trio.sleep(700)
        assert await m.status(contract) == "running"
        assert any(event["what"] == "resumes by itself" for event in await m.ask("history"))


async def test_sometimes_only_the_actual_status_tells_of_a_preemption(autojump_clock: MockClock) -> None:
    async with market(outbid_shows_exited=1.0, lag=False) as m:
        contract = await m.rented()
        await m.until_status(contract, "running")
        await m.order(kind="preempt", label="*")
        row = await m.row(contract)
        assert row is not None
        assert (row["actual_status"], row["cur_state"]) == ("exited", "running")


async def test_a_rebid_on_the_outbid_contract_brings_it_back(autojump_clock: MockClock) -> None:
    async with market(lag=False) as m:
        contract = await m.rented()
        await m.until_status(contract, "running")
        row = await m.row(contract)
        assert row is not None
        await m.order(kind="busy", machine=row["machine_id"], bid=row["dph_base"] * 2, for_s=90_000)
        assert await m.status(contract) == "stopped"
        answer = await m.http.put(f"/api/v0/instances/bid_price/{contract}/", json={"client_id": "me", "price": 2.5})
        assert answer.json() == {"success": True}
        await m.until_status(contract, "running")
        assert (await m.http.put("/api/v0/instances/bid_price/1/", json={"price": 1})).status_code == 404


async def test_start_of_a_taken_gpu_is_queued(autojump_clock: MockClock) -> None:
    async with market() as m:
        contract = await m.rented()
        await m.until_status(contract, "running")
        path = f"/api/v0/instances/{contract}/"
        assert (await m.http.put(path, json={"state": "stopped"})).json()["success"] is True
        assert await m.status(contract) == "stopped"
        await m.order(kind="taken", endpoint="start", for_s=300)
        answer = (await m.http.put(path, json={"state": "running"})).json()
        assert answer["msg"].startswith("Required resources are currently unavailable, state change queued")
        await trio.sleep(600)
        assert await m.status(contract) == "running"


async def test_a_destroyed_instance_is_null_and_then_404(autojump_clock: MockClock) -> None:
    async with market() as m:
        first, second = await m.rented(label="a"), await m.rented(label="b")
        assert (await m.http.delete(f"/api/v0/instances/{first}/")).json()["success"] is True
        shown = await m.http.get(f"/api/v0/instances/{first}/")
        assert (shown.status_code, shown.json()) == (200, {"instances": None})
        again = await m.http.delete(f"/api/v0/instances/{first}/")
        assert (again.status_code, again.json()["msg"]) == (404, "Instance not found")
        bulk = await m.http.request("DELETE", "/api/v0/instances/", json={"instance_ids": [second]})
        assert bulk.json()["success"] is True
        assert await m.ask("alive") == []


async def test_lists_come_in_pages_with_counts_by_label(autojump_clock: MockClock) -> None:
    async with market(vast_machines=90, search_rows_max=500, credit=1e6) as m:
        offers = [offer for offer in await m.offers(gpu_name={"neq": ""}) if offer["num_gpus"] == 1]
        for number, offer in enumerate(offers[:30]):
            await m.rent(offer, price=offer["min_bid"] * 1.1, label="many" if number else "one")
        first = (await m.http.get("/api/v1/instances/", params={"limit": "100"})).json()
        assert (first["instances_found"], first["total_instances"]) == (25, 30)
        assert first["label_counts"] == {"many": 29, "one": 1}
        rest = (await m.http.get("/api/v1/instances/", params={"after_token": first["next_token"]})).json()
        assert rest["next_token"] is None
        assert len({row["id"] for row in first["instances"] + rest["instances"]}) == 30
        by_label = {"select_filters": '{"label": {"eq": "one"}}'}
        assert (await m.http.get("/api/v1/instances/", params=by_label)).json()["total_instances"] == 1
        for wrong in ({"after_token": "nonsense"}, {"select_filters": '{"dph_total": {"gt": 1}}'}):
            assert (await m.http.get("/api/v1/instances/", params=wrong)).status_code == 400


async def test_limits_are_minimum_intervals_per_endpoint(autojump_clock: MockClock) -> None:
    async with market(limits=True) as m:
        path = "/api/v1/instances/"
        codes = [(await m.http.get(path)).status_code for _ in range(2)]
        await trio.sleep(1.01)
        assert [*codes, (await m.http.get(path)).status_code] == [200, 429, 200]
        answers = [await m.http.post("/api/v0/bundles/", json={}) for _ in range(11)]
        assert [answer.status_code for answer in answers] == [200] * 10 + [429]
        assert "retry-after" not in answers[-1].headers
        await trio.sleep(60)
        offer = (await m.offers())[0]
        assert (await m.rent(offer, price=120)).status_code == 200
        await trio.sleep(1)
        assert (await m.rent(offer, price=120)).status_code == 429
        await trio.sleep(4)
        assert (await m.rent(offer, price=120)).status_code == 429, "an early create keeps the next one out for 12 s"
        assert {"rule": "sent too early", "what": "create", "detail": 2} in await m.ask("violations")


async def test_keys_are_wanted_and_a_containers_key_reaches_only_itself(autojump_clock: MockClock) -> None:
    async with market() as m:
        mine = await m.rented(label="mine")
        other = await m.rented(label="other")
        (living,) = await m.ask("alive", label="mine")
        own = {"Authorization": f"Bearer {living['instance_key']}"}
        assert (await m.http.delete(f"/api/v0/instances/{other}/", headers=own)).status_code == 404
        assert (await m.http.post("/api/v0/bundles/", json={}, headers=own)).status_code == 404
        assert (await m.http.delete(f"/api/v0/instances/{mine}/", headers=own)).json()["success"] is True
        stranger = {"Authorization": "Bearer somebody-else"}
        shown = await m.http.get(f"/api/v0/instances/{other}/", headers=stranger)
        assert shown.json() == {"instances": None}
        async with httpx.AsyncClient(transport=m.sim.transport, base_url=m.sim.url) as nobody:
            refused = await nobody.get("/api/v1/instances/")
            assert (refused.status_code, refused.json()["error"]) == (401, "auth_error")
            assert (await nobody.post("/api/v0/bundles/", json={})).status_code == 404
            assert (await nobody.get("/api/v1/instances/", params={"api_key": KEY})).status_code == 200


async def test_bulk_create_rents_several_in_one_call(autojump_clock: MockClock) -> None:
    async with market() as m:
        asks = [offer["id"] for offer in await m.offers(num_gpus={"eq": 1})][:3]
        body = {"ids": [*asks, 999], "image": "i", "price": 1.5, "label": "sw-race"}
        answer = (await m.http.post("/api/v0/asks/bulk/", json=body)).json()
        assert len(answer["new_contracts"]) == 3
        assert [result["success"] for result in answer["results"]] == [True, True, True, False]

        async def all_run() -> bool:
            return {one["phase"] for one in await m.ask("alive")} == {"running"}

        await until(all_run)
