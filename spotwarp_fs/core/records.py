"""The metadata map: every fact about the workspace is a key and a value, on the node and in the store alike.

Invariant: keys sort so that all records of one inode are neighbours; lower-case tables are the *tree* and its
bookkeeping (published), upper-case tables never leave the node.

    tree         i <ino 8>                   inode record
                 e <parent 8> <name>         directory entry      -> ino 8, dtype 1
                 x <ino 8> <name>            extended attribute   -> value
                 b <ino 8> <block 4>         block                -> on the node: BlockState; published: FrameRef
    bookkeeping  s <name>                    snapshot name        -> manifest number 8
                 c <pack 12>                 condemned pack       -> manifest number 8, server time (s) 8
                 r <kind> ...                retention and pins   -> see core/retention.py
                 t <kind>                    what a start read    -> see core/trace.py
    node only    see NodeTable

All integers are big-endian. A published block is `FrameRef` (56 bytes); on the node one more byte in front keeps the
two facts of a block apart: has it local bytes, and which frame has its present content.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode, PackId

INODE_TABLE: Final = b"i"
ENTRY_TABLE: Final = b"e"
XATTR_TABLE: Final = b"x"
BLOCK_TABLE: Final = b"b"
SNAPSHOT_TABLE: Final = b"s"
CONDEMNED_TABLE: Final = b"c"
RETENTION_TABLE: Final = b"r"
TRACE_TABLE: Final = b"t"
TREE_TABLES: Final = (BLOCK_TABLE, ENTRY_TABLE, INODE_TABLE, XATTR_TABLE)
BOOKKEEPING_TABLES: Final = (CONDEMNED_TABLE, RETENTION_TABLE, SNAPSHOT_TABLE, TRACE_TABLE)


class NodeTable:
    """Tables that never leave the node."""

    CHANGES: Final = b"C"
    """C <tree key> -> change seq 8: what the next cut must export."""
    CHANGELOG: Final = b"L"
    """L <change seq 8> -> tree key: the same, in order."""
    NAMES: Final = b"N"
    """N <ino 8> <parent 8> <name> -> '': the entries backwards (derived from table e)."""
    RANGES: Final = b"R"
    """R <ino 8> <change seq 8> -> first block 4: "all blocks from here on were dropped"; exported before the puts."""
    IN_FLIGHT: Final = b"F"
    """F <ino 8> -> in-flight mark."""
    UNLOADED: Final = b"U"
    """U <ino 8> -> first dropped block 4: this inode's blocks still lie in the base; from here on they do not count."""
    DEDUP: Final = b"D"
    """D <digest 32> -> FrameRef without digest: frames that a new block may refer to."""
    ORPHANS: Final = b"O"
    """O <ino 8> -> '': unlinked, still open; never exported, reaped at the next start."""
    SCRATCH: Final = b"S"
    """S <ino 8> -> change seq 8 (0: made so): all names of this inode are scratch; see core/scratch.py."""
    SCRATCH_NAMES: Final = b"T"
    """T <parent 8> <name> -> '': an entry that is scratch, in a directory that is not."""
    WITNESS: Final = b"W"
    """W <ino 8> -> what the directory form last saw of the real file; see core/witness.py."""
    META: Final = b"M"
    """M <name> -> value: counters, session, head, base sections."""


