"""Which encoding squeezes a block: none, zstd, or byte planes of which some are Huffman-coded.

Invariant: `expand` gives back the very bytes that `squeeze` was given, and a payload is never larger than they were.

    raw      the bytes themselves
    zstd     one zstd frame
    planes   param = N, the stride in bytes (1, 2, 4 or 8); q = raw_bytes // N

         0        4                4 * N
         +--------+-- ... --+------+---------+-- ... --+-----------+--------------------+
         | size 0 |         | size N-1       | plane 0 | plane N-1 | last raw_bytes % N |
         +--------+-- ... --+------+---------+-- ... --+-----------+--------------------+

         size: u32; top bit set = the plane is a zstd frame of that many bytes, clear = q bytes as they are.
         Plane p holds bytes p, p + N, p + 2N, ... of the block.

Floats compress in their sign and exponent bytes only, and there by Huffman coding, not by matches (docs/FORMAT.md
gives the measurements). So a sample decides per block which stride fits, and per plane whether coding it can pay.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from spotwarp_fs.core.errors import Corrupt

Bytes = NDArray[np.uint8]
Piece = bytes | memoryview

STRIDES: Final = (1, 2, 4, 8)
PLANE_BITS_MAX: Final = 7.8
"""A plane whose sampled entropy is above this is stored: coding it costs time and saves at most 2 %."""
SAMPLE_SLICES: Final = 8
SAMPLE_SLICE_BYTES: Final = 1024
SAMPLE_MIN_BYTES: Final = 4096
"""Below this a block is small enough to just try zstd on."""
STRIDE_MARGIN: Final = 0.01
"""A wider stride must beat a narrower one by this; without it noise drifts to stride 8."""
MATCH_MARGIN: Final = 0.03
"""What a zstd trial must save beyond planes to be taken: text, code, token ids."""
STORE_RATIO: Final = 0.99
"""An estimate above this is not worth decoding later: the block is stored raw."""

_CODED: Final = 1 << 31
_MISSING_BITS: Final = 8.0


class Encoding(IntEnum):
    """The encoding byte of a frame's header."""

    RAW = 0
    ZSTD = 1
    PLANES = 2


class Effort(Enum):
    """How hard to try."""

    STORE = "store"
    """Not at all."""
    DATA = "data"
    """Sample, then decide: for blocks of files."""
    METADATA = "metadata"
    """zstd level 3: for sections and roots."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sample of a block said; holds for its neighbours in the same file until the ratio moves."""

    encoding: Encoding
    stride: int = 1
    coded: tuple[bool, ...] = ()
    """Per plane: is it worth coding?"""


STORE: Final = Plan(Encoding.RAW)
MATCHES: Final = Plan(Encoding.ZSTD)


