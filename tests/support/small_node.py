"""A node with just enough engine to lose power: it follows the rules of `core/rebuild.py` and of engine/blocks.py.

One directory, three files, small writes; a store that is a dict. It is for random programs of writes, fsyncs, cuts,
evictions and power losses against an oracle of "which bytes may be here now".
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from spotwarp_fs.core.changes import ChangeCounter, Recorder, dropped_ranges
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.journal import Changes, LocalClaims, Published, Record, Replaced, Synced, journalled_upto
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.rebuild import Rebuilt, rebuild
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    DIRTY,
    BlockState,
    EntryRecord,
    FrameRef,
    FrameState,
    InodeRecord,
    NodeTable,
    block_key,
    decode_u64,
    entry_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
    table_range,
)
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, ChangeSeq, Inode, ManifestNumber, PackId
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryJournal, MemoryKV

FILE_MODE = 0o100644


@dataclass
class Frozen:
    """A cut whose manifest has not landed."""

    seq: ChangeSeq
    rows: dict[bytes, bytes]
    names: dict[bytes, Inode]
    versions: dict[Inode, int]
    """Which of an inode's versions the cut holds."""


class SmallNode:
    def __init__(self) -> None:
        self.kv = MemoryKV()
        self.data = MemoryDataFiles()
        self.journal = MemoryJournal()
        self.claims = LocalClaims()
        self.counter = ChangeCounter(ChangeSeq(0))
        self.journalled = ChangeSeq(0)
        self.head: dict[bytes, bytes] = {}
        self.head_seq = ChangeSeq(0)
        self.frames: dict[FrameRef, bytes] = {}
        self.inodes = count(10)
        self.packs = count(1)
        self.versions: dict[Inode, list[bytes]] = {}
        self.names_journalled: dict[bytes, Inode] = {}
        self.cut: Frozen | None = None

    # What a program may do.

    def create(self, name: bytes) -> None:
        if name in self.names():
            return
        ino = Inode(next(self.inodes))
        with self.kv.write() as txn:
            recorder = Recorder(txn, self.counter)
            recorder.put(inode_key(ino), InodeRecord(FILE_MODE, 1, 0, 0, 0).encode())
            recorder.put(entry_key(ROOT_INODE, name), EntryRecord(ino, 8).encode())
        self.versions[ino] = [b""]

    def write(self, name: bytes, offset: int, length: int, byte: int) -> None:
        ino = self.names().get(name)
        if ino is None:
            return
        record = self.inode(ino)
        blocks = range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))
        for block in blocks:
            self.hydrate(ino, BlockIndex(block))
        if offset > record.size:
            self.data.truncate(ino, record.size)
        with self.kv.write() as txn:
            recorder = Recorder(txn, self.counter)
            for block in blocks:
                if self.state(ino, BlockIndex(block)) is None:
                    self.data.clear(ino, block * BLOCK_BYTES, BLOCK_BYTES)
                    record = replace(record, allocated=record.allocated + BLOCK_BYTES)
                recorder.put(block_key(ino, BlockIndex(block)), DIRTY.encode())
            recorder.put(inode_key(ino), replace(record, size=max(record.size, offset + length)).encode())
        self.data.pwrite(ino, offset, bytes([byte]) * length)
        self.versions[ino].append(self.read(ino))

    def truncate(self, name: bytes, size: int) -> None:
        ino = self.names().get(name)
        if ino is None:
            return
        record = self.inode(ino)
        first, cut = BlockIndex(-(-size // BLOCK_BYTES)), BlockIndex(size // BLOCK_BYTES)
        if size < record.size and size % BLOCK_BYTES:
            self.hydrate(ino, cut)
        if size > record.size:
            self.data.truncate(ino, record.size)
        with self.kv.write() as txn:
            recorder = Recorder(txn, self.counter)
            if size < record.size:
                gone = len(list(txn.scan(block_key(ino, first), ino_range(BLOCK_TABLE, ino)[1])))
                record = replace(record, allocated=record.allocated - gone * BLOCK_BYTES)
                recorder.drop_blocks(ino, first)
                if size % BLOCK_BYTES and self.state(ino, cut) is not None:
                    recorder.put(block_key(ino, cut), DIRTY.encode())
            recorder.put(inode_key(ino), replace(record, size=size).encode())
        if self.claims.holds_any(ino, cut):
            self.append([self.collect()])
        self.data.truncate(ino, size)
        self.versions[ino].append(self.read(ino))

    def unlink(self, name: bytes) -> None:
        ino = self.names().get(name)
        if ino is None:
            return
        with self.kv.write() as txn:
            recorder = Recorder(txn, self.counter)
            recorder.delete(entry_key(ROOT_INODE, name))
            recorder.delete(inode_key(ino))
            recorder.drop_blocks(ino, BlockIndex(0))
        if self.claims.holds_any(ino):
            self.append([self.collect()])
        self.data.remove(ino)

    def fsync(self, name: bytes) -> None:
        ino = self.names().get(name)
        if ino is None:
            return
        changes = self.collect()
        self.data.sync(ino)
        self.append([changes, Synced(changes.seq, ino)])
        self._settle(ino)

    def _settle(self, ino: Inode) -> None:
        """Nothing older than the present content may ever come back."""
        self.versions[ino] = [self.read(ino)]
        if self.cut is not None and ino in self.cut.versions:
            self.cut.versions[ino] = 0

    def seal(self, name: bytes) -> None:
        ino = self.names().get(name)
        for block, state in self.blocks(ino) if ino is not None else []:
            if ino is not None and state.dirty:
                self.put_local(ino, block, BlockState(True, FrameState.UNPUBLISHED, self.upload(ino, block)))

    def upload(self, ino: Inode, block: BlockIndex) -> FrameRef:
        start = block * BLOCK_BYTES
        content = self.data.pread(ino, start, min(BLOCK_BYTES, self.inode(ino).size - start))
        frame = FrameRef(PackId(f"00000001-{next(self.packs):016x}"), 0, len(content), len(content), b"d" * 32)
        self.frames[frame] = content
        return frame

    def evict(self, name: bytes) -> None:
        ino = self.names().get(name)
        for block, state in self.blocks(ino) if ino is not None else []:
            if ino is not None and state.local and not state.dirty:
                absent = state.without_local_bytes()
                self.put_local(ino, block, absent)
                if self.claims.holds(ino, block):
                    key = block_key(ino, block)
                    self.append([self.collect(), Replaced(self.counter.seq, key, absent.encode())])
                self.data.punch(ino, block * BLOCK_BYTES, BLOCK_BYTES)

    def freeze(self) -> None:
        """Begin a cut: what it publishes is fixed now, and the node learns of its frames when it lands."""
        if self.cut is not None:
            return
        rows = {}
        with self.kv.read() as view:
            for key, value in view.scan(b"a"):
                if key[:1] == BLOCK_TABLE:
                    frame = BlockState.decode(value).frame or self.upload(key_ino(key), key_block(key))
                    value = BlockState(local=False, state=FrameState.PUBLISHED, frame=frame).encode()
                rows[key] = value
        counts = {ino: len(self.versions[ino]) - 1 for ino in self.names().values()}
        self.cut = Frozen(self.counter.barrier(), rows, self.names(), counts)

    def land(self, *, confirm: bool = True) -> None:
        """The cut's manifest is in the store; without *confirm* the node does not know it yet."""
        cut, self.cut = self.cut, None
        if cut is None:
            return
        self.head, self.head_seq = cut.rows, cut.seq
        if self.journalled < cut.seq:
            self.names_journalled = cut.names
        for ino, first in cut.versions.items():
            self.versions[ino] = self.versions[ino][first:]
        if confirm:
            self._confirm()

    def publish(self) -> None:
        self.land()
        self.freeze()
        self.land()

    def _confirm(self) -> None:
        with self.kv.write() as txn:
            for key, value in self.head.items():
                if key[:1] == BLOCK_TABLE and (now := txn.get(key)):
                    row = txn.get(NodeTable.CHANGES + key)
                    if row is not None and decode_u64(row) <= self.head_seq:
                        published = BlockState.decode(value)
                        txn.put(key, replace(published, local=BlockState.decode(now).local).encode())
            for table, at in ((NodeTable.CHANGELOG, 1), (NodeTable.RANGES, 9)):
                for row, key in list(txn.scan(*table_range(table))):
                    if decode_u64(row, at) <= self.head_seq:
                        txn.delete(row)
                        if table == NodeTable.CHANGELOG:
                            txn.delete(NodeTable.CHANGES + key)
        record = Published(self.head_seq, ManifestNumber(self.head_seq), "")
        self.append([record])
        self.journal.prune(self.head_seq, frozenset())
        self.journalled = max(self.journalled, self.head_seq)

    def kill(self) -> None:
        """SIGKILL and a restart within the same boot: map and files are there, cuts are abandoned."""
        self.cut = None
        self.kv, self.data, self.journal = self.kv.reopened(), self.data.restarted(), self.journal.reopened()
        records = self.journal.records()
        self.claims = LocalClaims(records)
        self.journalled = journalled_upto(records, self.head_seq)
        self.counter = ChangeCounter(self.counter.seq)
        for ino in self.names().values():
            assert self.read(ino) == self.versions[ino][-1], "acknowledged writes survive SIGKILL"

    def lose_power(self, rng: random.Random) -> Rebuilt:
        if rng.random() < 0.5:
            self.land(confirm=False)
        self.cut = None
        self.data = self.data.power_loss(rng)
        self.journal = self.journal.reopened(torn=b"SWJ\x01 half a record")
        self.kv = MemoryKV()
        with self.kv.write() as txn:
            for key, value in self.head.items():
                txn.put(key, value)
            rebuilt = rebuild(txn, self.head_seq, self.journal.records())
            seq = txn.get(NodeTable.META + b"change_seq")
        for ino in list(self.data.inodes()):
            self.data.keep_only(ino, rebuilt.trusted.get(ino, frozenset()))
        for ino, size in rebuilt.sizes.items():
            self.data.truncate(ino, size)
            self.data.sync(ino)
        self.journal.rewrite(rebuilt.journal)
        self.claims = LocalClaims(rebuilt.journal)
        self.counter = ChangeCounter(ChangeSeq(decode_u64(seq or bytes(8))))
        self.journalled = self.counter.seq
        return rebuilt

    # What it is made of.

    def names(self) -> dict[bytes, Inode]:
        with self.kv.read() as view:
            start, stop = ino_range(b"e", ROOT_INODE)
            return {key[9:]: EntryRecord.decode(value).ino for key, value in view.scan(start, stop)}

    def inode(self, ino: Inode) -> InodeRecord:
        with self.kv.read() as view:
            return InodeRecord.decode(view.get(inode_key(ino)) or b"")

    def state(self, ino: Inode, block: BlockIndex) -> BlockState | None:
        with self.kv.read() as view:
            value = view.get(block_key(ino, block))
        return BlockState.decode(value) if value else None

    def blocks(self, ino: Inode) -> list[tuple[BlockIndex, BlockState]]:
        with self.kv.read() as view:
            rows = list(view.scan(*ino_range(BLOCK_TABLE, ino)))
        return [(key_block(key), BlockState.decode(value)) for key, value in rows if value]

    def put_local(self, ino: Inode, block: BlockIndex, state: BlockState) -> None:
        with self.kv.write() as txn:
            txn.put(block_key(ino, block), state.encode())

    def hydrate(self, ino: Inode, block: BlockIndex) -> None:
        state = self.state(ino, block)
        if state is not None and not state.local and state.frame is not None:
            self.data.clear(ino, block * BLOCK_BYTES, BLOCK_BYTES)
            self.data.pwrite(ino, block * BLOCK_BYTES, self.frames[state.frame])
            self.put_local(ino, block, state.with_local_bytes())

    def collect(self) -> Changes:
        with self.kv.read() as view:
            seq = self.counter.barrier()
            cut_seq = self.cut.seq if self.cut is not None and self.cut.seq > self.journalled else self.journalled
            earlier = self._between(view, self.journalled, cut_seq)
            later = self._between(view, cut_seq, seq)
        self.journalled = seq
        return Changes(seq, later, ((cut_seq, earlier),) if earlier else ())

    def _between(self, view: KVRead, after: ChangeSeq, upto: ChangeSeq) -> ChangeSet:
        log = view.scan(*table_range(NodeTable.CHANGELOG))
        keys = [key for row, key in log if after < decode_u64(row, 1) <= upto]
        rows = [row for row in view.scan(*table_range(NodeTable.RANGES)) if decode_u64(row[0], 9) > after]
        return ChangeSet.of(dropped_ranges(iter(rows), upto), {key: view.get(key) for key in keys})

    def append(self, records: list[Record]) -> None:
        self.journal.append(records)
        for record in records:
            self.claims.note(record)
            if isinstance(record, Changes):
                self.names_journalled = self.names()

    def read(self, ino: Inode) -> bytes:
        """Content by the map: local bytes, frames, holes."""
        content = bytearray(self.inode(ino).size)
        for block, state in self.blocks(ino):
            start = block * BLOCK_BYTES
            if state.local:
                found = self.data.pread(ino, start, BLOCK_BYTES)
            else:
                assert state.frame is not None
                found = self.frames[state.frame]
            found = found[: len(content) - start] if start < len(content) else b""
            content[start : start + len(found)] = found
        return bytes(content)

    def check_after_power_loss(self) -> None:
        """Every name as journalled; every byte from a version since the last fsync or publish."""
        assert self.names() == self.names_journalled
        for ino in self.names().values():
            found, versions = self.read(ino), self.versions[ino]
            sizes = [len(version) for version in versions]
            assert min(sizes) <= len(found) <= max(sizes), (ino, sizes, len(found))
            possible = np.zeros(len(found), dtype=bool)
            view = np.frombuffer(found, dtype=np.uint8)
            for version in versions:
                shared = min(len(version), len(found))
                possible[:shared] |= view[:shared] == np.frombuffer(version, dtype=np.uint8)[:shared]
            assert possible.all(), (ino, int(np.argmin(possible)), sizes, len(found))
            assert self.inode(ino).allocated == len(self.blocks(ino)) * BLOCK_BYTES
            self.versions[ino] = [found]
        with self.kv.read() as view_:
            assert {key_ino(row) for row, _ in view_.scan(*table_range(BLOCK_TABLE))} <= set(self.names().values())
