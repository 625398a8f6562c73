"""Does every ordered map mean the same by `core.ports.KVStore`?"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from spotwarp_fs.core.ports import KVStore
from spotwarp_fs.local.kv import READER_CHECK_S, LmdbKV
from spotwarp_fs.local.memory import MemoryKV

MakeKV = Callable[[], KVStore]
KINDS = ("lmdb", "memory")


def make_kv(kind: str, path: Path) -> KVStore:
    return LmdbKV(path, map_bytes=1 << 30) if kind == "lmdb" else MemoryKV()


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    store = make_kv(request.param, tmp_path / "map")
    yield store
    store.close()


def rows(kv: KVStore) -> list[tuple[bytes, bytes]]:
    with kv.read() as view:
        return list(view.scan(b""))


def fill(kv: KVStore, **values: bytes) -> None:
    with kv.write() as txn:
        for key, value in values.items():
            txn.put(key.encode(), value)


def test_a_committed_value_is_read_back(kv: KVStore) -> None:
    fill(kv, key=b"value", empty=b"")
    with kv.read() as view:
        assert view.get(b"key") == b"value"
        assert view.get(b"empty") == b""
        assert view.get(b"other") is None


def test_scan_is_ordered_and_half_open(kv: KVStore) -> None:
    fill(kv, c=b"3", a=b"1", b=b"2", ab=b"4")
    assert [key for key, _ in rows(kv)] == [b"a", b"ab", b"b", b"c"]
    with kv.read() as view:
        assert list(view.scan(b"ab", b"c")) == [(b"ab", b"4"), (b"b", b"2")]
        assert list(view.scan(b"aa", b"ab")) == []
        assert list(view.scan(b"d")) == []


def test_a_write_transaction_sees_its_own_changes(kv: KVStore) -> None:
    fill(kv, a=b"1", b=b"2")
    with kv.write() as txn:
        txn.put(b"b", b"new")
        txn.put(b"c", b"3")
        assert txn.delete(b"a") is True
        assert txn.delete(b"a") is False
        assert txn.get(b"a") is None
        assert txn.get(b"b") == b"new"
        assert list(txn.scan(b"a")) == [(b"b", b"new"), (b"c", b"3")]


def test_an_exception_takes_the_whole_block_back(kv: KVStore) -> None:
    fill(kv, a=b"1", b=b"2")

    def fail() -> None:
        with kv.write() as txn:
            txn.put(b"a", b"changed")
            txn.delete(b"b")
            txn.put(b"c", b"3")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert rows(kv) == [(b"a", b"1"), (b"b", b"2")]
    fill(kv, d=b"4")
    assert rows(kv) == [(b"a", b"1"), (b"b", b"2"), (b"d", b"4")]


@pytest.mark.parametrize("opened", ["before", "within"])
def test_a_view_does_not_see_a_block_that_had_not_ended(kv: KVStore, opened: str) -> None:
    fill(kv, a=b"1")
    early = kv.snapshot()
    with kv.write() as txn:
        txn.put(b"a", b"2")
        within = kv.snapshot()
        txn.put(b"b", b"3")
    view = early if opened == "before" else within
    assert list(view.scan(b"")) == [(b"a", b"1")]
    assert view.get(b"b") is None
    early.close()
    within.close()
    assert rows(kv) == [(b"a", b"2"), (b"b", b"3")]


def test_a_snapshot_stays_as_it_was_and_serves_another_thread(kv: KVStore) -> None:
    fill(kv, a=b"1", b=b"2")
    snapshot = kv.snapshot()
    fill(kv, a=b"9", c=b"3")
    with kv.write() as txn:
        txn.delete(b"b")
    found: list[tuple[bytes, bytes]] = []
    thread = threading.Thread(target=lambda: found.extend(snapshot.scan(b"")))
    thread.start()
    thread.join()
    snapshot.close()
    assert found == [(b"a", b"1"), (b"b", b"2")]
    assert rows(kv) == [(b"a", b"9"), (b"c", b"3")]


def test_a_nested_write_block_is_refused_instead_of_waiting_for_itself(kv: KVStore) -> None:
    with kv.write() as outer:
        outer.put(b"a", b"1")
        with pytest.raises(AssertionError), kv.write():
            pass
    assert rows(kv) == [(b"a", b"1")]


def test_deleting_what_a_scan_collected(kv: KVStore) -> None:
    with kv.write() as txn:
        for number in range(500):
            txn.put(b"k%03d" % number, b"v")
    with kv.write() as txn:
        for key, _ in list(txn.scan(b"k100", b"k400")):
            txn.delete(key)
    assert len(rows(kv)) == 200


def test_a_key_that_is_too_long_is_refused(kv: KVStore) -> None:
    def put(length: int) -> None:
        with kv.write() as txn:
            txn.put(b"k" * length, b"")

    put(511)
    with pytest.raises((AssertionError, lmdb.BadValsizeError)):
        put(512)


KEYS = st.binary(min_size=1, max_size=3)
CHANGES = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=4))), max_size=8)
BLOCKS = st.lists(st.tuples(CHANGES, st.booleans(), st.booleans()), max_size=8)


@settings(max_examples=60, deadline=None)
@given(blocks=BLOCKS)
def test_any_program_leaves_both_maps_equal_to_a_dict(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[list[tuple[bytes, bytes | None]], bool, bool]]
) -> None:
    for kind in KINDS:
        kv = make_kv(kind, tmp_path_factory.mktemp("map"))
        _run_program(kv, blocks)
        kv.close()


def _run_program(kv: KVStore, blocks: list[tuple[list[tuple[bytes, bytes | None]], bool, bool]]) -> None:
    model: dict[bytes, bytes] = {}
    kept = []
    for changes, fails, snapshot in blocks:
        if snapshot:
            kept.append((kv.snapshot(), sorted(model.items())))
        after = dict(model)
        try:
            with kv.write() as txn:
                for key, value in changes:
                    if value is None:
                        assert txn.delete(key) == (after.pop(key, None) is not None)
                    else:
                        txn.put(key, value)
                        after[key] = value
                assert list(txn.scan(b"")) == sorted(after.items())
                if fails:
                    raise KeyError
            model = after
        except KeyError:
            pass
        assert rows(kv) == sorted(model.items())
    for view, expected in kept:
        assert list(view.scan(b"")) == expected
        view.close()


def test_lmdb_a_full_map_is_enospc_and_the_block_is_undone(tmp_path: Path) -> None:
    kv = LmdbKV(tmp_path, map_bytes=1 << 20)
    fill(kv, a=b"1")

    def overfill() -> None:
        with kv.write() as txn:
            for number in range(1000):
                txn.put(b"k%d" % number, bytes(10_000))

    with pytest.raises(OSError, match="fixed size") as caught:
        overfill()
    assert caught.value.errno == errno.ENOSPC
    assert rows(kv) == [(b"a", b"1")]
    kv.close()


def test_lmdb_a_second_thread_waits_for_the_first_ones_block(tmp_path: Path) -> None:
    kv = LmdbKV(tmp_path, map_bytes=1 << 26)
    seen: list[bytes | None] = []

    def second() -> None:
        with kv.write() as txn:
            seen.append(txn.get(b"a"))

    with kv.write() as txn:
        thread = threading.Thread(target=second)
        thread.start()
        txn.put(b"a", b"first")
    thread.join()
    assert seen == [b"first"]
    kv.close()


WRITER = """
import sys
from pathlib import Path
from spotwarp_fs.local.kv import LmdbKV

