"""A frame: one encoded block, or one piece of metadata, that says itself how it is encoded.

     0          1          2        3          4                  8
     +----------+----------+--------+----------+------------------+---- ... ----+
     | 0xF1     | encoding | param  | 0        | raw_bytes (u32)  | payload     |
     +----------+----------+--------+----------+------------------+---- ... ----+

Invariant: a frame carries no digest, because what it must contain is decided by whoever names it: `open_frame` gives
bytes only if they have the digest of the *reference* (H11). So a stale offset or a swapped pack can never pass.
"""

from __future__ import annotations

import struct
from typing import Final

import blake3
import numpy as np

from spotwarp_fs.core import codec
from spotwarp_fs.core.codec import Bytes, Effort, Plan
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import BLOCK_BYTES

FRAME_MAGIC: Final = 0xF1
"""Magic in the upper half, version in the lower."""
FRAME_HEADER_BYTES: Final = 8
METADATA_BYTES_MAX: Final = 64 << 20
"""No frame is larger than this before encoding; a frame of a file is at most BLOCK_BYTES."""
DIGEST_BYTES: Final = 32
PLAN_BLOCKS: Final = 16
"""Blocks of one file that are encoded by one sample."""
STORED_PLAN_BLOCKS: Final = 4
"""Fewer when the plan is to store: then no ratio tells that it has stopped to fit."""
PLAN_DRIFT: Final = 0.02
"""A ratio that moves by more than this ends the plan early."""

_HEADER: Final = struct.Struct(">BBBBI")
_ZEROS: Final = bytes(BLOCK_BYTES)


def digest(raw: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of a block's content: the only identity that blocks have."""
    return blake3.blake3(raw).digest()


def is_zero(data: bytes | bytearray | memoryview) -> bool:
    """Is every byte zero? Such a block becomes a hole."""
    if len(data) <= BLOCK_BYTES:
        return _ZEROS.startswith(data)
    view = memoryview(data)
    return all(_ZEROS.startswith(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))


def holds(ref: FrameRef, raw: bytes, name: bytes) -> bool:
    """Does *ref* stand for these bytes, whose digest is *name*? Beyond its valid length a block is zeros (H5)."""
    if ref.raw_bytes == len(raw):
        return ref.digest == name
    if ref.raw_bytes > len(raw):
        return False
    return digest(raw[: ref.raw_bytes]) == ref.digest and is_zero(raw[ref.raw_bytes :])


def encode_frame(raw: bytes | bytearray | memoryview, *, effort: Effort = Effort.DATA) -> bytes:
    """Encode one block or one piece of metadata by itself."""
    array = _array(raw)
    if effort is Effort.METADATA:
        return _assemble(array, codec.squeeze_metadata(array))
    assert array.size <= BLOCK_BYTES, f"a block has {array.size} bytes, at most {BLOCK_BYTES}"
    return _assemble(array, codec.squeeze(array, codec.STORE if effort is Effort.STORE else codec.plan(array)))


class FrameEncoder:
    """Encodes the blocks of one file in order, asking a new sample only now and then.

    Sampling is dozens of small calls under the interpreter's lock: two threads that sample every block gain little on
    one. An encoder belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._ratio: float | None = None
        self._left = 0

    def encode(self, raw: bytes | bytearray | memoryview) -> bytes:
        """Encode the next block; the frame is like any other, only the way to it is shorter."""
        array = _array(raw)
        assert array.size <= BLOCK_BYTES, f"a block has {array.size} bytes, at most {BLOCK_BYTES}"
        if self._plan is None or self._left <= 0 or array.size < codec.SAMPLE_MIN_BYTES:
            self._plan, self._ratio = codec.plan(array), None
            self._left = STORED_PLAN_BLOCKS if self._plan == codec.STORE else PLAN_BLOCKS
        stored = _assemble(array, codec.squeeze(array, self._plan))
        ratio = len(stored) / max(array.size, 1)
        if self._ratio is None:
            self._ratio = ratio
        self._left -= 1
        if abs(ratio - self._ratio) > PLAN_DRIFT:
            self._left = 0
        return stored


def decode_frame(stored: bytes | memoryview) -> bytes:
    """Decode a frame, or raise Corrupt; says nothing about whether it is the right one (see `open_frame`)."""
    if len(stored) < FRAME_HEADER_BYTES:
        raise Corrupt(f"frame of {len(stored)} bytes is shorter than its header of {FRAME_HEADER_BYTES}")
    magic, encoding, param, reserved, raw_bytes = _HEADER.unpack_from(stored)
    if magic != FRAME_MAGIC or reserved != 0:
        raise Corrupt(f"frame begins with {bytes(stored[:4]).hex()}, expected {FRAME_MAGIC:02x}, encoding, param, 00")
    if raw_bytes > METADATA_BYTES_MAX:
        raise Corrupt(f"frame says it has {raw_bytes} bytes, at most {METADATA_BYTES_MAX} are allowed")
    return codec.expand(encoding, param, memoryview(stored)[FRAME_HEADER_BYTES:], raw_bytes)


def open_frame(ref: FrameRef, stored: bytes | memoryview) -> bytes:
    """Decode the frame that *ref* names and give its bytes only if they are the ones that *ref* promises."""
    where = f"frame in pack {ref.pack} at offset {ref.offset}"
    if len(stored) != ref.stored_bytes:
        raise Corrupt(f"{where}: got {len(stored)} bytes, its record says {ref.stored_bytes}")
    try:
        raw = decode_frame(stored)
    except Corrupt as error:
        raise Corrupt(f"{where}, which should have digest {ref.digest.hex()}: {error}") from error
    found = digest(raw)
    if found != ref.digest:
        raise Corrupt(f"{where} has digest {found.hex()}, its record says {ref.digest.hex()}")
    if len(raw) != ref.raw_bytes:
        raise Corrupt(f"{where} has {len(raw)} bytes, its record says {ref.raw_bytes} (digest {found.hex()})")
    return raw


def _array(raw: bytes | bytearray | memoryview) -> Bytes:
    return np.frombuffer(raw, dtype=np.uint8)


def _assemble(raw: Bytes, squeezed: tuple[codec.Encoding, int, list[codec.Piece]]) -> bytes:
    encoding, param, pieces = squeezed
    assert raw.size <= METADATA_BYTES_MAX, f"a frame has {raw.size} bytes, at most {METADATA_BYTES_MAX}"
    return b"".join([_HEADER.pack(FRAME_MAGIC, encoding, param, 0, raw.size), *pieces])
