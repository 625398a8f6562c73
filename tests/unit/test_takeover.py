from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import inflight, takeover
from spotwarp_fs.core.changesets import ChangeSet, apply, fold
from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.records import BLOCK_TABLE, ENTRY_TABLE, ino_range, inode_key, key_block, key_ino, xattr_key
from spotwarp_fs.core.replacement import Older, Plan, Served, replace_in_flight
from spotwarp_fs.core.retention import retained, touches
from spotwarp_fs.core.subtrees import resolve
from spotwarp_fs.core.takeover import GoBack, Replacement, ServeHead, ServeHeadWithout, decide
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.core.types import BlockIndex, Inode, ManifestNumber
from tests.support.inflight_worlds import SECOND, DictView, World, content, tree

POLICIES = Policies()
PUBLISHED = (b"b", b"e", b"i", b"x")


@dataclass(frozen=True)
class Facts:
    number: ManifestNumber
    created_s: float = 0.0
    in_flight: tuple[InFlightItem, ...] = ()
    barrier: bool = False

    @property
    def quiescent(self) -> bool:
        return all(item.torn for item in self.in_flight)


def item(path: str, *, torn: bool = False) -> InFlightItem:
    return InFlightItem(Inode(7), path.encode(), "file", torn)


OPEN = (item("a.pt"),)
TORN = (item("t.pt", torn=True),)


def states(*about: tuple[float, tuple[InFlightItem, ...], bool]) -> list[Facts]:
    return [Facts(ManifestNumber(n), *facts) for n, facts in enumerate(about, 1)]


def served(found: Sequence[Facts]) -> takeover.Serve:
    return decide(found, [state.number for state in found])


@pytest.mark.promise("P-05")
def test_a_head_with_nothing_in_flight_is_served() -> None:
    assert served(states((0, OPEN, False), (1, (), False))) == ServeHead()


@pytest.mark.promise("P-05")
@pytest.mark.history("M-k")
def test_the_newest_quiescent_state_is_served_while_it_is_young_enough() -> None:
    found = states((0, (), False), (10, (), True), (20, OPEN, False), (910, OPEN, False))
    assert served(found) == GoBack(ManifestNumber(2), (), OPEN)
    older = served(states((0, (), False), (10, (), False), (20, OPEN, False), (910.5, OPEN, False)))
    assert older == ServeHeadWithout((Replacement(OPEN[0], ManifestNumber(2)),), None)


@pytest.mark.history("L12")
@pytest.mark.promise("P-05")
def test_L12_an_answered_barrier_is_never_gone_behind() -> None:
    found = states((0, (), False), (1, OPEN, True), (2, OPEN, False))
    assert served(found) == ServeHeadWithout((Replacement(OPEN[0], ManifestNumber(1)),), ManifestNumber(2))
    unread = [state for state in found if state.number != 2]
    assert isinstance(served(unread), ServeHeadWithout), "a manifest that was not read may have answered one"


@pytest.mark.history("L8")
@pytest.mark.promise("P-05")
def test_L8_torn_things_are_replaced_in_every_state_that_is_served() -> None:
    found = states((0, (), False), (1, TORN, False))
    assert served(found) == ServeHeadWithout((Replacement(TORN[0], ManifestNumber(1)),), None)
    found = states((0, (), False), (1, TORN, False), (2, TORN + OPEN, False))
    assert served(found) == GoBack(ManifestNumber(2), (Replacement(TORN[0], ManifestNumber(1)),), TORN + OPEN)
    assert served(states((0, OPEN, False))) == ServeHeadWithout((Replacement(OPEN[0], None),), None)


def test_a_state_that_is_not_retained_is_neither_served_nor_taken_from() -> None:
    found = states((0, (), False), (1, (), False), (2, OPEN, False))
    assert decide(found, [ManifestNumber(3)]) == ServeHeadWithout((Replacement(OPEN[0], None),), None)
    assert decide(found, [ManifestNumber(1)]) == GoBack(ManifestNumber(1), (), OPEN)


