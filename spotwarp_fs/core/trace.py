"""What a job read when it started, by role, so that the next node may fetch that first (P-07).

    row    t start -> version u8 (1) | zstd frame of the entries, in the order in which they were first read
    entry  missed u8 | role bytes u16 | extents u16 | role | per extent: first block u32, blocks u32

A *role* is a path from the root in which the newest checkpoint of a family stands as NUL and its name with `#` for each
number: names move on, roles stay. Invariant: nothing but time depends on a trace. One that is damaged, or written by a
newer program, counts as none; a role that leads nowhere is passed over.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol

import zstandard

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.inflight import family
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import ENTRY_TABLE, TRACE_TABLE, EntryRecord, ino_range, key_name
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode

TRACE_KEY: Final = TRACE_TABLE + b"start"
VERSION: Final = 1
ENCODED_BYTES_MAX: Final = 64 << 10
RAW_BYTES_MAX: Final = 4 << 20
MISSED_MAX: Final = 3
"""An entry is forgotten when so many starts in a row did not read it: a short look at the workspace erases nothing."""
EXTENTS_MAX: Final = 1024
"""Of one file; what is read in more pieces than this is read at random."""
NAMES_MAX: Final = 4096
"""Names of one directory among which the newest of a family is looked for."""
DIRECTORY_DTYPE: Final = 0o040000 >> 12

_ENTRY: Final = struct.Struct(">BHH")
_EXTENT: Final = struct.Struct(">II")
_FAMILY: Final = b"\0"
_NUMBER: Final = re.compile(rb"[0-9]+")

Blocks = tuple[BlockIndex, int]
"""A first block and how many."""


class AtomicNames(Protocol):
    """Which names stand for checkpoints; `core.policies.Policies` is one."""

    def is_atomic(self, name: bytes) -> bool:
        """Tell whether a file of this name is one."""
        ...

    def is_atomic_dir(self, name: bytes) -> bool:
        """Tell whether a directory of this name is one."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One file that was read, and where."""

    role: bytes
    extents: tuple[Blocks, ...]
    missed: int = 0
    """How many starts since then did not read it."""


def encode(entries: Sequence[Entry]) -> bytes:
    """Write the row's value; the last entries are left out when it would be longer than ENCODED_BYTES_MAX."""
    kept = list(entries)
    while True:
        raw = b"".join(map(_encode_entry, kept))
        if len(raw) <= RAW_BYTES_MAX:
            value = bytes([VERSION]) + zstandard.ZstdCompressor(write_checksum=True).compress(raw)
            if len(value) <= ENCODED_BYTES_MAX:
                return value
        del kept[len(kept) * 3 // 4 :]


def _encode_entry(entry: Entry) -> bytes:
    extents = entry.extents[:EXTENTS_MAX]
    head = _ENTRY.pack(entry.missed, len(entry.role), len(extents))
    return b"".join([head, entry.role, *(_EXTENT.pack(*extent) for extent in extents)])


def decode(value: bytes | None) -> tuple[Entry, ...]:
    """Read the row's value; anything that is not as it should be is no trace at all."""
    if not value or value[0] != VERSION or len(value) > ENCODED_BYTES_MAX:
        return ()
    try:
        if not 0 < zstandard.get_frame_parameters(value[1:]).content_size <= RAW_BYTES_MAX:
            return ()
        raw = zstandard.ZstdDecompressor().decompress(value[1:])
        return tuple(_decode_entries(raw))
    except (zstandard.ZstdError, struct.error, ValueError):
        return ()


def _decode_entries(raw: bytes) -> list[Entry]:
    entries, at = [], 0
    while at < len(raw):
        missed, role_bytes, count = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        role, at = raw[at : at + role_bytes], at + role_bytes
        extents = tuple((BlockIndex(first), n) for first, n in _extents(raw, at, count))
        at += count * _EXTENT.size
        if len(role) != role_bytes or any(n == 0 for _, n in extents):
            raise ValueError(f"entry at byte {at} is cut short or empty")
        entries.append(Entry(role, extents, missed))
    return entries


def _extents(raw: bytes, at: int, count: int) -> Iterable[tuple[int, int]]:
    return (_EXTENT.unpack_from(raw, at + index * _EXTENT.size) for index in range(count))


def extents_of(blocks: Iterable[BlockIndex]) -> tuple[Blocks, ...]:
    """Merge blocks into extents, in file order.

    >>> extents_of({3, 1, 2, 7})
    ((1, 3), (7, 1))
    """
    found: list[Blocks] = []
    for block in sorted(blocks):
        if found and sum(found[-1]) == block:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((block, 1))
    return tuple(found)


def merged(now: Sequence[Entry], before: Iterable[Entry]) -> list[Entry]:
    """Put what this start has read in front of what earlier ones did, as long as they did not do so too long ago."""
    seen = {entry.role for entry in now}
    older = (replace(entry, missed=entry.missed + 1) for entry in before if entry.role not in seen)
    return [*now, *(entry for entry in older if entry.missed <= MISSED_MAX)]


class Roles:
    """Says what role a file has, and which file has a role; what it found in a directory it does not look up again."""

    def __init__(self, names: AtomicNames) -> None:
        self._names = names
        self._newest: dict[tuple[Inode, bytes, bool], bytes | None] = {}

    def role_of(self, view: KVRead, ino: Inode) -> bytes | None:
        """Return the role of a file, by one of its names; None when it has none."""
        parts: list[bytes] = []
        directory = False
        while ino != ROOT_INODE:
            place = next(paths.each_name(view, ino), None)
            if place is None:
                return None
            ino, name = place
            parts.append(self._part(view, ino, name, directory=directory))
            directory = True
        return b"/".join(reversed(parts))

    def _part(self, view: KVRead, parent: Inode, name: bytes, *, directory: bool) -> bytes:
        atomic = self._names.is_atomic_dir(name) if directory else self._names.is_atomic(name)
        if not atomic or _NUMBER.search(name) is None:
            return name
        newest = self._newest_of(view, parent, family(name), directory=directory)
        return _FAMILY + family(name) if newest == name else name

    def find(self, view: KVRead, role: bytes) -> Inode | None:
        """Return the file that has *role* now."""
        ino = ROOT_INODE
        parts = role.split(b"/")
        for at, part in enumerate(parts):
            name: bytes | None = part
            if part.startswith(_FAMILY):
                name = self._newest_of(view, ino, part[1:], directory=at < len(parts) - 1)
            if not name:
                return None
            try:
                entry = paths.entry(view, ino, name)
            except Refused:
                return None
            if entry is None:
                return None
            ino = entry.ino
        return ino

    def _newest_of(self, view: KVRead, parent: Inode, wanted: bytes, *, directory: bool) -> bytes | None:
        """The name of the family with the highest numbers: what trainers go on from."""
        place = parent, wanted, directory
        if place not in self._newest:
            rows = islice(view.scan(*ino_range(ENTRY_TABLE, parent)), NAMES_MAX)
            alike = (
                key_name(key)
                for key, value in rows
                if (EntryRecord.decode(value).dtype == DIRECTORY_DTYPE) == directory and family(key_name(key)) == wanted
            )
            self._newest[place] = max(alike, key=_numbers, default=None)
        return self._newest[place]


def _numbers(name: bytes) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(name)]
