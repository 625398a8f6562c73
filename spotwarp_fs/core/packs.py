"""A pack: many frames in one immutable object, index last.

     0              8        12      20   24
     +--------------+--------+-------+----+---------+-- ... --+---------+---------------+-----------+
     | "SWPACK" 0 1 | epoch  | ident | 0  | frame 0 |         | frame n | index, n rows | trailer   |
     +--------------+--------+-------+----+---------+-- ... --+---------+---------------+-----------+

     index row (44)   digest 32 | offset u32 | stored_bytes u32 | raw_bytes u32
     trailer (48)     "SWINDEX" 1 | index offset u32 | frames u32 | BLAKE3 of everything before these last 32 bytes

Invariant: two packs with the same length and trailer are the same bytes, and a pack's own name is among them. Readers
need the index only to check or to repack: whoever wants a block has a FrameRef already.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import blake3

from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import DIGEST_BYTES
from spotwarp_fs.core.records import FrameRef, pack_from_bytes, pack_key_bytes
from spotwarp_fs.core.types import PackId

PACK_BYTES_TARGET: Final = 16 << 20
"""A pack this large is sealed."""
PACK_BYTES_MAX: Final = 64 << 20
PACK_MAGIC: Final = b"SWPACK\x00\x01"
INDEX_MAGIC: Final = b"SWINDEX\x01"
PACK_HEADER_BYTES: Final = 24
TRAILER_BYTES: Final = 48

_ROW: Final = struct.Struct(">32sIII")
_TRAILER: Final = struct.Struct(">8sII")


class PackBuilder:
    """Collects the frames of one pack; their places are final as soon as they are added."""

    def __init__(self, pack: PackId) -> None:
        self.pack: Final = pack
        self._parts: list[bytes] = [PACK_MAGIC + pack_key_bytes(pack) + bytes(4)]
        self._refs: list[FrameRef] = []
        self._end = PACK_HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        """What `finish` would give now."""
        return self._end + len(self._refs) * _ROW.size + TRAILER_BYTES

    @property
    def refs(self) -> tuple[FrameRef, ...]:
        """The frames added so far, in order."""
        return tuple(self._refs)

    def fits(self, stored_bytes: int) -> bool:
        """Would one more frame of *stored_bytes* keep the pack within PACK_BYTES_MAX?"""
        return self.size_bytes + stored_bytes + _ROW.size <= PACK_BYTES_MAX

    @property
    def full(self) -> bool:
        """Has the pack reached its target size?"""
        return self.size_bytes >= PACK_BYTES_TARGET

    def add(self, stored: bytes, digest: bytes, raw_bytes: int) -> FrameRef:
        """Append an encoded frame and say where it lies."""
        assert len(digest) == DIGEST_BYTES, digest
        assert self.fits(len(stored)), f"pack {self.pack}: {self.size_bytes} + {len(stored)} > {PACK_BYTES_MAX}"
        ref = FrameRef(self.pack, self._end, len(stored), raw_bytes, digest)
        self._parts.append(stored)
        self._refs.append(ref)
        self._end += len(stored)
        return ref

    def only(self, digests: Collection[bytes]) -> PackBuilder:
        """Give the same pack with these frames only, as long as nobody was told the places of the others."""
        chosen = PackBuilder(self.pack)
        for ref, stored in zip(self._refs, self._parts[1:], strict=True):
            if ref.digest in digests:
                chosen.add(stored, ref.digest, ref.raw_bytes)
        return chosen

    def finish(self) -> bytes:
        """Give the pack's bytes: the same each time, so that a retry sends the same body."""
        rows = b"".join(_ROW.pack(ref.digest, ref.offset, ref.stored_bytes, ref.raw_bytes) for ref in self._refs)
        parts = [*self._parts, rows, _TRAILER.pack(INDEX_MAGIC, self._end, len(self._refs))]
        # Hashed part by part and joined once: a copy of the whole costs as much as hashing it.
        hasher = blake3.blake3()
        for part in parts:
            hasher.update(part)
        return b"".join([*parts, hasher.digest()])


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last bytes of a pack, read."""

    index_offset: int
    frames: int
    digest: bytes
    """BLAKE3 of the pack up to here."""

    @property
    def index_bytes(self) -> int:
        """Length of the index, which lies just before the trailer."""
        return self.frames * _ROW.size


def trailer(body: bytes) -> bytes:
    """Cut the trailer off a pack's end, to compare it with what the store has."""
    return body[-TRAILER_BYTES:]


def same_pack(body: bytes, *, stored_size: int, stored_trailer: bytes) -> bool:
    """Is the object that the store refused to replace (412) this very pack, sent before?"""
    return len(body) == stored_size and trailer(body) == stored_trailer


def parse_trailer(pack: PackId, size_bytes: int, tail: bytes) -> Trailer:
    """Read the last TRAILER_BYTES of a pack of *size_bytes*, or raise Corrupt."""
    if len(tail) != TRAILER_BYTES or tail[:8] != INDEX_MAGIC:
        raise Corrupt(f"pack {pack} ends with {tail[:8]!r}, expected {INDEX_MAGIC!r} and {TRAILER_BYTES} bytes")
    _, offset, frames = _TRAILER.unpack_from(tail)
    found = Trailer(offset, frames, tail[_TRAILER.size :])
    if offset < PACK_HEADER_BYTES or offset + found.index_bytes + TRAILER_BYTES != size_bytes:
        raise Corrupt(f"pack {pack} of {size_bytes} bytes says that {frames} index rows begin at {offset}")
    return found


def parse_index(pack: PackId, rows: bytes) -> list[FrameRef]:
    """Read index rows (fetched by themselves), or raise Corrupt."""
    if len(rows) % _ROW.size:
        raise Corrupt(f"pack {pack}: index of {len(rows)} bytes is no multiple of {_ROW.size}")
    refs = [FrameRef(pack, offset, stored, raw, digest) for digest, offset, stored, raw in _ROW.iter_unpack(rows)]
    end = PACK_HEADER_BYTES
    for ref in refs:
        if ref.offset != end:
            raise Corrupt(f"pack {pack}: a frame lies at {ref.offset}, the one before it ends at {end}")
        end += ref.stored_bytes
    return refs


def read_index(pack_bytes: bytes, *, expected: PackId | None = None) -> list[FrameRef]:
    """Check a whole pack (magic, name, trailer, digest) and read its index, or raise Corrupt."""
    if len(pack_bytes) < PACK_HEADER_BYTES + TRAILER_BYTES or pack_bytes[:8] != PACK_MAGIC:
        raise Corrupt(f"pack {expected or ''} of {len(pack_bytes)} bytes begins with {pack_bytes[:8]!r}")
    pack = pack_from_bytes(pack_bytes, 8)
    if expected is not None and pack != expected:
        raise Corrupt(f"object of pack {expected} says that it is pack {pack}")
    last = parse_trailer(pack, len(pack_bytes), trailer(pack_bytes))
    found = blake3.blake3(memoryview(pack_bytes)[:-DIGEST_BYTES]).digest()
    if found != last.digest:
        raise Corrupt(f"pack {pack} has digest {found.hex()}, its trailer says {last.digest.hex()}")
    refs = parse_index(pack, pack_bytes[last.index_offset : last.index_offset + last.index_bytes])
    end = refs[-1].offset + refs[-1].stored_bytes if refs else PACK_HEADER_BYTES
    if end != last.index_offset:
        raise Corrupt(f"pack {pack}: frames end at {end}, its index begins at {last.index_offset}")
    return refs
