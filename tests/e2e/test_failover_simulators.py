"""A whole failover on rented nodes: both simulators, the real archive, real processes that are really preempted."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import CommandLine
from tests.support.s3_server import S3Server
from tests.support.simulator_process import KEYS, simulator

PATIENCE_S = 240.0
SECRET = "hunter2-of-the-job"
# What the simulated container runs: the order's own first process, with the GPU that the order paid for.
CONTAINER = (
    "PATH={bin}:$PATH; export PATH; "
    'if [ "$SIM_PROVIDER" = vast ]; then exec /bin/sh -c "${{SIM_ARGS#-c }}"; else exec /bin/sh "$SIM_ONSTART"; fi'
)
NVIDIA_SMI = """#!/bin/sh
i=0
while [ $i -lt "$SIM_GPU_COUNT" ]; do
  echo "$SIM_GPU_NAME, $((SIM_GPU_MEMORY_GB * 1024))"
  i=$((i + 1))
done
"""
TRAINER = """
import os, pathlib, sys, time
place = pathlib.Path(os.environ["SPOTWARP_CHECKPOINT_DIR"])
done = sorted(place.glob("step_*"))
step = int(done[-1].name[5:]) if done else 0
print("resumed at", step, flush=True)
while step < int(sys.argv[1]):
    step += 1
    time.sleep(0.3)
    draft = place / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "weights.pt").write_bytes(b"%d " % step * 50000)
    draft.rename(place / f"step_{step:06}")
print("finished", flush=True)
"""
STEPS = 120
JOB = "w"


class Controller:
    """`spotwarp failover --events`, and what it has said."""

    def __init__(self, cli: CommandLine, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spotwarp_fs", "failover", "--yes", "--events", *arguments], cwd=cli.home,
            env=cli.whole_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._listen)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"'):
                self.events.append(json.loads(line))

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def until(self, event: str, **fields: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for found in list(self.events):
                if found["event"] == event and fields.items() <= found.items():
                    return found
            assert time.monotonic() < deadline, f"no {event} {fields}\n{self.story()}"
            assert self.process.poll() is None, self.story()
            time.sleep(0.1)

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(10)
        return code

    def story(self) -> str:
        return "\n".join([*(json.dumps(event) for event in self.events[-40:]), *self.errors[-20:]])


def told(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the simulator itself."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.slow  # it makes the real archive, with pip, which takes a minute and needs a package index
@pytest.mark.timeout(900)
@pytest.mark.promise("P-14")
@pytest.mark.promise("P-15")
def test_a_preempted_node_is_replaced_on_the_simulated_market(s3_server: S3Server, tmp_path: Path) -> None:
    tools, home = tmp_path / "bin", tmp_path / "home"
    tools.mkdir()
    home.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    source = home / "source"
    source.mkdir()
    (source / "train.py").write_text(TRAINER)
    (home / "secrets").write_text(f"WANDB_API_KEY={SECRET}\n")
    (home / "secrets").chmod(0o600)
    container = CONTAINER.format(bin=shlex.quote(str(tools)))
    market: dict[str, Any] = {"image_cached": 1, "start_unix_s": int(time.time())}
    with simulator(tmp_path / "nodes", scale=4, command=container, **market) as variables:
        url = variables["VAST_URL"]
        cli = CommandLine(home, s3_server.url, {**variables, **s3_server.environment})
        controller = Controller(
            cli, "--providers", "vast,runpod", "--gpu", "RTX 4090", "--max-price", "3",
            "--workspace", JOB, "--job", JOB,
            "--interval", "1s", "--from", str(source), "--env-file", str(home / "secrets"),
            "--", "python3", "train.py", str(STEPS),
        )  # fmt: skip
        try:
            first = controller.until("NodeSaid", phase="running")["ident"]
            time.sleep(5)
            told(url, "/__sim/faults", {"kind": "preempt", "label": f"*{first}"})
            loss = controller.until("FailoverEnded")
            while loss["failover"]["kind"] != "loss":
                loss = next((e for e in controller.events if e.get("failover", {}).get("kind") == "loss"), loss)
                assert controller.process.poll() is None, controller.story()
                time.sleep(0.1)
            assert loss["failover"]["lost"] == first
            assert controller.ended() == 0, controller.story()
        finally:
            controller.process.kill()
            controller.ended()
        assert told(url, "/__sim/alive") == [], "something is still paid for"
        assert told(url, "/__sim/violations") == []
        leaks = told(url, "/__sim/leaks", {"needles": [*KEYS.values()]})
        assert not leaks, "an account's key went to a rented host"
    names = json.loads(cli.ok("ls", "w:checkpoints", "--json"))["files"]
    assert f"step_{STEPS:06}" in json.dumps(names)
    assert SECRET not in controller.story()
