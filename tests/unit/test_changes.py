"""Is every committed change noted for the next cut, and no other?"""

from __future__ import annotations

import pytest

from spotwarp_fs.core.changes import ChangeCounter, Recorder
from spotwarp_fs.core.records import NodeTable, block_key, inode_key
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode
from spotwarp_fs.local.memory import MemoryKV

KEY = inode_key(Inode(7))


def noted(kv: MemoryKV) -> list[bytes]:
    with kv.read() as view:
        return [key for _, key in view.scan(NodeTable.CHANGELOG, bytes([NodeTable.CHANGELOG[0] + 1]))]


def put_and_fail(kv: MemoryKV, counter: ChangeCounter) -> None:
    with kv.write() as txn:
        Recorder(txn, counter).put(KEY, b"lost")
        raise ZeroDivisionError


def test_a_change_after_an_aborted_transaction_is_noted() -> None:
    kv, counter = MemoryKV(), ChangeCounter(ChangeSeq(0))
    with pytest.raises(ZeroDivisionError):
        put_and_fail(kv, counter)
    counter.rolled_back()
    with kv.write() as txn:
        Recorder(txn, counter).put(KEY, b"kept")
    assert noted(kv) == [KEY]


def test_a_key_changed_again_after_a_barrier_moves_above_it() -> None:
    kv, counter = MemoryKV(), ChangeCounter(ChangeSeq(0))
    with kv.write() as txn:
        Recorder(txn, counter).put(KEY, b"1")
    cut = counter.barrier()
    with kv.write() as txn:
        Recorder(txn, counter).put(KEY, b"2")
        assert txn.get(NodeTable.CHANGES + KEY) > cut.to_bytes(8)
    assert noted(kv) == [KEY]


def test_dropping_blocks_forgets_rows_that_no_cut_can_hold_and_keeps_the_others() -> None:
    kv, counter = MemoryKV(), ChangeCounter(ChangeSeq(0))
    old, new = block_key(Inode(7), BlockIndex(0)), block_key(Inode(7), BlockIndex(1))
    with kv.write() as txn:
        Recorder(txn, counter).put(old, b"\x01")
    counter.barrier()
    with kv.write() as txn:
        recorder = Recorder(txn, counter)
        recorder.put(new, b"\x01")
        recorder.drop_blocks(Inode(7), BlockIndex(0))
        assert txn.get(old) is None
        assert txn.get(new) is None
    assert noted(kv) == [old]
