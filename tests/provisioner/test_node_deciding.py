"""Does the agent decide rightly, whatever happens in whatever order?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.core.bootstrap import EXIT_FENCED
from provisioner.core.gpus import parse_gpu
from provisioner.core.rendezvous import NodePhase, Orders, Report
from provisioner.core.wishes import Wish
from provisioner.node.checks import SeenGpu, judge_gpus, judge_store
from provisioner.node.deciding import (
    HAND_OVER_PATIENCE_S,
    LIVED_S,
    NOT_SAVED,
    PUBLISH_TRIES,
    STOP_PATIENCE_S,
    Command,
    Event,
    Failed,
    GivePermit,
    Looked,
    Node,
    Noted,
    Notified,
    Ordered,
    Passed,
    Rules,
    RunEnded,
    StartRun,
    StopRun,
    Sync,
    Synced,
    Tick,
    begin,
    turn,
)

ORDER = list(NodePhase)


class Play:
    """One node, and everything it did."""

    def __init__(self, crashes_max: int = 2) -> None:
        self.node, commands = begin(Rules(crashes_max), Report("00c0ffee-1", 1, NodePhase.BOOTED))
        self.did: list[Command] = list(commands)
        self.now_s = 100.0
        self.seq = 0

    def on(self, *events: Event, after_s: float = 1.0) -> tuple[Command, ...]:
        commands: tuple[Command, ...] = ()
        for event in events:
            self.now_s += after_s
            self.node, commands = turn(self.node, event, self.now_s)
            self.did += commands
        return commands

    def order(self, **words: object) -> tuple[Command, ...]:
        self.seq += 1
        return self.on(Ordered(Orders(1, self.seq, **words)))  # type: ignore[arg-type]

    def holding(self) -> Play:
        """Go on until the command runs."""
        self.on(Passed("gpu"), Passed("store"), Noted("prefetched", 1.0))
        assert self.order(permit_writer_epoch=3) == (GivePermit(3),)
        self.on(Noted("claimed", 2.0, writer_epoch=3, resumed_from=7), Noted("started", 3.0, form="directory"))
        assert self.phase is NodePhase.RUNNING
        return self

    def ticked(self, after_s: float = 60.0) -> tuple[Command, ...]:
        return self.on(Tick(), after_s=after_s)

    @property
    def phase(self) -> NodePhase:
        return self.node.report.phase

    @property
    def report(self) -> Report:
        return self.node.report


def test_it_is_ready_when_everything_is_checked_and_the_head_is_loaded() -> None:
    play = Play()
    assert play.did == [StartRun()]
    play.on(Passed("gpu", {"gpu": "1 × H100"}), Noted("prefetched", 1.0))
    assert play.phase is NodePhase.BOOTED
    play.on(Passed("store", {"store_up_mbps": "900"}))
    assert play.phase is NodePhase.READY
    assert play.report.checks == {"gpu": "1 × H100", "store_up_mbps": "900"}


def test_a_machine_that_fails_a_check_ends_its_run_and_says_why() -> None:
    play = Play()
    play.on(Noted("prefetched", 1.0), Passed("store"))
    assert play.on(Failed("gpu", "no GPU", {"gpu": "none"})) == (StopRun(),)
    assert (play.phase, play.report.why, play.node.exit) == (NodePhase.UNFIT, "no GPU", None)
    play.on(RunEnded(143))
    assert play.node.exit == 1
    assert play.phase is NodePhase.UNFIT


def test_an_order_counts_once_and_an_older_one_not_at_all() -> None:
    play = Play()
    new = Orders(2, 1, permit_writer_epoch=5)
    assert play.on(Ordered(new)) == (GivePermit(5),)
    assert play.on(Ordered(new)) == ()
    assert play.on(Ordered(Orders(1, 9, permit_writer_epoch=8, end=True))) == (), "of a controller that was replaced"
    assert play.on(Ordered(Orders(2, 2, permit_writer_epoch=6))) == (GivePermit(6),)


def test_success_ends_it_with_everything_published() -> None:
    play = Play().holding()
    play.on(RunEnded(0, saved=True))
    assert (play.phase, play.report.exit_code, play.node.exit) == (NodePhase.ENDED, 0, 0)
    assert (play.report.writer_epoch, play.report.resumed_from) == (3, 7)


def test_what_could_not_be_saved_is_published_before_the_success_is_told() -> None:
    play = Play().holding()
    play.on(RunEnded(NOT_SAVED, saved=False, last_words="3 GiB could not be saved"))
    assert play.phase is NodePhase.RUNNING
    assert "3 GiB" in play.report.why
    assert play.ticked() == (StartRun(publish_only=True),)
    play.on(RunEnded(NOT_SAVED))
    assert play.ticked() == (StartRun(publish_only=True),)
    play.on(RunEnded(0, saved=True))
    assert (play.report.exit_code, play.node.exit, play.report.why) == (0, 0, "")


def test_publishing_is_given_up_at_last_and_said() -> None:
    play = Play().holding()
    play.on(RunEnded(NOT_SAVED))
    for _ in range(PUBLISH_TRIES):
        assert play.ticked() == (StartRun(publish_only=True),)
        play.on(RunEnded(NOT_SAVED))
    assert play.node.exit == NOT_SAVED
    assert play.report.exit_code == 0, "the command itself had succeeded"
    assert "not everything is published" in play.report.why


def test_a_crash_is_started_again_so_often_in_a_row() -> None:
    play = Play(crashes_max=2).holding()
    for _ in range(2):
        play.on(RunEnded(1, saved=True))
        assert play.on(Tick(), after_s=0.1) == (), "not at once"
        assert play.ticked() == (StartRun(),)
    play.on(RunEnded(1, saved=True, last_words="CUDA out of memory"))
    assert (play.phase, play.report.exit_code, play.node.exit) == (NodePhase.ENDED, 1, 1)
    assert "3 times in a row" in play.report.why
    assert "out of memory" in play.report.why


@pytest.mark.parametrize("progress", ["checkpoint", "long"])
def test_progress_between_crashes_begins_the_row_anew(progress: str) -> None:
    play = Play(crashes_max=1).holding()
    for number in range(1, 6):
        play.on(Looked(10 * number, True, "" if progress == "long" else f"{number}"))
        after_s = LIVED_S if progress == "long" else 1.0
        play.on(Looked(10 * number + 1, True, "" if progress == "long" else f"{number}+"), after_s=after_s)
        play.on(RunEnded(1, saved=True))
        assert play.ticked() == (StartRun(),)


def test_a_line_in_a_log_is_no_progress() -> None:
    play = Play(crashes_max=1).holding()
    play.on(Looked(5, True, "same"), Looked(6, True, "same"), RunEnded(1, saved=True))
    play.ticked()
    play.on(Looked(7, True, "same"), Looked(8, True, "same"), RunEnded(1, saved=True))
    assert play.node.exit == 1


def test_hand_over_waits_for_the_next_checkpoint_that_is_whole() -> None:
    play = Play().holding()
    play.on(Looked(5, True, "a"))
    assert play.order(hand_over=True) == ()
    assert play.phase is NodePhase.HANDING_OVER
    assert play.on(Looked(6, True, "a"), Looked(7, True, "a")) == (), "nothing new to hand over"
    assert play.on(Looked(8, False, "b")) == (Sync(),)
    assert play.on(Looked(9, False, "b")) == (), "one at a time"
    assert play.on(Synced(quiescent=False)) == ()
    assert play.on(Looked(10, True, "b+")) == (Sync(),)
    assert play.on(Synced(quiescent=True)) == (StopRun(),)
    play.on(RunEnded(0, saved=True))
    assert (play.report.exit_code, play.report.why, play.node.exit) == (None, "handed over", 0)


def test_hand_over_of_a_job_without_checkpoints_does_not_wait() -> None:
    play = Play().holding()
    play.order(hand_over=True)
    assert play.on(Looked(6, True, "")) == (Sync(),)
    assert play.on(Synced(quiescent=True)) == (StopRun(),)


def test_hand_over_has_an_end_without_a_checkpoint() -> None:
    play = Play().holding()
    play.order(hand_over=True)
    play.on(Looked(6, True, "a"))
    assert play.on(Looked(7, True, "a"), after_s=HAND_OVER_PATIENCE_S) == (Sync(),)
    assert play.on(Synced(quiescent=False)) == (StopRun(),)


def test_a_command_that_ends_while_it_hands_over_has_ended_by_itself() -> None:
    play = Play().holding()
    play.order(hand_over=True)
    play.on(RunEnded(0, saved=True))
    assert play.report.exit_code == 0


def test_an_end_order_stops_everything_and_destroys() -> None:
    for play in (Play(), Play().holding()):
        assert play.order(end=True) == (StopRun(),)
        play.on(RunEnded(143, saved=True))
        assert (play.phase, play.report.exit_code, play.node.exit) == (NodePhase.ENDED, None, EXIT_FENCED)


def test_a_run_that_hangs_is_killed_and_what_it_left_is_published() -> None:
    play = Play().holding()
    play.order(hand_over=True)
    play.on(Looked(6, True, ""), Synced(quiescent=True))
    assert play.ticked(STOP_PATIENCE_S) == (StopRun(kill=True),)
    play.on(RunEnded(137))
    assert play.ticked() == (StartRun(publish_only=True),)
    play.on(RunEnded(0, saved=True))
    assert (play.report.why, play.report.exit_code) == ("handed over", None)


def test_a_notice_ends_it_in_the_time_that_is_left() -> None:
    play = Play().holding()
    assert play.on(Notified(25.0)) == (StopRun(),)
    assert play.report.notice_ends_at_s == play.now_s + 25.0
    play.on(RunEnded(143, saved=False))
    assert play.node.exit == NOT_SAVED, "there is no time for another try"
    assert play.report.exit_code is None


def test_a_fenced_run_is_lost_at_any_time() -> None:
    for play in (Play(), Play().holding()):
        play.on(RunEnded(EXIT_FENCED, last_words="another node was faster"))
        assert (play.phase, play.node.exit) == (NodePhase.LOST, EXIT_FENCED)
        assert play.report.why == "another node was faster"


def test_a_store_that_does_not_answer_yet_is_tried_again_and_anything_else_is_unfit() -> None:
    play = Play()
    play.on(RunEnded(4))
    assert play.ticked() == (StartRun(),)
    play.on(RunEnded(3, last_words="no such setting"))
    assert (play.phase, play.report.exit_code, play.node.exit) == (NodePhase.UNFIT, None, 1)
    assert "no such setting" in play.report.why
    missing = Play()
    missing.on(RunEnded(127, last_words="no program"))
    assert missing.report.exit_code == 127


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Passed, st.sampled_from(["gpu", "store"])),
    st.just(Failed("gpu", "broken")),
    st.builds(Noted, st.sampled_from(["prefetched", "claimed", "first_read", "started"]), st.floats(1, 2)),
    st.builds(
        lambda epoch, seq, permit, over, end: Ordered(Orders(epoch, seq, permit, over, end)),
        st.integers(1, 2), st.integers(1, 9), st.none() | st.integers(1, 3), st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    st.builds(Looked, st.integers(0, 9), st.booleans(), st.sampled_from(["", "a", "b"])),
    st.builds(Synced, st.booleans()),
    st.builds(RunEnded, st.sampled_from([0, 1, 3, 4, 12, 13, 127, 137, 143]), st.booleans()),
    st.just(Notified(5.0)),
    st.just(Tick()),
)  # fmt: skip


@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 1.0, 61.0, 2000.0])), max_size=60))
@settings(max_examples=400, deadline=None)
def test_in_any_order_of_events_its_words_stay_true(story: list[tuple[Event, float]]) -> None:
    node, commands = begin(Rules(2), Report("00c0ffee-1", 1, NodePhase.BOOTED))
    now_s = 0.0
    for event, after_s in story:
        now_s += after_s
        if isinstance(event, RunEnded) and not node.running:
            continue  # nothing lives that could end
        before = node
        node, commands = turn(node, event, now_s)
        check(before, node, commands)


def check(before: Node, node: Node, commands: tuple[Command, ...]) -> None:
    assert ORDER.index(node.report.phase) >= ORDER.index(before.report.phase), "phases only go down the list"
    changed = replace(node.report, seq=before.report.seq) != before.report
    assert node.report.seq == before.report.seq + changed
    if before.exit is not None:
        assert (node, commands) == (before, ())
    for command in commands:
        if isinstance(command, StartRun):
            assert not before.running, "never two at once"
            assert node.report.phase not in (NodePhase.ENDED, NodePhase.LOST)
            assert command.publish_only or node.report.phase is not NodePhase.UNFIT
    if any(isinstance(command, StopRun | Sync) for command in commands):
        assert before.running
    if node.exit is not None:
        assert not node.running
        assert node.report.phase in (NodePhase.ENDED, NodePhase.UNFIT, NodePhase.LOST)
    if node.exit == 0:
        assert node.report.exit_code in (0, None)


H100 = SeenGpu("NVIDIA H100 80GB HBM3", 85_520_809_984, "yes")


def test_gpus_are_compared_with_what_was_rented() -> None:
    wish = Wish(parse_gpu("H100"), gpu_count=2)
    assert judge_gpus([H100, H100], wish, "") == Passed("gpu", {"gpu": "2 × NVIDIA H100 80GB HBM3", "cuda": "yes"})
    for seen, problem, why in (
        ([H100], "", "1 GPUs are visible, 2 were rented"),
        ([], "there is no libcuda here", "there is no libcuda here"),
        ([H100, SeenGpu("NVIDIA A100-SXM4-80GB", 85_000_000_000, "yes")], "", "A100 SXM 80GB), wanted was H100"),
        ([H100, replace(H100, works="cuMemcpyHtoD_v2 says 700")], "", "CUDA does not work on"),
    ):
        found = judge_gpus(seen, wish, problem)
        assert isinstance(found, Failed)
        assert why in found.why
    assert isinstance(judge_gpus([replace(H100, works="")] * 2, wish, ""), Passed), "nvidia-smi cannot try CUDA"


def test_the_slower_direction_decides() -> None:
    assert isinstance(judge_store(100.0, 30.0, 20.0), Passed)
    for up, down in ((19.0, 900.0), (900.0, 19.0), (0.0, 0.0)):
        found = judge_store(up, down, 20.0)
        assert isinstance(found, Failed)
        assert "wanted are 20" in found.why
