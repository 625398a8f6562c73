"""Does `spotwarp run` live with what happens to its workspace: a takeover, the death of the daemon?"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import await_true, is_gone
from tests.support.mounts import needs_fuse
from tests.support.running import Runs
from tests.support.running import runs as runs

pytestmark = needs_fuse

COUNTS = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(os.environ["SPOTWARP_WORKSPACE"])
state = here / "count"
number = int(state.read_text()) if state.exists() else 0
log = open(here / "log", "a")
print("start", os.environ["SPOTWARP_RESUMED"], "at", number, flush=True)
while number < int(sys.argv[1]):
    number += 1
    log.write(f"{number}\\n")
    log.flush()
    state.write_text(str(number))
    time.sleep(0.05)
print("done", flush=True)
sys.exit(5)
"""
NEVER_ENDS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal,time\\nsignal.signal(15, signal.SIG_IGN)\\ntime.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", deaf])
open(os.environ["SPOTWARP_WORKSPACE"] + "/f", "w").write("1")
print("ready", os.getpid(), other.pid, flush=True)
while True:
    time.sleep(0.1)
"""


def program(directory: Path, text: str) -> str:
    path = directory / "program.py"
    path.write_text(text)
    return str(path)


@pytest.mark.promise("P-01")
def test_after_the_death_of_the_daemon_the_command_is_started_again(runs: Runs) -> None:
    node = runs.node()
    run = runs.start(node, sys.executable, "-u", program(node.home, COUNTS), "60").until("start 0 at 0")
    await_true(lambda: (node.root / "count").exists(), "the first count")
    daemon = node.pid
    os.kill(daemon, signal.SIGKILL)
    assert run.ended() == 5, run.story()
    starts = [line.split() for line in run.output.splitlines() if line.startswith("start")]
    assert [start[1] for start in starts] == ["0", "1"], run.story()
    assert int(starts[1][3]) >= 1, "what was acknowledged is there"
    assert "starting the command again" in run.said
    assert "saved at manifest" in run.said
    assert not node.root.is_mount()
    assert node.run("cat", "--store", node.store, "work:count").stdout == "60"


@pytest.mark.promise("P-01")
def test_a_command_that_the_death_of_the_daemon_does_not_end_is_stopped_first(runs: Runs) -> None:
    node = runs.node()
    text = (
        "import os, time\n"
        "print('start', os.environ['SPOTWARP_RESUMED'], os.getpid(), flush=True)\n"
        "if os.environ['SPOTWARP_RESUMED'] == '0':\n    time.sleep(600)\n"
        "open(os.environ['SPOTWARP_WORKSPACE'] + '/f', 'w').write('second')\n"
    )
    run = runs.start(node, sys.executable, "-u", program(node.home, text)).until("start 0")
    first = int(run.output.split()[2])
    os.kill(node.pid, signal.SIGKILL)
    assert run.ended() == 0, run.story()
    assert is_gone(first)
    assert "stopped and started again" in run.said
    assert node.run("cat", "--store", node.store, "work:f").stdout == "second"


def test_a_daemon_that_dies_again_and_again_is_an_error(runs: Runs) -> None:
    node = runs.node()
    few = "import spotwarp_fs.cli.running.supervising as s; s.RESTARTS_MAX = 1"
    run = runs.start(node, "sh", "-c", "echo started; sleep 600", first=few).until("started")
    first = node.pid
    os.kill(first, signal.SIGKILL)
    await_true(lambda: run.output.count("started") == 2, "the second start")
    os.kill(node.pid, signal.SIGKILL)
    assert run.ended() == ExitCode.FAILED, run.story()
    assert "2 times in a row" in run.said
    assert run.output.count("started") == 2
    assert not node.root.is_mount()


@pytest.mark.promise("P-06")
@pytest.mark.history("L11")
def test_a_daemon_that_comes_back_after_a_takeover_stops_the_command(runs: Runs) -> None:
    node, other = runs.node(), runs.node()
    run = runs.start(node, "sh", "-c", 'echo 1 > "$SPOTWARP_WORKSPACE/f"; echo ready; sleep 600').until("ready")
    node.call("sync")
    supervisor = node.supervisor_pid
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(node.pid, signal.SIGKILL)
    other.start("--takeover")
    (other.root / "f").write_text("2")
    os.kill(supervisor, signal.SIGCONT)
    assert run.ended() == ExitCode.FENCED, run.story()
    assert not node.root.is_mount()
    other.sync()
    assert (other.root / "f").read_text() == "2"


def test_without_daemon_and_supervisor_it_gives_up_and_says_so(runs: Runs) -> None:
    node = runs.node()
    run = runs.start(node, "sh", "-c", "echo ready; sleep 600").until("ready")
    supervisor, daemon = node.supervisor_pid, node.pid
    os.kill(supervisor, signal.SIGKILL)
    os.kill(daemon, signal.SIGKILL)
    assert run.ended() == ExitCode.FAILED, run.story()
    assert "not served any more" in run.said
    assert not node.root.is_mount()


@pytest.mark.promise("P-06")
def test_a_takeover_stops_the_command_and_everything_it_started(runs: Runs) -> None:
    node, other = runs.node(), runs.node()
    run = runs.python(node, NEVER_ENDS).until("ready")
    pids = [int(word) for word in run.output.split()[1:3]]
    node.call("sync")
    other.start("--takeover")
    assert (other.root / "f").read_text() == "1"
    assert run.ended() == ExitCode.FENCED, run.story()
    assert all(is_gone(pid) for pid in pids)
    assert "another node took the workspace over" in run.said
    assert not node.root.is_mount()


@pytest.mark.promise("P-06")
def test_a_command_that_fails_because_it_was_fenced_ends_as_fenced(runs: Runs) -> None:
    node, other = runs.node(), runs.node()
    text = (
        "import os, time\nprint('ready', flush=True)\n"
        "while True:\n"
        "    open(os.environ['SPOTWARP_WORKSPACE'] + '/f', 'w').write('1')\n"
        "    time.sleep(0.01)\n"
    )
    run = runs.python(node, text).until("ready")
    other.start("--takeover")
    assert run.ended() == ExitCode.FENCED, run.story()
