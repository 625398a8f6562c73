"""Is the workspace after a power loss what the head and the journal prove, and nothing less of what was fsynced?"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core.changes import SEQ_KEY
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes, Record, Replaced, SessionBegun, Synced
from spotwarp_fs.core.rebuild import Rebuilt, rebuild
from spotwarp_fs.core.records import (
    DIRTY,
    BlockState,
    EntryRecord,
    FrameRef,
    FrameState,
    InodeRecord,
    NodeTable,
    block_key,
    decode_u64,
    encode_u32,
    entry_key,
    ino_key,
    inode_key,
    name_key,
)
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ChangeSeq, Inode, PackId, WriterEpoch
from spotwarp_fs.local.memory import MemoryKV
from tests.support.small_node import SmallNode

F, G = Inode(100), Inode(101)
HEAD_SEQ = ChangeSeq(9)


def frame(number: int, raw_bytes: int = BLOCK_BYTES) -> FrameRef:
    return FrameRef(PackId(f"00000001-{number:016x}"), 0, 10, raw_bytes, bytes([number]) * 32)


def published(number: int, raw_bytes: int = BLOCK_BYTES) -> BlockState:
    return BlockState(local=False, state=FrameState.PUBLISHED, frame=frame(number, raw_bytes))


def uploaded(number: int, *, local: bool) -> BlockState:
    return BlockState(local=local, state=FrameState.UNPUBLISHED, frame=frame(number))


def inode(size: int, blocks: int = 0, nlink: int = 1) -> bytes:
    return InodeRecord(0o100644, nlink, 0, 0, size, allocated=blocks * BLOCK_BYTES).encode()


def block(number: int, ino: Inode = F) -> bytes:
    return block_key(ino, BlockIndex(number))


def changes(seq: int, rows: dict[bytes, bytes | None], drop: int | None = None) -> Changes:
    drops = {} if drop is None else {F: BlockIndex(drop)}
    return Changes(ChangeSeq(seq), ChangeSet.of(drops, rows))


def synced(seq: int, ino: Inode = F) -> Synced:
    return Synced(ChangeSeq(seq), ino)


class World:
    """A map as loaded from a head, rebuilt."""

    def __init__(self, head: dict[bytes, bytes], records: list[Record], *, has_base: bool = False) -> None:
        self.kv = MemoryKV()
        with self.kv.write() as txn:
            for key, value in head.items():
                txn.put(key, value)
            self.rebuilt: Rebuilt = rebuild(txn, HEAD_SEQ, records, has_base=has_base)

    def get(self, key: bytes) -> bytes | None:
        with self.kv.read() as view:
            return view.get(key)

    def state(self, number: int, ino: Inode = F) -> BlockState | None:
        value = self.get(block(number, ino))
        return BlockState.decode(value) if value else None

    def size(self, ino: Inode = F) -> int:
        return InodeRecord.decode(self.get(inode_key(ino)) or b"").size

    def trusted(self, ino: Inode = F) -> set[int]:
        return set(self.rebuilt.trusted.get(ino, ()))


def new_file(seq: int, size: int, *blocks: int) -> Changes:
    rows: dict[bytes, bytes | None] = {inode_key(F): inode(size, len(blocks))}
    return changes(seq, rows | {block(number): DIRTY.encode() for number in blocks})


@pytest.mark.history("C4")
@pytest.mark.promise("P-02")
def test_C4_what_was_fsynced_is_there_after_a_power_loss() -> None:
    world = World({}, [new_file(10, 80, 0), synced(10)])
    assert world.trusted() == {0}
    assert world.size() == 80
    assert world.state(0) == DIRTY
    assert world.rebuilt.sizes == {F: 80}
    assert world.rebuilt.cut_back == ()


@pytest.mark.history("C4")
def test_C4_a_file_that_was_never_fsynced_is_cut_back_although_another_files_fsync_named_it() -> None:
    world = World({}, [new_file(10, 80, 0), synced(10, G)])
    assert world.trusted() == set()
    assert world.size() == 0
    assert world.state(0) is None
    (report,) = world.rebuilt.cut_back
    assert (report.ino, report.size_before, report.size_after, report.blocks) == (F, 80, 0, (0,))
    assert InodeRecord.decode(world.get(inode_key(F)) or b"").allocated == 0


@pytest.mark.history("C4")
def test_C4_an_inode_that_lost_a_hole_unknown_to_the_journal_holds_what_its_blocks_hold() -> None:
    lost_a_hole = changes(11, {inode_key(F): inode(2 * BLOCK_BYTES, 1)})
    world = World({}, [new_file(10, 2 * BLOCK_BYTES, 0, 1), synced(10), lost_a_hole])
    assert world.trusted() == {0, 1}
    assert InodeRecord.decode(world.get(inode_key(F)) or b"").allocated == 2 * BLOCK_BYTES


@pytest.mark.history("C4")
@pytest.mark.promise("P-02")
def test_C4_a_later_unsynced_append_does_not_take_the_fsynced_part_away() -> None:
    world = World({}, [new_file(10, 80, 0), synced(10), new_file(12, 160, 0), synced(12, G)])
    assert world.trusted() == {0}
    assert world.size() == 80
    assert world.rebuilt.sizes == {F: 80}


@pytest.mark.history("C4")
def test_C4_blocks_fsynced_behind_an_unsynced_one_are_kept() -> None:
    size = 10 * BLOCK_BYTES
    world = World({}, [new_file(10, size, 7, 9), synced(10), changes(12, {block(2): DIRTY.encode()})])
    assert world.trusted() == {7, 9}
    assert world.size() == size
    assert world.state(2) is None


@pytest.mark.history("C4")
def test_C4_an_unsynced_overwrite_of_a_published_block_falls_back_to_its_frame() -> None:
    head = {inode_key(F): inode(2 * BLOCK_BYTES, 2), block(0): published(1).encode(), block(1): published(2).encode()}
    world = World(head, [changes(10, {block(1): DIRTY.encode()})])
    assert world.state(1) == published(2)
    assert world.trusted() == set()
    assert world.size() == 2 * BLOCK_BYTES
    (report,) = world.rebuilt.cut_back
    assert report.blocks == (1,)
    assert world.get(NodeTable.CHANGES + block(1)) is None


@pytest.mark.history("C4")
def test_C4_a_block_with_a_frame_comes_from_the_store_and_not_from_this_disk() -> None:
    world = World({}, [changes(10, {inode_key(F): inode(5), block(0): uploaded(7, local=True).encode()}), synced(10)])
    assert world.state(0) == uploaded(7, local=False)
    assert world.trusted() == set()
    assert world.rebuilt.cut_back == ()


@pytest.mark.history("C4")
def test_C4_truncated_and_rewritten_without_fsync_is_empty_and_not_zeros() -> None:
    head = {inode_key(F): inode(500, 1), block(0): published(1, 500).encode()}
    rewrite = changes(11, {inode_key(F): inode(300, 1), block(0): DIRTY.encode()}, drop=0)
    earlier: list[Record] = [changes(10, {block(0): DIRTY.encode()}), synced(10)]
    nothing: list[Record] = []
    for before in (nothing, earlier):
        world = World(head, [*before, rewrite])
        assert world.size() == 0
        assert world.state(0) is None
        assert world.trusted() == set()


@pytest.mark.history("H5")
def test_H5_an_unsynced_truncation_inside_a_block_that_falls_back_is_undone_with_it() -> None:
    head = {inode_key(F): inode(100, 1), block(0): published(1, 100).encode()}
    world = World(head, [changes(10, {inode_key(F): inode(50, 1), block(0): DIRTY.encode()})])
    assert world.state(0) == published(1, 100)
    assert world.size() == 100


@pytest.mark.history("L4")
def test_L4_a_block_fsynced_then_uploaded_evicted_and_punched_is_not_taken_from_disk() -> None:
    replaced = Replaced(ChangeSeq(10), block(0), uploaded(3, local=False).encode())
    world = World({}, [new_file(10, BLOCK_BYTES, 0), synced(10), replaced])
    assert world.trusted() == set()
    assert world.state(0) == uploaded(3, local=False)
    assert world.size() == BLOCK_BYTES


@pytest.mark.history("L4")
@pytest.mark.promise("P-02")
def test_L4_evicted_hydrated_and_overwritten_without_fsync_falls_back_to_the_frame_of_the_fsynced_bytes() -> None:
    replaced = Replaced(ChangeSeq(10), block(0), uploaded(3, local=False).encode())
    again = changes(12, {block(0): DIRTY.encode()})
    world = World({}, [new_file(10, BLOCK_BYTES, 0), synced(10), replaced, again, synced(12, G)])
    assert world.trusted() == set()
    assert world.state(0) == uploaded(3, local=False)
    assert world.get(NodeTable.CHANGES + block(0)) is not None
    assert World({}, [new_file(10, BLOCK_BYTES, 0), synced(10), replaced, again, synced(12)]).trusted() == {0}


@pytest.mark.history("L4")
def test_L4_fsynced_unlinked_and_published_does_not_rise_again() -> None:
    name = entry_key(ROOT_INODE, b"f")
    records = [changes(5, {inode_key(F): inode(80, 1), name: EntryRecord(F, 8).encode(), block(0): DIRTY.encode()})]
    world = World({}, [*records, synced(5)])
    assert world.get(name) is None
    assert world.get(inode_key(F)) is None
    assert world.rebuilt.trusted == {}
    assert world.rebuilt.journal == ()


@pytest.mark.history("L4")
def test_L4_fsynced_then_unlinked_in_the_journal_leaves_nothing() -> None:
    name = entry_key(ROOT_INODE, b"f")
    made: dict[bytes, bytes | None] = {name: EntryRecord(F, 8).encode(), block(0): DIRTY.encode()}
    gone: dict[bytes, bytes | None] = {name: None, inode_key(F): None}
    world = World({}, [changes(10, made | {inode_key(F): inode(80)}), synced(10), changes(11, gone, drop=0)])
    with world.kv.read() as view:
        assert [key for key, _ in view.scan(b"a")] == []
        assert list(view.scan(*(NodeTable.NAMES, b"O"))) == []
    assert world.rebuilt.trusted == {}


@pytest.mark.history("H10")
def test_H10_a_sync_that_began_before_the_write_proves_nothing_of_it() -> None:
    late_report: list[Record] = [new_file(10, 80, 0), synced(10), new_file(12, BLOCK_BYTES + 9, 0, 1), synced(11)]
    world = World({}, late_report)
    assert world.trusted() == {0}
    assert world.size() == 80


@pytest.mark.history("H3")
def test_H3_a_mark_without_its_bytes_never_hides_the_frame() -> None:
    head = {inode_key(F): inode(BLOCK_BYTES, 1), block(0): published(1).encode()}
    world = World(head, [changes(10, {block(0): DIRTY.encode()}), synced(10, G)])
    assert world.state(0) == published(1)


@pytest.mark.history("L4")
@pytest.mark.promise("P-03")
def test_L4_a_truncation_from_before_a_cut_does_not_drop_what_the_cut_published() -> None:
    rewritten = ChangeSet.of({F: BlockIndex(0)}, {inode_key(F): inode(80, 1)})
    head = {inode_key(F): inode(80, 1), block(0): published(5, 80).encode()}
    after_cut: dict[bytes, bytes | None] = {inode_key(G): inode(0)}
    both = Changes(ChangeSeq(12), ChangeSet.of({}, after_cut), ((HEAD_SEQ, rewritten),))
    world = World(head, [both, synced(12, G)])
    assert world.state(0) == published(5, 80)
    assert world.size() == 80
    assert world.get(inode_key(G)) is not None
    before_the_head = World({}, [Changes(ChangeSeq(12), both.change_set, ((ChangeSeq(11), rewritten),))])
    assert before_the_head.get(inode_key(F)) is not None


def test_names_go_both_ways_and_unlinked_inodes_become_orphans() -> None:
    old, new = entry_key(ROOT_INODE, b"old"), entry_key(ROOT_INODE, b"new")
    head = {inode_key(F): inode(0), inode_key(G): inode(0), old: EntryRecord(F, 8).encode()}
    head |= {
        name_key(F, ROOT_INODE, b"old"): b"",
        new: EntryRecord(G, 8).encode(),
        name_key(G, ROOT_INODE, b"new"): b"",
    }
    moved: dict[bytes, bytes | None] = {old: None, new: EntryRecord(F, 8).encode(), inode_key(G): inode(0, nlink=0)}
    world = World(head, [changes(10, moved)])
    with world.kv.read() as view:
        assert [key for key, _ in view.scan(NodeTable.NAMES, b"O")] == [name_key(F, ROOT_INODE, b"new")]
        assert [key for key, _ in view.scan(NodeTable.ORPHANS, b"P")] == [ino_key(NodeTable.ORPHANS, G)]


def test_an_inode_whose_blocks_lie_in_the_base_keeps_them_and_loses_what_was_dropped() -> None:
    unloaded = ino_key(NodeTable.UNLOADED, F)
    head = {inode_key(F): inode(9 * BLOCK_BYTES, 9)}
    rows: dict[bytes, bytes | None] = {block(1): None, block(2): DIRTY.encode()}
    world = World(head, [changes(10, rows, drop=5), synced(10, G)], has_base=True)
    assert world.get(unloaded) == encode_u32(5)
    assert world.get(block(1)) == b""
    assert world.get(NodeTable.CHANGES + block(1)) is not None
    assert world.get(block(2)) is None
    earlier = World(head | {unloaded: encode_u32(3)}, [changes(10, {}, drop=5)], has_base=True)
    assert earlier.get(unloaded) == encode_u32(3)
    emptied = World(head, [changes(10, {inode_key(F): inode(0)}, drop=0)], has_base=True)
    assert emptied.get(unloaded) == encode_u32(0)


def test_changes_are_noted_for_the_next_cut_above_every_seq_of_the_journal() -> None:
    session = SessionBegun("5e55", WriterEpoch(2))
    world = World({}, [session, new_file(10, 80, 0), synced(10), synced(30, G)])
    noted = decode_u64(world.get(NodeTable.CHANGES + block(0)) or b"")
    assert noted > 30
    last = decode_u64(world.get(SEQ_KEY) or b"")
    assert world.rebuilt.journal[0] == session
    kinds = [type(record) for record in world.rebuilt.journal]
    assert kinds == [SessionBegun, Changes, Synced]
    assert world.rebuilt.journal[2] == Synced(ChangeSeq(last), F)


@pytest.mark.history("C4")
def test_C4_what_was_cut_back_stays_so_when_the_power_is_lost_again() -> None:
    first = World({}, [new_file(10, 3 * BLOCK_BYTES, 0, 1, 2), synced(9, G)])
    assert first.size() == 0
    grown = changes(40, {inode_key(F): inode(3 * BLOCK_BYTES), block(0): DIRTY.encode()})
    second = World({}, [*first.rebuilt.journal, grown, synced(40)])
    assert second.trusted() == {0}
    assert second.state(1) is None


NAMES = st.sampled_from([b"a", b"b", b"c"])
OFFSETS = st.sampled_from([0, 90, 5000, BLOCK_BYTES - 50, BLOCK_BYTES, BLOCK_BYTES + 4090, 2 * BLOCK_BYTES + 10])
STEPS = st.one_of(
    st.tuples(st.just("create"), NAMES),
    st.tuples(st.just("write"), NAMES, OFFSETS, st.integers(1, 6000)),
    st.tuples(st.just("write"), NAMES, OFFSETS, st.integers(1, 6000)),
    st.tuples(st.just("truncate"), NAMES, OFFSETS),
    st.tuples(st.just("unlink"), NAMES),
    st.tuples(st.just("fsync"), NAMES),
    st.tuples(st.just("fsync"), NAMES),
    st.tuples(st.just("seal"), NAMES),
    st.tuples(st.just("evict"), NAMES),
    st.tuples(st.just("publish")),
    st.tuples(st.just("freeze")),
    st.tuples(st.just("land")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("lose power")),
)


@pytest.mark.history("C4")
@pytest.mark.history("L4")
@pytest.mark.promise("P-02")
@settings(max_examples=120, deadline=None)
@given(program=st.lists(STEPS, min_size=5, max_size=25), seed=st.integers(0, 1 << 20))
def test_C4_L4_any_program_with_power_losses_keeps_what_was_fsynced(
    program: list[tuple[object, ...]], seed: int
) -> None:
    run_program(program, seed)


def run_program(program: list[tuple[object, ...]], seed: int) -> None:
    rng = random.Random(seed)
    node = SmallNode()
    for name in (b"a", b"b"):
        node.create(name)
    for number, step in enumerate([*program, ("lose power",)]):
        match step:
            case ("write", bytes(name), int(offset), int(length)):
                node.write(name, offset, length, number % 250 + 1)
            case ("truncate", bytes(name), int(size)):
                node.truncate(name, size)
            case (("publish" | "freeze" | "land" | "kill") as verb,):
                getattr(node, str(verb))()
            case ("lose power",):
                node.lose_power(rng)
                node.check_after_power_loss()
            case (str(verb), bytes(name)):
                getattr(node, verb)(name)
            case _:
                raise AssertionError(step)


@pytest.mark.history("L4")
@pytest.mark.promise("P-02")
@pytest.mark.parametrize("seed", range(12))
def test_L4_fsynced_evicted_hydrated_and_appended_to_survives_any_power_loss(seed: int) -> None:
    run_program(
        [
            ("write", b"a", 0, 6000), ("fsync", b"a"), ("seal", b"a"), ("evict", b"a"),
            ("write", b"a", 5000, 2000), ("write", b"b", 0, 10), ("fsync", b"b"),
        ],
        seed,
    )  # fmt: skip


@pytest.mark.history("L4")
@pytest.mark.promise("P-02")
@pytest.mark.parametrize("seed", range(4))
def test_L4_a_restart_does_not_journal_an_old_truncation_again(seed: int) -> None:
    run_program(
        [
            ("write", b"a", 0, 6000), ("truncate", b"a", 0), ("write", b"a", 0, 100), ("fsync", b"a"),
            ("kill",), ("write", b"b", 0, 10), ("fsync", b"b"),
        ],
        seed,
    )  # fmt: skip
