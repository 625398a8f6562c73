"""Do both kinds of data files mean the same by `core.ports.DataFiles`?"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.memory import PAGE_BYTES, MemoryDataFiles

AnyFiles = SparseDataFiles | MemoryDataFiles
INO = Inode(5 << 40 | 17)
OTHER = Inode(5 << 40 | 18)


@pytest.fixture(params=["sparse", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyFiles]:
    made: AnyFiles = SparseDataFiles(tmp_path) if request.param == "sparse" else MemoryDataFiles()
    yield made
    made.close()


def test_what_was_written_is_read_and_the_rest_is_zeros(files: AnyFiles) -> None:
    files.pwrite(INO, 10, b"hello")
    files.pwrite(INO, 100_000, memoryview(b"far"))
    assert files.pread(INO, 8, 10) == b"\0\0hello\0\0\0"
    assert files.pread(INO, 99_999, 6) == b"\0far\0\0"
    assert files.pread(INO, 1 << 40, 3) == bytes(3)


def test_a_file_that_does_not_exist_reads_as_zeros_and_is_not_made_by_it(files: AnyFiles) -> None:
    assert files.pread(INO, 0, 5) == bytes(5)
    files.truncate(INO, 0)
    files.punch(INO, 0, 4096)
    files.sync(INO)
    files.remove(INO)
    files.set_aside(INO, "cut-1")
    assert list(files.inodes()) == []
    assert files.allocated_bytes(INO) == 0


def test_cached_read_gives_the_same_bytes_or_none(files: AnyFiles) -> None:
    content = os.urandom(300_000)
    files.pwrite(INO, 0, content)
    for offset, length in ((0, 4096), (299_000, 1000), (299_500, 5000), (400_000, 10), (7, 200_000)):
        found = files.pread_cached(INO, offset, length)
        assert found in (None, content[offset : offset + length].ljust(length, b"\0"))


def test_truncate_only_shortens(files: AnyFiles) -> None:
    files.pwrite(INO, 0, b"x" * 10_000)
    files.truncate(INO, 20_000)
    files.truncate(INO, 5_000)
    files.pwrite(INO, 9_000, b"y")
    assert files.pread(INO, 4_990, 20) == b"x" * 10 + bytes(10)
    assert files.pread(INO, 8_999, 3) == b"\0y\0"


def test_a_hole_gives_its_space_back(files: AnyFiles) -> None:
    files.pwrite(INO, 0, b"x" * (3 * BLOCK_BYTES))
    files.sync(INO)
    before = files.allocated_bytes(INO)
    files.punch(INO, BLOCK_BYTES, BLOCK_BYTES)
    assert before - files.allocated_bytes(INO) == BLOCK_BYTES
    assert files.pread(INO, BLOCK_BYTES - 1, 2) == b"x\0"
    assert files.pread(INO, 2 * BLOCK_BYTES - 1, 2) == b"\0x"


def test_clear_is_a_punch_that_may_miss(files: AnyFiles) -> None:
    files.clear(INO, 0, 10)
    assert files.pread(INO, 0, 10) == bytes(10)
    files.pwrite(INO, 0, b"x" * 100)
    files.clear(INO, 4096, 4096)
    files.clear(INO, 50, 4096)
    assert files.pread(INO, 0, 100) == b"x" * 50 + bytes(50)


def test_keep_only_leaves_the_named_blocks(files: AnyFiles) -> None:
    for index in range(5):
        files.pwrite(INO, index * BLOCK_BYTES + 5, bytes([65 + index]))
    files.pwrite(OTHER, 0, b"gone")
    files.keep_only(INO, frozenset({BlockIndex(1), BlockIndex(3), BlockIndex(9)}))
    files.keep_only(OTHER, frozenset())
    kept = [files.pread(INO, index * BLOCK_BYTES + 5, 1) for index in range(5)]
    assert kept == [b"\0", b"B", b"\0", b"D", b"\0"]
    assert list(files.inodes()) == [INO]


@pytest.mark.history("C7")
def test_C7_a_file_set_aside_stays_readable_while_its_inode_starts_anew(files: AnyFiles) -> None:
    files.pwrite(INO, 0, b"frozen")
    files.set_aside(INO, "cut-1")
    assert list(files.inodes()) == []
    assert files.pread(INO, 0, 6) == bytes(6)
    files.pwrite(INO, 0, b"newer")
    assert files.pread(INO, 0, 6) == b"newer\0"
    assert files.pread_aside(INO, "cut-1", 0, 8) == b"frozen\0\0"
    assert files.spool_bytes() > 0
    files.drop_aside("cut-1")
    files.drop_aside("cut-1")
    assert files.spool_bytes() == 0
    assert files.pread(INO, 0, 6) == b"newer\0"


@pytest.mark.history("C7")
def test_C7_the_frozen_file_is_never_replaced_by_a_newer_one(files: AnyFiles) -> None:
    files.pwrite(INO, 0, b"frozen")
    files.set_aside(INO, "cut-1")
    files.pwrite(INO, 0, b"newer")
    with pytest.raises(FileExistsError):
        files.set_aside(INO, "cut-1")
    assert files.pread_aside(INO, "cut-1", 0, 6) == b"frozen"


@pytest.mark.history("C7")
def test_C7_the_first_copy_of_a_block_set_aside_stays(files: AnyFiles) -> None:
    files.append_aside_block("cut-2", INO, BlockIndex(3), b"old three")
    files.append_aside_block("cut-2", INO, BlockIndex(4), memoryview(b"old four"))
    files.append_aside_block("cut-2", INO, BlockIndex(3), b"newer than the cut")
    assert files.read_aside_block("cut-2", INO, BlockIndex(3)) == b"old three"
    assert files.read_aside_block("cut-2", INO, BlockIndex(4)) == b"old four"
    for token, ino in (("cut-2", OTHER), ("cut-3", INO)):
        with pytest.raises(KeyError):
            files.read_aside_block(token, ino, BlockIndex(3))
    assert files.spool_bytes() == len(b"old threeold four")
    files.drop_aside("cut-2")
    with pytest.raises(KeyError):
        files.read_aside_block("cut-2", INO, BlockIndex(3))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "truncate", "punch", "remove"]),
        st.integers(0, 5 * PAGE_BYTES),
        st.integers(1, 2 * PAGE_BYTES),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_any_program_reads_the_same_from_both(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]]
) -> None:
    sparse, memory = SparseDataFiles(tmp_path_factory.mktemp("files")), MemoryDataFiles()
    for number, (verb, offset, length) in enumerate(operations):
        for files in (sparse, memory):
            match verb:
                case "write":
                    files.pwrite(INO, offset, bytes([number + 1]) * length)
                case "truncate":
                    files.truncate(INO, offset)
                case "punch":
                    files.punch(INO, offset, length)
                case "remove":
                    files.remove(INO)
        assert sparse.pread(INO, 0, 8 * PAGE_BYTES) == memory.pread(INO, 0, 8 * PAGE_BYTES)
        assert list(sparse.inodes()) == list(memory.inodes())
    sparse.close()


def test_sparse_bytes_and_names_outlive_the_process(tmp_path: Path) -> None:
    first = SparseDataFiles(tmp_path)
    first.pwrite(INO, 3, b"kept")
    first.close()
    second = SparseDataFiles(tmp_path)
    assert list(second.inodes()) == [INO]
    assert second.pread(INO, 0, 7) == b"\0\0\0kept"
    second.close()


def test_sparse_a_descriptor_in_use_survives_eviction_by_other_threads(tmp_path: Path) -> None:
    files = SparseDataFiles(tmp_path, open_files_max=2)
    inodes = [Inode(number) for number in range(1, 13)]
    for ino in inodes:
        files.pwrite(ino, 0, bytes([ino]) * 50_000)
    wrong: list[tuple[Inode, bytes]] = []

    def read_at_random(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(1500):
            ino = rng.choice(inodes)
            if files.pread(ino, 0, 50_000) != bytes([ino]) * 50_000:
                wrong.append((ino, b""))

    threads = [threading.Thread(target=read_at_random, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    open_data = [name for name in _open_names() if str(tmp_path) in name]
    assert len(open_data) <= 2
    files.close()
    assert [name for name in _open_names() if str(tmp_path) in name] == []


def _open_names() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return names


def test_sparse_a_removed_file_gives_its_space_back_at_once(tmp_path: Path) -> None:
    files = SparseDataFiles(tmp_path)
    files.pwrite(INO, 0, b"x" * 100_000)
    files.remove(INO)
    assert [name for name in _open_names() if str(tmp_path) in name] == []
    assert not list((tmp_path / "data").rglob("*17"))
    files.close()


@pytest.mark.history("H10")
def test_H10_a_failed_sync_stays_failed_until_it_is_cleared(files: AnyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.pwrite(INO, 0, b"a")
    files.pwrite(OTHER, 0, b"b")
    fail_next_sync(files, monkeypatch)
    with pytest.raises(OSError, match="Input/output error"):
        files.sync(INO)
    with pytest.raises(OSError, match="earlier fdatasync"):
        files.sync(INO)
    assert files.failed(INO)
    files.sync(OTHER)
    files.clear_failed(INO)
    files.sync(INO)
    assert not files.failed(INO)


def fail_next_sync(files: AnyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail one fdatasync as a dying disk does: no disk here can be made to."""
    if isinstance(files, MemoryDataFiles):
        files.sync_errors.add(INO)
        return
    real, left = os.fdatasync, [1]

    def fdatasync(fd: int) -> None:
        if left:
            left.pop()
            raise OSError(5, os.strerror(5))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)


