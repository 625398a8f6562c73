"""Are journal records read back, and nothing that was torn or damaged? Golden bytes pin the format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.journal import (
    Changes,
    LocalClaims,
    Published,
    Record,
    Replaced,
    SessionBegun,
    Synced,
    _check,
    decode_prefix,
    encode_record,
    journalled_upto,
    last_published,
    sessions_of,
    still_needed,
)
from spotwarp_fs.core.records import DIRTY, BlockState, FrameRef, FrameState, block_key, inode_key
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode, ManifestNumber, PackId, WriterEpoch

INO = Inode(3 << 40 | 5)
OTHER = Inode(3 << 40 | 6)
FRAME = FrameRef(PackId("00000003-00000000000000aa"), 64, 900, 1000, b"d" * 32)
UPLOADED = BlockState(local=False, state=FrameState.UNPUBLISHED, frame=FRAME)


def seq(number: int) -> ChangeSeq:
    return ChangeSeq(number)


def block(number: int, ino: Inode = INO) -> bytes:
    return block_key(ino, BlockIndex(number))


def changes(number: int, rows: dict[bytes, bytes | None], drops: dict[Inode, BlockIndex] | None = None) -> Changes:
    return Changes(seq(number), ChangeSet.of(drops or {}, rows))


EXAMPLES: list[Record] = [
    SessionBegun("5e55", WriterEpoch(3)),
    Changes(seq(9), ChangeSet(changes=((block(1), None),)), ((seq(7), ChangeSet(changes=((block(0), b"x"),))),)),
    changes(9, {inode_key(INO): b"inode", block(0): DIRTY.encode(), block(1): None}, {INO: BlockIndex(4)}),
    Synced(seq(9), INO),
    Replaced(seq(9), block(0), UPLOADED.encode()),
    Published(seq(9), ManifestNumber(12), "ab" * 32),
]


def test_golden_bytes() -> None:
    assert encode_record(Synced(seq(9), INO)).hex() == (
        "53574a01" "02" "000000" "00000008" "0000000000000009" "0000030000000005"
        "9e17a1f7e793cd8eb07d8fc066cb7165"
    )  # fmt: skip


def test_records_are_read_back() -> None:
    stream = b"".join(map(encode_record, EXAMPLES))
    found, length = decode_prefix(stream)
    assert length == len(stream)
    assert [encode_record(record) for record in found] == [encode_record(record) for record in EXAMPLES]
    assert found[3:] == EXAMPLES[3:]


@given(cut=st.integers(0, 1000))
def test_a_torn_tail_ends_the_journal_at_the_last_whole_record(cut: int) -> None:
    parts = [encode_record(record) for record in EXAMPLES]
    stream = b"".join(parts)
    cut %= len(stream) + 1
    found, length = decode_prefix(stream[:cut])
    whole = [sum(map(len, parts[:count])) for count in range(len(parts) + 1)]
    assert length == max(end for end in whole if end <= cut)
    assert len(found) == whole.index(length)


@given(at=st.integers(0, 1000), flip=st.integers(1, 255))
def test_a_damaged_byte_ends_the_journal_before_its_record(at: int, flip: int) -> None:
    parts = [encode_record(record) for record in EXAMPLES]
    stream = bytearray(b"".join(parts))
    at %= len(stream)
    stream[at] ^= flip
    _, length = decode_prefix(bytes(stream))
    assert length == max(end for n in range(len(parts)) if (end := sum(map(len, parts[:n]))) <= at)


def test_zeros_behind_the_journal_are_not_records() -> None:
    stream = encode_record(EXAMPLES[3])
    assert decode_prefix(stream + bytes(5000)) == ([EXAMPLES[3]], len(stream))


def test_a_whole_record_of_a_newer_kind_is_refused_and_not_skipped() -> None:
    body = bytearray(encode_record(EXAMPLES[3])[:-16])
    body[4] = 77
    with pytest.raises(Corrupt, match="newer"):
        decode_prefix(bytes(body) + _check(bytes(body)))


@pytest.mark.history("L1")
def test_L1_a_session_in_the_journal_makes_its_head_our_own() -> None:
    records: list[Record] = [SessionBegun("old", WriterEpoch(2)), *EXAMPLES]
    assert sessions_of(records) == {"old", "5e55"}
    kept = still_needed(records, seq(9), frozenset({"5e55"}))
    assert kept == [EXAMPLES[0], EXAMPLES[5]]


def test_a_session_goes_on_where_the_journal_ends() -> None:
    assert journalled_upto(EXAMPLES, seq(4)) == 9
    assert journalled_upto(EXAMPLES, seq(12)) == 12
    assert journalled_upto([EXAMPLES[0]], seq(4)) == 4


def test_pruning_keeps_what_a_head_does_not_cover_in_order() -> None:
    newer: list[Record] = [changes(11, {block(2): DIRTY.encode()}), Synced(seq(11), INO)]
    second = Published(seq(10), ManifestNumber(13), "cd" * 32)
    assert still_needed([*EXAMPLES, newer[0], second, newer[1]], seq(10), frozenset()) == [newer[0], second, newer[1]]
    assert last_published([*EXAMPLES, second]) == second
    assert last_published(newer) is None


class TestClaims:
    def test_dirty_blocks_are_claimed_and_framed_ones_are_not(self) -> None:
        claims = LocalClaims([changes(5, {block(0): DIRTY.encode(), block(1): UPLOADED.encode()})])
        assert claims.holds(INO, BlockIndex(0))
        assert not claims.holds(INO, BlockIndex(1))
        assert not claims.holds(OTHER, BlockIndex(0))

    @pytest.mark.history("L4")
    @pytest.mark.parametrize(
        "release",
        [
            Replaced(seq(5), block(3), UPLOADED.encode()),
            changes(6, {block(3): UPLOADED.encode()}),
            changes(6, {block(3): None}),
            changes(6, {block(3): b""}),
            changes(6, {}, {INO: BlockIndex(2)}),
            changes(6, {inode_key(INO): None}),
            Published(seq(5), ManifestNumber(2), ""),
        ],
    )
    def test_L4_a_claim_ends_with_the_record_that_replaces_it(self, release: Record) -> None:
        claims = LocalClaims([changes(5, {block(3): DIRTY.encode(), block(0, OTHER): DIRTY.encode()})])
        assert claims.holds_any(INO, BlockIndex(3))
        claims.note(release)
        assert not claims.holds(INO, BlockIndex(3))
        assert not claims.holds_any(INO)
        assert claims.holds_any(OTHER) == (not isinstance(release, Published))

    def test_a_publish_releases_only_what_it_covers(self) -> None:
        claims = LocalClaims([changes(5, {block(0): DIRTY.encode(), block(1): DIRTY.encode()})])
        claims.note(changes(8, {block(1): DIRTY.encode()}))
        claims.note(Published(seq(5), ManifestNumber(2), ""))
        assert not claims.holds(INO, BlockIndex(0))
        assert claims.holds(INO, BlockIndex(1))
        assert not claims.holds_any(INO, BlockIndex(2))
