"""Does what somebody waits for always come next?"""

from __future__ import annotations

from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.engine.streams import Streams
from spotwarp_fs.engine.turns import Rank, Turns

INO = Inode(7)


def test_demand_comes_first_and_a_quarter_of_the_places_is_kept_for_it() -> None:
    turns = Turns(4)
    background = [turns.line_up(Rank.BACKGROUND) for _ in range(6)]
    assert [turn.admitted.is_set() for turn in background] == [True] * 3 + [False] * 3
    demand = [turns.line_up(Rank.DEMAND) for _ in range(3)]
    assert [turn.admitted.is_set() for turn in demand] == [True, False, False]
    turns.leave(background[0])
    assert demand[1].admitted.is_set()
    assert not background[3].admitted.is_set()
    turns.leave(demand[1])
    assert demand[2].admitted.is_set()
    turns.leave(demand[0])
    assert background[3].admitted.is_set()


def test_what_is_in_the_line_already_is_moved_to_the_front_when_somebody_waits_for_it() -> None:
    turns = Turns(2)
    background = [turns.line_up(Rank.BACKGROUND) for _ in range(4)]
    turns.promote(background[3])
    assert background[3].admitted.is_set()
    assert not background[1].admitted.is_set()
    turns.promote(background[0])  # under way: its place stays one of the background's
    turns.leave(background[3])
    assert not background[1].admitted.is_set()
    turns.leave(background[0])
    assert background[1].admitted.is_set()


def test_whoever_leaves_the_line_leaves_no_gap() -> None:
    turns = Turns(1)
    first, second, third = (turns.line_up(Rank.DEMAND) for _ in range(3))
    turns.leave(second)
    turns.leave(first)
    assert third.admitted.is_set()
    turns.leave(third)
    assert turns.line_up(Rank.BACKGROUND).admitted.is_set()


def note(streams: Streams, block: int) -> tuple[range, bool]:
    advice = streams.note(INO, BlockIndex(block), BlockIndex(block))
    return advice.ahead, advice.whole


def test_a_file_read_in_order_is_asked_for_further_and_further_ahead_and_never_twice() -> None:
    streams = Streams(window_max=32, step=8)
    asked = [ahead for block in range(100) if (ahead := note(streams, block)[0])]
    assert asked[0] == range(1, 5)
    assert [part.start for part in asked[1:]] == [part.stop for part in asked[:-1]]
    assert max(map(len, asked)) <= 32
    assert 100 <= asked[-1].stop <= 100 + 32


def test_the_same_block_again_says_nothing_and_what_was_declined_is_asked_for_again() -> None:
    streams = Streams(window_max=32, step=8)
    ahead, _ = note(streams, 0)
    assert note(streams, 0) == (range(0), False)
    streams.declined(INO, ahead)
    assert note(streams, 1)[0].start == 2


def test_only_header_and_then_a_jump_asks_for_the_whole_file() -> None:
    streams = Streams(window_max=32, step=8)
    assert note(streams, 0)[1] is False
    assert note(streams, 50) == (range(0), True)
    assert note(streams, 90) == (range(0), False)
    other = Streams(window_max=32, step=8)
    assert note(other, 50) == (range(0), False)
    assert note(other, 90) == (range(0), False)
