"""Commands about rented nodes: the way into one, its output as it grows, collecting the rest, an empty account.

A simulated Vast over loopback; what its controller would have left in the store is written here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from provisioner.core import intents, rendezvous
from provisioner.core.gpus import parse_gpu
from provisioner.core.intents import Intent, IntentRecord, IntentState, label_of
from provisioner.core.jobs import JobSpec, encode_spec
from provisioner.core.offers import Market
from provisioner.core.ports import Created, InstanceStatus, Launch
from provisioner.core.rendezvous import NodePhase, Report
from provisioner.core.wishes import Wish
from provisioner.providers.vast import Vast
from spotwarp_fs import api
from tests.support.command_line import CommandLine
from tests.support.simulator_process import KEYS, simulator

JOB = "llama"
WISH = Wish(parse_gpu("RTX 4090"), disk_gb=20.0)
PATIENCE_S = 60.0
# Nobody answers there: a plan goes on without the job's history.
STORE = {
    "SPOTWARP_S3_ENDPOINT": "http://127.0.0.1:9", "SPOTWARP_S3_ACCESS_KEY_ID": "id",
    "SPOTWARP_S3_SECRET_ACCESS_KEY": "secret-key-of-the-store",
}  # fmt: skip


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with simulator(tmp_path_factory.mktemp("market"), scale=20.0, image_cached=1.0) as variables:
        yield variables


@pytest.fixture
def cli(tmp_path: Path, market: Mapping[str, str]) -> CommandLine:
    return CommandLine(tmp_path, f"file://{tmp_path / 'store'}", {**market, "COLUMNS": "200"})


def put(cli: CommandLine, objects: Mapping[str, bytes]) -> None:
    """Write into the store."""
    settings = api.load_settings(environ={"SPOTWARP_STORE": cli.store}).settings

    async def main() -> None:
        store = api.Store(settings)
        for key, body in objects.items():
            await store.put(key, body)
        await store.aclose()

    trio.run(main)


def rented(cli: CommandLine, *serials: int, job: str = JOB) -> list[str]:
    """Rent a node for each intent, and return the instances once they run."""

    async def main() -> list[str]:
        provider = Vast(KEYS["VAST_API_KEY"], base_url=cli.environment["VAST_URL"])
        made = []
        for serial in serials:
            offers = [offer for offer in await provider.search(WISH) if offer.min_bid_usd_h is not None]
            label = label_of(job, "00c0ffee", serial)
            bid_usd_h = (offers[0].min_bid_usd_h or 0.0) * 2
            outcome = await provider.create(Launch(label, offers[0], "img:1", 20.0, "true", bid_usd_h=bid_usd_h))
            assert isinstance(outcome, Created), outcome
            made.append(outcome.instance_id)
        with trio.fail_after(PATIENCE_S):
            for instance_id in made:
                while (row := await provider.show(instance_id)) is None or row.status is not InstanceStatus.RUNNING:
                    await trio.sleep(0.5)
        await provider.aclose()
        return made

    return trio.run(main)


def record(serial: int, state: IntentState, *instances: str, won_at_s: float | None = None) -> IntentRecord:
    intent = Intent(
        f"00c0ffee-{serial}", label_of(JOB, "00c0ffee", serial), "vast", "1", Market.SPOT, "RTX 4090 24GB", 1,
        "EU", "m1", 0.5, 0.4, 1_800_000_000.0,
    )  # fmt: skip
    return IntentRecord(intent, state, 1_800_000_100.0, instances, won_at_s=won_at_s)


def left_in_store(*records: IntentRecord) -> dict[str, bytes]:
    spec = JobSpec(JOB, JOB, ("python", "train.py"), ("vast",), WISH)
    objects = {rendezvous.spec_key(JOB): encode_spec(spec)}
    return objects | {rendezvous.intent_key(JOB, one.intent.ident): intents.encode(one) for one in records}


def alive(cli: CommandLine) -> set[str]:
    rows = httpx.get(f"{cli.environment['VAST_URL']}/__sim/alive").json()
    return {row["label"] for row in (rows["alive"] if isinstance(rows, dict) else rows)}


def test_ssh_leads_into_the_node_that_holds_the_workspace(cli: CommandLine, tmp_path: Path) -> None:
    (instance,) = rented(cli, 1)
    put(cli, left_in_store(record(1, IntentState.WINNER, instance, won_at_s=1.0)))
    # Options stand before the job; what comes after it is for ssh.
    words = cli.here("ssh", "--print", JOB, "nvidia-smi", "-L").split()
    assert (words[0], words[1], words[3:5]) == ("ssh", "-p", ["-l", "root"])
    assert 0 < int(words[2]) < 65536
    assert words[6:] == ["nvidia-smi", "-L"]
    # What is run is what was printed: a stand-in for ssh says what it was given.
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "ssh $*"; exit 5\n')
    stand_in.chmod(0o755)
    cli.environment = {**cli.environment, "PATH": f"{stand_in.parent}:/usr/bin:/bin"}
    done = cli.run("ssh", JOB, "nvidia-smi", "-L")
    assert (done.stdout.split(), done.returncode) == (words, 5)


def test_without_a_node_or_an_instance_ssh_says_so(cli: CommandLine) -> None:
    put(cli, left_in_store(record(1, IntentState.GONE, "123")))
    assert f"no node holds the workspace of job {JOB} now" in cli.here("ssh", JOB, code=14)
    put(cli, left_in_store(record(1, IntentState.WINNER, "999999999", won_at_s=1.0)))
    assert "vast knows no instance 999999999 any more" in cli.here("ssh", JOB, code=14)


def test_what_nobody_owns_is_collected_from_an_empty_ledger_and_verified_gone(cli: CommandLine) -> None:
    holder, *_ = rented(cli, 11, 12)
    rented(cli, 13, job="of-a-deleted-job")
    put(cli, left_in_store(record(11, IntentState.WINNER, holder, won_at_s=1.0)))
    found = json.loads(cli.ok("gc", "--nodes", "--providers", "vast", "--json"))
    mine = {line.split("(")[1].rstrip(")") for line in found["destroyed"]}
    assert {label_of(JOB, "00c0ffee", 12), label_of("of-a-deleted-job", "00c0ffee", 13)} <= mine
    assert [line for line in found["kept"] if line.startswith(f"vast {holder} ")]
    assert found["failed"] == []
    assert label_of(JOB, "00c0ffee", 11) in alive(cli)
    assert not mine & alive(cli)


def test_an_account_without_credit_rents_nothing_and_says_why(cli: CommandLine) -> None:
    poor = "key-of-a-poor-account"
    fault = {"kind": "set_credit", "key": poor, "dollars": 0.0}
    assert httpx.post(f"{cli.environment['VAST_URL']}/__sim/faults", json=fault).status_code == 200
    cli.environment = {**cli.environment, "VAST_API_KEY": poor, **STORE}
    options = ("--gpu", "RTX 4090", "--providers", "vast", "--store", "s3://bucket/runs")
    made = json.loads(cli.here("plan", *options, "--json", code=1))
    assert made["problems"] == ["vast: the account has no credit ($0.00): add some before it can rent"]
    assert made["stops"] == made["problems"]
    assert poor not in json.dumps(made)


def report(seq: int, phase: NodePhase, exit_code: int | None = None) -> dict[str, bytes]:
    body = Report(f"00c0ffee-{seq}", seq, phase, exit_code=exit_code, times={"running": float(seq)})
    return {rendezvous.report_key(JOB, body.ident): rendezvous.encode(body)}


def test_logs_are_followed_from_node_to_node_until_the_job_ends(cli: CommandLine) -> None:
    first, second = record(1, IntentState.WINNER, "1", won_at_s=1.0), record(2, IntentState.WINNER, "2", won_at_s=2.0)
    put(cli, left_in_store(first) | {rendezvous.log_key(JOB, "00c0ffee-1"): b"step 1\n"})
    command = [sys.executable, "-m", "spotwarp_fs", "logs", "-f", JOB]
    with subprocess.Popen(
        command, cwd=cli.home, env=cli.whole_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        shown: list[str] = []
        assert follower.stdout is not None
        reader = threading.Thread(target=lambda: shown.extend(follower.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        until(lambda: shown == ["step 1\n"], shown)
        put(cli, {rendezvous.log_key(JOB, "00c0ffee-1"): b"step 1\nstep 2\n"})
        until(lambda: shown[1:] == ["step 2\n"], shown)
        gone = replace(first, state=IntentState.GONE)
        put(cli, {rendezvous.log_key(JOB, "00c0ffee-2"): b"resumed\n"} | left_in_store(gone, second))
        until(lambda: shown[2:] == ["resumed\n"], shown)
        log = {rendezvous.log_key(JOB, "00c0ffee-2"): b"resumed\nfinished\n"}
        put(cli, log | report(2, NodePhase.ENDED, 0) | left_in_store(gone, replace(second, state=IntentState.GONE)))
        until(lambda: shown[3:] == ["finished\n"], shown)
        assert follower.wait(PATIENCE_S) == 0, "the job has ended: nothing more comes"
        assert follower.stderr is not None
        assert follower.stderr.read() == "[now on 00c0ffee-2]\n"
        reader.join(PATIENCE_S)


def until(there: Callable[[], bool], seen: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
