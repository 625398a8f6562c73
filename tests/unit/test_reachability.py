from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import collection
from spotwarp_fs.core.changesets import ChangeSet, apply
from spotwarp_fs.core.collection import Condemned, Inventory, Plan, Refused, Writer
from spotwarp_fs.core.reachability import PackLive, Sweep
from spotwarp_fs.core.records import BLOCK_TABLE, FrameRef, block_key, entry_key
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode, ManifestNumber, PackId, WriterEpoch
from tests.support.inflight_worlds import DictView


def pack(number: int, epoch: int = 1) -> PackId:
    return PackId(f"{epoch:08x}-{number:016x}")


def frame(number: int) -> FrameRef:
    """A frame by number: few packs, several frames in each, of different sizes."""
    return FrameRef(pack(number % 4), number * 100, number + 1, 50, bytes([number]) * 32)


def number_(value: int) -> ManifestNumber:
    return ManifestNumber(value)


inodes = st.integers(2, 4).map(Inode)
keys = st.builds(block_key, inodes, st.integers(0, 3).map(BlockIndex))
refs = st.integers(0, 15).map(lambda n: frame(n).encode())
other_keys = st.just(entry_key(ROOT_INODE, b"name"))
change_sets = st.builds(
    ChangeSet.of,
    st.dictionaries(inodes, st.integers(0, 3).map(BlockIndex), max_size=2),
    st.dictionaries(keys | other_keys, st.none() | refs, max_size=4),
)
bases = st.dictionaries(keys, refs, max_size=8)


def states_of(
    base: Mapping[bytes, bytes], base_number: int, after: Sequence[ChangeSet]
) -> dict[int, dict[bytes, bytes]]:
    """Every state in full: the naive way."""
    states = {base_number: dict(base)}
    for number, change_set in enumerate(after, base_number + 1):
        states[number] = dict(states[number - 1])
        apply(states[number], change_set)
    return states


def naive(
    states: Mapping[int, Mapping[bytes, bytes]], head: int, retained: set[int], anchors: set[int]
) -> dict[PackId, PackLive]:
    def frames(numbers: set[int]) -> set[FrameRef]:
        rows = (row for n in numbers if n in states for row in states[n].items())
        return {FrameRef.decode(value) for key, value in rows if key[:1] == BLOCK_TABLE}

    of_head, of_any = frames({head}), frames(retained | {head})
    anchored = {ref.pack for ref in frames(anchors)}
    return {
        name: PackLive(
            sum(ref.stored_bytes for ref in of_head if ref.pack == name),
            sum(ref.stored_bytes for ref in of_any if ref.pack == name),
            name in anchored,
        )
        for name in {ref.pack for ref in of_any}
    }


