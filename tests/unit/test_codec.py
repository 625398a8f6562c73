"""Does the codec find the right encoding, give the same bytes back, and never make a block larger?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core import codec
from spotwarp_fs.core.codec import Encoding, Plan
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.types import BLOCK_BYTES

RNG = np.random.default_rng(7)
WEIGHTS = (RNG.standard_normal(BLOCK_BYTES // 4) * 0.02).astype(np.float32)
CONTENTS = {
    "fp32": WEIGHTS.tobytes(),
    "bf16": (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16).tobytes() * 2,
    "fp64": WEIGHTS[: BLOCK_BYTES // 8].astype(np.float64).tobytes(),
    "ids": RNG.zipf(1.3, BLOCK_BYTES // 8).clip(0, 50_000).astype(np.int64).tobytes(),
    "random": RNG.bytes(BLOCK_BYTES),
    "text": b"".join(b"step %d loss %.4f\n" % (step, 1 / (step + 1)) for step in range(40_000)),
}


def round_trip(raw: bytes, plan: Plan) -> tuple[Encoding, float]:
    encoding, param, pieces = codec.squeeze(np.frombuffer(raw, np.uint8), plan)
    payload = b"".join(pieces)
    assert codec.expand(encoding, param, memoryview(payload), len(raw)) == raw
    assert len(payload) <= len(raw)
    return encoding, len(payload) / max(len(raw), 1)


@pytest.mark.parametrize(
    ("content", "encoding", "stride", "ratio_max"),
    [
        ("fp32", Encoding.PLANES, 4, 0.84),
        ("bf16", Encoding.PLANES, 2, 0.68),
        ("fp64", Encoding.PLANES, 8, 0.44),
        ("ids", Encoding.PLANES, 8, 0.14),
        ("random", Encoding.RAW, 1, 1.0),
        ("text", Encoding.ZSTD, 1, 0.35),
    ],
)
def test_a_sample_finds_what_the_block_is(content: str, encoding: Encoding, stride: int, ratio_max: float) -> None:
    raw = CONTENTS[content]
    plan = codec.plan(np.frombuffer(raw, np.uint8))
    assert (plan.encoding, plan.stride) == (encoding, stride)
    used, ratio = round_trip(raw, plan)
    assert used is encoding
    assert ratio <= ratio_max


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CONTENTS)),
    st.integers(0, 70_000),
    st.integers(0, 9),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_every_plan_gives_every_content_back(
    content: str, size: int, shift: int, stride: int, coded: list[bool]
) -> None:
    raw = CONTENTS[content][shift : shift + size]
    round_trip(raw, Plan(Encoding.PLANES, stride, tuple(coded[:stride])))
    round_trip(raw, codec.MATCHES)
    round_trip(raw, codec.STORE)
    round_trip(raw, codec.plan(np.frombuffer(raw, np.uint8)))


@given(st.integers(0, 3), st.integers(0, 9), st.binary(max_size=64), st.integers(0, 80))
def test_nonsense_is_corrupt_or_as_long_as_it_says(encoding: int, param: int, payload: bytes, raw_bytes: int) -> None:
    try:
        raw = codec.expand(encoding, param, memoryview(payload), raw_bytes)
    except Corrupt:
        return
    assert len(raw) == raw_bytes


def test_a_frame_cannot_ask_for_more_memory_than_its_header_says() -> None:
    huge = b"".join(codec.squeeze(np.zeros(BLOCK_BYTES, np.uint8), codec.MATCHES)[2])
    with pytest.raises(Corrupt, match="announces 1048576 bytes"):
        codec.expand(Encoding.ZSTD, 0, memoryview(huge), 10)
