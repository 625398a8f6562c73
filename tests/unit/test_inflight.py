from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import inflight
from spotwarp_fs.core.inflight import InFlight, Mark, Standing, standing
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.records import ENTRY_TABLE, name_key
from spotwarp_fs.core.types import ROOT_INODE, Inode
from tests.support.inflight_worlds import SECOND, World

POLICIES = Policies()
WHOLE = ("model.safetensors", "optimizer.pt", "config.json")


def judge(world: World, *, age_s: float = 0) -> InFlight:
    """All directories are candidates: what the engine passes is a subset with the same answer."""
    found = inflight.candidates(world, [k for k in world.rows if k[:1] == ENTRY_TABLE], POLICIES, ())
    return inflight.in_flight(world, POLICIES, world.now + int(age_s * SECOND), found)


def listed(found: InFlight) -> dict[str, bool]:
    return {item.path.decode(): item.torn for item in found.items}


def save(world: World, directory: str, names: tuple[str, ...] = WHOLE) -> None:
    for name in names:
        world.write(f"{directory}/{name}", "x")


marks = st.builds(Mark, st.integers(0, 2**62), st.integers(0, 2**62), dying=st.booleans(), torn=st.booleans())


@given(marks)
def test_a_mark_survives_its_encoding(mark: Mark) -> None:
    assert Mark.decode(mark.encode()) == mark


def test_a_good_close_ends_the_mark_and_a_flush_alone_does_not() -> None:
    mark = inflight.on_write(None, 1)
    assert inflight.on_write(mark, 5) is mark, "nothing to store for the second write"
    flushed = inflight.on_flush(mark, 9, dying=False)
    assert flushed is not None
    assert standing(flushed, 9 + inflight.RELEASE_AFTER_NS - 1) is Standing.OPEN
    assert standing(flushed, 9 + inflight.RELEASE_AFTER_NS) is Standing.RELEASED
    assert inflight.on_release(flushed, 9, writers=1) == flushed
    assert inflight.on_release(flushed, 9, writers=0) is None
    again = inflight.on_write(flushed, 10)
    assert standing(again, 10**15) is Standing.OPEN, "a write after the flush begins the wait anew"


@pytest.mark.history("M-b")
def test_Mb_opened_but_not_written_is_not_in_flight() -> None:
    assert inflight.on_flush(None, 1, dying=True) is None
    assert inflight.on_release(None, 1, writers=0) is None


def test_truncating_by_path_is_whole_in_itself() -> None:
    assert inflight.on_truncate(None, 1, writers=0) is None
    assert inflight.on_truncate(None, 1, writers=1) == Mark(1)


@pytest.mark.history("C12")
def test_C12_the_close_of_a_dying_process_leaves_the_file_torn() -> None:
    mark = inflight.on_flush(inflight.on_write(None, 1), 2, dying=True)
    torn = inflight.on_release(mark, 3, writers=0)
    assert torn is not None
    assert torn.torn
    assert standing(torn, 10**18) is Standing.TORN
    assert inflight.on_release(inflight.on_write(torn, 10**15), 4, writers=0) is None, "written again, closed well"


@pytest.mark.history("C12")
def test_C12_handles_that_died_with_the_daemon_leave_torn_files() -> None:
    writing = inflight.on_write(None, 1)
    after = inflight.on_daemon_restart(writing, 5)
    assert after is not None
    assert after.torn
    assert inflight.on_daemon_restart(after, 7) == after
    closed = inflight.on_flush(writing, 6, dying=False)
    assert closed is not None
    assert inflight.on_daemon_restart(closed, 6 + inflight.RELEASE_AFTER_NS) is None, "had counted as released"


def test_a_worker_that_holds_the_handle_and_dies_later_does_not_tear_the_file() -> None:
    closed = inflight.on_flush(inflight.on_write(None, 1), 2, dying=False)
    late = 2 + inflight.RELEASE_AFTER_NS
    assert inflight.on_release(inflight.on_flush(closed, late, dying=True), late, writers=0) is None


@pytest.mark.history("C11")
def test_C11_a_flush_in_mid_write_by_a_child_process_certifies_nothing() -> None:
    world = World()
    mark = inflight.on_flush(world.open_mark(), world.now, dying=False)
    world.write("last.ckpt", "half", mark=mark)
    assert listed(judge(world)) == {"last.ckpt": False}
    assert inflight.closing(world, world.now) == [world.at("last.ckpt")]
    assert listed(judge(world, age_s=29)) == {"last.ckpt": False}
    settled = judge(world, age_s=30)
    assert settled.items == ()
    assert settled.settled == (world.at("last.ckpt"),)


