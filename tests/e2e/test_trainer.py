"""Is the demo's yardstick sound? The trainer alone, on a plain directory, killed and resumed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 24, 8


def command(directory: Path) -> list[str]:
    script = str(ROOT / "scripts" / "train_demo.py")
    return [sys.executable, script, "--dir", str(directory), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]


def workspace(directory: Path) -> Path:
    (directory / "data").mkdir(parents=True)
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "spotwarp_fs").glob("**/*.py")))
    (directory / "data" / "corpus.txt").write_bytes(text)
    return directory


def train(directory: Path) -> list[str]:
    run = subprocess.run(command(directory), capture_output=True, text=True, timeout=60, check=True)
    return run.stdout.splitlines()


def kill_at(directory: Path, line: str) -> None:
    """Start the trainer and SIGKILL it as soon as it prints *line*."""
    with subprocess.Popen(command(directory), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(said.startswith(line) for said in process.stdout)
        os.kill(process.pid, signal.SIGKILL)


def final_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / f"checkpoint-{STEPS}").iterdir()}


def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed, killed = workspace(tmp_path / "undisturbed"), workspace(tmp_path / "killed")
    expected = train(undisturbed)
    kill_at(killed, f"step {SAVE_EVERY + 3} ")
    found = train(killed)

    assert found[0] == f"resumed {SAVE_EVERY}"
    assert found[-1] == expected[-1]
    assert final_files(killed) == final_files(undisturbed)
    assert sorted(path.name for path in killed.glob("checkpoint-*")) == ["checkpoint-16", "checkpoint-24"]


def test_a_torn_checkpoint_is_never_passed_over(tmp_path: Path) -> None:
    """The promise is the filesystem's: the trainer must not hide a torn save by resuming from an older one."""
    directory = workspace(tmp_path / "run")
    kill_at(directory, f"saved {SAVE_EVERY} ")
    newest = directory / f"checkpoint-{SAVE_EVERY + 5}"
    newest.mkdir()
    (newest / "model.npz").write_bytes(b"half a file")
    run = subprocess.run(command(directory), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode != 0
    assert str(newest) in run.stderr