@given(bases, st.integers(0, 3), st.lists(change_sets, max_size=6), st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.promise("P-13")
def test_a_sweep_finds_what_full_states_would(
    base: dict[bytes, bytes], base_number: int, after: list[ChangeSet], data: st.DataObject
) -> None:
    states = states_of(base, base_number, after)
    head = max(states)
    retained = data.draw(st.sets(st.sampled_from(sorted(states))))
    anchors = data.draw(st.sets(st.sampled_from(sorted(retained)))) if retained else set()
    chain = [(number_(n), change_set) for n, change_set in enumerate(after, base_number + 1)]
    sweep = Sweep(number_(head), map(number_, retained), map(number_, anchors))
    sweep.chain(number_(base_number), sorted(base.items()), chain)
    assert sweep.result() == naive(states, head, retained, anchors)


@given(bases, st.lists(change_sets, min_size=2, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.history("H6")
def test_H6_a_retained_state_counts_through_its_own_chain_after_a_new_base(
    base: dict[bytes, bytes], after: list[ChangeSet], data: st.DataObject
) -> None:
    states = states_of(base, 0, after)
    head = max(states)
    rebased = data.draw(st.integers(1, head))
    retained = data.draw(st.sets(st.sampled_from(sorted(states))))
    chain = [(number_(n), change_set) for n, change_set in enumerate(after, 1)]
    sweep = Sweep(number_(head), map(number_, retained))
    blocks = [row for row in states[rebased].items() if row[0][:1] == BLOCK_TABLE]
    sweep.chain(number_(rebased), blocks, chain[rebased:])
    sweep.chain(number_(0), base.items(), chain, upto=number_(rebased - 1))
    assert sweep.result() == naive(states, head, retained, set())


def test_packs_of_metadata_are_anchored() -> None:
    sweep = Sweep(number_(1), [])
    sweep.metadata([frame(2)])
    assert sweep.result() == {pack(2): PackLive(0, 0, anchored=True)}


def test_many_references_to_one_frame_count_once_and_are_compacted() -> None:
    sweep = Sweep(number_(1), [])
    values = [frame(n).encode() for n in range(3)]
    rows = ((block_key(Inode(2), BlockIndex(n)), values[n % 3]) for n in range(200_000))
    sweep.chain(number_(1), rows, [])
    assert {p: live.head_bytes for p, live in sweep.result().items()} == {pack(0): 1, pack(1): 2, pack(2): 3}
    assert sum(map(len, sweep._of_head._places.values())) < 3 << 18


WRITER = Writer(WriterEpoch(5), serving=True, took_over_s=0.0)
GRACE = 600.0


def planned(inventory: Inventory, writer: Writer = WRITER, *, now_s: float = 10_000, skew_s: float = 0) -> Plan:
    found = collection.plan(inventory, writer, now_s=now_s, skew_s=skew_s, grace_s=GRACE)
    assert isinstance(found, Plan)
    return found


def condemned(*packs: PackId, number: int = 3, decided_s: int = 9_000) -> dict[PackId, Condemned]:
    return {p: Condemned(number_(number), decided_s) for p in packs}


BASE = Inventory(number_(10), {}, {}, {})
A, B, C = pack(1), pack(2), pack(3)


@pytest.mark.promise("P-13")
def test_garbage_is_condemned_first_and_deleted_after_the_grace() -> None:
    inventory = replace(BASE, stored={A: 100})
    assert planned(inventory).condemn == {A}
    assert planned(inventory).delete == set()
    waiting = replace(inventory, condemned=condemned(A, decided_s=9_401))
    assert (planned(waiting).condemn, planned(waiting).delete) == (set(), set())
    assert planned(replace(inventory, condemned=condemned(A, decided_s=9_400))).delete == {A}
    assert planned(replace(BASE, condemned=condemned(A))).forget == {A}


@pytest.mark.history("C9")
@pytest.mark.promise("P-13")
def test_C9_what_only_this_node_refers_to_is_never_condemned_or_deleted() -> None:
    inventory = replace(BASE, stored={A: 100, B: 100}, held={A}, unnamed={B})
    assert planned(inventory).condemn == set()
    again = planned(replace(inventory, condemned=condemned(A, B)))
    assert again.delete == set()
    assert again.disputed == {A, B}


@pytest.mark.history("C10")
@pytest.mark.promise("P-06")
def test_C10_only_a_published_condemnation_counts_and_only_for_a_serving_writer() -> None:
    stored = {A: 100}
    unpublished = replace(BASE, stored=stored, condemned=condemned(A, number=11))
    assert planned(unpublished).delete == set()
    published = replace(BASE, stored=stored, condemned=condemned(A))
    zombie = replace(WRITER, serving=False)
    assert isinstance(collection.plan(published, zombie, now_s=10_000, skew_s=0), Refused)
    starting = replace(WRITER, took_over_s=9_401.0)
    assert planned(published, starting).delete == set(), "its own grace begins with its takeover"
    late = replace(published, published_s={number_(3): 9_401.0})
    assert planned(late).delete == set(), "the publish waited in an outage"


def test_a_clock_too_far_from_the_stores_refuses() -> None:
    assert isinstance(collection.plan(BASE, WRITER, now_s=1, skew_s=-301), Refused)
    assert isinstance(collection.plan(BASE, WRITER, now_s=1, skew_s=300), Plan)


def test_packs_of_a_successor_are_never_touched() -> None:
    newer = pack(1, epoch=6)
    assert planned(replace(BASE, stored={newer: 9}, condemned=condemned(newer))).delete == set()
    assert planned(replace(BASE, stored={newer: 9})).condemn == set()


@pytest.mark.history("H12")
@pytest.mark.promise("P-13")
def test_H12_what_named_snapshots_reach_counts_whole_and_is_not_repacked() -> None:
    inventory = replace(BASE, stored={A: 1000}, live={A: PackLive(50, 50, anchored=True)})
    found = planned(inventory)
    assert found.repack == ()
    assert (found.stored_bytes, found.live_bytes) == (1000, 1000)


def test_a_pack_that_the_last_repacking_emptied_does_not_call_for_more() -> None:
    inventory = replace(BASE, stored={A: 1000, B: 1000}, live={A: PackLive(0, 100), B: PackLive(900, 900)})
    assert planned(inventory).repack == ()
    assert planned(inventory).condemn == set()


def test_least_live_packs_are_repacked_until_the_bound_holds() -> None:
    live = {A: PackLive(100, 100), B: PackLive(300, 300), C: PackLive(900, 900)}
    found = planned(replace(BASE, stored={A: 1000, B: 1000, C: 1000}, live=live))
    assert found.repack == (A, B)
    assert planned(replace(BASE, stored={A: 1000, C: 1000}, live=live)).repack == (A,)
    half = {pack(n): PackLive(550, 550) for n in range(10)}
    assert len(planned(replace(BASE, stored=dict.fromkeys(half, 1000), live=half)).repack) == 7


packs = st.builds(pack, st.integers(0, 6), st.integers(4, 6))
figures = st.builds(
    lambda head, more, anchored: PackLive(head, head + more, anchored),
    st.integers(0, 50),
    st.integers(0, 50),
    st.booleans(),
)
inventories = st.builds(
    Inventory,
    st.just(number_(10)),
    st.dictionaries(packs, st.integers(100, 200)),
    st.dictionaries(packs, figures),
    st.dictionaries(packs, st.builds(Condemned, st.integers(8, 11).map(number_), st.integers(9_000, 10_000))),
    st.frozensets(packs, max_size=2),
    st.frozensets(packs, max_size=2),
    st.dictionaries(st.integers(8, 10).map(number_), st.floats(9_000, 10_000)),
)


@given(inventories, st.floats(0, 10_000))
@settings(max_examples=200)
@pytest.mark.promise("P-13")
def test_no_plan_ever_breaks_a_rule(inventory: Inventory, took_over_s: float) -> None:
    writer = replace(WRITER, took_over_s=took_over_s)
    found = planned(inventory, writer)
    parts = [found.delete, found.forget, found.condemn, frozenset(found.repack), found.disputed]
    assert sum(map(len, parts)) == len(frozenset.union(*parts)), "a pack has one fate"
    reached = {p for p, live in inventory.live.items() if live.retained_bytes or live.anchored}
    for name in found.delete | found.forget:
        row = inventory.condemned[name]
        assert row.number <= inventory.head
        assert 10_000 - row.decided_s >= GRACE
        assert 10_000 - inventory.published_s.get(row.number, took_over_s) >= GRACE
    for name in found.delete | found.condemn | found.forget:
        assert name not in reached | inventory.held | inventory.unnamed
    for name in found.delete | found.condemn:
        assert name in inventory.stored
        assert int(name[:8], 16) <= writer.writer_epoch
    left = found.stored_bytes - sum(
        inventory.stored[p] - min(inventory.stored[p], inventory.live[p].retained_bytes) for p in found.repack
    )
    assert left <= collection.STORED_PER_LIVE * found.live_bytes


def test_rows_of_condemned_packs_are_read_back() -> None:
    view = DictView({collection.condemned_key(A): collection.condemned_row(number_(7), 12.9)})
    assert collection.condemned_in(view) == {A: Condemned(number_(7), 12)}
