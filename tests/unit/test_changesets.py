"""Do folding, sections and rebasing mean the same as applying change sets one by one?"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import changesets, sections
from spotwarp_fs.core.changesets import ChangeSet, DropBlocks, apply, decode_records, encode_records, fold
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.rebase import Reuse, Rewrite, merge_section, plan_merge
from spotwarp_fs.core.records import FrameRef, block_key, entry_key, inode_key, xattr_key
from spotwarp_fs.core.sections import MetadataWriter, Root, Section, SectionKind, encode_root, parse_root
from spotwarp_fs.core.types import BlockIndex, Inode, PackId

GOLDEN = Path(__file__).parent / "golden"


def ref(number: int) -> bytes:
    return FrameRef(PackId("00000001-00000000000000aa"), number, 7, 9, number.to_bytes(32, "big")).encode()


GOLDEN_SECTIONS = (
    Section(SectionKind.BLOCKS, b"b1", b"b9", 700, FrameRef.decode(ref(1))),
    Section(SectionKind.TREE, b"e1", b"x2", 12, FrameRef.decode(ref(2))),
)
inodes = st.integers(1, 6).map(Inode)
blocks = st.integers(0, 9).map(BlockIndex)
block_puts = st.tuples(st.builds(block_key, inodes, blocks), st.integers(0, 99).map(ref))
other_keys = st.one_of(
    st.builds(inode_key, inodes),
    st.builds(entry_key, inodes, st.binary(min_size=1, max_size=3)),
    st.builds(xattr_key, inodes, st.just(b"user.x")),
    st.just(b"sname"),
)
puts = st.one_of(block_puts, st.tuples(other_keys, st.binary(max_size=40)))
deletes = st.tuples(st.one_of(st.builds(block_key, inodes, blocks), other_keys), st.none())
change_sets = st.builds(
    ChangeSet.of,
    st.dictionaries(inodes, blocks, max_size=3),
    st.lists(st.one_of(puts, deletes), max_size=25).map(dict),
)


def naive(sets: list[ChangeSet]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for change_set in sets:
        for drop in change_set.drops:
            for block in range(drop.first_block, 100):
                state.pop(block_key(drop.ino, BlockIndex(block)), None)
        for key, value in change_set.changes:
            state.pop(key, None)
            if value is not None:
                state[key] = value
    return state


class Packs:
    """A store of finished metadata packs, and the names given to them."""

    def __init__(self) -> None:
        self.bodies: dict[PackId, bytes] = {}
        self.count = 0

    def name(self) -> PackId:
        self.count += 1
        return PackId(f"00000001-{self.count:016x}")

    def keep(self, writer: MetadataWriter) -> None:
        self.bodies.update(writer.finish())

    def load(self, frame: FrameRef) -> bytes:
        return open_frame(frame, self.bodies[frame.pack][frame.offset : frame.offset + frame.stored_bytes])

    def root(self, frame: FrameRef) -> Root:
        return parse_root(self.load(frame))

    def content(self, root: Root) -> ChangeSet:
        if not root.sections:
            return root.records
        return changesets.concat(decode_records(self.load(section.frame)) for section in root.sections)

    def rebase(self, base: Root | None, changes: ChangeSet) -> tuple[FrameRef, int]:
        writer, reused = MetadataWriter(self.name), 0
        stream = writer.stream()
        for step in plan_merge(base, changes):
            match step:
                case Reuse(section):
                    stream.reuse(section)
                    reused += 1
                case Rewrite(section, given, part):
                    if section is not None:
                        given = changesets.puts_of(decode_records(self.load(section.frame)))
                    stream.extend(merge_section(given, part))
        written = stream.finish()
        self.keep(writer)
        assert written.records == len(self.content(self.root(written.root)).changes)
        return written.root, reused


@given(change_sets)
def test_records_come_back(change_set: ChangeSet) -> None:
    found = decode_records(encode_records(change_set))
    assert (list(found.drops), list(found.changes)) == (list(change_set.drops), list(change_set.changes))


@given(change_sets, st.data())
def test_a_damaged_stream_is_corrupt_or_another_valid_one_but_never_a_crash(
    change_set: ChangeSet, data: st.DataObject
) -> None:
    stream = bytearray(encode_records(change_set))
    if not stream:
        return
    stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(stream)))
    for candidate in (bytes(stream), bytes(stream[:cut])):
        try:
            again = decode_records(candidate)
        except Corrupt:
            continue
        assert encode_records(again) == candidate


@pytest.mark.history("H4")
@given(st.lists(change_sets, max_size=5))
def test_apply_and_fold_agree_with_the_naive_meaning(sets: list[ChangeSet]) -> None:
    one_by_one: dict[bytes, bytes] = {}
    for change_set in sets:
        apply(one_by_one, change_set)
    at_once: dict[bytes, bytes] = {}
    apply(at_once, fold(sets))
    assert one_by_one == at_once == naive(sets)


@settings(max_examples=100)
@given(st.lists(change_sets, min_size=1, max_size=6), st.integers(60, 300), st.integers(1, 400))
def test_rebasing_again_and_again_equals_applying(sets: list[ChangeSet], section_bytes: int, inline_bytes: int) -> None:
    packs = Packs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "SECTION_BYTES", section_bytes)
        patch.setattr(sections, "INLINE_BYTES_MAX", inline_bytes)
        patch.setattr("spotwarp_fs.core.rebase.SMALL_SECTION_BYTES", section_bytes // 4)
        base: Root | None = None
        for at, change_set in enumerate(sets):
            frame, _ = packs.rebase(base, change_set)
            base = packs.root(frame)
            assert dict(changesets.puts_of(packs.content(base))) == naive(sets[: at + 1])
            assert all(s.kind is not SectionKind.DROPS for s in base.sections)


@settings(max_examples=100)
@given(change_sets, st.integers(60, 300), st.integers(1, 400))
def test_a_written_change_set_comes_back_and_sections_do_not_mix(
    change_set: ChangeSet, section_bytes: int, inline_bytes: int
) -> None:
    packs = Packs()
    writer = MetadataWriter(packs.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sections, "SECTION_BYTES", section_bytes)
        patch.setattr(sections, "INLINE_BYTES_MAX", inline_bytes)
        written = writer.write(change_set)
        packs.keep(writer)
    root = packs.root(written.root)
    found = packs.content(root)
    assert (list(found.drops), list(found.changes)) == (list(change_set.drops), list(change_set.changes))
    for section in root.sections:
        part = decode_records(packs.load(section.frame))
        assert {sections.kind_of(key) for key, _ in part.changes} <= {section.kind}
        assert bool(part.drops) == (section.kind is SectionKind.DROPS)
        assert section.records == len(part.drops) + len(part.changes)
    for ino in range(1, 7):
        near = [decode_records(packs.load(section.frame)) for section in root.blocks_of(Inode(ino))]
        mine = {key: value for part in near for key, value in part.changes if key[:9] == b"b" + ino.to_bytes(8, "big")}
        if root.sections:
            assert mine == {k: v for k, v in change_set.changes if k[:9] == b"b" + ino.to_bytes(8, "big")}
            assert [d for p in near for d in p.drops if d.ino == ino] == [d for d in change_set.drops if d.ino == ino]


def big_base(packs: Packs, files: int = 400, blocks_each: int = 150) -> Root:
    state: dict[bytes, bytes | None] = {}
    for ino in range(1, files + 1):
        state[inode_key(Inode(ino))] = bytes(80)
        state.update({block_key(Inode(ino), BlockIndex(b)): ref(ino * 1000 + b) for b in range(blocks_each)})
    frame, _ = packs.rebase(None, ChangeSet.of({}, state))
    return packs.root(frame)


def test_untouched_sections_are_taken_over_by_reference() -> None:
    packs = Packs()
    base = big_base(packs)
    assert len(base.sections) >= 5
    one_block = ChangeSet.of({}, {block_key(Inode(3), BlockIndex(1)): ref(1)})
    frame, reused = packs.rebase(base, one_block)
    assert reused == len(base.sections) - 1
    kept = {section.frame for section in packs.root(frame).sections}
    assert len(kept & {section.frame for section in base.sections}) == reused


def test_what_one_drop_covers_is_not_even_loaded() -> None:
    packs = Packs()
    base = big_base(packs, files=2, blocks_each=60_000)
    gone = ChangeSet.of({Inode(1): BlockIndex(0)}, {inode_key(Inode(1)): None})
    steps = plan_merge(base, gone)
    loaded = [step.section for step in steps if isinstance(step, Rewrite) and step.section is not None]
    assert len(steps) < len(base.sections)
    assert len([s for s in loaded if s.kind is SectionKind.BLOCKS]) <= 1
    frame, _ = packs.rebase(base, gone)
    left = dict(changesets.puts_of(packs.content(packs.root(frame))))
    assert len(left) == 60_001
    assert inode_key(Inode(2)) in left


def test_small_sections_do_not_pile_up() -> None:
    packs = Packs()
    base = big_base(packs, files=60)
    begun = len(base.sections)
    for ino in range(1000, 1030):
        frame, _ = packs.rebase(base, ChangeSet.of({}, {inode_key(Inode(ino)): b"x" * 80}))
        base = packs.root(frame)
    assert len(base.sections) <= begun + 2


def test_a_mount_needs_no_block_sections() -> None:
    base = big_base(Packs())
    assert {section.kind for section in base.without_blocks()} == {SectionKind.TREE}
    assert len(base.without_blocks()) == 1


@pytest.mark.parametrize(
    "stream",
    [
        b"\x07",
        encode_records(ChangeSet(changes=[(b"i2", b""), (b"i1", b"")])),
        encode_records(ChangeSet(changes=[(b"i1", b""), (b"i1", None)])),
        encode_records(ChangeSet(drops=[DropBlocks(Inode(2), BlockIndex(0)), DropBlocks(Inode(1), BlockIndex(0))])),
        changesets.encode_change(b"i1", b"") + changesets.encode_drop(DropBlocks(Inode(2), BlockIndex(0))),
        encode_records(ChangeSet(changes=[(b"i1", b"value")]))[:-1],
    ],
)
def test_disorder_is_corrupt(stream: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_records(stream)


def test_writing_refuses_what_must_not_leave_the_node() -> None:
    writer = MetadataWriter(Packs().name)
    with pytest.raises(AssertionError, match="never leaves the node"):
        writer.write(ChangeSet(changes=[(b"Mname", b"")]))
    with pytest.raises(AssertionError, match="no published block"):
        writer.write(ChangeSet(changes=[(block_key(Inode(1), BlockIndex(0)), b"\x05" + ref(1))]))


def test_a_base_with_a_delete_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="1 deletes"):
        changesets.puts_of(ChangeSet(changes=[(b"i1", None)]))


def test_golden_records_and_root() -> None:
    """Bytes of format 1: a change here is a change of the format."""
    change_set = ChangeSet.of(
        {Inode(5): BlockIndex(2)},
        {
            block_key(Inode(5), BlockIndex(0)): ref(3),
            entry_key(Inode(1), b"a.pt"): None,
            inode_key(Inode(5)): b"record",
        },
    )
    golden = bytes.fromhex((GOLDEN / "changeset.hex").read_text())
    assert encode_records(change_set) == golden
    assert encode_records(decode_records(golden)) == golden
    sections_root = bytes.fromhex((GOLDEN / "root_sections.hex").read_text())
    assert encode_root(GOLDEN_SECTIONS) == sections_root
    assert parse_root(sections_root) == Root(sections=GOLDEN_SECTIONS)
    inline = bytes.fromhex((GOLDEN / "root_inline.hex").read_text())
    assert parse_root(inline).records == decode_records(golden)


@given(st.data())
def test_a_damaged_root_is_corrupt_or_another_valid_one(data: st.DataObject) -> None:
    body = bytearray.fromhex((GOLDEN / "root_sections.hex").read_text())
    cut = bytes(body[: data.draw(st.integers(0, len(body) - 1))])
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        parse_root(cut)
    with contextlib.suppress(Corrupt):
        parse_root(bytes(body))
