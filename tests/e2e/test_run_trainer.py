"""Does a training loop under `spotwarp run` survive the loss of its node in mid-save, with the same final bits?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_trainer import SAVE_EVERY, STEPS, command, final_files, train, workspace
from tests.support.mounts import needs_fuse
from tests.support.running import Runs
from tests.support.running import runs as runs

pytestmark = needs_fuse


@pytest.mark.promise("P-05")
def test_the_same_line_on_the_next_node_ends_with_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    undisturbed = workspace(tmp_path / "undisturbed")
    expected = train(undisturbed)

    first, second = runs.node(), runs.node()
    text = str(undisturbed / "data" / "corpus.txt")
    line = ("sh", "-c", f'mkdir -p "$SPOTWARP_WORKSPACE/data" && cp -n {text} "$SPOTWARP_WORKSPACE/data/" && exec "$@"')
    run = runs.start(first, *line, "sh", *command(first.root)).until(f"saved {SAVE_EVERY} ")
    first.call("sync")
    run.until(f"step {2 * SAVE_EVERY} ")
    run.lose()

    again = runs.start(second, *line, "sh", *command(second.root), flags=("--takeover",))
    assert again.ended() == 0, again.story()
    assert any(f"resumed {number}" in again.output for number in (SAVE_EVERY, 2 * SAVE_EVERY)), again.story()
    assert again.output.splitlines()[-1] == expected[-1]
    copied = tmp_path / "copied"
    copied.mkdir()
    done = second.run("cp", "-r", "--store", second.store, f"work:checkpoint-{STEPS}", str(copied))
    assert done.returncode == 0, done.stderr
    assert final_files(copied) == final_files(undisturbed)
