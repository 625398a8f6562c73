"""Do the bytes of a file stay what they are through every way to change them, beside a file of the local disk?"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, Node
from tests.support.mounts import needs_fuse

pytestmark = needs_fuse

MIB = 1 << 20
FILE_MAX = 3 * MIB + 4096
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = tmp_path_factory.mktemp("bytes")
    fleet = Fleet(home, f"file://{home / 'store'}")
    try:
        yield fleet.node().start()
    finally:
        fleet.close()


class Both:
    """The same file twice, on the mount and on the local disk."""

    def __init__(self, node: Node, name: str, place: Path) -> None:
        self.rng = random.Random(name)
        self.node = node
        self.paths = (node.root / name, place / name)
        self.fds = tuple(os.open(path, os.O_RDWR | os.O_CREAT) for path in self.paths)

    def each(self, act: Callable[[int], object]) -> object:
        """Do the same to both; they must answer the same."""
        answers = [act(fd) for fd in self.fds]
        assert answers[0] == answers[1]
        return answers[0]

    @property
    def size(self) -> int:
        return os.fstat(self.fds[1]).st_size

    def reopen(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = tuple(os.open(path, os.O_RDWR) for path in self.paths)

    def compare(self) -> None:
        here, there = (path.read_bytes() for path in self.paths)
        assert len(here) == len(there)
        assert here == there
        for fd in self.fds:
            assert os.fstat(fd).st_size == len(there)

    def step(self) -> None:
        """One random change or look."""
        rng = self.rng
        offset, length = rng.randrange(FILE_MAX - 300_000), rng.choice((1, 511, 4096, 70_000, 300_000))
        data = rng.randbytes(length)
        kind = rng.choice(
            ("write", "write", "read", "read", "map", "map-read", "private", "truncate", "append", "sync")
        )
        if kind == "write":
            self.each(lambda fd: os.pwrite(fd, data, offset))
        elif kind == "read":
            self.each(lambda fd: os.pread(fd, length, offset))
        elif kind == "truncate":
            size = rng.choice((0, self.size // 2, offset, MIB, 2 * MIB, self.size + 5000))
            self.each(lambda fd: os.ftruncate(fd, min(size, FILE_MAX)))
        elif kind == "append" and self.size < FILE_MAX - 70_000:
            for path in self.paths:
                with path.open("ab", buffering=0) as file:
                    file.write(data[:70_000])
        elif kind == "sync":
            self.each(os.fsync)
        elif self.size > PAGE:
            self.map(kind, offset % self.size, data)

    def map(self, kind: str, offset: int, data: bytes) -> None:
        """Read or store through a mapping."""
        length = min(len(data), self.size - offset)
        flags = mmap.MAP_PRIVATE if kind == "private" else mmap.MAP_SHARED

        def act(fd: int) -> bytes:
            with mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                if kind != "map-read":
                    mapped[offset : offset + length] = data[:length]
                    if kind == "map":
                        mapped.flush()
                return mapped[offset : offset + length]

        self.each(act)


@pytest.mark.parametrize("name", ["m1", "m2", *(pytest.param(f"s{n}", marks=pytest.mark.slow) for n in range(40))])
def test_random_changes_are_those_of_a_local_file(node: Node, tmp_path: Path, name: str) -> None:
    both = Both(node, name, tmp_path)
    for number in range(250):
        both.step()
        if number % 50 == 49:
            both.compare()
            if number == 149:
                node.sync()
    both.compare()
    for fd in both.fds:
        os.close(fd)


APPENDER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for number in range(200):
    assert os.write(fd, b"%s %06d\\n" % (sys.argv[2].encode(), number)) == 9
"""


def test_appends_of_several_processes_never_mix_or_overwrite(node: Node) -> None:
    path = node.root / "appended"
    path.touch()
    writers = [subprocess.Popen([sys.executable, "-c", APPENDER, str(path), who]) for who in "abcd"]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    lines = path.read_text().splitlines()
    assert len(lines) == 800
    for who in "abcd":
        assert [line for line in lines if line[0] == who] == [f"{who} {number:06}" for number in range(200)]


