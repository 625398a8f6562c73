"""The fsync journal's records: what must survive a power loss before the next manifest says it (C4).

    record   "SWJ" 1 | kind u8 | 0 0 0 | payload bytes u32 | seq u64 | payload | BLAKE3 over all before, 16 bytes
    payload  1 CHANGES    earlier parts u32 | for each: seq u64, bytes u32, record stream | record stream
                          (core/changesets.py; a block's value is the node's BlockState)
             2 SYNCED     ino u64
             3 SESSION    expected writer epoch u64 | session, UTF-8
             4 PUBLISHED  manifest number u64 | digest of its body, hex
             5 REPLACED   a record stream of one change

Invariant: a reader believes the records before the first damaged one and nothing after it. CHANGES are appended in
rising order of seq, each holding *every* change since the one before, so that a prefix of the journal is a state that
the workspace once had. REPLACED and SYNCED never tell of changes that no CHANGES before them holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

import blake3

from spotwarp_fs.core.changesets import ChangeSet, decode_records, encode_records
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.records import BLOCK_TABLE, INODE_TABLE, BlockState, key_block, key_ino
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode, ManifestNumber, WriterEpoch

MAGIC: Final = b"SWJ\x01"
CHECK_BYTES: Final = 16
PAYLOAD_BYTES_MAX: Final = 1 << 30

_HEADER: Final = struct.Struct(">4sB3xIQ")
_PART: Final = struct.Struct(">QI")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_CHANGES, _SYNCED, _SESSION, _PUBLISHED, _REPLACED = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Changes:
    """Every metadata change since the CHANGES before, as of *seq*; values are those at *seq*, in all parts."""

    seq: ChangeSeq
    change_set: ChangeSet
    earlier: tuple[tuple[ChangeSeq, ChangeSet], ...] = ()
    """What was last changed up to the seq of a cut that had not been confirmed, apart from what came after: should that
    cut be the head, its part is left out. Otherwise a truncation from before the cut would drop blocks that the cut
    published."""

    def parts_after(self, published: ChangeSeq) -> Iterator[tuple[ChangeSeq, ChangeSet]]:
        """Give the parts that a head at *published* lacks, in order."""
        for seq, change_set in (*self.earlier, (self.seq, self.change_set)):
            if seq > published:
                yield seq, change_set


@dataclass(frozen=True, slots=True)
class Synced:
    """The data file of *ino* was fdatasynced after all its changes up to *seq*."""

    seq: ChangeSeq
    ino: Inode


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """Synced before the takeover of *session* is sent: a head of this session is our own (L1)."""

    session: str
    expected_epoch: WriterEpoch


@dataclass(frozen=True, slots=True)
class Published:
    """Manifest *number* is known to hold every change up to *seq*."""

    seq: ChangeSeq
    number: ManifestNumber
    digest: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The record of a block that needs no local bytes any more; synced before they are punched (L4)."""

    seq: ChangeSeq
    key: bytes
    value: bytes | None


Record = Changes | Synced | SessionBegun | Published | Replaced


class JournalLog(Protocol):
    """Where records are kept; calls block on the disk, so they run in a worker thread. All may raise OSError."""

    def append(self, records: Sequence[Record]) -> None:
        """Add records; they are on disk when this returns.

        After a failure nothing is believed of this file any more: every later append fails until a `rewrite` succeeds.
        """
        ...

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others, at once; they are on disk when this returns."""
        ...

    def compact(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others but the sessions, at once; on disk when this returns."""
        ...

    def prune(self, published: ChangeSeq, sessions: frozenset[str]) -> None:
        """Drop what the manifest at *published* covers, and every session but these."""
        ...

    def records(self) -> list[Record]:
        """Read all records back."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the journal."""
        ...


def encode_record(record: Record) -> bytes:
    """Write one record."""
    match record:
        case Changes(seq):
            kind, payload = _CHANGES, _encode_parts(record)
        case Synced(seq, ino):
            kind, payload = _SYNCED, _U64.pack(ino)
        case SessionBegun(session, expected_epoch):
            kind, seq, payload = _SESSION, ChangeSeq(0), _U64.pack(expected_epoch) + session.encode()
        case Published(seq, number, digest):
            kind, payload = _PUBLISHED, _U64.pack(number) + digest.encode()
        case Replaced(seq, key, value):
            kind, payload = _REPLACED, encode_records(ChangeSet(changes=((key, value),)))
        case _:
            assert_never(record)
    assert len(payload) <= PAYLOAD_BYTES_MAX, f"a journal record of {len(payload)} bytes"
    body = _HEADER.pack(MAGIC, kind, len(payload), seq) + payload
    return body + _check(body)


def decode_prefix(stream: bytes) -> tuple[list[Record], int]:
    """Read records up to the first torn or damaged one; returns them and the length that they take.

    Raises Corrupt for a record that is whole but says something unknown: a newer program wrote it.
    """
    records: list[Record] = []
    at = 0
    while at + _HEADER.size + CHECK_BYTES <= len(stream):
        magic, kind, length, seq = _HEADER.unpack_from(stream, at)
        stop = at + _HEADER.size + length
        if magic != MAGIC or stop + CHECK_BYTES > len(stream):
            break
        if _check(stream[at:stop]) != stream[stop : stop + CHECK_BYTES]:
            break
        records.append(_decode(kind, ChangeSeq(seq), stream[at + _HEADER.size : stop]))
        at = stop + CHECK_BYTES
    return records, at


