"""Does a node whose metadata map is damaged come back by itself, and is what only the map vouched for kept?"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from spotwarp_fs.local.mapcheck import examine
from tests.support.daemon import Fleet, Node, await_true, is_gone
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-02"), pytest.mark.history("C4")]

MIB = 1 << 20
PAGE = 4096
OLD = random.Random(1).randbytes(2 * MIB + 11)
SYNCED = random.Random(2).randbytes(3 * MIB + 5)
ONLY_HERE = random.Random(3).randbytes(2 * MIB)


def work(node: Node) -> None:
    """Publish a tree; then fsync one file and leave another one to the map alone."""
    (node.root / "published").write_bytes(OLD)
    (node.root / "grown").write_bytes(OLD)
    for number in range(300):
        (node.root / f"small{number}").write_text(str(number))
    node.sync()
    with (node.root / "synced").open("wb") as file:
        file.write(SYNCED)
        file.flush()
        os.fsync(file.fileno())
    (node.root / "unsynced").write_bytes(ONLY_HERE)
    with (node.root / "grown").open("ab") as file:
        file.write(ONLY_HERE)


def check_rebuilt(node: Node) -> None:
    """Everything published or fsynced is there; the rest is absent or as it was, and said to be missing."""
    assert (node.root / "published").read_bytes() == OLD
    assert (node.root / "synced").read_bytes() == SYNCED
    assert [int((node.root / f"small{number}").read_text()) for number in range(300)] == list(range(300))
    grown = (node.root / "grown").read_bytes()
    assert grown[: len(OLD)] == OLD
    assert set(grown[len(OLD) :]) <= {*ONLY_HERE} or not grown[len(OLD) :]
    notices = node.status()["notices"]
    assert len(notices) == 1
    assert "damaged" in notices[0]
    assert "may be missing" in notices[0]


def kept_of(node: Node) -> Path:
    """The one salvage on the node: the damaged map, and what only it vouched for."""
    (place,) = (node.cache / "salvage").iterdir()
    assert (place / "map").is_dir()
    return place


def map_file(node: Node) -> Path:
    return node.cache / "state" / "map" / "data.mdb"


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 8 // PAGE * PAGE)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero_head_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(2 * PAGE))


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [empty, zero_head_pages, remove])
def test_a_map_found_damaged_is_set_aside_and_built_anew(fleet: Fleet, damage: Callable[[Path], None]) -> None:
    node = fleet.node(interval="1h").start()
    work(node)
    node.kill()
    damage(map_file(node))
    node.restart()
    check_rebuilt(node)
    kept_of(node)


def test_what_only_the_damaged_map_vouched_for_can_be_had_until_it_is_dropped(fleet: Fleet) -> None:
    node = fleet.node(interval="1h").start()
    work(node)
    node.kill()
    cut_short(map_file(node))
    node.restart()
    check_rebuilt(node)
    place = kept_of(node)
    lines = [json.loads(line) for line in (place / "contents").read_text().splitlines()]
    assert any(line["path"] == "grown" for line in lines), "the file that the head knows is named"

    copied = node.home / "copied"
    identity = f"work/{place.name}"
    assert node.run("salvage", "copy", identity, str(copied), "--store", fleet.store).returncode == 0
    bodies = [path.read_bytes() for path in copied.rglob("*") if path.is_file()]
    assert ONLY_HERE in bodies, "the bytes of the unsynced file"
    assert any(body[len(OLD) :] == ONLY_HERE for body in bodies), "what was appended to the published one"
    assert SYNCED not in bodies, "the journal vouches for it"

    (node.root / "new").write_bytes(OLD)
    node.kill()
    node.restart()
    assert len(node.status()["notices"]) == 1, "said until it is dealt with"
    assert (node.root / "new").read_bytes() == OLD
    assert node.run("salvage", "drop", identity, "--yes", "--store", fleet.store).returncode == 0
    node.kill()
    node.restart()
    assert node.status()["notices"] == []


def spoil_pages(path: Path) -> None:
    """Overwrite every page but the two head pages: whatever is read next is wrong."""
    with path.open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(random.Random(7).randbytes(path.stat().st_size - 2 * PAGE))


def test_a_map_damaged_under_a_running_daemon_costs_one_restart(fleet: Fleet) -> None:
    node = fleet.node(interval="1h").start_supervised()
    work(node)
    before = node.pid
    spoil_pages(map_file(node))
    while_damaged = [node.root / "published", node.root / "small7"]
    for path in while_damaged:
        try:
            path.read_bytes()
        except OSError:
            continue
    await_true(lambda: is_gone(before) and node.report_of_restart() not in (None, before), "the next daemon")
    await_true(node.root.is_mount, "the mount is back")
    check_rebuilt(node)
    assert examine(node.cache / "state" / "map") is None
    place = kept_of(node)
    assert (place / "map" / "damaged").exists() or (place / "map" / "fault").stat().st_size
    assert node.umount() == 0
