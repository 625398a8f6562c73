"""Does everything that is scratch stay out of what is published, and nothing else, wherever names go?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import treecheck
from spotwarp_fs.core.policies import PathGlobs
from spotwarp_fs.core.scratch import is_scratch, published, scratch_paths
from spotwarp_fs.engine.export import export
from tests.support.dict_tree import DictMap
from tests.support.scratch_worlds import ScratchWorld

GLOBS = [
    (".c/uv",), ("*.tmp",), ("/a/uv",), ("a/**",), ("a/**/uv",), ("uv", ".c/*"), ("/a", "b/uv/uv"), ("**/uv",),
    ("a**/uv",), (),
]  # fmt: skip
places = st.sampled_from(
    [
        b"a", b"b", b".c", b"d", b"x.tmp", b"a/uv", b"a/b", b"a/x.tmp", b"b/uv", b".c/uv", b".c/b", b"d/uv", b"d/b",
        b"a/b/uv", b"a/uv/b", b".c/uv/b", b".c/uv/x.tmp", b".c/uv/b/a", b"d/uv/b", b"d/uv/b/a", b"b/uv/uv",
    ]
)  # fmt: skip
blocks = st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("mkdir"), places),
    st.tuples(st.just("create"), places),
    st.tuples(st.just("link"), places, places),
    st.tuples(st.just("remove"), places),
    st.tuples(st.just("move"), places, places, st.sampled_from([0, 0, 0, 2])),
    st.tuples(st.just("write"), places, blocks),
    st.tuples(st.just("truncate"), places, blocks),
    st.tuples(st.just("begin")),
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("settings"), st.sampled_from(GLOBS)),
)
BEGINNING = [
    ("mkdir", b"a"), ("mkdir", b".c"), ("mkdir", b"a/uv"), ("mkdir", b".c/uv"), ("mkdir", b".c/uv/b"),
    ("create", b".c/uv/b/a"), ("write", b".c/uv/b/a", 1), ("create", b"b"), ("write", b"b", 0),
]  # fmt: skip


@pytest.mark.timeout(300)
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GLOBS), st.lists(operations, max_size=25))
def test_tables_and_published_states_are_what_full_paths_say(
    globs: tuple[str, ...], program: list[tuple[object, ...]]
) -> None:
    world = ScratchWorld(PathGlobs(globs))
    for operation in [*BEGINNING, *program]:
        world.perform(operation)
        assert not world.wrong_tables(), operation
        assert not treecheck.check(published(world.tree)), operation
    world.publish(True)
    world.begin()
    world.publish(True)
    assert not world.wrong_head()
    head = DictMap()
    head.rows = world.head
    assert not treecheck.check(head, node_tables=False)


@pytest.mark.parametrize("globs", GLOBS)
@given(path=st.lists(st.sampled_from([b"a", b"b", b"uv", b".c", b"x.tmp", b"auv", b"abuv"]), max_size=5))
def test_the_cheap_look_at_a_name_never_misses_a_match(globs: tuple[str, ...], path: list[bytes]) -> None:
    known = PathGlobs(globs)
    if path and known.matches(b"/".join(path)):
        assert known.may_end(path[-1])


def world_of(*operations: tuple[object, ...], globs: tuple[str, ...] = (".c/uv",)) -> ScratchWorld:
    world = ScratchWorld(PathGlobs(globs))
    for operation in operations:
        assert world.perform(operation), operation
    return world


CACHE = (("mkdir", b".c"), ("mkdir", b".c/uv"), ("create", b".c/uv/f"), ("write", b".c/uv/f", 0))


def test_what_was_made_as_scratch_leaves_no_trace_in_a_change_set() -> None:
    world = world_of(*CACHE, ("begin",), ("publish", True))
    assert not [key for key in world.head if b"f" in key[9:]]
    assert world.tree.get(b"T" + world.place(b".c/uv")[0].to_bytes(8) + b"uv") is not None
    for operation in (("create", b".c/uv/g"), ("write", b".c/uv/g", 2), ("truncate", b".c/uv/g", 1), ("begin",)):
        assert world.perform(operation)
    assert world.cut is not None
    assert not export(world.cut, world.head_seq)


def test_renaming_one_name_of_a_file_onto_another_changes_nothing() -> None:
    world = world_of(("mkdir", b"a"), ("create", b"x.tmp"), ("link", b"x.tmp", b"a/x.tmp"), globs=("*.tmp",))
    assert world.perform(("move", b"x.tmp", b"a/x.tmp", 0))
    assert len(world.tables()[1]) == 2
    assert not world.wrong_tables()


def test_a_link_out_of_scratch_publishes_the_file_with_its_blocks() -> None:
    world = world_of(*CACHE, ("begin",), ("publish", True))
    for operation in (("link", b".c/uv/f", b"venv"), ("begin",), ("publish", True)):
        assert world.perform(operation)
    assert is_scratch(world.tree, world.place(b".c/uv/f")[0])
    assert not world.wrong_head()
    assert any(key.startswith(b"b") for key in world.head)


def test_the_last_published_name_takes_the_file_along() -> None:
    world = world_of(*CACHE, ("link", b".c/uv/f", b"venv"), ("begin",), ("publish", True), ("remove", b"venv"))
    world.perform(("begin",))
    world.perform(("publish", True))
    assert not world.wrong_head()
    assert not any(key.startswith(b"b") for key in world.head)
    assert any(key.startswith(b"b") for key in world.tree.rows)


def test_the_name_above_a_match_decides_too() -> None:
    world = world_of(*CACHE, ("begin",), ("publish", True), ("move", b".c", b"d", 0))
    assert world.tables() == (set(), set())
    world.perform(("begin",))
    world.perform(("publish", True))
    assert not world.wrong_head()
    assert world.perform(("move", b"d", b".c", 0))
    assert not world.wrong_tables()
    assert len(world.tables()[0]) == 2


def test_replacing_the_last_published_name_leaves_the_file_to_scratch() -> None:
    world = world_of(*CACHE, ("link", b".c/uv/f", b"venv"), ("create", b"other"), ("begin",), ("publish", True))
    assert world.perform(("move", b"other", b"venv", 0))
    assert not world.wrong_tables()
    world.perform(("begin",))
    world.perform(("publish", True))
    assert not world.wrong_head()


def test_what_comes_back_is_dirty_where_it_has_local_bytes() -> None:
    world = world_of(("mkdir", b".c"), ("mkdir", b".c/uv"), ("create", b"f"), ("write", b"f", 0), ("begin",))
    world.perform(("publish", True))
    for operation in (("move", b"f", b".c/uv/f", 0), ("begin",), ("publish", True), ("move", b".c/uv/f", b"f", 0)):
        assert world.perform(operation)
    states = [value for key, value in world.tree.rows.items() if key.startswith(b"b")]
    assert states == [b"\1"]
    world.perform(("begin",))
    world.perform(("publish", True))
    assert not world.wrong_head()


def test_other_globs_leave_what_lies_in_known_scratch_alone() -> None:
    world = world_of(("mkdir", b"b"), ("mkdir", b"b/uv"), ("mkdir", b"b/uv/uv"), globs=("uv",))
    assert world.perform(("settings", ("uv", "x")))
    assert not world.wrong_tables()


def test_only_the_outermost_scratch_is_named() -> None:
    world = world_of(*CACHE, ("mkdir", b"a"), ("create", b"a/x.tmp"), globs=(".c/uv", "*.tmp", "f"))
    assert sorted(scratch_paths(world.tree)) == [b".c/uv", b"a/x.tmp"]
