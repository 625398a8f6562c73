"""Is what a fresh node finds, after the old one was lost, the tree at one moment, and not too old?"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.daemon import Fleet
from tests.support.daemon import fleet as fleet
from tests.support.load import Load, nearest, tree_of
from tests.support.mounts import needs_fuse
from tests.support.s3_server import S3Server
from tests.support.s3_server import s3_server as s3_server

pytestmark = needs_fuse

INTERVAL_S = 1.0
RPO_EXTRA_S = 5.0
SLOW_MACHINE_S = 10.0
"""The promise is made for a machine that keeps up; this one runs other tests beside."""


def check_a_moment(load: Load, root: Path, *, lost_at: float) -> int:
    """The tree is a prefix, and every step that is missing is younger than the promised bound."""
    seen = tree_of(root)
    found = load.prefixes(seen)
    assert found, nearest(load, seen)
    kept = found[-1].count
    if kept < len(load.done):
        oldest_lost = load.done[kept][1]
        assert lost_at - oldest_lost < INTERVAL_S + RPO_EXTRA_S + SLOW_MACHINE_S
    return kept


@pytest.mark.promise("P-03")
@pytest.mark.promise("P-04")
@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
def test_a_fresh_node_finds_a_prefix_of_the_acknowledged_steps(fleet: Fleet, seed: int) -> None:
    lose_and_look(fleet, seed)


@pytest.mark.promise("P-03")
@pytest.mark.promise("P-04")
def test_a_fresh_node_finds_a_prefix_on_s3_too(tmp_path: Path, s3_server: S3Server) -> None:
    fleet = Fleet(tmp_path, s3_server.url, s3_server.environment)
    try:
        lose_and_look(fleet, 41)
    finally:
        fleet.close()


def lose_and_look(fleet: Fleet, seed: int) -> None:
    """Write, lose the node at a seeded moment, and take over on another one."""
    rng = random.Random(seed)
    node = fleet.node().start()
    load = Load(node.root, seed).start()
    time.sleep(rng.uniform(2.0, 5.0))
    node.kill()
    lost_at = time.monotonic()
    load.stop()
    node.lose()
    fresh = fleet.node().start("--takeover")
    kept = check_a_moment(load, fresh.root, lost_at=lost_at)
    assert kept > 0, "two intervals went by and nothing was published"


@pytest.mark.slow
@pytest.mark.promise("P-03")
@pytest.mark.promise("P-04")
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_workspace_survives_one_node_after_the_other(fleet: Fleet, seed: int) -> None:
    """Each replacement goes on from what it found, until it is lost as well."""
    rng = random.Random(seed)
    load = None
    for _ in range(4):
        node = fleet.node().start("--takeover")
        if load is None:
            load = Load(node.root, seed)
        load.root = node.root
        load.start()
        time.sleep(rng.uniform(1.5, 6.0))
        if rng.random() < 0.3:
            node.kill()
            load.stop()
            node.restart()
            found = [each for each in load.prefixes(tree_of(node.root)) if each.count >= len(load.done)]
            assert found, nearest(load, tree_of(node.root))
            load.settle(found[0])
            load.start()
            time.sleep(rng.uniform(0.5, 2.0))
        node.kill()
        lost_at = time.monotonic()
        load.stop()
        node.lose()
        fresh = fleet.node().start("--takeover")
        check_a_moment(load, fresh.root, lost_at=lost_at)
        load.go_back_to(load.prefixes(tree_of(fresh.root))[-1])
        fresh.umount()


@pytest.mark.promise("P-03")
def test_what_sync_returned_for_is_never_lost(fleet: Fleet) -> None:
    node = fleet.node(interval="1h").start()
    load = Load(node.root, 21).start()
    time.sleep(1.0)
    load.stop()
    number = node.sync()
    synced = len(load.done)
    load.start()
    time.sleep(0.5)
    node.kill()
    load.stop()
    node.lose()
    fresh = fleet.node().start("--takeover")
    assert fresh.report["manifest"] > number
    seen = tree_of(fresh.root)
    assert any(prefix.count >= synced for prefix in load.prefixes(seen)), nearest(load, seen)
