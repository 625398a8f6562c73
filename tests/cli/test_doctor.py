"""Does doctor measure what a save takes here, name the better form, and leave nothing behind?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spotwarp_fs.cli.wiring_speed import Speed, verdict
from tests.support.daemon import Fleet, Node
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse
from tests.support.unprivileged import PoorNode, needs_namespace

GB = 10**9


def checks_of(node: Node, *arguments: str) -> dict[str, Any]:
    done = node.run("doctor", "--store", node.store, "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_the_directory_form_is_named_where_a_mount_is_much_slower() -> None:
    found = verdict(Speed(5 * GB, 1.0), Speed(GB, 1.0), 140 * GB)
    assert found.outcome == "warn"
    assert "would block 2 min 20 s through a mount, 28 s in a plain directory" in found.detail
    assert "--mode directory" in found.remedy


def test_a_mount_that_is_nearly_as_fast_is_no_reason() -> None:
    found = verdict(Speed(GB, 1.0), Speed(GB, 1.5), 140 * GB)
    assert (found.outcome, found.remedy) == ("ok", "")


@needs_fuse[0]
@needs_fuse[1]
def test_both_forms_are_measured_and_nothing_stays(fleet: Fleet) -> None:
    node = fleet.node()
    found = checks_of(node, "--save", "2G")
    assert "2 GiB would block" in found["save"]["detail"]
    assert "through a mount" in found["save"]["detail"]
    assert found["file leases"]["outcome"] in ("ok", "warn")
    left = [path for path in node.state.rglob("*") if path.is_file() or "doctor" in path.name]
    assert not left
    assert str(node.state) not in Path("/proc/mounts").read_text()
    assert "save" not in checks_of(node, "--quick")


@needs_namespace
def test_without_rights_it_says_that_nothing_is_missing(tmp_path: Path) -> None:
    node = PoorNode(tmp_path / "node", f"file://{tmp_path / 'store'}")
    found = checks_of(node)
    assert found["/dev/fuse"]["outcome"] == "warn"
    assert "spotwarp run" in found["/dev/fuse"]["remedy"]
    assert "in a plain directory" in found["save"]["detail"]
    assert "/dev/fuse is missing" in found["save"]["detail"]
