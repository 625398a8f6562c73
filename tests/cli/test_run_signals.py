"""Does `spotwarp run` end as it should: signals, deadlines, as process 1, and what could not be saved?"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import is_gone
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, nothing_left, stored
from tests.support.running import runs as runs

pytestmark = needs_fuse

SAVES_AT_SIGTERM = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["SPOTWARP_CHECKPOINT_DIR"])
def save(number, frame):
    (here / "last.txt").write_text("saved in the handler")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(here / "first.txt").write_text("1")
print("ready")
while True:
    time.sleep(0.1)
"""


@pytest.mark.promise("P-12")
def test_sigterm_lets_the_command_save_and_publishes_that(runs: Runs) -> None:
    node = runs.node()
    run = runs.python(node, SAVES_AT_SIGTERM, flags=("--interval", "1h")).until("ready")
    run.send(signal.SIGTERM)
    assert run.ended() == 0, run.story()
    assert stored(node, "checkpoints/last.txt") == "saved in the handler"
    nothing_left(run)


@pytest.mark.promise("P-12")
def test_a_command_that_does_not_heed_sigterm_is_killed_in_time(runs: Runs) -> None:
    node = runs.node()
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
        "other = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(os.environ['SPOTWARP_WORKSPACE'] + '/f', 'w').write('kept')\n"
        "print('ready', other.pid, flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    run = runs.python(node, program, environment={"SPOTWARP_NOTICE_TIMEOUT": "6s"}).until("ready")
    left_session = int(run.output.split("ready ")[1].split()[0])
    run.send(signal.SIGTERM)
    assert run.ended() == 137, run.story()
    assert "no" in run.output
    assert is_gone(left_session), "what left the group is killed too"
    assert stored(node, "f") == "kept"
    nothing_left(run)


def test_a_second_sigterm_does_not_wait(runs: Runs) -> None:
    node = runs.node()
    program = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready')\ntime.sleep(600)"
    run = runs.python(node, program, environment={"SPOTWARP_NOTICE_TIMEOUT": "10m"}).until("ready")
    run.send(signal.SIGTERM)
    run.until("asked to stop")
    run.send(signal.SIGTERM)
    assert run.ended() == 137, run.story()
    nothing_left(run)


def test_signals_are_forwarded(runs: Runs) -> None:
    """And none but SIGTERM means more than it says."""
    node = runs.node()
    numbers = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH]
    program = (
        "import signal, sys, time\n"
        f"for number in {[int(number) for number in numbers]}:\n"
        "    signal.signal(number, lambda n, f: print('got', n, flush=True))\n"
        "print('ready')\n"
        "while True: time.sleep(0.1)\n"
    )
    run = runs.python(node, program).until("ready")
    for number in numbers:
        run.send(number)
        run.until(f"got {int(number)}\n")
    run.send(signal.SIGTERM)
    assert run.ended() == 143, run.story()


def test_what_the_command_leaves_running_is_ended(runs: Runs) -> None:
    """Otherwise the workspace stays in use, and what is published is not the end."""
    node = runs.node()
    run = runs.start(node, "sh", "-c", 'sleep 600 > "$SPOTWARP_WORKSPACE/log" & echo $!')
    assert run.ended() == 0, run.story()
    assert is_gone(int(run.output))
    nothing_left(run)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a pid namespace needs root")
def test_as_process_one_it_collects_orphans_and_obeys(runs: Runs) -> None:
    node = runs.node()
    program = (
        "import os, pathlib, subprocess, time\n"
        "subprocess.run(['sh', '-c', '(sleep 0.2; exit 3) & exit 0'])\n"
        "def dead():\n"
        "    return [p for p in os.listdir('/proc') if p.isdecimal() and ') Z' in\n"
        "            pathlib.Path('/proc', p, 'stat').read_text()]\n"
        "time.sleep(1.5)\n"
        "print('parent', os.getppid(), 'dead', len(dead()))\n"
        "open(os.environ['SPOTWARP_WORKSPACE'] + '/f', 'w').write('kept')\n"
        "print('ready')\n"
        "time.sleep(600)\n"
    )
    wrapper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    run = runs.python(node, program, wrapper=wrapper).until("ready")
    assert "parent 1 dead 0" in run.output, run.story()
    [first] = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)
    assert run.ended() == 143, run.story()
    assert stored(node, "f") == "kept"


@pytest.mark.promise("P-12")
def test_what_could_not_be_saved_is_said(runs: Runs, tmp_path: Path) -> None:
    node = runs.node()
    store = Path(node.store.removeprefix("file://"))
    run = runs.start(
        node, "sh", "-c", 'echo ready; read x < pipe; base64 -w 0 /dev/urandom | head -c 3000000 > "$WORK/f"',
        flags=("--interval", "1h"), environment={"SPOTWARP_DRAIN_TIMEOUT": "3s", "WORK": str(node.root)},
    )  # fmt: skip
    os.mkfifo(node.home / "pipe")
    run.until("ready")
    node.call("sync")
    store.rename(tmp_path / "away")
    store.write_text("no directory")
    (node.home / "pipe").write_text("go\n")
    assert run.ended() == ExitCode.NOT_SAVED, run.story()
    assert "could not be saved" in run.said
    store.unlink()
    (tmp_path / "away").rename(store)
    again = runs.start(node, "sh", "-c", 'wc -c < "$SPOTWARP_WORKSPACE/f"')
    assert again.ended() == 0, again.story()
    assert int(again.output) == 3_000_000
    assert len(stored(node, "f")) == 3_000_000
