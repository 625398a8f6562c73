"""Does a reference get exactly the bytes that it promises, or an error that says which frame it was?"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import frames
from spotwarp_fs.core.codec import Effort
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import FrameEncoder, decode_frame, digest, encode_frame, is_zero, open_frame
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import BLOCK_BYTES, PackId

GOLDEN = Path(__file__).parent / "golden"
PACK = PackId("00000003-00000000deadbeef")


def ref_of(raw: bytes, stored: bytes | bytearray, offset: int = 24) -> FrameRef:
    return FrameRef(PACK, offset, len(stored), len(raw), digest(raw))


@settings(max_examples=60)
@given(st.binary(max_size=9000), st.sampled_from(Effort))
def test_a_frame_gives_its_bytes_back(raw: bytes, effort: Effort) -> None:
    stored = encode_frame(raw, effort=effort)
    assert len(stored) <= len(raw) + frames.FRAME_HEADER_BYTES
    assert decode_frame(stored) == raw
    assert encode_frame(memoryview(bytearray(raw)), effort=effort) == stored
    assert open_frame(ref_of(raw, stored), memoryview(stored)) == raw


@settings(max_examples=60)
@given(st.data())
def test_no_flipped_bit_and_no_missing_byte_is_ever_served(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9000))
    raw = (np.arange(size, dtype=np.uint32) // 3).astype(np.uint16).tobytes()
    stored = bytearray(encode_frame(raw, effort=data.draw(st.sampled_from(Effort))))
    ref = ref_of(raw, stored)
    short = stored[: data.draw(st.integers(0, len(stored) - 1))]
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        open_frame(ref, bytes(short))
    with contextlib.suppress(Corrupt):
        assert open_frame(ref, bytes(stored)) == raw


@pytest.mark.promise("P-08")
@pytest.mark.history("H11")
def test_a_perfectly_valid_other_frame_is_refused_and_both_digests_are_named() -> None:
    mine, other = b"weights of step 100" * 99, b"weights of step 200" * 99
    stored = encode_frame(other)
    ref = replace(ref_of(mine, stored), offset=4711)
    with pytest.raises(Corrupt) as caught:
        open_frame(ref, stored)
    for fact in (PACK, "4711", digest(mine).hex(), digest(other).hex()):
        assert fact in str(caught.value)


def test_lengths_are_checked_too() -> None:
    stored = encode_frame(b"abc")
    with pytest.raises(Corrupt, match="its record says 12"):
        open_frame(replace(ref_of(b"abc", stored), stored_bytes=12), stored)
    with pytest.raises(Corrupt, match="has 3 bytes, its record says 4"):
        open_frame(replace(ref_of(b"abc", stored), raw_bytes=4), stored)


def test_damage_in_the_payload_names_pack_offset_and_digest() -> None:
    raw = bytes(range(64)) * 200
    stored = bytearray(encode_frame(raw, effort=Effort.METADATA))
    stored[12] ^= 0xFF
    with pytest.raises(Corrupt) as caught:
        open_frame(ref_of(raw, bytes(stored), offset=31337), bytes(stored))
    assert PACK in str(caught.value)
    assert "31337" in str(caught.value)
    assert digest(raw).hex() in str(caught.value)


@pytest.mark.parametrize("effort", [Effort.DATA, Effort.STORE])
def test_a_block_is_never_larger_than_a_block(effort: Effort) -> None:
    with pytest.raises(AssertionError, match="1048577"):
        encode_frame(bytes(BLOCK_BYTES + 1), effort=effort)
    assert decode_frame(encode_frame(bytes(BLOCK_BYTES + 1), effort=Effort.METADATA)) == bytes(BLOCK_BYTES + 1)


def test_a_header_that_promises_too_much_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(Corrupt, match="4294967295"):
        decode_frame(bytes([frames.FRAME_MAGIC, 1, 0, 0]) + b"\xff" * 4 + b"x")


def test_an_encoder_of_a_file_changes_its_mind_when_the_content_does() -> None:
    rng = np.random.default_rng(3)
    weights = [(rng.standard_normal(BLOCK_BYTES // 4) * 0.02).astype(np.float32).tobytes() for _ in range(3)]
    text = b"".join(b"%d: the quick brown fox\n" % number for number in range(45_000))[:BLOCK_BYTES]
    contents = [*weights, text, text, rng.bytes(BLOCK_BYTES), rng.bytes(BLOCK_BYTES), *weights, weights[0][:5000], b""]
    encoder = FrameEncoder()
    stored = [encoder.encode(raw) for raw in contents]
    assert [decode_frame(frame) for frame in stored] == contents
    sizes = [len(frame) / BLOCK_BYTES for frame in stored]
    assert max(sizes[:3]) < 0.85
    assert sizes[4] < 0.4, "one block late at most"


def test_zeros_are_told_from_everything_else() -> None:
    for size in (0, 1, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 5):
        assert is_zero(bytes(size))
        assert is_zero(memoryview(bytearray(size)))
    for size in (1, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 5):
        last = bytes(size - 1) + b"\x01"
        assert not is_zero(last)
        assert not is_zero(memoryview(last))


@pytest.mark.parametrize("name", ["raw", "zstd", "planes"])
def test_frames_written_by_earlier_versions_are_read(name: str) -> None:
    """Golden: decoding is what must never change; encoders may get better."""
    stored = bytes.fromhex((GOLDEN / f"frame_{name}.hex").read_text())
    raw = bytes.fromhex((GOLDEN / f"frame_{name}.raw.hex").read_text())
    assert decode_frame(stored) == raw
    assert digest(raw).hex() == (GOLDEN / f"frame_{name}.digest").read_text().strip()


def test_header_layout_is_what_the_format_page_says() -> None:
    assert encode_frame(b"spot", effort=Effort.STORE) == bytes.fromhex("f1000000 00000004") + b"spot"
