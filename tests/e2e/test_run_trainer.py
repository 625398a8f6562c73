"""Does a training loop under `spotwarp run` survive the loss of its node in mid-save, with the same final bits?"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_trainer import SAVE_EVERY, STEPS, command, final_files, train, workspace
from tests.support.daemon import Node
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, lose_often
from tests.support.running import runs as runs

pytestmark = needs_fuse


FORMS = ["fuse", "directory"]


@pytest.mark.promise("P-05")
@pytest.mark.parametrize("form", FORMS)
def test_the_same_line_on_the_next_node_ends_with_the_same_bits(runs: Runs, tmp_path: Path, form: str) -> None:
    undisturbed = workspace(tmp_path / "undisturbed")
    expected = train(undisturbed)

    first, second = runs.node(), runs.node()
    text = str(undisturbed / "data" / "corpus.txt")
    line = ("sh", "-c", f'mkdir -p "$SPOTWARP_WORKSPACE/data" && cp -n {text} "$SPOTWARP_WORKSPACE/data/" && exec "$@"')
    mode = ("--mode", form)
    run = runs.start(first, *line, "sh", *command(first.root), flags=mode).until(f"saved {SAVE_EVERY} ")
    first.call("sync")
    run.until(f"step {2 * SAVE_EVERY} ")
    run.lose()

    again = runs.start(second, *line, "sh", *command(second.root), flags=("--takeover", *mode))
    assert again.ended() == 0, again.story()
    assert any(f"resumed {number}" in again.output for number in (SAVE_EVERY, 2 * SAVE_EVERY)), again.story()
    assert again.output.splitlines()[-1] == expected[-1]
    copied = tmp_path / "copied"
    copied.mkdir()
    done = second.run("cp", "-r", "--store", second.store, f"work:checkpoint-{STEPS}", str(copied))
    assert done.returncode == 0, done.stderr
    assert final_files(copied) == final_files(undisturbed)


LIVES = int(os.environ.get("SPOTWARP_LIVES", "50"))
LONG = 400
"""Steps of a run that is killed so often."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.promise("P-05")
@pytest.mark.promise("P-11")
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_loses_its_node_at_random_times_ends_with_the_same_bits(
    runs: Runs, tmp_path: Path, form: str
) -> None:
    rng = random.Random(len(form))
    undisturbed = workspace(tmp_path / "undisturbed")
    text = str(undisturbed / "data" / "corpus.txt")
    long = [word if word != str(STEPS) else str(LONG) for word in command(undisturbed)]
    expected = subprocess.run(long, capture_output=True, text=True, timeout=600, check=True).stdout.splitlines()
    line = ("sh", "-c", f'mkdir -p "$SPOTWARP_WORKSPACE/data" && cp -n {text} "$SPOTWARP_WORKSPACE/data/" && exec "$@"')

    def there(node: Node) -> list[str]:
        return [*line, "sh", *(word.replace(str(undisturbed), str(node.root)) for word in long)]

    run = lose_often(runs, there, flags=("--mode", form), lives=LIVES, rng=rng)
    copied = tmp_path / "copied"
    copied.mkdir()
    assert run.output.splitlines()[-1] == expected[-1]
    node = run.node
    assert node.run("cp", "-r", "--store", node.store, f"work:checkpoint-{LONG}", str(copied)).returncode == 0
    last = {path.name: path.read_bytes() for path in (undisturbed / f"checkpoint-{LONG}").iterdir()}
    assert {path.name: path.read_bytes() for path in (copied / f"checkpoint-{LONG}").iterdir()} == last
