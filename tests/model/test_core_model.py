"""Do the namespace rules make a directory? Random programs run against the reference, compared after each step."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from spotwarp_fs.core import namespace, paths, treecheck
from spotwarp_fs.core.changes import ChangeCounter, Recorder
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.records import ENTRY_TABLE, NodeTable, ino_range, table_range
from spotwarp_fs.core.rename import rename
from spotwarp_fs.core.types import ROOT_INODE, ChangeSeq, Inode
from tests.support.calls import Call, settle
from tests.support.core_tree import ROOT_USER, CoreTree
from tests.support.dict_tree import DictMap, DictTree
from tests.support.programs import programs
from tests.support.reference import Reference, diff


@pytest.mark.promise("P-11")
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_every_step_gives_the_reference_s_outcome_and_tree(program: list[Call]) -> None:
    tree = DictTree()
    core, reference = CoreTree(tree, now_ns=1), Reference(now_ns=1)
    for now_ns, drawn in enumerate(program, 2):
        call = settle(drawn, reference)
        before = dict(tree.rows)
        outcome = core.perform(call, now_ns)
        assert outcome == reference.apply(call, now_ns), call
        assert outcome == 0 or tree.rows == before, f"{call} was refused and still changed the tree"
        assert treecheck.check(tree) == [], call
        assert diff(reference.snapshot(), core.snapshot()) == [], call


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(large=False))
def test_reaping_orphans_leaves_nothing_of_them(program: list[Call]) -> None:
    tree, reference = DictTree(), Reference(now_ns=1)
    core = CoreTree(tree, now_ns=1)
    for now_ns, drawn in enumerate(program, 2):
        call = settle(drawn, reference)
        core.perform(call, now_ns)
        reference.apply(call, now_ns)
    gone = namespace.orphans(tree)
    for ino in gone:
        assert paths.names(tree, ino) == []
        assert paths.path_of(tree, ino) is None
        namespace.reap(tree, ino)
    assert namespace.orphans(tree) == []
    assert treecheck.check(tree) == []
    assert diff(reference.snapshot(), core.snapshot()) == []
    tables = b"iex" + NodeTable.NAMES + NodeTable.ORPHANS
    left = [key for ino in gone for table in tables for key, _ in tree.scan(*ino_range(bytes([table]), ino))]
    assert left == []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(large=False))
def test_paths_and_inodes_lead_to_each_other(program: list[Call]) -> None:
    tree, reference = DictTree(), Reference(now_ns=1)
    core = CoreTree(tree, now_ns=1)
    for now_ns, drawn in enumerate(program, 2):
        call = settle(drawn, reference)
        core.perform(call, now_ns)
        reference.apply(call, now_ns)
    found = dict(paths.subtree(tree, ROOT_INODE))
    assert set(found) == set(reference.paths("fdlo"))
    for path, node in found.items():
        assert paths.walk(tree, path) == node
        same = {other for other, seen in found.items() if seen.ino == node.ino}
        assert paths.path_of(tree, node.ino) in same
        named = {b"/".join(filter(None, (paths.path_of(tree, up), name))) for up, name in paths.names(tree, node.ino)}
        assert named == (same if path else set())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(large=False))
def test_what_changed_is_noted_for_the_next_cut(program: list[Call]) -> None:
    """A copy that is only ever given the noted keys is the same tree."""
    tree, copy, reference = DictMap(), DictMap(), Reference(now_ns=1)
    counter = ChangeCounter(ChangeSeq(0))
    core = CoreTree(Recorder(tree, counter), now_ns=1)
    for now_ns, drawn in enumerate(program, 2):
        call = settle(drawn, reference)
        core.perform(call, now_ns)
        reference.apply(call, now_ns)
        if now_ns % 5 == 0:
            publish(tree, copy, counter)
    publish(tree, copy, counter)
    assert copy.rows == {key: value for key, value in tree.rows.items() if key[:1].islower()}


def publish(tree: DictMap, copy: DictMap, counter: ChangeCounter) -> None:
    counter.barrier()
    for row, seq in list(tree.scan(*table_range(NodeTable.CHANGES))):
        key = row[1:]
        value = tree.get(key)
        if value is None:
            copy.delete(key)
        else:
            copy.put(key, value)
        assert tree.get(NodeTable.CHANGELOG + seq) == key
        tree.delete(row)
        tree.delete(NodeTable.CHANGELOG + seq)


def test_a_very_deep_tree_needs_no_recursion() -> None:
    depth, tree = 3_000, DeepTree()
    namespace.make_root(tree, ROOT_USER, 1)
    for ino in range(2, depth):
        namespace.create(tree, Inode(ino - 1), b"d", 0o40755, ROOT_USER, Inode(ino), ino)
    assert paths.path_of(tree, Inode(depth - 1)) == b"/".join([b"d"] * (depth - 2))
    assert sum(1 for _ in paths.subtree(tree, ROOT_INODE)) == depth - 1
    with pytest.raises(Refused) as refusal:
        rename(tree, ROOT_INODE, b"d", Inode(depth - 1), b"loop", 0, depth)
    assert refusal.value.errno == errno.EINVAL


class DeepTree(DictTree):
    """Ranges of one inode found without sorting everything; each inode here has one entry and one name at most."""

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        table, ino = start[:1], start[1:9]
        above = (int.from_bytes(ino) - 1).to_bytes(8)
        key = start + b"d" if table == ENTRY_TABLE else start + above + b"d"
        return iter([(key, self.rows[key])] if key in self.rows else [])