kv = LmdbKV(Path(sys.argv[1]), map_bytes=1 << 30)
number = 0
while True:
    number += 1
    with kv.write() as txn:
        txn.put(b"last", b"%d" % number)
        txn.put(b"row %d" % number, b"x" * (number % 3000))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.promise("P-01")
@pytest.mark.parametrize("kill_after", [1, 40, 700, 2500])
def test_lmdb_what_was_acknowledged_survives_sigkill(tmp_path: Path, kill_after: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = 0
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged == kill_after:
                os.kill(child.pid, signal.SIGKILL)
    assert acknowledged >= kill_after

    kv = LmdbKV(tmp_path, map_bytes=1 << 30)
    with kv.read() as view:
        last = int(view.get(b"last") or b"0")
        assert last in (acknowledged, acknowledged + 1)
        for number in range(1, last + 1):
            assert view.get(b"row %d" % number) == b"x" * (number % 3000)
        assert view.get(b"row %d" % (last + 1)) is None
    fill(kv, after=b"written")
    kv.close()


READER = """
import sys
from pathlib import Path
from spotwarp_fs.local.kv import LmdbKV

kv = LmdbKV(Path(sys.argv[1]), map_bytes=1 << 28)
snapshot = kv.snapshot()
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.mark.history("M-g")
def test_lmdb_the_slot_of_a_killed_reader_is_freed(tmp_path: Path) -> None:
    kv = LmdbKV(tmp_path, map_bytes=1 << 28)
    fill(kv, a=b"1")
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"reading\n"
        assert kv.reader_check() == 0
        os.kill(child.pid, signal.SIGKILL)
    assert kv.reader_check() == 1
    assert kv.reader_check() == 0
    kv.close()


@pytest.mark.history("M-g")
def test_Mg_while_a_map_is_served_dead_readers_are_cleared_each_minute(tmp_path: Path) -> None:
    kv = LmdbKV(tmp_path, map_bytes=1 << 28)
    fill(kv, a=b"1")

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kv.watch_readers)
            await trio.sleep(READER_CHECK_S / 2)
            command = [sys.executable, "-c", READER, str(tmp_path)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"reading\n"
                child.kill()
            await trio.sleep(READER_CHECK_S)
            nursery.cancel_scope.cancel()

    trio.run(serve, clock=MockClock(autojump_threshold=0))
    assert kv.reader_check() == 0, "nobody was left to clear"
    kv.close()
