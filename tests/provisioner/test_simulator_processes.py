"""Is an instance a real process, and its end a real end? Real sockets, real process groups, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

pytest.importorskip("graphql", reason="the simulator extra is not installed: pip install -e '.[simulator]'")

from provisioner.simulator.latencies import SHIPPED, Latencies
from provisioner.simulator.market.scenario import Scenario
from provisioner.simulator.simulation import simulating
from tests.support.simulated import CALM, KEY, Market, until

SCALE = 120.0
"""Two minutes pass in a second: a boot takes a fraction of one."""

NODE = """
trap 'echo terminated >> signals' TERM
echo "$CONTAINER_ID$RUNPOD_POD_ID A=$A gpus=$SIM_GPU_COUNT" >> booted
sh "$SIM_ONSTART"
sleep 1000 & echo $! >> children
while :; do date +%s%N > beat; sleep 0.05; done
"""


def patient() -> Latencies:
    """Return latencies with a notice of seconds in real time, which a shell on a busy machine can notice."""
    table = json.loads(SHIPPED.read_text())
    table["runpod"]["notice_spot"] = {"low": 5 * SCALE, "p50": 5 * SCALE, "high": 5 * SCALE}
    return Latencies(table)


@asynccontextmanager
async def nodes(tmp_path: Path, command: str = NODE, **settings: Any) -> AsyncIterator[Market]:
    scenario = Scenario(**{**CALM, "lag": False, **settings})
    async with simulating(
        scenario, scale=SCALE, latencies=patient(), port=0, nodes_dir=tmp_path, command=command
    ) as sim:  # fmt: skip
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=sim.url, headers=headers, timeout=60) as http:
            yield Market(sim, http)


async def soon(check: Any) -> None:
    async def there() -> bool:
        return bool(check())

    await until(there, every_s=0.02, at_most_s=60)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def booted(m: Market, home: Path, times: int = 1) -> int:
    """Wait for the node's start, and return the process that it started in the background."""
    await soon(lambda: len(lines(home / "children")) >= times and (home / "beat").exists())
    return int(lines(home / "children")[-1])


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def test_a_node_boots_dies_with_its_group_and_finds_its_disk_when_it_returns(tmp_path: Path) -> None:
    async with nodes(tmp_path) as m:
        contract = await m.rented(env={"A": "1", "-p 1:1": "1"}, onstart="echo script >> scripts")
        home = tmp_path / f"vast-{contract}"
        child = await booted(m, home)
        assert lines(home / "booted") == [f"{contract} A=1 gpus=1"]
        assert lines(home / "scripts") == ["script"]
        assert len(await m.ask("processes")) == 1

        await m.order(kind="preempt", label="sw-job-1", for_s=100_000)
        await soon(lambda: not alive(child))
        assert lines(home / "signals") == [], "no notice: SIGKILL"
        assert await m.ask("processes") == {}

        await m.order(kind="come_back", label="sw-job-1")
        again = await booted(m, home, times=2)
        assert lines(home / "booted") == [f"{contract} A=1 gpus=1"] * 2, "the same disk"
        await m.http.delete(f"/api/v0/instances/{contract}/")
        await soon(lambda: not alive(again))
        assert not home.exists()


async def test_a_runpod_spot_node_gets_a_notice(tmp_path: Path) -> None:
    async with nodes(tmp_path, runpod_spot=True) as m:
        rent = (
            'mutation { podRentInterruptable(input: {name: "sw-pod-1", imageName: "i", cloudType: ALL, '
            'gpuTypeId: "NVIDIA GeForce RTX 4090", gpuCount: 1, bidPerGpu: 5.0}) { id } }'
        )
        pod = (await m.graph(rent)).json()["data"]["podRentInterruptable"]["id"]
        home = tmp_path / f"runpod-{pod}"
        await booted(m, home)
        (pid,) = (await m.ask("processes")).values()
        await m.order(kind="preempt", label="sw-pod-1")
        await soon(lambda: lines(home / "signals") == ["terminated"])
        await soon(lambda: not alive(pid))
        assert (await m.http.get(f"/v2/pods/{pod}")).json()["status"] == "EXITED"


