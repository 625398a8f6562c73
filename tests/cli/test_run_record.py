"""Is it recorded what ran, without secrets; is it said what differs, and what nothing saves?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotwarp_fs.core.manifests import Manifest, decode
from spotwarp_fs.core.provenance import FILE_NAME, NOTE
from tests.support.mounts import needs_fuse
from tests.support.running import Runs, stored
from tests.support.running import runs as runs

pytestmark = needs_fuse

SECRETS = {
    "HF_TOKEN": "hf_NobodyMaySeeThisOne",
    "WANDB_API_KEY": "nobody-may-see-this-either",
    "INNOCENT": "q8Zr1vT4kPx93LmWb7Yc",
    "PROXY": "http://me:pass-not-for-you@proxy.example:3128",
}
HIDDEN = [*SECRETS.values(), "pass-not-for-you", "only-in-the-command-line", "in-the-diff-only"]
WRITES_OUTSIDE = """
import os, time
os.makedirs("out/step-1", exist_ok=True)
with open("out/step-1/model.bin", "wb") as file:
    for _ in range(120):
        file.write(bytes(1 << 20))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def manifests(store: Path) -> list[Manifest]:
    return [decode(path.read_bytes()) for path in sorted(store.glob("**/manifests/*")) if path.is_file()]


def everything_in(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def git(*arguments: str, cwd: Path) -> str:
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git checkout with a change that is not committed."""
    directory = tmp_path / "project"
    directory.mkdir()
    git("init", "-q", cwd=directory)
    (directory / "train.py").write_text("print('v1')\n")
    git("add", ".", cwd=directory)
    git("commit", "-qm", "first", cwd=directory)
    (directory / "train.py").write_text("api_key = 'in-the-diff-only'\nprint('v2')\n")
    return directory


@pytest.mark.promise("P-15")
def test_what_ran_is_recorded_and_no_secret_is(runs: Runs, project: Path) -> None:
    node = runs.node()
    environment = {**SECRETS, "NCCL_DEBUG": "WARN", "LR": "3e-4"}
    command = (sys.executable, "train.py", "--api-key", "only-in-the-command-line", "--lr", "3e-4")
    run = runs.start(node, *command, environment=environment, cwd=project)
    assert run.ended() == 0, run.story()
    assert "HF_TOKEN" in run.said
    text = stored(node, FILE_NAME)
    found: dict[str, Any] = json.loads(text)
    assert found["command"] == [sys.executable, "train.py", "--api-key", "<secret>", "--lr", "3e-4"]
    assert found["directory"] == str(project)
    assert found["python"] == sys.version.split()[0]
    assert found["packages"]["pytest"] == pytest.__version__
    assert found["git_commit"] == git("rev-parse", "HEAD", cwd=project)
    assert "+print('v2')" in found["git_diff"]
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert set(SECRETS) <= set(found["secrets"])

    store = Path(node.store.removeprefix("file://"))
    notes = manifests(store)[-1].notes[NOTE]
    assert notes["git"] == f"{found['git_commit'][:12]}+changes"
    assert len(json.dumps(notes)) < 512
    shown = text + json.dumps([manifest.notes for manifest in manifests(store)]) + run.said + node.log()
    leaked = [secret for secret in HIDDEN if secret in shown]
    assert not leaked, shown
    kept = everything_in(store) + everything_in(node.state)
    assert not [secret for secret in HIDDEN if secret.encode() in kept]


def test_on_a_new_node_it_says_what_differs(runs: Runs, project: Path) -> None:
    first, second = runs.node(), runs.node()
    before = {"NCCL_DEBUG": "WARN", "HOSTNAME": "one"}
    run = runs.start(first, sys.executable, "train.py", environment=before, cwd=project)
    assert run.ended() == 0, run.story()
    assert "has changed" not in run.said
    git("commit", "-qam", "second", cwd=project)
    now = {"NCCL_DEBUG": "INFO", "HOSTNAME": "two"}
    run = runs.start(second, sys.executable, "train.py", environment=now, cwd=project)
    assert run.ended() == 0, run.story()
    assert "variable NCCL_DEBUG: WARN before, INFO now" in run.said
    assert "git commit: " in run.said
    assert "uncommitted changes" in run.said
    assert "HOSTNAME" not in run.said
    assert "package" not in run.said

    again = runs.start(second, sys.executable, "train.py", environment=now, cwd=project)
    assert again.ended() == 0, again.story()
    assert "has changed" not in again.said


def test_it_warns_of_what_nothing_saves(runs: Runs) -> None:
    node = runs.node()
    run = runs.python(
        node, WRITES_OUTSIDE, first="import spotwarp_fs.cli.running.supervising as s; s.INSIDE_WITHIN_S = 1.0"
    )
    run.until("ready").until("nothing to save").until("outside the workspace")
    warnings = [line for line in run.said.splitlines() if "warning" in line]
    assert any(
        f"MiB to {node.home}/out," in line and "--output_dir $SPOTWARP_CHECKPOINT_DIR" in line for line in warnings
    )
    run.send(15)
    assert run.ended() == 143, run.story()
    assert len([line for line in run.said.splitlines() if "outside the workspace" in line]) == 1
