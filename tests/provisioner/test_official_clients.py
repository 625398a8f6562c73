"""Do the providers' own clients work against the fakes, unmodified? The `vastai` command and SDK, the `runpod` SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import simulating
from tests.support.official_clients import HOW, Clients, clients_python
from tests.support.simulated import CALM, GPU_ID, KEY, Market

PYTHON = clients_python()
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason=f"the official clients are not installed: {HOW}"),
    pytest.mark.timeout(240),
]

SCALE = 100.0


@asynccontextmanager
async def served(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Market, Clients]]:
    async with simulating(Scenario(**{**CALM, "lag": False, **settings}), scale=SCALE, port=0) as sim:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=sim.url, headers=headers, timeout=60) as http:
            assert PYTHON is not None
            yield Market(sim, http), Clients(PYTHON, sim.url, tmp_path)


async def test_the_vastai_command_from_search_to_destroy(tmp_path: Path) -> None:
    async with served(tmp_path) as (m, clients):
        offers = await clients.vastai_json("search", "offers", "gpu_name=RTX_4090 num_gpus=1", "--type", "bid")
        assert offers
        assert {offer["gpu_name"] for offer in offers} == {"RTX 4090"}
        ask, bid = str(offers[0]["id"]), str(offers[0]["min_bid"] * 1.15)
        made = await clients.vastai_json(
            "create", "instance", ask, "--image", "some/image:1", "--disk", "20", "--bid_price", bid, "--label",
            "sw-cli-1",
            "--env", "-e A=1 -p 8080:8080", "--onstart-cmd", "echo", "--ssh", "--direct", "--cancel-unavail",
        )  # fmt: skip
        assert made["success"] is True
        contract = str(made["new_contract"])

        (row,) = await clients.vastai_json("show", "instances-v1")
        assert (row["id"], row["label"]) == (int(contract), "sw-cli-1")
        await m.until_status(int(contract), "running")
        shown = await clients.vastai_json("show", "instance", contract)
        assert shown["is_bid"] is True
        assert shown["extra_env"] == {"A": "1", "-p 8080:8080": "1"}
        assert "203.0.113." in await clients.vastai("ssh-url", contract)

        assert "bid price changed" in await clients.vastai("change", "bid", contract, "--price", "1.5")
        assert (await m.row(int(contract)) or {})["dph_base"] == 1.5
        await clients.vastai("stop", "instance", contract)
        await m.until_status(int(contract), "stopped")
        await clients.vastai("start", "instance", contract)
        await m.until_status(int(contract), "running")
        await clients.vastai("label", "instance", contract, "sw-cli-2")
        assert (await m.ask("alive"))[0]["label"] == "sw-cli-2"

        assert "destroying" in await clients.vastai("destroy", "instance", contract, "-y")
        assert await clients.vastai_json("show", "instance", contract) == {"instances": None}
        assert await m.ask("alive") == []
        assert "Instance not found" in await clients.vastai("destroy", "instance", contract, "-y", "--raw", fails=True)


async def test_the_vastai_sdk_and_its_three_puts_for_one_create(tmp_path: Path) -> None:
    async with served(tmp_path) as (m, clients):
        found = await clients.program(
            """
import json
from vastai import VastAI
v = VastAI()
offers = v.search_offers(query="gpu_name=RTX_4090 num_gpus=1", type="interruptible")
made = v.create_instance(id=offers[0]["id"], image="i", disk=20, bid_price=1.5, label="sw-sdk-1", env={"A": "1"})
mine = v.show_instances()
one = v.show_instance(id=made["new_contract"])
v.change_bid(id=made["new_contract"], price=1.6)
v.stop_instance(id=made["new_contract"])
v.destroy_instance(id=made["new_contract"])
gone = v.show_instance(id=made["new_contract"])
print(json.dumps({"offers": len(offers), "mine": [row["label"] for row in mine], "bid": one["is_bid"], "gone": gone}))
"""
        )
        assert found["offers"] > 0
        assert (found["mine"], found["bid"], found["gone"]) == (["sw-sdk-1"], True, None)

        # providers.md 0, fact 5: the SDK sends an ambiguous create again, and the fake lets it pay for that.
        await m.order(kind="lost_answer", endpoint="create", how="drop", count=2)
        await clients.program(
            """
