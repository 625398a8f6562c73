"""A job from its first line to its last, as people run it: real processes, the local provider, a directory as store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.cli.jobs_here import JobsHere, lives, process_began
from tests.support.command_line import CommandLine

SECRET = "hunter2-of-the-job"
PATIENCE_S = 100.0
JOB = "run7"
COUNTS = 'i=0; while [ $i -lt {steps} ]; do i=$((i+1)); echo "step $i"; echo $i > out; sleep 0.5; done; echo finished'


class Desk(CommandLine):
    """The command line in a directory of its own, and what it has started."""

    def begin(self, *options: str, steps: int = 1000, ending: str = "") -> list[str]:
        script = COUNTS.format(steps=steps) + ending
        return [
            "failover", "--providers", "local-a,local-b", "--workspace", JOB, "--job", JOB, "--interval", "1s",
            "--mode", "directory", "--env-file", str(self.home / "secrets"), *options, "--", "sh", "-c", script,
        ]  # fmt: skip

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spotwarp_fs", *arguments]
        return subprocess.Popen(
            command, cwd=self.home, env=self.whole_environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self) -> dict[str, Any]:
        jobs = json.loads(self.ok("ps", "--all", "--json"))["jobs"]
        return dict(jobs[0]) if jobs else {"state": "none", "phase": ""}

    def until(self, there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not there(line := self.line()):
            assert time.monotonic() < deadline, f"{line}\n{self.log()}"
            time.sleep(0.3)
        return line

    def log(self) -> str:
        path = self.state.log(JOB)
        return path.read_text()[-4000:] if path.exists() else ""

    @property
    def state(self) -> JobsHere:
        return JobsHere(self.home / ".spotwarp")

    def controller(self) -> int:
        record = self.state.read(JOB)
        assert record is not None
        return record.pid


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    (tmp_path / "secrets").write_text(f"JOB_TOKEN={SECRET}\n")
    (tmp_path / "secrets").chmod(0o600)
    made = Desk(tmp_path, f"file://{tmp_path / 'store'}", {"PYTHONPATH": os.pathsep.join(sys.path)})
    yield made
    record = made.state.read(JOB)
    if lives(record):
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
    if record is not None:
        made.run("down", JOB)


@pytest.mark.timeout(240)
def test_a_short_job_ends_with_its_commands_code_and_a_report(desk: Desk) -> None:
    done = desk.run(
        *desk.begin("--yes", "--events", "--crashes", "0", steps=3, ending='; test -n "$JOB_TOKEN" && exit 7')
    )
    assert done.returncode == 7, done.stderr
    assert f"{JOB} ended with exit code 7" in done.stderr
    assert re.search(r"^launch 1 local-[ab] ", done.stdout, re.MULTILINE)
    assert desk.line()["exit_code"] == 7
    assert "finished" in desk.ok("logs", JOB)
    page = desk.home / "report.html"
    report = json.loads(desk.ok("report", JOB, "--json", "--html", str(page)))
    assert report["exit_code"] == 7
    assert report["failovers"][0]["kind"] == "launch"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert desk.run("failover", "--job", JOB).returncode == 7, "it has ended, and says so again"
    assert not list((desk.home / ".spotwarp" / "nodes").glob("*/*/record.json")), "every node is gone"

    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]
    assert {"OffersSeen", "CandidateMoved", "FailoverEnded"} <= {event["event"] for event in events}
    assert SECRET not in done.stdout + done.stderr + desk.ok("ps", "--all") + desk.ok("logs") + desk.ok("report")
    kept = [path for path in desk.home.rglob("*") if path.is_file() and path.name != "secrets"]
    assert kept
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]


@pytest.mark.promise("P-14")
@pytest.mark.timeout(300)
def test_a_job_in_the_background_is_moved_drilled_orphaned_and_ended(desk: Desk) -> None:
    began = json.loads(desk.ok(*desk.begin("--yes", "--detach", "--json")))
    assert process_began(began["pid"]) is not None
    first = desk.until(lambda line: line["phase"] == "running")
    assert (first["controller"], first["here"]) == ("alive", True)

    again = desk.run("failover", "--job", JOB)
    assert again.returncode == 1
    assert "has a controller that lives, process" in again.stderr

    other = "local-b" if first["provider"] == "local-a" else "local-a"
    moved = json.loads(desk.ok("move", JOB, "--to", other, "--json"))
    assert (moved["provider"], moved["node"] != first["node"]) == (other, True)
    desk.until(lambda line: line["phase"] == "running" and line["node"] == moved["node"])
    drilled = json.loads(desk.ok("failover", "--now", "--job", JOB, "--json"))
    assert drilled["node"] not in (first["node"], moved["node"])
    kinds = [one["kind"] for one in json.loads(desk.ok("report", JOB, "--json"))["failovers"]]
    assert kinds[:2] == ["launch", "move"]

    # The controller dies, and comes back in the foreground without a word about what it is to run.
    os.kill(desk.controller(), signal.SIGKILL)
    dead = desk.until(lambda line: line["controller"] == "dead")
    assert dead["state"] == "running"
    assert "no controller of job run7 lives (dead)" in desk.run("move", JOB).stderr
    carried_on = desk.spawn("failover", "--job", JOB, "--env-file", str(desk.home / "secrets"))
    desk.until(lambda line: line["controller"] == "alive")
    carried_on.send_signal(signal.SIGINT)
    _, said = carried_on.communicate(timeout=PATIENCE_S)
    assert carried_on.returncode == 130, said
    assert f"Carry on with `spotwarp failover --job {JOB}`, end it with `spotwarp down {JOB}`" in said

    # Nobody controls it now: `down` is its controller, and ends it.
    shown = desk.ok("down", JOB)
    assert shown.startswith(f"{JOB} is down: ")
    assert not list((desk.home / ".spotwarp" / "nodes").glob("*/*/record.json"))
    assert desk.line()["state"] == "ended"


def test_without_a_terminal_nobody_is_asked(desk: Desk) -> None:
    done = desk.run(*desk.begin())
    assert done.returncode == 2
    assert "nobody can be asked here, which is no terminal: add --yes to rent without asking" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("failover",), 2, "say what to keep running: `spotwarp failover … -- python train.py`"),
        (("failover", "--job", "nope"), 2, "the store has no job 'nope' to carry on: give its command"),
        (("failover", "--job", "nope", "--budget", "3"), 2, "--budget: a job goes on with what it was begun with; "
         "give its command too to change it"),
        (("logs",), 2, "has 0 jobs: start one with `spotwarp failover`"),
        (("down", "nope"), 2, "has no job 'nope'; it has none"),
        (("move", "nope"), 2, "has no job 'nope'; it has none"),
        (("report", "nope"), 2, "has no job 'nope'; it has none"),
        (("gc", "--nodes"), 3, "no account's key is here, and no local node: name the providers with --providers"),
        (("gc", "--providers", "vast"), 2, "--providers is about rented nodes: say --nodes too"),
        (("gc", "--nodes", "--dry-run"), 2, "--nodes is about all rented nodes"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(desk: Desk, arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in desk.here(*arguments, code=code)


def test_nothing_runs(desk: Desk) -> None:
    assert desk.here("ps") == "no job is running\n"
    assert json.loads(desk.here("ps", "--json")) == {"ok": True, "jobs": [], "problems": []}


def test_a_process_number_that_came_again_is_no_controller(tmp_path: Path) -> None:
    here = JobsHere(tmp_path)
    here.write(JOB, "file:///s", JOB)
    record = here.read(JOB)
    assert record is not None
    assert lives(record)
    path = tmp_path / "jobs" / JOB / "here.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid_began": record.pid_began + 1}))
    assert not lives(here.read(JOB))
