"""How metadata lies in frames: sections of a record stream, and the root that holds or names them.

Invariant: a section is at most SECTION_BYTES (or one record) before encoding, and block records never share one with
other tables, so that mounting loads names without block maps (P-07).

    root     "SWROOT" 0 1 | form u8 | 0 0 0 | sections u32 | then
      form 0  the record stream itself (core/changesets.py)
      form 1  per section, in key order:
              kind u8 ("d" drops, "b" blocks, "t" all other tables) | 0 | first key bytes u16 | last key bytes u16
              | records u32 | FrameRef 56 | first key | last key

Roots and sections are frames of *metadata packs*, which hold nothing else and are never repacked (L2).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from spotwarp_fs.core.changesets import (
    NOTHING,
    ChangeSet,
    DropBlocks,
    Put,
    decode_records,
    encode_change,
    encode_drop,
)
from spotwarp_fs.core.codec import Effort
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.frames import digest, encode_frame
from spotwarp_fs.core.packs import PackBuilder
from spotwarp_fs.core.records import BLOCK_TABLE, FRAME_REF_BYTES, FrameRef, ino_range
from spotwarp_fs.core.types import Inode, PackId

SECTION_BYTES: Final = 1 << 20
INLINE_BYTES_MAX: Final = 256 << 10
"""A record stream below this lies in its root."""

_MAGIC: Final = b"SWROOT\x00\x01"
_HEAD: Final = struct.Struct(">8sB3xI")
_ROW: Final = struct.Struct(">BxHHI")
_INLINE, _SECTIONS = 0, 1


class SectionKind(Enum):
    """What a section holds."""

    DROPS = b"d"
    BLOCKS = b"b"
    TREE = b"t"
    """Everything that is not a block: inodes, entries, xattrs, bookkeeping."""


def kind_of(key: bytes) -> SectionKind:
    """Which kind of section a put or delete of *key* belongs in."""
    return SectionKind.BLOCKS if key[:1] == BLOCK_TABLE else SectionKind.TREE


@dataclass(frozen=True, slots=True)
class Section:
    """A piece of a record stream in a frame of its own; both keys are inclusive."""

    kind: SectionKind
    first_key: bytes
    last_key: bytes
    records: int
    frame: FrameRef


@dataclass(frozen=True, slots=True)
class Root:
    """A base or a change set, parsed as far as its root goes: one of the two fields is empty."""

    records: ChangeSet = NOTHING
    sections: tuple[Section, ...] = ()

    def without_blocks(self) -> list[Section]:
        """What a mount loads at once."""
        return [section for section in self.sections if section.kind is SectionKind.TREE]

    def blocks_of(self, ino: Inode) -> list[Section]:
        """The sections that may concern the blocks of *ino*, drops first."""
        start, stop = ino_range(BLOCK_TABLE, ino)
        return [
            section
            for kind in (SectionKind.DROPS, SectionKind.BLOCKS)
            for section in _overlapping([s for s in self.sections if s.kind is kind], start, stop)
        ]

    def packs(self) -> set[PackId]:
        """The packs that the sections lie in; the root's own is named by the manifest."""
        return {section.frame.pack for section in self.sections}


@dataclass(frozen=True, slots=True)
class Written:
    """A root that was written, and what reading all of it costs."""

    root: FrameRef
    stored_bytes: int
    records: int


def encode_root(sections: Sequence[Section]) -> bytes:
    """Write a root that names *sections*."""
    return b"".join([_HEAD.pack(_MAGIC, _SECTIONS, len(sections)), *map(_encode_section, sections)])


def parse_root(raw: bytes) -> Root:
    """Read a root's content, or raise Corrupt."""
    try:
        magic, form, count = _HEAD.unpack_from(raw)
        if magic != _MAGIC or form not in (_INLINE, _SECTIONS):
            raise Corrupt(f"root begins with {raw[:9]!r}, expected {_MAGIC!r} and form 0 or 1")
        if form == _INLINE:
            return Root(records=decode_records(raw[_HEAD.size :]))
        sections, at = [], _HEAD.size
        for _ in range(count):
            section, at = _decode_section(raw, at)
            sections.append(section)
    except (struct.error, ValueError) as error:
        raise Corrupt(f"root of {len(raw)} bytes is damaged: {error}") from error
    if at != len(raw):
        raise Corrupt(f"root of {len(raw)} bytes has {count} sections that end at byte {at}")
    return Root(sections=tuple(sections))