@pytest.mark.history("M-a")
def test_Ma_the_name_at_the_cut_decides() -> None:
    world = World()
    world.write("out/.tmpX1", "half", mark=world.open_mark())
    assert judge(world).items == ()
    world.rename("out/.tmpX1", "out/model.safetensors")
    world.link("out/model.safetensors", "out/best.pt")
    assert listed(judge(world)) == {"out/model.safetensors": False, "out/best.pt": False}
    world.unlink("out/model.safetensors")
    world.unlink("out/best.pt")
    assert judge(world).items == ()


@pytest.mark.history("L10")
def test_L10_no_transition_exists_by_which_fsync_could_end_a_mark() -> None:
    assert [name for name in vars(inflight) if "sync" in name] == []


@pytest.mark.history("L8")
def test_L8_torn_things_are_listed_but_do_not_block_quiescence() -> None:
    world = World()
    world.write("last.ckpt", "half", mark=world.torn_mark())
    found = judge(world)
    assert listed(found) == {"last.ckpt": True}
    assert found.quiescent
    world.write("b.pt", "half", mark=world.open_mark())
    assert not judge(world).quiescent


@pytest.mark.promise("P-05")
def test_anything_marked_holds_the_whole_atomic_directory() -> None:
    world = World()
    save(world, "run/checkpoint-1")
    world.write("run/checkpoint-1/trainer_state.json", "half", mark=world.open_mark())
    assert listed(judge(world)) == {"run/checkpoint-1": False}
    world.write("run/checkpoint-1/trainer_state.json", "half", mark=world.torn_mark())
    assert listed(judge(world)) == {"run/checkpoint-1": True}
    world.write("run/checkpoint-1/trainer_state.json", "whole")
    assert judge(world).items == ()


def test_a_log_that_is_written_for_hours_does_not_hold_its_directory() -> None:
    world = World()
    world.write("step_1/train.log", "line", mark=world.open_mark())
    world.now += 2 * 3600 * SECOND
    assert judge(world).items == ()
    world.write("step_1/weights.pt", "half", mark=Mark(world.now - 2 * 3600 * SECOND))
    assert listed(judge(world)) == {"step_1": False, "step_1/weights.pt": False}


@pytest.mark.history("L7")
@pytest.mark.promise("P-05")
def test_L7_a_pause_does_not_certify_a_directory_that_lacks_what_its_sibling_has() -> None:
    world = World()
    save(world, "checkpoint-500")
    world.now += 3600 * SECOND
    save(world, "checkpoint-1000", WHOLE[:1])
    found = judge(world, age_s=300)
    assert listed(found) == {"checkpoint-1000": False}
    assert found.due_ns == world.now + inflight.ATOMIC_MAX_AGE_NS
    assert judge(world, age_s=900).items == (), "at most atomic_max_age after its last change"
    save(world, "checkpoint-1000")
    assert judge(world).items == ()


def test_shards_are_counted_not_only_named() -> None:
    world = World()
    save(world, "global_step1", ("mp_rank_00.pt", "mp_rank_01.pt"))
    world.now += 3600 * SECOND
    save(world, "global_step2", ("mp_rank_01.pt",))
    assert listed(judge(world)) == {"global_step2": False}
    save(world, "global_step2", ("mp_rank_00.pt",))
    assert judge(world).items == ()


def test_names_in_subdirectories_count() -> None:
    world = World()
    save(world, "checkpoint-1/global_step1", ("zero_0.pt",))
    save(world, "checkpoint-1", ("trainer_state.json",))
    world.now += 3600 * SECOND
    save(world, "checkpoint-2", ("trainer_state.json",))
    assert listed(judge(world)) == {"checkpoint-2": False}


def test_without_a_sibling_a_marker_or_a_minute_decides() -> None:
    world = World()
    save(world, "checkpoint-1")
    found = judge(world, age_s=59)
    assert listed(found) == {"checkpoint-1": False}
    assert found.due_ns == world.now + inflight.UNCHANGED_NS
    assert judge(world, age_s=60).items == ()
    world.write("checkpoint-1/.metadata", "m")
    assert judge(world).items == ()


def test_two_new_directories_do_not_vouch_for_each_other() -> None:
    world = World()
    save(world, "checkpoint-1", WHOLE[:1])
    save(world, "checkpoint-2", WHOLE[:1])
    assert set(listed(judge(world))) == {"checkpoint-1", "checkpoint-2"}