def _decode(kind: int, seq: ChangeSeq, payload: bytes) -> Record:
    match kind:
        case 1:
            return _decode_parts(seq, payload)
        case 2:
            return Synced(seq, Inode(_U64.unpack(payload)[0]))
        case 3:
            return SessionBegun(payload[_U64.size :].decode(), WriterEpoch(_U64.unpack_from(payload)[0]))
        case 4:
            return Published(seq, ManifestNumber(_U64.unpack_from(payload)[0]), payload[_U64.size :].decode())
        case 5:
            ((key, value),) = decode_records(payload).changes
            return Replaced(seq, key, value)
    raise Corrupt(f"journal record of kind {kind}: written by a newer version of this program")


def _encode_parts(record: Changes) -> bytes:
    parts = [_U32.pack(len(record.earlier))]
    for seq, change_set in record.earlier:
        stream = encode_records(change_set)
        parts += [_PART.pack(seq, len(stream)), stream]
    return b"".join(parts) + encode_records(record.change_set)


def _decode_parts(seq: ChangeSeq, payload: bytes) -> Changes:
    (count,) = _U32.unpack_from(payload)
    at = _U32.size
    earlier = []
    for _ in range(count):
        part_seq, length = _PART.unpack_from(payload, at)
        at += _PART.size + length
        earlier.append((ChangeSeq(part_seq), decode_records(payload[at - length : at])))
    return Changes(seq, decode_records(payload[at:]), tuple(earlier))


def _check(body: bytes) -> bytes:
    return blake3.blake3(body).digest(CHECK_BYTES)


def sessions_of(records: Iterable[Record]) -> set[str]:
    """Whose heads are our own (L1)."""
    return {record.session for record in records if isinstance(record, SessionBegun)}


def last_published(records: Iterable[Record]) -> Published | None:
    """The newest manifest that this journal knows of."""
    return max((r for r in records if isinstance(r, Published)), key=lambda r: r.number, default=None)


def journalled_upto(records: Iterable[Record], published: ChangeSeq) -> ChangeSeq:
    """Where the next CHANGES begins, for a session that goes on with this journal and its map.

    Not simply at the head: an old truncation, journalled again after its file was fsynced, would drop what was fsynced.
    """
    return max([published, *(record.seq for record in records if isinstance(record, Changes))])


def still_needed(records: Iterable[Record], published: ChangeSeq, sessions: frozenset[str]) -> list[Record]:
    """What a rebuild on top of a head at *published* would still read, in the same order."""
    kept: list[Record] = []
    newest = last_published(records := list(records))
    for record in records:
        match record:
            case SessionBegun():
                needed = record.session in sessions
            case Published():
                needed = record is newest
            case Changes() | Synced() | Replaced():
                needed = record.seq > published
        if needed:
            kept.append(record)
    return kept


class LocalClaims:
    """Which blocks a rebuild would take from this node's disk: their bytes may not go before the journal says so (L4).

    Ask before eviction, a hole, a truncation, setting a data file aside or removing it. When a claim is held: append
    CHANGES up to now (and REPLACED, for a block that only loses its local bytes), let them be synced, then go on.
    CHANGES come first, because the frame's content may be newer than what was journalled of the file. Grows with the
    blocks that were journalled since the last publish.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._claims: dict[Inode, dict[BlockIndex, ChangeSeq]] = {}
        for record in records:
            self.note(record)

    def holds(self, ino: Inode, block: BlockIndex) -> bool:
        """Return whether a rebuild would take this block from the disk."""
        return block in self._claims.get(ino, ())

    def holds_any(self, ino: Inode, first: BlockIndex = BlockIndex(0)) -> bool:
        """Return whether a rebuild would take any block of *ino*, from *first* on, from the disk."""
        return any(block >= first for block in self._claims.get(ino, ()))

    def blocks_of(self, ino: Inode) -> list[BlockIndex]:
        """Give the blocks of *ino* that a rebuild would take from the disk."""
        return sorted(self._claims.get(ino, ()))

    def note(self, record: Record) -> None:
        """Take in a record that has been appended, in order."""
        match record:
            case Changes():
                for seq, change_set in record.parts_after(ChangeSeq(0)):
                    for drop in change_set.drops:
                        self._drop(drop.ino, drop.first_block)
                    for key, value in change_set.changes:
                        self._change(seq, key, value)
            case Replaced(seq, key, value):
                self._change(seq, key, value)
            case Published(seq):
                self._release(seq)
            case _:
                pass

    def _change(self, seq: ChangeSeq, key: bytes, value: bytes | None) -> None:
        if key[:1] == INODE_TABLE and value is None:
            self._claims.pop(key_ino(key), None)
        elif key[:1] == BLOCK_TABLE:
            ino, block = key_ino(key), key_block(key)
            if value and BlockState.decode(value).dirty:
                self._claims.setdefault(ino, {})[block] = seq
            elif ino in self._claims:
                self._claims[ino].pop(block, None)

    def _drop(self, ino: Inode, first: BlockIndex) -> None:
        self._keep(ino, {block: seq for block, seq in self._claims.get(ino, {}).items() if block < first})

    def _release(self, published: ChangeSeq) -> None:
        for ino, blocks in list(self._claims.items()):
            self._keep(ino, {block: seq for block, seq in blocks.items() if seq > published})

    def _keep(self, ino: Inode, blocks: dict[BlockIndex, ChangeSeq]) -> None:
        if blocks:
            self._claims[ino] = blocks
        else:
            self._claims.pop(ino, None)