_INODE = struct.Struct(">IIIIQQQqqqI")
_COUNTED = struct.Struct(">II8xQ")
_SIZE, _SIZE_AT = struct.Struct(">Q"), 16
_TIMES, _TIMES_AT = struct.Struct(">qq"), 48
"""Where in a value of table i the size is, and mtime and ctime."""
_ENTRY = struct.Struct(">QB")
_FRAME_REF = struct.Struct(">IQIII32s")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
FRAME_REF_BYTES: Final = _FRAME_REF.size
PACK_KEY_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class InodeRecord:
    """Everything `stat` tells, to the nanosecond, and a symlink's target."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    allocated: int = 0
    """Bytes held by blocks (holes excluded), for `st_blocks`."""
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    target: bytes = b""
    """Symlink target; empty for everything else."""

    def encode(self) -> bytes:
        """Pack into the value of table i."""
        return (
            _INODE.pack(
                self.mode, self.nlink, self.uid, self.gid, self.size, self.allocated, self.rdev,
                self.atime_ns, self.mtime_ns, self.ctime_ns, 0,
            )
            + self.target
        )  # fmt: skip

    @classmethod
    def decode(cls, value: bytes) -> InodeRecord:
        """Unpack a value of table i."""
        mode, nlink, uid, gid, size, allocated, rdev, atime, mtime, ctime, _ = _INODE.unpack_from(value)
        return cls(mode, nlink, uid, gid, size, allocated, rdev, atime, mtime, ctime, value[_INODE.size :])

    def with_content(self, size: int, allocated: int, now_ns: int) -> InodeRecord:
        """Give the record after a write. Each one runs through here, and `replace` would cost three times as much."""
        return InodeRecord(
            self.mode, self.nlink, self.uid, self.gid, size, allocated, self.rdev,
            self.atime_ns, now_ns, now_ns, self.target,
        )  # fmt: skip

    def with_links(self, nlink: int, mtime_ns: int, ctime_ns: int) -> InodeRecord:
        """Give the record after names came or went, as cheaply."""
        return InodeRecord(
            self.mode, nlink, self.uid, self.gid, self.size, self.allocated, self.rdev,
            self.atime_ns, mtime_ns, ctime_ns, self.target,
        )  # fmt: skip


def after_write(value: bytes, stop: int, now_ns: int) -> bytes:
    """Give a value of table i after a write that ends at *stop* into blocks that are there: its size and its times."""
    size = max(_SIZE.unpack_from(value, _SIZE_AT)[0], stop)
    return b"".join(
        (value[:_SIZE_AT], _SIZE.pack(size), value[_SIZE_AT + 8 : _TIMES_AT], _TIMES.pack(now_ns, now_ns),
         value[_TIMES_AT + 16 :])
    )  # fmt: skip


def counted(value: bytes) -> tuple[int, int, int]:
    """Read mode, nlink and size out of a value of table i, and nothing else of it."""
    mode, nlink, size = _COUNTED.unpack_from(value)
    return mode, nlink, size


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """Where a name leads, and what kind of thing it is (`d_type`, the top four bits of the mode)."""

    ino: Inode
    dtype: int

    def encode(self) -> bytes:
        """Pack into the value of table e."""
        return _ENTRY.pack(self.ino, self.dtype)

    @classmethod
    def decode(cls, value: bytes) -> EntryRecord:
        """Unpack a value of table e."""
        ino, dtype = _ENTRY.unpack(value)
        return cls(Inode(ino), dtype)


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a block's content lies in the store, and the digest that it must have (P-08).

    `raw_bytes` is the block's valid length: bytes beyond it read as zeros, and extending the file never raises it (H5).
    """

    pack: PackId
    offset: int
    stored_bytes: int
    raw_bytes: int
    digest: bytes

    def encode(self) -> bytes:
        """Pack into 56 bytes: the published value of table b."""
        epoch, ident = self.pack.split("-")
        return _FRAME_REF.pack(
            int(epoch, 16), int(ident, 16), self.offset, self.stored_bytes, self.raw_bytes, self.digest
        )

    @classmethod
    def decode(cls, value: bytes, at: int = 0) -> FrameRef:
        """Unpack from *value* at byte *at*."""
        epoch, ident, offset, stored, raw, digest = _FRAME_REF.unpack_from(value, at)
        return cls(PackId(f"{epoch:08x}-{ident:016x}"), offset, stored, raw, digest)


class FrameState(IntEnum):
    """What is known of the frame that holds a block's present content."""

    NONE = 0
    """No frame: the block is dirty."""
    UNPUBLISHED = 1
    """The store has acknowledged the frame; no published manifest names it yet."""
    PUBLISHED = 2