class StreamWriter:
    """Writes one record stream, in order, and cuts it into sections; get one from a MetadataWriter."""

    def __init__(self, write_frame: Callable[[bytes], FrameRef]) -> None:
        self._write_frame = write_frame
        self._sections: list[Section] = []
        self._closed: list[_Piece] = []
        """Pieces that are complete but may still end up inside the root."""
        self._closed_bytes = 0
        self._open: _Piece | None = None

    def drop(self, drop: DropBlocks) -> None:
        """Add a drop; all drops come before all changes."""
        self._add(SectionKind.DROPS, drop.start, drop.last_key, encode_drop(drop))

    def change(self, key: bytes, value: bytes | None) -> None:
        """Add a put, or a delete when *value* is None."""
        kind = kind_of(key)
        assert key[:1].islower(), f"{key!r} is of a table that never leaves the node"
        if kind is SectionKind.BLOCKS and value is not None:
            assert len(value) == FRAME_REF_BYTES, f"{key!r} has {len(value)} bytes: no published block"
        self._add(kind, key, key, encode_change(key, value))

    def extend(self, puts: Iterable[Put]) -> None:
        """Add puts."""
        for key, value in puts:
            self.change(key, value)

    def reuse(self, section: Section) -> None:
        """Take a section of an older base over by reference."""
        self._close()
        self._spill()
        self._check_order(section.first_key)
        self._sections.append(section)

    def finish(self) -> Written:
        """Write the root."""
        self._close()
        if not self._sections and self._closed_bytes < INLINE_BYTES_MAX:
            records = sum(piece.records for piece in self._closed)
            parts = [part for piece in self._closed for part in piece.parts]
            root = self._write_frame(b"".join([_HEAD.pack(_MAGIC, _INLINE, 0), *parts]))
            return Written(root, root.stored_bytes, records)
        self._spill()
        root = self._write_frame(encode_root(self._sections))
        stored = root.stored_bytes + sum(section.frame.stored_bytes for section in self._sections)
        return Written(root, stored, sum(section.records for section in self._sections))

    def _add(self, kind: SectionKind, first_key: bytes, last_key: bytes, record: bytes) -> None:
        piece = self._open
        if piece is None or piece.kind is not kind or piece.size_bytes + len(record) > SECTION_BYTES:
            self._close()
            self._check_order(first_key if kind is not SectionKind.DROPS else b"")
            piece = self._open = _Piece(kind, first_key)
        assert not piece.records or first_key > piece.last_key, f"{first_key!r} after {piece.last_key!r}"
        piece.add(last_key, record)

    def _check_order(self, first_key: bytes) -> None:
        """Sections of changes must follow one another; drops have an order of their own, before them."""
        before = self._closed[-1] if self._closed else self._sections[-1] if self._sections else None
        if before is not None and before.kind is not SectionKind.DROPS and first_key:
            assert before.last_key < first_key, f"{first_key!r} after {before.last_key!r}"

    def _close(self) -> None:
        if self._open is not None:
            self._closed.append(self._open)
            self._closed_bytes += self._open.size_bytes
            self._open = None
        if self._sections or self._closed_bytes >= INLINE_BYTES_MAX:
            self._spill()

    def _spill(self) -> None:
        for piece in self._closed:
            frame = self._write_frame(b"".join(piece.parts))
            self._sections.append(Section(piece.kind, piece.first_key, piece.last_key, piece.records, frame))
        self._closed.clear()
        self._closed_bytes = 0


class MetadataWriter:
    """Puts roots and sections into metadata packs; `packs` must be in the store before a manifest names a root.

    Compresses: call it in a worker thread when there is much to write.
    """

    def __init__(self, new_pack: Callable[[], PackId]) -> None:
        self._new_pack = new_pack
        self._builder: PackBuilder | None = None
        self._finished: list[tuple[PackId, bytes]] = []

    def stream(self) -> StreamWriter:
        """Begin a base (puts and reused sections) or a change set, to be written bit by bit."""
        return StreamWriter(self._write_frame)

    def write(self, change_set: ChangeSet) -> Written:
        """Write a whole change set."""
        stream = self.stream()
        for drop in change_set.drops:
            stream.drop(drop)
        for key, value in change_set.changes:
            stream.change(key, value)
        return stream.finish()

    def take_packs(self) -> list[tuple[PackId, bytes]]:
        """Give (once) the packs that are full, so that they can be uploaded while the rest is written."""
        packs, self._finished = self._finished, []
        return packs

    def finish(self) -> list[tuple[PackId, bytes]]:
        """Seal the last pack and give (once) all that were not taken yet."""
        self._seal()
        return self.take_packs()

    def _write_frame(self, raw: bytes) -> FrameRef:
        stored = encode_frame(raw, effort=Effort.METADATA)
        if self._builder is not None and (self._builder.full or not self._builder.fits(len(stored))):
            self._seal()
        if self._builder is None:
            self._builder = PackBuilder(self._new_pack())
        return self._builder.add(stored, digest(raw), len(raw))

    def _seal(self) -> None:
        if self._builder is not None:
            self._finished.append((self._builder.pack, self._builder.finish()))
            self._builder = None


class _Piece:
    """A section in the making."""

    def __init__(self, kind: SectionKind, first_key: bytes) -> None:
        self.kind = kind
        self.first_key = first_key
        self.last_key = first_key
        self.parts: list[bytes] = []
        self.size_bytes = 0

    @property
    def records(self) -> int:
        return len(self.parts)

    def add(self, last_key: bytes, record: bytes) -> None:
        self.last_key = last_key
        self.parts.append(record)
        self.size_bytes += len(record)


def _encode_section(section: Section) -> bytes:
    kind = section.kind.value[0]
    row = _ROW.pack(kind, len(section.first_key), len(section.last_key), section.records)
    return row + section.frame.encode() + section.first_key + section.last_key


def _decode_section(raw: bytes, at: int) -> tuple[Section, int]:
    kind, first_bytes, last_bytes, records = _ROW.unpack_from(raw, at)
    at += _ROW.size
    frame = FrameRef.decode(raw, at)
    first_at = at + FRAME_REF_BYTES
    last_at = first_at + first_bytes
    stop = last_at + last_bytes
    section = Section(SectionKind(bytes([kind])), raw[first_at:last_at], raw[last_at:stop], records, frame)
    return section, stop


def _overlapping(sections: list[Section], start: bytes, stop: bytes) -> list[Section]:
    first = bisect_left(sections, start, key=lambda section: section.last_key)
    last = bisect_right(sections, stop, key=lambda section: section.first_key)
    return sections[first:last]
