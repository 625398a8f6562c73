"""Does what a fenced or killed writer had not published come back, with the commands that its messages name?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Fleet, Node, RefusedToMount, await_true
from tests.support.daemon import fleet as fleet
from tests.support.load import tree_of
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-06"), pytest.mark.history("H15")]

FENCED = 12
MIB = 1 << 20
BIG = os.urandom(3 * MIB)
PART = os.urandom(MIB + 17)
MODEL = os.urandom(2 * MIB + 5)
AFTER = BIG[: MIB // 2] + PART + BIG[MIB // 2 + len(PART) :]


def work(node: Node) -> None:
    """Publish a tree, then change it without publishing."""
    (node.root / "kept").write_bytes(b"published and not touched again")
    (node.root / "big").write_bytes(BIG)
    (node.root / "gone").write_text("removed later")
    node.sync()
    with (node.root / "big").open("r+b") as file:
        file.seek(MIB // 2)
        file.write(PART)
    (node.root / "run").mkdir()
    (node.root / "run" / "model.bin").write_bytes(MODEL)
    os.symlink("run/model.bin", node.root / "newest")
    (node.root / "gone").unlink()


CHANGED = {"big": AFTER, "run/model.bin": MODEL}


def command(node: Node, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = node.run("salvage", *arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def listed(node: Node, store: str) -> list[dict[str, Any]]:
    return list(command(node, "list", "work", "--store", store)["salvage"])


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def objects_below(store: str, name: str) -> list[Path]:
    return [path for path in Path(store.removeprefix("file://")).rglob(f"{name}/**/*") if path.is_file()]


def test_a_fenced_mount_sets_its_work_aside_in_the_store(fleet: Fleet, tmp_path: Path) -> None:
    old, new, laptop = fleet.node(interval="1h").start(), fleet.node(), fleet.node()
    work(old)
    new.start("--takeover")
    await_true(lambda: "is in the store" in (old.status()["salvage"] or ""), "the fenced writer saves its work")
    assert old.status()["fenced"]
    assert (new.root / "big").read_bytes() == BIG
    assert (new.root / "gone").exists()
    assert not (new.root / "run").exists()

    done = old.run("umount", str(old.root))
    assert done.returncode == FENCED, done.stdout + done.stderr
    assert "spotwarp salvage" in done.stderr
    assert "to go on publishing" not in done.stderr
    assert old.ended() == FENCED

    old.lose()
    (item,) = listed(laptop, fleet.store)
    assert item["where"] == "store"
    assert item["complete"]
    target = tmp_path / "back"
    report = command(laptop, "copy", item["id"], str(target), "--store", fleet.store)
    assert report["removed"] == ["gone"]
    assert files_of(target) == CHANGED
    assert os.readlink(target / "newest") == "run/model.bin"
    command(laptop, "copy", item["id"][:-8], str(tmp_path / "whole"), "--all", "--store", fleet.store)
    assert files_of(tmp_path / "whole") == {**CHANGED, "kept": b"published and not touched again"}

    new.sync()
    assert command(laptop, "drop", item["id"], "--yes", "--store", fleet.store)["id"] == item["id"]
    assert listed(laptop, fleet.store) == []
    assert objects_below(fleet.store, "salvage") == []
    assert (new.root / "big").read_bytes() == BIG


def test_the_cache_of_a_killed_writer_is_salvage_once_another_has_gone_on(fleet: Fleet, tmp_path: Path) -> None:
    old, new = fleet.node(interval="1h").start(), fleet.node()
    work(old)
    old.kill()
    new.start("--takeover")
    (new.root / "after").write_text("the other node goes on")
    new.sync()
    with pytest.raises(RefusedToMount) as caught:
        old.start()
    assert caught.value.code == FENCED
    assert "spotwarp salvage list" in str(caught.value)

    where = ("--store", fleet.store)
    old.environment = {"SPOTWARP_CACHE_DIR": str(old.cache)}
    (item,) = listed(old, fleet.store)
    assert item["where"] == "node"
    assert item["files"] == len(CHANGED) + len(["newest", "run"])
    report = command(old, "copy", item["id"], str(tmp_path / "back"), *where)
    assert report["removed"] == ["gone"]
    assert files_of(tmp_path / "back") == CHANGED
    command(old, "copy", item["id"], str(tmp_path / "back"), *where, code=2)
    command(old, "copy", "work/nothing", str(tmp_path / "none"), *where, code=14)

    old.start("--takeover")
    assert tree_of(old.root)["after"] == b"the other node goes on"
    command(old, "copy", item["id"], str(tmp_path / "again"), *where)
    assert files_of(tmp_path / "again") == CHANGED
    command(old, "drop", item["id"], "--yes", *where)
    assert listed(old, fleet.store) == []


def test_a_fenced_mount_with_nothing_unpublished_ends_well_and_leaves_nothing(fleet: Fleet) -> None:
    old, new = fleet.node(interval="1h").start(), fleet.node()
    (old.root / "f").write_text("published")
    old.sync()
    new.start("--takeover")
    await_true(lambda: old.status()["fenced"], "the idle writer learns that it was fenced")
    done = old.run("umount", str(old.root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert old.ended() == 0
    assert objects_below(fleet.store, "salvage") == []
    assert listed(new, fleet.store) == []


def test_a_killed_writer_with_nothing_unpublished_leaves_no_salvage(fleet: Fleet) -> None:
    old, new = fleet.node(interval="1h").start(), fleet.node()
    (old.root / "f").write_text("published")
    old.sync()
    old.kill()
    new.start("--takeover")
    with pytest.raises(RefusedToMount) as caught:
        old.start()
    assert caught.value.code == FENCED
    assert not list((old.cache / "salvage").glob("*"))