# A small history of a workspace, its states and what each listed.


class Published(World):
    """A world whose states are kept, as manifests would."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[ManifestNumber, DictView] = {}
        self.facts: list[Facts] = []
        self.cut()

    def cut(self, *, barrier: bool = False) -> ManifestNumber:
        changed = [key for key in self.rows if key[:1] == ENTRY_TABLE]
        listed = self.facts[-1].in_flight if self.facts else ()
        directories = inflight.candidates(self, changed, POLICIES, listed)
        found = inflight.in_flight(self, POLICIES, self.now, directories)
        number = ManifestNumber(len(self.facts) + 1)
        self.facts.append(Facts(number, self.now / SECOND, found.items, barrier))
        self.views[number] = published(self)
        return number

    def changes_after(self, number: ManifestNumber, *, drop: bool = False) -> ChangeSet:
        return fold(
            difference(self.views[ManifestNumber(n)], self.views[ManifestNumber(n + 1)], drop=drop)
            for n in range(number, len(self.facts))
        )


def published(view: DictView) -> DictView:
    return DictView({key: value for key, value in view.rows.items() if key[:1] in PUBLISHED})


def difference(before: DictView, after: DictView, *, drop: bool) -> ChangeSet:
    """Write the change set the plain way, or with drops wherever a block changed."""
    keys = before.rows.keys() | after.rows.keys()
    changed = {key: after.get(key) for key in keys if before.get(key) != after.get(key)}
    drops: dict[Inode, BlockIndex] = {}
    if drop:
        drops = {key_ino(key): BlockIndex(0) for key in changed if key[:1] == BLOCK_TABLE}
        changed = {k: v for k, v in changed.items() if v is not None or k[:1] != BLOCK_TABLE}
        for ino in drops:
            changed |= dict(after.scan(*ino_range(BLOCK_TABLE, ino)))
    return ChangeSet.of(drops, changed)


def planned(
    world: Published, at: ManifestNumber, replaced: Sequence[Replacement], behind: Sequence[InFlightItem] = ()
) -> tuple[Plan, DictView]:
    fresh = itertools.count(1 << 40)
    view = world.views[at]
    older = Older(world.facts, world.views.__getitem__)
    plan = replace_in_flight(Served(at, view), replaced, older, POLICIES, lambda: Inode(next(fresh)), behind)
    blocks = {
        copy: [(key_block(k), v) for k, v in world.views[copy.source].scan(*ino_range(BLOCK_TABLE, copy.ino))]
        for copy in plan.copies
    }
    result = DictView(view.rows)
    apply(result.rows, plan.change_set(blocks))
    assert check(result, node_tables=False) == []
    return plan, result


def head_without(world: Published) -> tuple[Plan, DictView]:
    head = world.facts[-1]
    keep = [state.number for state in world.facts]
    return planned(world, head.number, [Replacement(i, _source(world, i, keep)) for i in head.in_flight])


def _source(world: Published, found: InFlightItem, keep: Iterable[ManifestNumber]) -> ManifestNumber | None:
    return takeover.source_of(
        found.path, [s for s in world.facts if s.number in set(keep)], upto=world.facts[-1].number
    )


def save(world: World, directory: str, text: str, names: Sequence[str] = ("model.pt", "optimizer.pt")) -> None:
    for name in names:
        world.write(f"{directory}/{name}", text)


def test_a_file_written_in_place_goes_back_in_place_with_all_its_names() -> None:
    world = Published()
    ino = world.write("last.ckpt", "whole")
    world.link("last.ckpt", "backup")
    world.rows[xattr_key(ino, b"user.step")] = b"1"
    world.cut()
    world.write("last.ckpt", "half", mark=world.open_mark())
    world.rows[xattr_key(ino, b"user.step")] = b"2"
    world.write("log", "later")
    world.cut()
    plan, result = head_without(world)
    assert tree(result) == {"last.ckpt": "whole", "backup": "whole", "log": "later"}
    assert result.get(xattr_key(ino, b"user.step")) == b"1"
    assert [line.hint("me-run") for line in plan.left_out] == ["spotwarp cp me-run:last.ckpt DEST --at 3"]
    assert plan.left_out[0].source == 2


def test_a_half_written_file_that_was_renamed_over_a_good_one_gives_it_back() -> None:
    world = Published()
    good = world.write("last.ckpt", "whole")
    world.cut()
    world.write("tmp", "half", mark=world.open_mark())
    world.rename("tmp", "last.ckpt")
    world.cut()
    _, result = head_without(world)
    assert tree(result) == {"last.ckpt": "whole"}
    assert inode_key(good) in result.rows, "the number is free, so it is kept"


def test_a_good_file_that_lives_on_under_another_name_keeps_its_content_and_number() -> None:
    world = Published()
    good = world.write("last.ckpt", "step 1")
    world.cut()
    world.rename("last.ckpt", "previous.ckpt")
    world.write("previous.ckpt", "step 1, amended")
    world.write("last.ckpt", "half", mark=world.open_mark())
    world.cut()
    _, result = head_without(world)
    assert tree(result) == {"last.ckpt": "step 1", "previous.ckpt": "step 1, amended"}
    assert inode_key(good) in result.rows


@pytest.mark.history("M-a")
def test_Ma_link_counts_are_counted_anew() -> None:
    world = Published()
    ino = world.write("ck.pt", "whole")
    world.link("ck.pt", "best.pt")
    world.cut()
    world.unlink("best.pt")
    world.write("ck.pt", "half", mark=world.open_mark())
    world.write("best.pt", "half too", mark=world.open_mark())
    world.cut()
    _, result = head_without(world)
    assert tree(result) == {"ck.pt": "whole", "best.pt": "whole"}
    assert World.record(result, ino).nlink == 2  # type: ignore[arg-type]


def test_a_directory_that_was_renamed_away_is_copied_and_not_taken_back() -> None:
    world = Published()
    save(world, "out/checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    world.rename("out/checkpoint-1", "out/old")
    world.write("out/checkpoint-1/model.pt", "half", mark=world.open_mark())
    world.cut()
    _, result = head_without(world)
    assert {path: text for path, text in tree(result).items() if text != "/"} == {
        "out/checkpoint-1/model.pt": "one",
        "out/checkpoint-1/optimizer.pt": "one",
        "out/old/model.pt": "one",
        "out/old/optimizer.pt": "one",
    }


@pytest.mark.promise("P-05")
def test_a_half_checkpoint_without_an_older_version_is_absent() -> None:
    world = Published()
    save(world, "checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    save(world, "checkpoint-2", "two", ("model.pt",))
    world.cut()
    plan, result = head_without(world)
    assert sorted(tree(result)) == ["checkpoint-1", "checkpoint-1/model.pt", "checkpoint-1/optimizer.pt"]
    assert plan.put_back == ()
    assert plan.missing == ()


@pytest.mark.promise("P-05")
@pytest.mark.history("L8")
def test_L8_the_last_complete_checkpoint_is_put_back_where_it_was() -> None:
    """Keep-1 rotation removed the old one, and its directory, before the new one was whole."""
    world = Published()
    save(world, "runs/a/checkpoint-1", "one")
    world.write("vocab.pt", "words")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("runs/a")
    save(world, "runs/a/checkpoint-2", "two", ("model.pt",))
    world.write("runs/a/checkpoint-2/optimizer.pt", "half", mark=world.torn_mark())
    world.cut()
    above = world.record(world.at("runs/a"))
    plan, result = head_without(world)
    assert content(result, "runs/a/checkpoint-1/optimizer.pt") == "one"
    assert "runs/a/checkpoint-2" not in tree(result)
    assert plan.put_back == ((b"runs/a/checkpoint-1", ManifestNumber(2)),)
    assert World.record(result, world.at("runs/a")) == above, "times above stay, or rotation deletes the wrong one"  # type: ignore[arg-type]


@pytest.mark.promise("P-05")
def test_going_back_to_a_moment_without_a_checkpoint_puts_the_last_one_back() -> None:
    world = Published()
    save(world, "checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("checkpoint-1")
    back = world.cut()
    world.write("checkpoint-2/model.pt", "half", mark=world.open_mark())
    world.cut()
    found = decide(world.facts, [state.number for state in world.facts])
    assert isinstance(found, GoBack)
    assert found.to == back
    plan, result = planned(world, found.to, found.replaced, found.behind)
    assert content(result, "checkpoint-1/model.pt") == "one"
    assert plan.put_back == ((b"checkpoint-1", ManifestNumber(2)),)


def test_a_glob_without_any_complete_thing_is_served_from_wherever_there_was_one() -> None:
    world = Published()
    save(world, "old-run/checkpoint-7", "seven")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("old-run")
    world.write("new-run/checkpoint-1/model.pt", "half", mark=world.open_mark())
    world.cut()
    plan, result = head_without(world)
    assert content(result, "old-run/checkpoint-7/model.pt") == "seven"
    assert plan.missing == (b"new-run/checkpoint-#",)


def test_a_part_of_a_checkpoint_is_not_put_back_without_the_rest() -> None:
    world = Published()
    save(world, "checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("checkpoint-1")
    world.write("last.pt", "half", mark=world.open_mark())
    world.cut()
    plan, result = head_without(world)
    assert below(tree(result), "checkpoint-1") == below(tree(world.views[ManifestNumber(2)]), "checkpoint-1")
    assert plan.put_back == ((b"checkpoint-1", ManifestNumber(2)),)


def test_a_checkpoint_comes_back_into_a_directory_of_runs_that_is_still_there() -> None:
    world = Published()
    world.write("epoch_runs/notes", "kept")
    save(world, "epoch_runs/checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("epoch_runs/checkpoint-1")
    world.now += 3600 * SECOND
    for name in ("step_1", "step_2"):
        save(world, f"epoch_runs/{name}", "x", ("config.json", ".metadata"))
    world.write("epoch_runs/checkpoint-2/model.pt", "half", mark=world.open_mark())
    world.cut()
    plan, result = head_without(world)
    assert content(result, "epoch_runs/checkpoint-1/model.pt") == "one"
    assert content(result, "epoch_runs/notes") == "kept"
    assert plan.put_back == ((b"epoch_runs/checkpoint-1", ManifestNumber(2)),)


def test_what_cannot_be_put_back_is_reported() -> None:
    world = Published()
    save(world, "out/checkpoint-1", "one")
    world.now += 3600 * SECOND
    world.cut()
    world.rmtree("out")
    world.write("out", "a file now")
    world.write("checkpoint-3/model.pt", "half", mark=world.open_mark())
    world.cut()
    plan, result = head_without(world)
    assert tree(result) == {"out": "a file now"}
    assert plan.missing == (b"checkpoint-#", b"checkpoint-*")


@pytest.mark.history("H16")
@pytest.mark.promise("P-05")
def test_H16_a_write_that_takes_longer_than_the_age_never_replaces_the_good_file() -> None:
    world = Published()
    world.write("last.ckpt", "whole")
    world.cut()
    mark = world.open_mark()
    for minute in range(40):
        world.now += 60 * SECOND
        world.write("last.ckpt", f"half {minute}", mark=mark)
        world.cut()
    found = decide(world.facts, retained(world.facts, world.now / SECOND))
    assert isinstance(found, ServeHeadWithout)
    assert content(planned(world, world.facts[-1].number, found.replaced)[1], "last.ckpt") == "whole"


@pytest.mark.history("C11")
@pytest.mark.parametrize("barriers", [False, True])
def test_C11_shards_written_in_place_are_never_mixed_with_others_metadata(*, barriers: bool) -> None:
    """Case A26, a cut after every step: what is served is a state that existed."""
    world = Published()
    for version in range(1, 4):
        for shard in ("__0_0.distcp", "__1_0.distcp"):
            world.write(shard, "half", mark=world.open_mark())
            served_versions(world, barriers=barriers)
            world.write(shard, str(version))
            served_versions(world, barriers=barriers)
        world.write(".metadata.tmp", str(version))
        if world.find(".metadata") is not None:
            world.unlink(".metadata")
        served_versions(world, barriers=barriers)
        world.rename(".metadata.tmp", ".metadata")
        served_versions(world, barriers=barriers)


def served_versions(world: Published, *, barriers: bool) -> None:
    world.now += SECOND
    head = world.cut(barrier=barriers)
    match decide(world.facts, [state.number for state in world.facts]):
        case ServeHead():
            result = world.views[head]
        case GoBack(to, replaced, behind):
            assert not barriers
            result = planned(world, to, replaced, behind)[1]
        case ServeHeadWithout(replaced, _):
            result = planned(world, head, replaced)[1]
    first, second, metadata = (int(content(result, n) or 0) for n in ("__0_0.distcp", "__1_0.distcp", ".metadata"))
    assert first - 1 <= second <= first
    assert metadata <= second
    assert metadata in (0, first, first - 1)


def test_lost_files_are_named() -> None:
    world = Published()
    world.write("a/kept", "1")
    back = world.cut()
    world.write("a/lost", "2")
    world.link("a/lost", "b")
    world.cut()
    assert sorted(takeover.lost_files(world.changes_after(back), world, POLICIES)) == [b"a/lost", b"b"]


# Properties over random histories.

FILES = ["last.ckpt", "out/best.pt", "log.txt", "out/checkpoint-1/model.pt", "out/checkpoint-1/state.json",
         "out/checkpoint-2/model.pt", "out/checkpoint-2/state.json", "tmp/model.pt"]  # fmt: skip
DIRECTORIES = ["tmp", "out/checkpoint-1", "out/checkpoint-2", "out"]
steps = st.one_of(
    st.tuples(st.sampled_from(["half", "whole", "torn", "finish", "unlink"]), st.sampled_from(FILES), st.none()),
    st.tuples(st.sampled_from(["link", "rename"]), st.sampled_from(FILES), st.sampled_from(FILES)),
    st.tuples(st.just("move"), st.sampled_from(DIRECTORIES), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("rmtree"), st.sampled_from(DIRECTORIES), st.none()),
    st.tuples(st.sampled_from(["cut", "cut", "minute", "quarter"]), st.none(), st.none()),
)


WAITS_S = {"minute": 61, "quarter": 901}


class Story(Published):
    """Each content is written once, so that it tells which write it came from."""

    def step(self, name: str, a: str | None, b: str | None) -> None:
        self.now += SECOND
        if name == "cut":
            self.cut()
        elif name in WAITS_S:
            self.now += WAITS_S[name] * SECOND
        elif name in ("half", "torn", "whole"):
            mark = {"half": self.open_mark(), "torn": self.torn_mark(), "whole": None}[name]
            self.write(str(a), f"{'whole' if mark is None else 'half'} {self.now}", mark=mark)
        elif self.find(str(a)) is not None:
            self.change_names(name, str(a), str(b))

    def change_names(self, name: str, a: str, b: str) -> None:
        target = self.find(b)
        if name == "unlink":
            self.unlink(a)
        elif name == "rmtree":
            self.rmtree(a)
        elif name == "link" and target is None:
            self.link(a, b)
        elif name == "rename" and target != self.at(a):
            self.rename(a, b)
        elif name == "move" and target is None:
            self.move(a, b)

    def move(self, a: str, b: str) -> None:
        if not b.startswith(f"{a}/"):
            self.rename(a, b)


def told(program: Sequence[tuple[str, str | None, str | None]]) -> Story:
    story = Story()
    for step in program:
        story.step(*step)
    story.cut()
    return story


programs = st.lists(steps, max_size=30)


@given(programs, st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.history("L3")
def test_L3_going_back_gives_the_older_tree_and_leaves_bookkeeping_alone(
    program: list[tuple[str, str | None, str | None]], drop: bool, data: st.DataObject
) -> None:
    story = told(program)
    back = ManifestNumber(data.draw(st.integers(1, len(story.facts))))
    after = story.changes_after(back, drop=drop)
    named = (b"sbest", b"\0" * 8)
    change_set = takeover.going_back(fold([after, ChangeSet((), (named,))]), story.views[back])
    rows = dict(story.views[story.facts[-1].number].rows) | dict([named])
    apply(rows, change_set)
    assert rows.pop(named[0]) == named[1]
    assert rows == story.views[back].rows
    needed = takeover.blocks_needed(after)
    changed = [k for k in rows if k[:1] == BLOCK_TABLE and k in dict(change_set.changes)]
    assert {key_ino(key) for key in changed} <= needed


@given(programs)
@settings(max_examples=300, deadline=None)
@pytest.mark.promise("P-05")
def test_no_takeover_ever_serves_half_a_checkpoint(program: list[tuple[str, str | None, str | None]]) -> None:
    story = told(program)
    keep = retained(story.facts, story.now / SECOND)
    decision = decide(story.facts, keep)
    event(type(decision).__name__)
    head = story.facts[-1]
    behind: Sequence[InFlightItem] = ()
    match decision:
        case ServeHead():
            at, replaced = head.number, ()
        case GoBack(to, replaced, behind):
            at = to
        case ServeHeadWithout(replaced, _):
            at = head.number
    plan, result = planned(story, at, replaced, behind)
    facts = story.facts[at - 1]
    served, before = tree(result), tree(story.views[at])
    for path, text in served.items():
        name = path.rpartition("/")[2].encode()
        half = text.startswith("half")
        assert not (half and POLICIES.is_atomic(name)), path
        stream = half and story.now - int(text.split()[1]) > 3600 * SECOND
        assert not half or stream or "/checkpoint-" not in path, path
    put_back = [path for path, _ in plan.put_back]
    replaced_inodes = {r.item.ino for r in replaced}
    for path, text in before.items():
        if touches(facts.in_flight, path.encode()) or story_inode(story, at, path) in replaced_inodes:
            continue
        assert served[path] == text, f"{path} was whole and is not what it was"
    for path in served.keys() - before.keys():
        listed = touches(facts.in_flight, path.encode())
        assert listed or any(path.encode().startswith(p) or p.startswith(path.encode()) for p in put_back), path
    for directory in ("out/checkpoint-1", "out/checkpoint-2"):
        part = below(served, directory)
        versions = [
            below(tree(story.views[s.number]), directory)
            for s in story.facts
            if not touches(s.in_flight, directory.encode())
        ]
        assert not part or part in versions, f"{directory} is of no state in which it was whole"
    for lost in [r.item for r in replaced] + list(behind):
        kin = inflight.family(lost.path)
        alike = [path for path in served if inflight.family(path.encode()) == kin]
        was_there = resolve(story.views[head.number], lost.path) is not None
        assert alike or kin in plan.missing or not was_there or b"/checkpoint-#/" in kin, lost
    assert {line.path for line in plan.left_out} <= {r.item.path for r in replaced}


def below(paths: dict[str, str], directory: str) -> dict[str, str]:
    return {path: text for path, text in paths.items() if path == directory or path.startswith(f"{directory}/")}


def story_inode(story: Story, at: ManifestNumber, path: str) -> Inode | None:
    world = story.copy()
    world.rows = dict(story.views[at].rows)
    return world.find(path)


@given(programs)
@settings(max_examples=100, deadline=None)
def test_a_plan_of_nothing_changes_nothing(program: list[tuple[str, str | None, str | None]]) -> None:
    story = told(program)
    head = replace(story.facts[-1], in_flight=())
    plan, _ = planned(story, head.number, ())
    assert (plan.changes, plan.drops, plan.copies) == ({}, {}, ())
