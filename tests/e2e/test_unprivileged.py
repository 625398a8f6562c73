"""Does the directory form work for a user without any capability, without /dev/fuse, with a read-only home?"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import Fleet
from tests.support.privileges import NOBODY
from tests.support.unprivileged import PoorNode, needs_namespace

pytestmark = needs_namespace
MiB = 1 << 20
FACTS = """
import json, os, sys
caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")]
print(json.dumps({"uid": os.getuid(), "caps": caps, "fuse": os.path.exists("/dev/fuse"),
                  "home": os.access(os.environ["HOME"], os.W_OK)}))
"""
TRAINS = """
import os, pathlib, sys
model = pathlib.Path(os.environ["SPOTWARP_WORKSPACE"]) / "model.bin"
whole = b"weights " * 500_000
if model.exists():
    sys.exit(0 if model.read_bytes() == whole else 9)
model.write_bytes(whole)
sys.exit(int(os.environ["SPOTWARP_RESUMED"]))
"""


@pytest.fixture
def poor(tmp_path: Path) -> Iterator[Fleet]:
    """Nodes without rights over one directory store."""
    fleet = Fleet(tmp_path, f"file://{tmp_path / 'store'}")
    try:
        yield fleet
    finally:
        fleet.close()


def node_of(fleet: Fleet) -> PoorNode:
    made = PoorNode(fleet.home / f"node{len(fleet.nodes)}", fleet.store)
    made.flags = (*made.flags, "--state-dir", str(made.state))
    fleet.nodes.append(made)
    return made


def write(path: Path, data: bytes) -> None:
    """As the node's user would."""
    path.write_bytes(data)
    os.chown(path, NOBODY, NOBODY)


def test_the_node_is_as_poor_as_it_is_meant_to_be(poor: Fleet) -> None:
    done = node_of(poor).without_rights(sys.executable, "-c", FACTS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"uid": NOBODY, "caps": ["0" * 16] * 5, "fuse": False, "home": False}


@pytest.mark.promise("P-08")
def test_a_lost_node_comes_back_with_placeholders_that_any_process_can_read(poor: Fleet) -> None:
    first = node_of(poor)
    data = {f"model{number}.bin": random.Random(number).randbytes(6 * MiB + number) for number in range(6)}
    for name, content in data.items():
        write(first.root / name, content)
    first.start_supervised()
    assert first.run("sync", str(first.root)).returncode == 0
    first.lose()

    second = node_of(poor)
    second.start_supervised("--restore", "--takeover")
    assert "6 come when they are needed" in str(second.report["notes"]), second.report
    of_root = subprocess.run(["cat", str(second.root / "model5.bin")], capture_output=True, timeout=60, check=True)
    assert of_root.stdout == data["model5.bin"]
    for name, content in data.items():
        read = second.without_rights("sha256sum", str(second.root / name))
        assert read.stdout.split()[0] == hashlib.sha256(content).hexdigest(), (name, read.stderr)
    write(second.root / "more", b"goes on")
    assert second.run("stop", str(second.root)).returncode == ExitCode.OK, second.log()
    assert second.run("cat", "--store", second.store, "work:more").stdout == "goes on"


def test_run_takes_the_directory_form_by_itself_and_says_why(poor: Fleet) -> None:
    for expected in ("created", "resumed at manifest"):
        node = node_of(poor)
        where = ["--workspace", str(node.root), "--name", "work", "--store", node.store, "--cache-dir", str(node.cache)]
        done = node.run("run", *where, *node.flags, "--mode", "auto", "--takeover", "--", sys.executable, "-c", TRAINS)
        assert done.returncode == 0, done.stderr
        assert "(directory: no FUSE mount is possible here: /dev/fuse is missing" in done.stderr
        assert expected in done.stderr
        assert not node.read_only_home.joinpath(".spotwarp").exists()
        node.lose()


def test_a_home_that_cannot_be_written_is_said_to_be_one(poor: Fleet) -> None:
    node = node_of(poor)
    node.read_only_home.chmod(0o700)
    done = node.run("start", "--workspace", str(node.root), "--store", node.store, "--cache-dir", str(node.cache))
    assert done.returncode == ExitCode.CACHE, done.stderr
    assert f"{node.read_only_home}/.spotwarp can't be written (Permission denied)" in done.stderr
    assert "--state-dir" in done.stderr


def test_mount_says_what_to_type_instead(poor: Fleet) -> None:
    node = node_of(poor)
    done = node.run("mount", str(node.root), "--store", node.store, "--mode", "auto")
    assert done.returncode == ExitCode.NO_FUSE
    assert "/dev/fuse is missing" in done.stderr
    assert f"`spotwarp start --workspace {node.root} --store {node.store}`" in done.stderr
    assert "`spotwarp run" in done.stderr