def test_direct_io_reads_and_writes_what_others_see(node: Node) -> None:
    buffer = mmap.mmap(-1, 16 * PAGE)
    buffer[:] = random.Random(3).randbytes(16 * PAGE)
    fd = os.open(node.root / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.pwritev(fd, [buffer], MIB - 8 * PAGE) == 16 * PAGE
        expected = bytes(MIB - 8 * PAGE) + buffer[:]
        assert (node.root / "direct").read_bytes() == expected
        with (node.root / "direct").open("r+b", buffering=0) as file:
            file.seek(MIB)
            file.write(b"through the page cache")
        assert os.preadv(fd, [buffer], MIB) == 8 * PAGE
        assert buffer[:22] == b"through the page cache"
    finally:
        os.close(fd)
        buffer.close()


def test_holes_read_as_zeros_take_no_room_and_can_be_sought(node: Node) -> None:
    path = node.root / "sparse"
    with path.open("wb") as file:
        file.seek(40 * MIB)
        file.write(b"end")
    found = path.stat()
    assert found.st_size == 40 * MIB + 3
    assert found.st_blocks * 512 <= 2 * MIB
    fd = os.open(path, os.O_RDONLY)
    try:
        # Without an lseek handler the kernel's answer is "all data, and a hole at the end", which is allowed.
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 40 * MIB + 3
        assert os.pread(fd, MIB, 20 * MIB + 7) == bytes(MIB)
        assert os.pread(fd, 100, 40 * MIB) == b"end"
    finally:
        os.close(fd)


def test_space_between_an_old_and_a_new_end_is_zeros(node: Node) -> None:
    path = node.root / "regrown"
    path.write_bytes(b"x" * (MIB + 5000))
    os.truncate(path, 5)
    os.truncate(path, MIB + 100)
    assert path.read_bytes() == b"xxxxx" + bytes(MIB + 95)
    with path.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"y")
    assert path.read_bytes() == b"xxxxx" + bytes(2 * MIB - 5) + b"y"


def test_fallocate_gives_room_without_changing_bytes(node: Node) -> None:
    """No handler: glibc writes zeros where nothing is, and those must not replace data."""
    with (node.root / "allocated").open("w+b") as file:
        file.write(b"data")
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 100_000)
        assert os.fstat(file.fileno()).st_size == 100_000
        assert os.pread(file.fileno(), 100_000, 0) == b"data" + bytes(99_996)


def test_copy_file_range_and_sendfile_copy(node: Node) -> None:
    body = random.Random(9).randbytes(MIB + 7)
    source, target = node.root / "source", node.root / "target"
    source.write_bytes(body)
    with source.open("rb") as reader, target.open("wb") as writer:
        done = os.copy_file_range(reader.fileno(), writer.fileno(), 500_000, 0, 0)
        assert done > 0
        while done < len(body):
            done += os.sendfile(writer.fileno(), reader.fileno(), done, len(body) - done) if _at(writer, done) else 0
    assert target.read_bytes() == body


def _at(writer, offset: int) -> bool:  # type: ignore[no-untyped-def]
    os.lseek(writer.fileno(), offset, os.SEEK_SET)
    return True


def test_an_unlinked_file_lives_until_its_last_descriptor(node: Node) -> None:
    path = node.root / "doomed"
    body = random.Random(4).randbytes(MIB + 500)
    path.write_bytes(body)
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    path.unlink()
    assert not path.exists()
    assert os.fstat(first).st_nlink == 0
    os.pwrite(first, b"still here", MIB - 3)
    os.close(first)
    node.sync()
    assert os.pread(second, 10, MIB - 3) == b"still here"
    assert os.pread(second, MIB, 0)[: MIB - 3] == body[: MIB - 3]
    path.write_bytes(b"another file of that name")
    assert os.pread(second, 10, MIB - 3) == b"still here"
    os.close(second)


def test_a_store_through_a_mapping_is_published_also_while_the_mapping_lives(node: Node) -> None:
    path = node.root / "mapped"
    path.write_bytes(bytes(MIB + PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[MIB - 2 : MIB + 2] = b"once"
        mapped.flush()
        node.sync()
        mapped[MIB - 2 : MIB + 2] = b"more"  # M11: an already dirty page changes neither mtime nor ctime
        mapped.flush()
        node.sync()
    node.kill()
    node.restart()
    assert path.read_bytes()[MIB - 2 : MIB + 2] == b"more"


def test_renameat2_by_number(node: Node) -> None:
    """What Python has no function for, straight from libc."""
    libc = ctypes.CDLL(None, use_errno=True)
    one, two = node.root / "one", node.root / "two"
    one.write_text("1")
    two.write_text("2")

    def rename2(flags: int) -> int:
        done = libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(two), flags)
        return ctypes.get_errno() if done else 0

    assert rename2(1) == 17
    assert rename2(2) == 0
    assert (one.read_text(), two.read_text()) == ("2", "1")
    assert rename2(3) == 22