import json
from vastai import VastAI
v = VastAI()
ids = [offer["id"] for offer in v.search_offers(query="num_gpus=8", type="on-demand")]
try:
    v.create_instance(id=ids[0], image="i", disk=20, label="sw-sdk-2", cancel_unavail=False)
finally:
    print(json.dumps(0))
"""
        )
        calls = (await m.ask("creates"))["sw-sdk-2"]
        assert (calls["sent"], len(calls["made"])) == (3, 3)
        assert "several instances for one label" in {one["rule"] for one in await m.ask("violations")}


async def test_the_runpod_sdk_from_search_to_terminate(tmp_path: Path) -> None:
    async with served(tmp_path) as (m, clients):
        found = await clients.program(
            f"""
import json, time, runpod
runpod.api_key = "{KEY}"
kinds = runpod.get_gpus()
kind = runpod.get_gpu("{GPU_ID}")
pod = runpod.create_pod("sw-sdk-1", "i:1", "{GPU_ID}", ports="22/tcp,8888/http", env={{"A": "1"}})
for _ in range(600):
    shown = runpod.get_pod(pod["id"])
    if shown["runtime"]:
        break
    time.sleep(0.1)
listed = runpod.get_pods()
stopped = runpod.stop_pod(pod["id"])
resumed = runpod.resume_pod(pod["id"], 1)
runpod.terminate_pod(pod["id"])
texts = []
for wrong in (lambda: runpod.create_pod("x", "i", "NVIDIA Nothing"), lambda: runpod.terminate_pod(pod["id"]),
              lambda: runpod.create_pod("x", "i", "{GPU_ID}", gpu_count=64)):
    try:
        wrong()
    except Exception as error:
        texts.append(type(error).__name__ + ": " + str(error))
print(json.dumps({{"kinds": len(kinds), "price": kind["communityPrice"], "pod": shown, "listed": len(listed),
    "stopped": stopped, "resumed": resumed["desiredStatus"], "left": runpod.get_pods(), "texts": texts}}))
"""
        )
        assert found["kinds"] > 3
        assert found["price"] > 0
        assert found["pod"]["env"] == ["A=1"]
        assert {port["privatePort"] for port in found["pod"]["runtime"]["ports"]} == {22, 8888}
        assert (found["listed"], found["stopped"]["desiredStatus"], found["resumed"]) == (1, "EXITED", "RUNNING")
        assert found["left"] == []
        assert [text.split(":")[0] for text in found["texts"]] == ["ValueError", "QueryError", "QueryError"]
        assert "no longer any instances available" in found["texts"][2]
        assert await m.ask("alive") == []


async def test_a_refused_key_looks_to_the_clients_as_they_expect(tmp_path: Path) -> None:
    async with served(tmp_path) as (m, clients):
        await m.order(kind="revoke_key", key=KEY)
        assert '"status_code": 401' in await clients.vastai("show", "instances-v1", "--raw", fails=True)
        text = await clients.program(
            f"""
import json, runpod
runpod.api_key = "{KEY}"
try:
    runpod.get_pods()
except Exception as error:
    print(json.dumps(str(error)))
"""
        )
        assert text == "Unauthorized request, please check your API key."


async def test_the_command_line_survives_the_limits(tmp_path: Path) -> None:
    async with served(tmp_path, limits=True) as (m, clients):
        await m.order(kind="rate_limited", endpoint="list", form="text", count=2)
        assert await clients.vastai_json("show", "instances-v1") == []
        entries = await m.ask("journal", endpoint="list")
        assert [entry["status"] for entry in entries] == [429, 429, 200]