def test_what_a_crash_left_behind_does_not_vouch_for_the_next() -> None:
    world = World()
    save(world, "checkpoint-1")
    world.now += 3600 * SECOND
    save(world, "checkpoint-2", WHOLE[:1])
    world.now += 3600 * SECOND
    save(world, "checkpoint-3", WHOLE[:1])
    assert listed(judge(world)) == {"checkpoint-3": False}


def test_a_half_removed_directory_is_in_flight() -> None:
    world = World()
    save(world, "checkpoint-1")
    save(world, "checkpoint-2")
    world.now += 3600 * SECOND
    world.unlink("checkpoint-1/optimizer.pt")
    assert listed(judge(world)) == {"checkpoint-1": False}


def test_a_directory_of_runs_is_not_a_checkpoint() -> None:
    world = World()
    save(world, "epoch_runs/checkpoint-1")
    save(world, "epoch_runs/checkpoint-2", (*WHOLE, "trainer_state.json"))
    world.write("epoch_runs/checkpoint-2/optimizer.pt", "half", mark=world.open_mark())
    assert set(listed(judge(world, age_s=61))) == {"epoch_runs/checkpoint-2", "epoch_runs/checkpoint-2/optimizer.pt"}


def test_only_changed_directories_and_those_listed_before_are_candidates() -> None:
    world = World()
    save(world, "a/checkpoint-1")
    save(world, "a/tmp-2")
    before = set(world.rows)
    world.rename("a/tmp-2", "a/checkpoint-2")
    changed = [key for key in set(world.rows) ^ before if key[:1] == ENTRY_TABLE]
    item = InFlightItem(world.at("a/checkpoint-1"), b"a/checkpoint-1", "directory", torn=False)
    assert inflight.candidates(world, changed, POLICIES, ()) == {world.at("a"), world.at("a/checkpoint-2")}
    assert world.at("a/checkpoint-1") in inflight.candidates(world, changed, POLICIES, (item,))


def test_a_file_with_the_name_of_a_checkpoint_directory_is_a_file() -> None:
    world = World()
    world.write("step_1", "text")
    world.write("epoch_2", "text", mark=world.open_mark())
    assert judge(world).items == ()
    assert inflight.closing(world, world.now) == []


def test_very_deep_paths_are_rendered() -> None:
    world = World()
    world.write("x.pt", "half", mark=world.open_mark())
    at, path = world.at("x.pt"), "x.pt"
    del world.rows[name_key(at, ROOT_INODE, b"x.pt")]
    name = b"x.pt"
    for number in range(10_000, 11_100):
        world.rows[name_key(at, Inode(number), name)] = b""
        at, name, path = Inode(number), b"d", "d/" + path
    world.rows[name_key(at, ROOT_INODE, name)] = b""
    assert list(listed(judge(world))) == [path]


@given(
    st.lists(st.sampled_from(["write", "flush", "dying", "release", "restart", "wait"]), max_size=12),
)
@settings(max_examples=200)
def test_a_mark_ends_only_by_a_last_good_release_or_a_quiet_flush(steps: list[str]) -> None:
    """Against a plain account of what happened since the last good end."""
    mark: Mark | None = None
    now, written, quiet_since, dying, torn = 1, False, 0, False, False
    for step in steps:
        now += 1
        settled = bool(quiet_since) and now - quiet_since >= inflight.RELEASE_AFTER_NS and not torn
        if step == "write":
            dying = dying and written and not torn
            mark, written, quiet_since, torn = inflight.on_write(mark, now), True, 0, False
        elif step in ("flush", "dying"):
            mark = inflight.on_flush(mark, now, dying=step == "dying")
            if written and not torn and not settled:
                quiet_since, dying = now, dying or step == "dying"
        elif step == "release":
            mark = inflight.on_release(mark, now, writers=0)
            torn = torn or (written and dying)
            written, dying = torn, dying and torn
            quiet_since = quiet_since if torn else 0
        elif step == "restart" and mark is not None:
            mark = inflight.on_daemon_restart(mark, now)
            torn = torn or not (settled and not dying)
            written = torn
            if not torn:
                quiet_since, dying = 0, False
        else:
            now += inflight.RELEASE_AFTER_NS
        assert (mark is not None) == written
        if mark is not None:
            quiet = bool(quiet_since) and now - quiet_since >= inflight.RELEASE_AFTER_NS
            expected = Standing.TORN if torn or (quiet and dying) else Standing.RELEASED if quiet else Standing.OPEN
            assert standing(mark, now) is expected
