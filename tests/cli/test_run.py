"""Does `spotwarp run` do what it says around a command: codes, signals, surroundings, and nothing left behind?"""

from __future__ import annotations

import json
import signal
import sys

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, nothing_left, stored
from tests.support.running import runs as runs

pytestmark = needs_fuse


@pytest.mark.parametrize(("program", "code"), [("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_exit_code_is_the_commands_own(runs: Runs, program: str, code: int) -> None:
    node = runs.node()
    run = runs.start(node, "sh", "-c", f"echo out; echo err >&2; echo kept > $SPOTWARP_WORKSPACE/f; {program}")
    assert run.ended() == code, run.story()
    assert run.output == "out\n"
    assert "err\n" in run.said
    assert str(node.root) in run.said
    nothing_left(run)
    assert stored(node, "f") == "kept\n"


def test_the_command_is_told_where_it_is(runs: Runs) -> None:
    node = runs.node()
    show = "import os, json; print(json.dumps({**os.environ, 'cwd': os.getcwd(), 'shadow': os.listdir('.')}))"
    first = runs.start(node, sys.executable, "-c", show, cwd=node.root)
    assert first.ended() == 0, first.story()
    told = json.loads(first.output)
    assert told["SPOTWARP_WORKSPACE"] == told["cwd"] == str(node.root)
    assert told["SPOTWARP_CHECKPOINT_DIR"] == str(node.root / "checkpoints")
    assert (told["SPOTWARP_RESUMED"], told["SPOTWARP_RESTORED_FROM"]) == ("0", "")
    assert "checkpoints" in told["shadow"], "the command is in the mounted directory, not in the one below it"

    other = runs.node()
    second = runs.start(other, sys.executable, "-c", show, flags=("--checkpoint-path", "out/ckpt"))
    assert second.ended() == 0, second.story()
    told = json.loads(second.output)
    assert told["cwd"] == str(other.home)
    assert told["SPOTWARP_CHECKPOINT_DIR"] == str(other.root / "out/ckpt")
    assert told["SPOTWARP_RESUMED"] == "1"
    number = int(told["SPOTWARP_RESTORED_FROM"])
    assert f"saved at manifest {number}" in first.said


def test_commands_of_ours_work_inside(runs: Runs) -> None:
    """The variables that the command is told are no settings, nor is the directory a name."""
    node = runs.node()
    words = f"{sys.executable} -c 'from spotwarp_fs.cli.main import main; main()'"
    run = runs.start(node, "sh", "-c", f"echo 1 > $SPOTWARP_WORKSPACE/f; {words} sync && {words} config check")
    assert run.ended() == 0, run.story()
    assert run.output.split()[0].isdigit()


def test_a_script_runs_with_this_python(runs: Runs) -> None:
    node = runs.node()
    (node.home / "train.py").write_text("import sys; print(sys.executable, sys.argv[1:]); sys.exit(3)")
    run = runs.start(node, "--steps", "5", flags=("--script", "train.py", "--checkpoint-dir", node.store))
    assert run.ended() == 3, run.story()
    assert run.output.strip() == f"{sys.executable} ['--steps', '5']"


@pytest.mark.parametrize(
    ("flags", "command", "code", "reason"),
    [
        ((), (), ExitCode.USAGE, "say what to run"),
        ((), ("there-is-no-such-program",), 127, "no program 'there-is-no-such-program'"),
        ((), ("{root}/missing",), 127, "no program"),
        (("--script", "missing.py"), ("x",), 127, "no script missing.py"),
        (("--checkpoint-dir", "file:///elsewhere"), ("true",), ExitCode.USAGE, "leave one out"),
        (("--checkpoint-path", "/tmp"), ("true",), ExitCode.USAGE, "not in the workspace"),
        (("--takeover", "--no-wait"), ("true",), ExitCode.USAGE, "--no-wait"),
    ],
)
def test_what_cannot_be_run_is_refused(
    runs: Runs, flags: tuple[str, ...], command: tuple[str, ...], code: int, reason: str
) -> None:
    node = runs.node()
    run = runs.start(node, *(word.format(root=node.root) for word in command), flags=flags)
    assert run.ended() == code, run.story()
    assert reason in run.said
    nothing_left(run)


def test_a_program_that_the_system_refuses_leaves_nothing_mounted(runs: Runs) -> None:
    node = runs.node()
    broken = node.home / "broken"
    broken.write_bytes(b"\x7fELF and no more")
    broken.chmod(0o755)
    run = runs.start(node, str(broken))
    assert run.ended() == 126, run.story()
    nothing_left(run)


def test_files_are_not_hidden_by_a_mount(runs: Runs) -> None:
    node = runs.node()
    (node.root / "train.py").write_text("print('here')")
    run = runs.start(node, "true")
    assert run.ended() == 0, run.story()
    assert "'train.py'" in run.said, "why it is the directory form"
    assert stored(node, "train.py") == "print('here')"


def test_a_run_inside_a_run_is_refused(runs: Runs) -> None:
    node = runs.node()
    inner = node.command("run", "--workspace", str(node.root / "inner"), "--", "true")
    run = runs.start(node, *inner)
    assert run.ended() == ExitCode.FAILED, run.story()
    assert "belongs to the workspace" in run.said
    nothing_left(run)


def test_nor_beside_one_from_another_shell(runs: Runs) -> None:
    node = runs.node()
    outer = runs.start(node, "sh", "-c", "echo ready; sleep 600").until("ready")
    for place in (node.root / "inner", node.home):
        done = node.run("run", "--workspace", str(place), "--", "true")
        assert done.returncode == ExitCode.FAILED, done.stderr
        assert "one within the other" in done.stderr
    same = node.run("run", "--workspace", str(node.root), "--", "true")
    assert same.returncode == ExitCode.MOUNTPOINT, same.stderr
    outer.send(signal.SIGTERM)
    assert outer.ended() == 143, outer.story()