@dataclass(frozen=True, slots=True)
class BlockState:
    """The two independent facts of a block on this node: local bytes (yes/no), and its frame.

    No record at all means a hole. Dirty implies local.
    """

    local: bool
    state: FrameState
    frame: FrameRef | None

    def __post_init__(self) -> None:
        assert (self.frame is None) == (self.state is FrameState.NONE), "a frame and its state go together"
        assert self.local or self.frame is not None, "a block without local bytes needs a frame"

    @property
    def dirty(self) -> bool:
        """No frame holds the present content."""
        return self.state is FrameState.NONE

    def encode(self) -> bytes:
        """Pack into the node's value of table b."""
        flags = bytes([self.local | self.state << 1])
        return flags if self.frame is None else flags + self.frame.encode()

    @classmethod
    def decode(cls, value: bytes) -> BlockState:
        """Unpack the node's value of table b."""
        state = FrameState(value[0] >> 1)
        return cls(bool(value[0] & 1), state, FrameRef.decode(value, 1) if len(value) > 1 else None)

    def without_local_bytes(self) -> BlockState:
        """Evicted: only the first fact is cleared."""
        return replace(self, local=False)

    def with_local_bytes(self) -> BlockState:
        """Hydrated."""
        return replace(self, local=True)


DIRTY: Final = BlockState(local=True, state=FrameState.NONE, frame=None)


def inode_key(ino: Inode) -> bytes:
    """Key of an inode record."""
    return INODE_TABLE + _U64.pack(ino)


def entry_key(parent: Inode, name: bytes) -> bytes:
    """Key of a directory entry."""
    return ENTRY_TABLE + _U64.pack(parent) + name


def xattr_key(ino: Inode, name: bytes) -> bytes:
    """Key of an extended attribute."""
    return XATTR_TABLE + _U64.pack(ino) + name


def block_key(ino: Inode, block: BlockIndex) -> bytes:
    """Key of a block."""
    return BLOCK_TABLE + _U64.pack(ino) + _U32.pack(block)


def name_key(ino: Inode, parent: Inode, name: bytes) -> bytes:
    """Key of a backward entry (node only)."""
    return NodeTable.NAMES + _U64.pack(ino) + _U64.pack(parent) + name


def ino_key(table: bytes, ino: Inode) -> bytes:
    """Key (or key prefix) of *ino* in *table*."""
    return table + _U64.pack(ino)


def ino_range(table: bytes, ino: Inode) -> tuple[bytes, bytes]:
    """First key of *ino* in *table*, and the key just after its last one."""
    return table + _U64.pack(ino), table + _U64.pack(ino + 1)


def table_range(table: bytes) -> tuple[bytes, bytes]:
    """First key of *table*, and the key just after its last one."""
    return table, bytes([table[0] + 1])


def key_ino(key: bytes) -> Inode:
    """Inode that a key of tables i, e, x, b or an inode-keyed node table belongs to (for e: the directory)."""
    return Inode(_U64.unpack_from(key, 1)[0])


def key_block(key: bytes) -> BlockIndex:
    """Block index of a key of table b."""
    return BlockIndex(_U32.unpack_from(key, 9)[0])


def key_name(key: bytes) -> bytes:
    """Name in a key of table e or x."""
    return key[9:]


def backward_name(key: bytes) -> tuple[Inode, bytes]:
    """Parent and name in a key of table N."""
    return Inode(_U64.unpack_from(key, 9)[0]), key[17:]


def pack_key_bytes(pack: PackId) -> bytes:
    """A pack's name as the 12 bytes used in keys."""
    epoch, ident = pack.split("-")
    return _U32.pack(int(epoch, 16)) + _U64.pack(int(ident, 16))


def pack_from_bytes(value: bytes, at: int = 0) -> PackId:
    """Read a pack's name from 12 bytes."""
    return PackId(f"{_U32.unpack_from(value, at)[0]:08x}-{_U64.unpack_from(value, at + 4)[0]:016x}")


def encode_u64(value: int) -> bytes:
    """Eight big-endian bytes."""
    return _U64.pack(value)


def decode_u64(value: bytes, at: int = 0) -> int:
    """Read eight big-endian bytes."""
    return int(_U64.unpack_from(value, at)[0])


def encode_u32(value: int) -> bytes:
    """Four big-endian bytes."""
    return _U32.pack(value)


def decode_u32(value: bytes, at: int = 0) -> int:
    """Read four big-endian bytes."""
    return int(_U32.unpack_from(value, at)[0])


def changelog_key(seq: ChangeSeq) -> bytes:
    """Key of the change log's row *seq*."""
    return NodeTable.CHANGELOG + _U64.pack(seq)


def range_key(ino: Inode, seq: ChangeSeq) -> bytes:
    """Key of a "blocks dropped from here on" row."""
    return NodeTable.RANGES + _U64.pack(ino) + _U64.pack(seq)
