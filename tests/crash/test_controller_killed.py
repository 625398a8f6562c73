"""P-14: a controller that is killed with SIGKILL in each phase of a job is started again, and nothing is left over.

Real processes: the controller, its nodes on the local provider, a directory as store.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.providers.processes import marked
from tests.support.command_line import CommandLine

JOB = "killed"
STEPS = 6
# Goes on where the workspace is; each life of the command leaves a line.
COMMAND = (
    'i=$(cat step 2>/dev/null || echo 0); echo "from $i" >> lives; '
    f"while [ $i -lt {STEPS} ]; do i=$((i+1)); echo $i > step; sleep 0.4; done"
)
END_S = 150.0
Event = dict[str, Any]


def moved(phase: str) -> Callable[[Event], bool]:
    return lambda event: (event["event"], event.get("phase")) == ("CandidateMoved", phase)


def said(phase: str) -> Callable[[Event], bool]:
    return lambda event: (event["event"], event.get("phase")) == ("NodeSaid", phase)


PHASES: dict[str, Callable[[Event], bool]] = {
    "planning": lambda event: event["event"] == "OffersSeen",
    "creating": moved("requested"),
    "booting": moved("booting"),
    "ready": said("ready"),
    "claiming": moved("claiming"),
    "running": said("running"),
    "command ended": said("ended"),
    "tearing down": lambda event: event["event"] == "Said" and event["text"].startswith("the job ends"),
}
FAST = ("claiming",)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[CommandLine]:
    made = CommandLine(tmp_path, f"file://{tmp_path / 'store'}")
    yield made
    made.run("down", JOB)
    assert not nodes(made), "processes outlive the test"


def nodes(desk: CommandLine) -> dict[str, set[int]]:
    """What runs in nodes of this test, by directory."""
    mine = str(desk.home.resolve())
    return {home: pids for home, pids in marked().items() if home.startswith(mine)}


def begun(desk: CommandLine) -> subprocess.Popen[str]:
    arguments = [
        "failover", "--providers", "local-a,local-b", "--workspace", JOB, "--job", JOB, "--interval", "1s", "--mode",
        "directory", "--yes", "--events", "--", "sh", "-c", COMMAND,
    ]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "spotwarp_fs", *arguments], cwd=desk.home, env=desk.whole_environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def killed_at(desk: CommandLine, there: Callable[[Event], bool]) -> list[Event]:
    """Begin the job, kill its controller at the first event that *there* accepts, and return what it had said."""
    controller, seen = begun(desk), []
    assert controller.stdout is not None
    for line in controller.stdout:
        if line.startswith('{"event"'):
            seen.append(json.loads(line))
            if there(seen[-1]):
                break
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    assert controller.returncode == -signal.SIGKILL, f"it ended by itself: {seen}"
    return seen


@pytest.mark.promise("P-14")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "phase", [phase if phase in FAST else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]
)
def test_a_controller_killed_in_any_phase_is_started_again_and_leaves_nothing(desk: CommandLine, phase: str) -> None:
    killed_at(desk, PHASES[phase])
    again = begun(desk)
    said, _ = again.communicate(timeout=END_S)
    assert again.returncode == 0, said
    assert not list((desk.home / ".spotwarp" / "nodes").glob("*/*/record.json")), "a node is still rented"
    assert not nodes(desk), "processes of a node live on"
    assert desk.ok("cat", f"{JOB}:step") == f"{STEPS}\n"
    lives = desk.ok("cat", f"{JOB}:lives").splitlines()
    assert lives == ["from 0"], "the node went on while nobody controlled it"
    report = json.loads(desk.ok("report", JOB, "--json"))
    assert report["exit_code"] == 0
    records = [json.loads(path.read_text()) for path in (desk.home / "store").rglob("intents/*")]
    assert records
    assert {record["state"] for record in records} == {"gone"}
