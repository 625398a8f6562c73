"""Would the worlds and histories notice? Each careless version of a rule, planted, must be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim import test_histories_blocks as blocks
from tests.sim import test_histories_bounds as bounds
from tests.sim import test_histories_publish as publish
from tests.support.plants import PLANTS
from tests.support.sim_world import run_world


def _with_patches(test: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        test(patches)


FOUND_BY_WORLDS = {
    "manifest_before_its_packs": 3,
    "frame_set_whatever_was_written_since": 8,
    "partial_write_over_an_absent_block": 4,
    "export_of_live_values": 4,
    "zombie_goes_on_after_the_foreign_manifest": 12,
    "deletions_left_out": 4,
    "own_lost_answer_taken_for_a_rival": 72,
}
"""Within so many seeds, counted from 0."""

FOUND_BY_HISTORIES: dict[str, Callable[[], None]] = {
    "truncation_without_a_new_generation": (
        blocks.test_C6_a_block_cut_shorter_after_a_restart_is_not_given_the_frame_of_the_longer_one
    ),
    "punch_after_a_wait": blocks.test_C2_a_write_after_an_eviction_is_not_punched_away,
    "fetched_block_written_unseen": lambda: blocks.test_C2_a_late_answer_does_not_bring_old_bytes_back("overwrite"),
    "frozen_block_evicted_once_it_has_a_frame": (
        blocks.test_L15_a_frozen_block_with_an_early_frame_is_not_evicted_under_the_cut
    ),
    "file_set_aside_before_the_commit": (
        lambda: blocks.test_C7_a_kill_while_the_frozen_file_moves_aside_loses_nothing(2)
    ),
    "overwrite_under_a_cut": lambda: blocks.test_C7_frozen_bytes_outlive_what_destroys_them("overwrite"),
    "mark_before_bytes": (
        lambda: blocks.test_H3_a_kill_in_an_overwrite_of_an_absent_block_leaves_old_or_new_bytes("pwrite")
    ),
    "truncated_blocks_not_dropped_from_the_store": lambda: _with_patches(
        publish.test_H4_blocks_that_lie_only_in_the_base_are_dropped_too
    ),
    "rows_dropped_before_the_manifest_is_there": (
        bounds.test_C16_a_kill_between_the_packs_and_the_manifest_loses_no_change
    ),
    "session_not_noted_before_its_takeover": (
        publish.test_C16_L1_a_restart_knows_its_own_manifest_and_keeps_every_deletion
    ),
}


def run_worlds(count: int) -> None:
    for seed in range(count):
        run_world(seed)


@pytest.mark.parametrize("name", FOUND_BY_WORLDS)
def test_worlds_find(name: str) -> None:
    with PLANTS[name].planted(), pytest.raises((Exception, BaseExceptionGroup)):
        run_worlds(FOUND_BY_WORLDS[name])


@pytest.mark.parametrize("name", FOUND_BY_HISTORIES)
def test_histories_find(name: str) -> None:
    with PLANTS[name].planted(), pytest.raises((Exception, BaseExceptionGroup, pytest.fail.Exception)):
        FOUND_BY_HISTORIES[name]()


def test_every_plant_is_looked_for() -> None:
    assert set(PLANTS) <= set(FOUND_BY_WORLDS) | set(FOUND_BY_HISTORIES)
