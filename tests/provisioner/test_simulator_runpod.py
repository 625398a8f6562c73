"""Does the fake say what RunPod says? REST v2 against the vendor's schemas, GraphQL, v1 (providers.md, section 2)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")
pytest.importorskip("jsonschema", reason="the test extra is not installed: pip install -e '.[test]'")

import jsonschema

from provisioner.simulator.clock import rfc3339
from tests.support.runpod_schemas import conforms
from tests.support.simulated import GPU_ID, Market, market, until


def test_the_schemas_can_refuse() -> None:
    wrong = httpx.Response(200, json={"pods": [{"id": "x"}]}, headers={"Content-Type": "application/json"})
    with pytest.raises(jsonschema.ValidationError):
        conforms(wrong, "ListPodsResponse")


async def phase(m: Market, pod_id: str) -> str:
    return str(conforms(await m.http.get(f"/v2/pods/{pod_id}"), "Pod")["status"])


async def test_a_pod_lives_through_the_documented_statuses(autojump_clock: MockClock) -> None:
    async with market() as m:
        pod = conforms(await m.pod(ports=["22/tcp", "8888/http"], env={"A": "1"}, disk=30), "Pod", status=201)
        assert (pod["status"], pod["actions"], pod["runtime"]) == ("PROVISIONING", ["stop", "terminate"], None)
        seen = ["PROVISIONING"]
        while seen[-1] != "RUNNING":
            if (now := await phase(m, pod["id"])) != seen[-1]:
                seen.append(now)
            await trio.sleep(1)
        assert seen == ["PROVISIONING", "STARTING", "RUNNING"]
        (running,) = conforms(await m.http.get("/v2/pods"), "ListPodsResponse")["pods"]
        assert {port["private"] for port in running["runtime"]["ports"]} == {22, 8888}
        assert running["ssh"]["direct"]["port"] == running["runtime"]["ports"][0]["public"]
        assert running["cost"] > 0

        action = f"/v2/pods/{pod['id']}/action"
        stopped = conforms(await m.http.post(action, json={"action": "stop"}), "Pod")
        assert (stopped["status"], stopped["cost"], stopped["runtime"]) == ("EXITED", 0.0, None)
        conforms(await m.http.post(action, json={"action": "restart"}), "ErrorResponse", status=409)
        conforms(await m.http.post(action, json={"action": "start"}), "Pod")
        renamed = await m.http.patch(f"/v2/pods/{pod['id']}", json={"name": "other", "locked": True})
        assert conforms(renamed, "Pod")["actions"] == ["terminate"]
        gone = await m.http.delete(f"/v2/pods/{pod['id']}")
        assert (gone.status_code, gone.content) == (204, b"")
        conforms(await m.http.get(f"/v2/pods/{pod['id']}"), "ErrorResponse", status=404)
        assert conforms(await m.http.get("/v2/pods"), "ListPodsResponse") == {"pods": []}


@pytest.mark.parametrize(
    "fields",
    [
        {"interruptible": True},
        {"name": ""},
        {"image": None},
        {"gpu": {"id": GPU_ID, "bid": 0.2}},
        {"gpu": {"id": GPU_ID, "count": 0}},
        {"env": {"A": 1}},
        {"cloud": "ALL"},
        {"mounts": {"persistent": {"size": 5, "path": "/x"}}},
    ],
)
async def test_a_body_outside_the_contract_is_422(autojump_clock: MockClock, fields: dict[str, Any]) -> None:
    async with market() as m:
        assert conforms(await m.pod(**fields), "ErrorResponse", status=422)["errors"]


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": None},
        {"gpu": {"id": GPU_ID, "allowedCudaVersions": ["12.8"], "minCudaVersion": "12.4"}},
        {"gpu": {"id": GPU_ID, "count": 64}},
        {"gpu": {"id": "NVIDIA Nothing"}},
        {"dataCenterIds": ["XX-1"]},
        {"env": {f"A{n}": "" for n in range(51)}},
    ],
)
async def test_a_broken_rule_and_no_capacity_are_both_400(autojump_clock: MockClock, fields: dict[str, Any]) -> None:
    async with market() as m:
        conforms(await m.pod(**fields), "ErrorResponse", status=400)
        assert await m.ask("alive") == []


async def test_the_catalog_says_what_can_be_had(autojump_clock: MockClock) -> None:
    async with market() as m:
        stock = {"include": "AVAILABILITY", "product": "POD"}
        gpus = conforms(await m.http.get("/v2/catalog/gpus", params=stock), "ListGpuTypesResponse")["gpus"]
        (ours,) = [gpu for gpu in gpus if gpu["id"] == GPU_ID]
        assert ours["availability"] in {"LOW", "MEDIUM", "HIGH"}
        conforms(await m.http.get("/v2/catalog/gpus", params={"include": "AVAILABILITY"}), "ErrorResponse", status=400)
        plain = conforms(await m.http.get(f"/v2/catalog/gpus/{GPU_ID}"), "GpuType")
        assert "availability" not in plain
        query = {"regions": "EUROPE", "include": "GPU_AVAILABILITY"}
        centers = conforms(await m.http.get("/v2/catalog/datacenters", params=query), "ListDataCentersResponse")
        assert {center["region"] for center in centers["dataCenters"]} == {"EUROPE"}
        await m.order(kind="busy", provider="runpod")
        gpus = conforms(await m.http.get("/v2/catalog/gpus", params=stock), "ListGpuTypesResponse")["gpus"]
        assert {gpu["availability"] for gpu in gpus} == {"NONE"}
        conforms(await m.pod(), "ErrorResponse", status=400)


async def test_the_bill_can_be_audited(autojump_clock: MockClock) -> None:
    async with market() as m:
        pod = conforms(await m.pod(), "Pod", status=201)
        await trio.sleep(1800)
        bill = conforms(await m.http.get("/v2/billing/pods", params={"podId": pod["id"]}), "ListPodBillingResponse")
        (record,) = bill["records"]
        assert record["gpuAmount"] == pytest.approx(pod["cost"] / 2, rel=0.01)
        assert bill["metadata"]["totals"]["totalAmount"] == record["totalAmount"]


async def test_every_answer_tells_the_quota_and_the_61st_of_a_minute_is_429(autojump_clock: MockClock) -> None:
    async with market(limits=True) as m:
        answers = [await m.http.get("/v2/pods") for _ in range(61)]
        assert [answer.status_code for answer in answers] == [200] * 60 + [429]
        assert answers[0].headers["RateLimit"].startswith('"minute";r=59;t=')
        assert (
            answers[0].headers["RateLimit-Policy"] == '"minute";q=60;w=60, "hour";q=3000;w=3600, "day";q=50000;w=86400'
        )
        conforms(answers[-1], "ErrorResponse", status=429)
        await trio.sleep(int(answers[-1].headers["Retry-After"]))
        assert (await m.http.get("/v2/pods")).status_code == 200


async def test_keys_paths_and_methods(autojump_clock: MockClock) -> None:
    async with market() as m:
        async with httpx.AsyncClient(transport=m.sim.transport, base_url=m.sim.url) as nobody:
            conforms(await nobody.get("/v2/pods"), "ErrorResponse", status=401)
        assert (await m.http.put("/v2/pods")).headers["Allow"] == "GET, POST"
        conforms(await m.http.get("/v2/nothing"), "ErrorResponse", status=404)
        conforms(await m.http.put("/v2/account/ssh-keys", json={"keys": ["nonsense"]}), "ErrorResponse", status=422)
        key = {"keys": ["ssh-ed25519 AAAA me"]}
        assert conforms(await m.http.put("/v2/account/ssh-keys", json=key), "SshKeys") == key
        bad = await m.http.post("/v2/pods", content=b"{", headers={"Content-Type": "application/json"})
        conforms(bad, "ErrorResponse", status=422)


async def test_a_pods_own_key_ends_only_its_pod_or_nothing(autojump_clock: MockClock) -> None:
    for allowed in (True, False):
        async with market(runpod_pod_key=allowed) as m:
            pods = [(await m.pod(name=name)).json()["id"] for name in ("a", "b")]
            (living,) = await m.ask("alive", label="a")
            own = {"Authorization": f"Bearer {living['instance_key']}"}
            assert (await m.http.delete(f"/v2/pods/{pods[1]}", headers=own)).status_code == (404 if allowed else 401)
            assert (await m.http.delete(f"/v2/pods/{pods[0]}", headers=own)).status_code == (204 if allowed else 401)


DEPLOY = """mutation Deploy($input: PodFindAndDeployOnDemandInput) {
  podFindAndDeployOnDemand(input: $input) { id name desiredStatus costPerHr machineId machine { podHostId } }
}"""
RENT = """mutation { podRentInterruptable(input: {
  name: "sw-spot-1", imageName: "i", cloudType: ALL, gpuTypeId: "%s", gpuCount: 1, bidPerGpu: %s, ports: "22/tcp"
}) { id podType } }"""


def wish(**fields: Any) -> dict[str, Any]:
    return {
        "input": {"name": "sw-g-1", "imageName": "i", "gpuTypeId": GPU_ID, "gpuCount": 1, "cloudType": "ALL", **fields}
    }


async def test_graphql_says_running_at_once_and_runtime_when_it_is(autojump_clock: MockClock) -> None:
    async with market() as m:
        pod = (await m.graph(DEPLOY, wish(ports="22/tcp"))).json()["data"]["podFindAndDeployOnDemand"]
        assert pod["desiredStatus"] == "RUNNING"
        fields = "desiredStatus runtime { ports { privatePort isIpPublic } }"
        query = f'{{ pod(input: {{podId: "{pod["id"]}"}}) {{ {fields} }} }}'
        assert (await m.graph(query)).json()["data"]["pod"] == {"desiredStatus": "RUNNING", "runtime": None}

        async def up() -> bool:
            return (await m.graph(query)).json()["data"]["pod"]["runtime"] is not None

        await until(up)
        ports = (await m.graph(query)).json()["data"]["pod"]["runtime"]["ports"]
        assert ports == [{"privatePort": 22, "isIpPublic": True}]
        end = f'mutation {{ podTerminate(input: {{podId: "{pod["id"]}"}}) }}'
        assert (await m.graph(end)).json() == {"data": {"podTerminate": None}}
        again = (await m.graph(end)).json()
        assert again["errors"][0]["message"] == "pod not found to terminate"


async def test_graphql_refuses_with_200_and_malformed_queries_with_400(autojump_clock: MockClock) -> None:
    async with market() as m:
        none_left = await m.graph(DEPLOY, wish(gpuCount=64))
        assert none_left.status_code == 200
        (error,) = none_left.json()["errors"]
        assert error["message"].startswith(
            "There are no longer any instances available with the requested specifications."
        )
        assert (error["path"], error["extensions"]) == (["podFindAndDeployOnDemand"], {"code": "RUNPOD"})
        for query in ("{ nothing }", "{", 'mutation { podStop(input: {pod: "x"}) { id } }'):
            assert (await m.graph(query)).status_code == 400


async def test_terminate_after_is_a_dead_mans_switch(autojump_clock: MockClock) -> None:
    async with market() as m:
        await m.graph(DEPLOY, wish(terminateAfter=rfc3339(m.sim.clock.now() + 600)))
        assert len(await m.ask("alive")) == 1
        await trio.sleep(602)
        assert await m.ask("alive") == []


async def test_spot_is_gone_unless_the_world_still_has_it(autojump_clock: MockClock) -> None:
    async with market() as m:
        removed = await m.graph(RENT % (GPU_ID, 0.4))
        assert removed.status_code == 400
        assert "Cannot query field" in removed.json()["errors"][0]["message"]
    async with market(runpod_spot=True) as m:
        price = "lowestPrice(input: {gpuCount: 1}) { minimumBidPrice }"
        lowest = f'{{ gpuTypes(input: {{id: "{GPU_ID}"}}) {{ {price} }} }}'
        bid = (await m.graph(lowest)).json()["data"]["gpuTypes"][0]["lowestPrice"]["minimumBidPrice"]
        too_low = (await m.graph(RENT % (GPU_ID, bid / 2))).json()
        assert too_low["errors"][0]["message"].startswith("There are no instances available with the request")
        pod = (await m.graph(RENT % (GPU_ID, bid * 1.2))).json()["data"]["podRentInterruptable"]
        assert pod["podType"] == "INTERRUPTABLE"
        await trio.sleep(900)
        assert await phase(m, pod["id"]) == "RUNNING"
        await m.order(kind="preempt", label="sw-spot-1")
        assert await phase(m, pod["id"]) == "RUNNING", "five seconds of notice"
        await trio.sleep(6)
        assert await phase(m, pod["id"]) == "EXITED"
        resume = f'mutation {{ podResume(input: {{podId: "{pod["id"]}", gpuCount: 1}}) {{ id }} }}'
        assert "Cannot resume a spot pod" in (await m.graph(resume)).json()["errors"][0]["message"]
        rebid = f'mutation {{ podBidResume(input: {{podId: "{pod["id"]}", bidPerGpu: {bid * 2}}}) {{ id }} }}'
        assert "not enough free GPUs" in (await m.graph(rebid)).json()["errors"][0]["message"]


async def test_v1_answers_until_it_is_retired(autojump_clock: MockClock) -> None:
    body = {"name": "sw-v1", "imageName": "i", "gpuTypeIds": ["NVIDIA H200", GPU_ID], "cloudType": "COMMUNITY"}
    async with market() as m:
        pod = (await m.http.post("/v1/pods", json=body)).json()
        assert pod["desiredStatus"] == "RUNNING"
        assert isinstance(pod["costPerHr"], str)
        assert [one["id"] for one in (await m.http.get("/v1/pods")).json()] == [pod["id"]]
        assert (await m.http.post(f"/v1/pods/{pod['id']}/stop")).json()["desiredStatus"] == "EXITED"
        assert (await m.http.delete(f"/v1/pods/{pod['id']}")).status_code == 204
        unknown = await m.http.post("/v1/pods", json={**body, "gpuTypeIds": ["NVIDIA X"]})
        assert unknown.json()["error"] == "body/gpuTypeIds/0 must be one of the allowed values"
        await m.order(kind="busy", provider="runpod")
        none_left = await m.http.post("/v1/pods", json=body)
        assert (none_left.status_code, none_left.json()["status"]) == (500, 500)
    async with market(runpod_v1=False) as m:
        assert (await m.http.get("/v1/pods")).status_code == 410