async def test_a_frozen_node_goes_on_where_it_was(tmp_path: Path) -> None:
    async with nodes(tmp_path, outbid_freezes=True) as m:
        contract = await m.rented()
        home = tmp_path / f"vast-{contract}"
        child = await booted(m, home)
        await m.order(kind="preempt", label="*", for_s=1_000_000)
        await trio.sleep(0.3)
        beat = (home / "beat").read_text()
        await trio.sleep(0.3)
        assert (home / "beat").read_text() == beat
        assert alive(child)
        await m.order(kind="come_back", label="*")
        await soon(lambda: (home / "beat").read_text() != beat)
        assert len(lines(home / "booted")) == 1, "it was not started anew: it knows nothing of the pause"


async def test_a_program_that_ends_shows_as_exited(tmp_path: Path) -> None:
    async with nodes(tmp_path, command="sleep 1000 & echo $! > child; exit 3") as m:
        contract = await m.rented()
        await soon(lambda: (tmp_path / f"vast-{contract}" / "child").exists())
        await m.until_status(contract, "exited")
        (living,) = await m.ask("alive")
        assert (living["why"], living["phase"]) == ("died", "exited")
        child = int((tmp_path / f"vast-{contract}" / "child").read_text())
        await soon(lambda: not alive(child))


async def test_a_node_can_end_itself_with_the_key_it_was_given(tmp_path: Path) -> None:
    command = (
        f"exec {sys.executable} -c 'import os, urllib.request as u; u.urlopen(u.Request("
        'os.environ["SIM_URL"] + "/api/v0/instances/" + os.environ["CONTAINER_ID"] + "/", method="DELETE", '
        'headers={"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"]}))\''
    )
    async with nodes(tmp_path, command=command) as m:
        contract = await m.rented()
        await m.until_status(contract, "gone")
        assert await m.ask("alive") == []


async def test_a_cut_connection_and_a_dribbling_body_are_real(tmp_path: Path) -> None:
    async with nodes(tmp_path, command="true") as m:
        await m.order(kind="lost_answer", endpoint="list", how="drop")
        with pytest.raises((httpx.NetworkError, httpx.RemoteProtocolError)):
            await m.http.get("/v2/pods")
        await m.order(kind="dribble", endpoint="search", for_s=60)
        began = trio.current_time()
        assert (await m.http.get("/v2/catalog/gpus")).json()["gpus"]
        assert trio.current_time() - began > 0.9 * 60 / SCALE


def test_the_command_prints_its_addresses_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "provisioner.simulator", "--seed", "7", "--scale", "600", "--dir", str(tmp_path)]
    environment = {**os.environ, "SPOTWARP_SIM_EXEC": "echo $$ > pid; exec sleep 1000"}
    settings = [argument for name in ("rivals_per_hour=0", "busy=0") for argument in ("--set", name)]
    process = subprocess.Popen(command + settings, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        assert addresses["seed"] == 7
        with httpx.Client(base_url=addresses["url"], headers={"Authorization": "Bearer k"}, timeout=60) as http:
            offers = http.post("/api/v0/bundles/", json={"type": "on-demand"}).json()["offers"]
            for offer in offers[:1]:
                assert http.put(f"/api/v0/asks/{offer['id']}/", json={"image": "i"}).json()["success"] is True
            trio.run(soon, lambda: list(tmp_path.glob("*/pid")) and next(tmp_path.glob("*/pid")).read_text().strip())
        (pid,) = [int(path.read_text()) for path in tmp_path.glob("*/pid")]
        assert alive(pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not alive(pid)
    finally:
        process.kill()
        process.wait()


def test_a_misspelt_setting_is_named() -> None:
    command = [sys.executable, "-m", "provisioner.simulator", "--set", "rivals=0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert "no setting 'rivals'" in run.stderr