def plan(raw: Bytes) -> Plan:
    """Sample a block and decide how to encode it."""
    if raw.size < SAMPLE_MIN_BYTES:
        return MATCHES
    stride, coded, planes_ratio = _best_stride(_sample(raw))
    middle = (raw.size // 2) & ~7
    trial = raw[middle : middle + SAMPLE_SLICES * SAMPLE_SLICE_BYTES]
    if len(_compress_matches(trial)) / trial.size < min(planes_ratio, STORE_RATIO) - MATCH_MARGIN:
        return MATCHES
    if planes_ratio > STORE_RATIO:
        return STORE
    return Plan(Encoding.PLANES, stride, coded)


def squeeze(raw: Bytes, chosen: Plan) -> tuple[Encoding, int, list[Piece]]:
    """Encode by *chosen*; gives encoding, param and the payload in pieces, raw when that is not smaller."""
    if chosen.encoding is Encoding.ZSTD:
        packed = _compress_matches(raw)
        if len(packed) < raw.size * STORE_RATIO:
            return Encoding.ZSTD, 0, [packed]
    elif chosen.encoding is Encoding.PLANES and raw.size >= chosen.stride:
        pieces = _split(raw, chosen)
        if sum(len(piece) for piece in pieces) < raw.size * STORE_RATIO:
            return Encoding.PLANES, chosen.stride, pieces
    return Encoding.RAW, 0, [raw.data]


def squeeze_metadata(raw: Bytes) -> tuple[Encoding, int, list[Piece]]:
    """Encode a section or a root."""
    packed = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(raw.data)
    return (Encoding.ZSTD, 0, [packed]) if len(packed) < raw.size else (Encoding.RAW, 0, [raw.data])


def expand(encoding: int, param: int, payload: memoryview, raw_bytes: int) -> bytes:
    """Decode a payload into exactly *raw_bytes* bytes, or raise Corrupt."""
    if encoding == Encoding.RAW:
        if len(payload) != raw_bytes:
            raise Corrupt(f"raw frame holds {len(payload)} bytes, its header says {raw_bytes}")
        return bytes(payload)
    if encoding == Encoding.ZSTD:
        return _decompress(payload, raw_bytes)
    if encoding == Encoding.PLANES:
        if param not in STRIDES:
            raise Corrupt(f"frame has stride {param}, known are {STRIDES}")
        return _join(payload, param, raw_bytes)
    raise Corrupt(f"frame has encoding {encoding}, known are 0 to {max(Encoding)}")


def _sample(raw: Bytes) -> Bytes:
    """Take rows of eight bytes from slices spread over the block, in phase with its start."""
    slices = min(SAMPLE_SLICES, raw.size // SAMPLE_SLICE_BYTES)
    step = ((raw.size - SAMPLE_SLICE_BYTES) // max(slices - 1, 1)) & ~7
    strides = (step, 1)
    return np.lib.stride_tricks.as_strided(raw, (slices, SAMPLE_SLICE_BYTES), strides).reshape(-1, 8)


_COLUMN: Final = np.arange(8, dtype=np.uint16) << 8


def _best_stride(rows: Bytes) -> tuple[int, tuple[bool, ...], float]:
    """Compare the entropies of the byte planes of each stride; gives stride, planes to code, expected ratio."""
    columns = np.bincount((rows + _COLUMN).ravel(), minlength=2048).reshape(8, 256)
    ratios: dict[int, float] = {}
    coded: dict[int, tuple[bool, ...]] = {}
    for stride in STRIDES:
        bits = _entropy_bits(columns.reshape(8 // stride, stride, 256).sum(axis=0))
        gate = bits < PLANE_BITS_MAX
        coded[stride] = tuple(bool(flag) for flag in gate)
        ratios[stride] = float(np.where(gate, bits, _MISSING_BITS).mean()) / 8
    best = min(ratios.values())
    stride = next(stride for stride in STRIDES if ratios[stride] <= best + STRIDE_MARGIN)
    return stride, coded[stride], ratios[stride]


def _entropy_bits(histograms: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate bits per byte of each row, corrected for the smallness of the sample (Miller and Madow)."""
    total = histograms.sum(axis=1)
    share = histograms / total[:, None]
    logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
    correction = ((histograms > 0).sum(axis=1) - 1) / (2 * np.log(2) * total)
    return np.asarray(correction - (share * logs).sum(axis=1))


def _compress_matches(raw: Bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(raw.data)


def _compress_plane(plane: Bytes) -> bytes:
    """Code the literals of a plane; long minimal matches and a tiny table keep the futile match search short."""
    return zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(plane.data)


_HUFFMAN: Final = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8, write_content_size=True)


def _split(raw: Bytes, chosen: Plan) -> list[Piece]:
    stride = chosen.stride
    quotient = raw.size // stride
    sizes: list[int] = []
    planes: list[Piece] = []
    for number, code in enumerate(chosen.coded):
        plane = _every(raw, number, stride, quotient)
        packed = _compress_plane(plane) if code else b""
        if code and len(packed) < quotient:
            sizes.append(len(packed) | _CODED)
            planes.append(packed)
        else:
            sizes.append(quotient)
            planes.append(plane.data)
    return [struct.pack(f">{stride}I", *sizes), *planes, raw[quotient * stride :].data]


def _every(raw: Bytes, first: int, stride: int, count: int) -> Bytes:
    """Gather every *stride*-th byte from *first* on.

    Narrowing a (mostly unaligned) view of words keeps just their first byte, and runs as vector code: three times
    faster than a strided copy or a shift.
    """
    if stride == 1:
        return raw[first : first + count]
    plane = np.empty(count, dtype=np.uint8)
    last = first + stride * (count - 1)
    np.copyto(plane[:-1], raw[first:last].view(f"<u{stride}"), casting="unsafe")
    plane[-1] = raw[last]
    return plane


def _join(payload: memoryview, stride: int, raw_bytes: int) -> bytes:
    quotient = raw_bytes // stride
    tail_bytes = raw_bytes - quotient * stride
    at = 4 * stride
    if len(payload) < at:
        raise Corrupt(f"planes frame holds {len(payload)} bytes, its table needs {at}")
    sizes = struct.unpack_from(f">{stride}I", payload)
    if at + sum(size & ~_CODED for size in sizes) + tail_bytes != len(payload):
        raise Corrupt(f"planes frame holds {len(payload)} bytes, its table says {[hex(size) for size in sizes]}")
    planes: list[NDArray[np.unsignedinteger]] = []
    for size in sizes:
        stored = payload[at : at + (size & ~_CODED)]
        at += len(stored)
        planes.append(_plane(stored, quotient, coded=bool(size & _CODED)))
    words = _interleave(planes)
    return b"".join([words.data, payload[at:]])


def _interleave(planes: list[NDArray[np.unsignedinteger]]) -> NDArray[np.unsignedinteger]:
    """Join neighbours into words of twice their width until one array is left."""
    if len(planes) == 1:
        return planes[0]
    low, high = _interleave(planes[: len(planes) // 2]), _interleave(planes[len(planes) // 2 :])
    bits = 8 * low.itemsize
    words = high.astype(f"<u{2 * low.itemsize}")
    words <<= bits
    words |= low
    return words


def _plane(stored: memoryview, quotient: int, *, coded: bool) -> NDArray[np.unsignedinteger]:
    if coded:
        return np.frombuffer(_decompress(stored, quotient), dtype=np.uint8)
    if len(stored) != quotient:
        raise Corrupt(f"stored plane holds {len(stored)} bytes, its block needs {quotient}")
    return np.frombuffer(stored, dtype=np.uint8)


def _decompress(packed: memoryview, raw_bytes: int) -> bytes:
    """Decompress one zstd frame that says itself that it has *raw_bytes*, so that damage cannot ask for more memory."""
    try:
        announced = zstandard.get_frame_parameters(packed).content_size
        if announced != raw_bytes:
            raise Corrupt(f"zstd frame announces {announced} bytes, its header says {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd frame of {len(packed)} bytes is damaged: {error}") from error
    if len(raw) != raw_bytes:
        raise Corrupt(f"zstd frame gave {len(raw)} bytes, its header says {raw_bytes}")
    return raw
