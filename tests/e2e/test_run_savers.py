"""Do programs that save in other ways than the demo's survive `spotwarp run` and the loss of their nodes?"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_trainer import ROOT, SAVE_EVERY, workspace
from tests.support.daemon import Node
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, lose_often
from tests.support.running import runs as runs

pytestmark = [pytest.mark.promise("P-05"), pytest.mark.promise("P-11")]

LIVES = int(os.environ.get("SPOTWARP_LIVES", "50"))
PROGRAM = ROOT / "tests" / "support" / "savers.py"
SAVERS = ["renamed", "in-place", "overwritten", "sharded"]
FORMS = [pytest.param("fuse", marks=needs_fuse), "directory"]
SHORT_LIVES, SHORT_STEPS, LONG_STEPS = 1, 48, 400
TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
"""A Python that has torch, where ours has not: nothing else needs its 200 MB."""
HAS_TORCH = "TORCH_PYTHON" in os.environ or importlib.util.find_spec("torch") is not None


def survives(
    runs: Runs, tmp_path: Path, *, saver: str, form: str, lives: int, steps: int, saved_as: str = "npz"
) -> None:
    """Lose the node *lives* times, and compare every file of the end with those of a run that nobody disturbed."""
    undisturbed = workspace(tmp_path / "undisturbed")
    text = undisturbed / "data" / "corpus.txt"
    python = TORCH_PYTHON if saved_as == "torch" else sys.executable
    how = ["--saver", saver, "--format", saved_as, "--steps", str(steps), "--save-every", str(SAVE_EVERY)]

    def command(directory: Path) -> list[str]:
        return [python, str(PROGRAM), "--dir", str(directory), *how]

    done = subprocess.run(command(undisturbed), capture_output=True, text=True, timeout=600, check=True)
    expected = done.stdout.splitlines()[-1]
    prepare = f'mkdir -p "$SPOTWARP_WORKSPACE/data" && cp -n {text} "$SPOTWARP_WORKSPACE/data/" && exec "$@"'

    def line(node: Node) -> list[str]:
        return ["sh", "-c", prepare, "sh", *command(node.root)]

    rng = random.Random(f"{saver} {form} {saved_as}")
    run = lose_often(runs, line, flags=("--mode", form), lives=lives, rng=rng)
    assert run.output.splitlines()[-1] == expected
    copied = tmp_path / "copied"
    copied.mkdir()
    fetched = run.node.run("cp", "-r", "--store", run.node.store, "work:saves", str(copied))
    assert fetched.returncode == 0, fetched.stderr
    assert _files(copied / "saves") == _files(undisturbed / "saves")


def _files(top: Path) -> dict[str, bytes]:
    """What is saved; a temporary file is what a killed save has left."""
    found = (path for path in top.rglob("*") if path.is_file() and path.suffix != ".tmp")
    return {str(path.relative_to(top)): path.read_bytes() for path in found}


def test_a_sharded_save_survives_the_loss_of_its_node(runs: Runs, tmp_path: Path) -> None:
    survives(runs, tmp_path, saver="sharded", form="directory", lives=SHORT_LIVES, steps=SHORT_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saver", SAVERS)
def test_every_way_to_save_survives_losses_at_random_times(runs: Runs, tmp_path: Path, saver: str, form: str) -> None:
    survives(runs, tmp_path, saver=saver, form=form, lives=LIVES, steps=LONG_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch (pip install torch, or TORCH_PYTHON names a Python that has it)")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saver", ["renamed", "in-place"])
def test_torch_save_survives_losses_at_random_times(runs: Runs, tmp_path: Path, saver: str, form: str) -> None:
    survives(runs, tmp_path, saver=saver, form=form, lives=LIVES, steps=LONG_STEPS, saved_as="torch")