@pytest.mark.history("C4")
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_C4_after_a_power_loss_every_page_is_old_or_new_and_synced_bytes_are_there(seed: int) -> None:
    rng = random.Random(seed)
    files = MemoryDataFiles()
    old, new = [bytes([letter]) * (6 * PAGE_BYTES) for letter in b"on"]
    files.pwrite(INO, 0, old)
    files.sync(INO)
    files.pwrite(INO, 2 * PAGE_BYTES, new[: 2 * PAGE_BYTES])
    files.pwrite(OTHER, 0, new)
    after = files.power_loss(rng)
    found = after.pread(INO, 0, len(old))
    for page in range(6):
        content = found[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        assert set(content) <= ({ord("o"), ord("n")} if page in (2, 3) else {ord("o")})
        assert len(set(content)) == 1
    assert set(after.pread(OTHER, 0, len(new))) <= {0, ord("n")}


def test_power_losses_differ_and_can_be_repeated() -> None:
    def lose(seed: int) -> bytes:
        files = MemoryDataFiles()
        files.pwrite(INO, 0, b"n" * 8 * PAGE_BYTES)
        return files.power_loss(random.Random(seed)).pread(INO, 0, 8 * PAGE_BYTES)

    assert lose(3) == lose(3)
    assert len({lose(seed) for seed in range(40)}) > 5
