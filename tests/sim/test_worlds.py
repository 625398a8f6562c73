"""Is it right under faults, crashes and schedules? Seeded worlds against the oracle of `tests/support/oracle.py`.

`SPOTWARP_SEED=17 pytest tests/sim/test_worlds.py -k one_seed` runs a single world; `scripts/soak` runs fresh ones.
"""

from __future__ import annotations

import os

import pytest

from tests.support.sim_world import World, run_world

pytestmark = [pytest.mark.promise("P-01"), pytest.mark.promise("P-03"), pytest.mark.promise("P-06")]

CHUNK = 10
FAST_SEEDS = 100
SLOW_SEEDS = 2_000

FAILED_ONCE = {
    1: "an unlinked file's published xattrs stayed in the manifest after its inode",
    3: "dirty blocks of an unlinked, open file filled the cache for ever",
    9: "killed while creating the workspace: the next start met a root that it had not expected",
    28: "a damaged manifest in a parallel read ended the session with a group of errors",
    79: "a takeover sent by a start that was killed arrived late, and its own next start fenced itself",
    141: "a fenced session died of the base that it was making",
    1448: "a block had one frame in the map and another in the manifest, because its file had grown in between",
    1546: "a block map that arrived after its file was removed left records behind",
    303: "a flipped bit in a pack's trailer made our own upload a rival's",
}
"""Seeds that found something, with the story. Worlds change as they grow; the histories keep the bugs themselves."""


@pytest.mark.parametrize("chunk", range(0, FAST_SEEDS, CHUNK))
def test_worlds(chunk: int) -> None:
    for seed in range(chunk, chunk + CHUNK):
        run_world(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(1_000, 1_000 + SLOW_SEEDS, 100))
def test_more_worlds(chunk: int) -> None:
    for seed in range(chunk, chunk + 100):
        run_world(seed)


@pytest.mark.parametrize("seed", [seed for seed in FAILED_ONCE if seed >= FAST_SEEDS])
def test_a_seed_that_failed_once(seed: int) -> None:
    run_world(seed)


@pytest.mark.skipif("SPOTWARP_SEED" not in os.environ, reason="SPOTWARP_SEED names the world to run")
def test_one_seed() -> None:
    run_world(int(os.environ["SPOTWARP_SEED"]))


def everything_seen(world: World) -> object:
    history = world.current[1].trace if world.current is not None else []
    return (
        world.trace,
        history,
        sorted((key, found.etag, found.modified_s) for key, found in world.store._objects.items()),
    )


@pytest.mark.parametrize("seed", [2, 5, 11, 15])
def test_same_seed_same_trace(seed: int) -> None:
    assert everything_seen(run_world(seed)) == everything_seen(run_world(seed))


def test_another_seed_is_another_world() -> None:
    assert everything_seen(run_world(5)) != everything_seen(run_world(11))
