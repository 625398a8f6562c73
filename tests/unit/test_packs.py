"""Is a pack the same bytes whenever it is finished, and does every kind of damage show?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import packs
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import digest, encode_frame, open_frame
from spotwarp_fs.core.packs import PackBuilder, read_index, same_pack, trailer
from spotwarp_fs.core.types import PackId

GOLDEN = Path(__file__).parent / "golden"
PACK = PackId("00000003-00000000deadbeef")


def build(contents: list[bytes], pack: PackId = PACK) -> PackBuilder:
    builder = PackBuilder(pack)
    for raw in contents:
        builder.add(encode_frame(raw), digest(raw), len(raw))
    return builder


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=300), max_size=12))
def test_index_and_frames_come_back(contents: list[bytes]) -> None:
    builder = build(contents)
    body = builder.finish()
    assert body == builder.finish()
    assert len(body) == builder.size_bytes
    refs = read_index(body, expected=PACK)
    assert tuple(refs) == builder.refs
    for ref, raw in zip(refs, contents, strict=True):
        assert open_frame(ref, body[ref.offset : ref.offset + ref.stored_bytes]) == raw


@settings(max_examples=60)
@given(st.data())
def test_every_flipped_bit_and_every_cut_shows(data: st.DataObject) -> None:
    body = bytearray(build([b"abc", b"", bytes(50)]).finish())
    cut = bytes(body[: data.draw(st.integers(0, len(body) - 1))])
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(body), cut):
        with pytest.raises(Corrupt):
            read_index(damaged, expected=PACK)


def test_the_index_can_be_fetched_by_itself() -> None:
    body = build([b"one", b"two" * 50]).finish()
    last = packs.parse_trailer(PACK, len(body), trailer(body))
    rows = body[last.index_offset : last.index_offset + last.index_bytes]
    assert packs.parse_index(PACK, rows) == read_index(body)
    with pytest.raises(Corrupt, match="no multiple"):
        packs.parse_index(PACK, rows[:-1])
    with pytest.raises(Corrupt, match="index rows begin at"):
        packs.parse_trailer(PACK, len(body) + 1, trailer(body))


def test_a_refused_put_is_mine_only_if_length_and_trailer_agree() -> None:
    mine = build([b"one"]).finish()
    other = build([b"two"]).finish()
    assert same_pack(mine, stored_size=len(mine), stored_trailer=trailer(mine))
    assert not same_pack(mine, stored_size=len(mine), stored_trailer=trailer(other))
    assert not same_pack(mine, stored_size=len(mine) + 1, stored_trailer=trailer(mine))


def test_a_pack_under_another_name_is_refused() -> None:
    swapped = build([b"one"], PackId("00000003-00000000deadbee0")).finish()
    with pytest.raises(Corrupt, match="says that it is pack 00000003-00000000deadbee0"):
        read_index(swapped, expected=PACK)


def test_a_pack_has_a_largest_size() -> None:
    builder = PackBuilder(PACK)
    big = bytes(packs.PACK_BYTES_TARGET)
    for _ in range(3):
        builder.add(big, digest(b""), 0)
    assert builder.full
    assert not builder.fits(len(big))
    with pytest.raises(AssertionError, match=str(packs.PACK_BYTES_MAX)):
        builder.add(big, digest(b""), 0)


def test_golden_pack() -> None:
    """Bytes of format 1: a change here is a change of the format."""
    builder = PackBuilder(PACK)
    builder.add(bytes.fromhex("f1000000 00000004") + b"spot", digest(b"spot"), 4)
    builder.add(bytes.fromhex("f1000000 00000000"), digest(b""), 0)
    assert builder.finish() == bytes.fromhex((GOLDEN / "pack.hex").read_text())
