"""Does a placeholder give every reader the right bytes or an error, whoever of daemon and keeper dies meanwhile?"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import keeper_link, keeping, leases
from spotwarp_fs.directory.keeping import PlaceholderLate, open_keeper
from tests.support import placeholders
from tests.support.placeholders import (
    CONTENT_BYTES,
    DEADLINE_S,
    Daemon,
    content,
    is_waiting,
    ordinary,
    output_of,
    path_of,
    reader,
    running,
    socket_of,
    until,
)

MANY = 3_000
SOON_S = 1.5
"""When a placeholder is given up in these tests."""


def made(parent: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="spotwarp-keeper-", dir=parent))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def overlay() -> Iterator[Path]:
    """Mount an overlay, as in a container, or skip."""
    parts = made(tempfile.gettempdir())
    try:
        for name in ("lower", "upper", "work", "merged"):
            (parts / name).mkdir()
        options = f"lowerdir={parts}/lower,upperdir={parts}/upper,workdir={parts}/work"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts / "merged")]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            pytest.skip(f"no overlay can be mounted here: {mounted.stderr.strip()}")
        try:
            yield parts / "merged"
        finally:
            subprocess.run(["umount", "-l", parts / "merged"], check=True)
    finally:
        shutil.rmtree(parts)


@contextlib.contextmanager
def filesystem(kind: str) -> Iterator[Path]:
    if kind == "overlay":
        with overlay() as path:
            yield path
        return
    path = made("/dev/shm" if kind == "memory" else tempfile.gettempdir())
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def workspace(kind: str) -> Iterator[Path]:
    with filesystem(kind) as path:
        if why := leases.why_no_leases(path):
            pytest.skip(why)
        try:
            yield path
        finally:
            placeholders.end_keeper(path)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on a filesystem with leases; its keeper is ended."""
    with workspace(request.param) as path:
        yield path


@pytest.fixture
def one() -> Iterator[Path]:
    """The same, on the disk only, where the filesystem makes no difference."""
    with workspace("disk") as path:
        yield path


# Every kind of reader and writer, against a daemon without any capability that fills what is wanted.

READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
MAP = "import mmap, sys; f = open(sys.argv[1], 'rb'); sys.stdout.buffer.write(mmap.mmap(f.fileno(), 0, prot=1))"
SEND = """
import os, sys
source = os.open(sys.argv[1], os.O_RDONLY)
left = os.fstat(source).st_size
while left:
    left -= os.sendfile(1, source, None, left)
"""
READERS = {
    "read": [sys.executable, "-c", READ],
    "mmap": [sys.executable, "-c", MAP],
    "sendfile": [sys.executable, "-c", SEND],
    "cp": ["sh", "-c", 'cp "$0" "$0.copy" && cat "$0.copy"'],
    "shared by two": ["sh", "-c", 'cat "$0" > "$0.1" & cat "$0" > "$0.2"; wait; cmp "$0.1" "$0.2" && cat "$0.1"'],
}
WRITERS = {
    "append": ('printf tail >> "$0"', lambda whole: whole + b"tail"),
    "save over": ('printf new > "$0"', lambda _: b"new"),
    "truncate": ("exec python3 -c 'import os, sys; os.truncate(sys.argv[1], 10)' \"$0\"", lambda whole: whole[:10]),
    "replace": ('cp "$0" "$0.new" && printf tail >> "$0.new" && mv "$0.new" "$0"', lambda whole: whole + b"tail"),
}
COUNT = 40


@pytest.fixture(scope="module", params=["disk", "memory", "overlay"])
def idents(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Iterator[int]]]:
    """A directory of placeholders that an ordinary user's daemon fills, and idents that no test has used."""
    with workspace(request.param) as path:
        placeholders.give_to(path, ordinary())
        with running(path, 1, COUNT, "fill", "mode=755", prefix=ordinary()):
            assert len(list(path.glob("f*"))) == COUNT
            yield path, iter(range(1, COUNT + 1))


@pytest.mark.history("L5")
@pytest.mark.history("M-j")
@pytest.mark.parametrize("name", READERS)
def test_a_reader_gets_the_right_bytes(idents: tuple[Path, Iterator[int]], name: str) -> None:
    directory, numbers = idents
    ident = next(numbers)
    path = path_of(directory, ident)
    assert leases.absence(path) is not None
    assert path.stat().st_size == CONTENT_BYTES
    run = subprocess.run([*READERS[name], path], capture_output=True, timeout=DEADLINE_S, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout == content(ident)
    assert leases.absence(path) is None


@pytest.mark.history("L5")
@pytest.mark.parametrize("name", WRITERS)
def test_no_write_to_a_placeholder_is_lost(idents: tuple[Path, Iterator[int]], name: str) -> None:
    directory, numbers = idents
    ident = next(numbers)
    path = path_of(directory, ident)
    command, result = WRITERS[name]
    subprocess.run(["sh", "-c", command, path], timeout=DEADLINE_S, check=True)
    assert path.read_bytes() == result(content(ident))
    assert leases.absence(path) is None


def test_an_executed_placeholder_runs_or_is_busy_for_a_moment(idents: tuple[Path, Iterator[int]]) -> None:
    directory, numbers = idents
    ident = next(numbers)
    path = path_of(directory, ident)
    command = ["sh", "-c", 'exec "$0"', path]
    run = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    # The kernel executes nothing that is open for writing, and its filler has it open until just after the lease.
    while b"Text file busy" in run.stderr:
        run = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert run.stdout == f"placeholder {ident}\n".encode(), run.stderr.decode()


def test_who_does_not_want_to_wait_gets_an_error_and_the_bytes_come(idents: tuple[Path, Iterator[int]]) -> None:
    directory, numbers = idents
    ident = next(numbers)
    path = path_of(directory, ident)
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    until(lambda: leases.absence(path) is None, "the bytes that an impatient reader asked for")
    assert path.read_bytes() == content(ident)


def test_tar_which_does_not_want_to_wait_says_so_and_can_be_run_again(idents: tuple[Path, Iterator[int]]) -> None:
    directory, numbers = idents
    ident = next(numbers)
    path = path_of(directory, ident)
    command = ["tar", "-C", str(directory), "-cf", str(directory / "archive.tar"), path.name]
    run = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    if run.returncode == 0:  # another tar than GNU's may wait
        assert leases.absence(path) is None
    else:
        assert b"temporarily unavailable" in run.stderr
        until(lambda: subprocess.run(command, check=False).returncode == 0, "the bytes that tar asked for")
    unpacked = subprocess.run(["tar", "-xOf", directory / "archive.tar"], capture_output=True, check=True)
    assert unpacked.stdout == content(ident)


# Either process dies while somebody waits.


@pytest.mark.history("L5")
def test_a_reader_outwaits_the_death_of_the_daemon(place: Path) -> None:
    prefix = ordinary()
    placeholders.give_to(place, prefix)
    with running(place, 1, 3, prefix=prefix) as daemon:
        waiting = reader(path_of(place, 2))
        assert daemon.hear("wanted") == ["2"]
        daemon.kill()
        assert is_waiting(waiting, path_of(place, 2))
        late_comer = reader(path_of(place, 3))
        until(lambda: is_waiting(late_comer, path_of(place, 3)), "a reader without a daemon")
    with running(place, 10, 0, "fill", prefix=prefix) as daemon:
        assert output_of(waiting) == content(2)
        assert output_of(late_comer) == content(3)
        assert output_of(reader(path_of(place, 1))) == content(1)


@pytest.mark.history("L5")
async def test_a_reader_outwaits_the_death_of_the_keeper(place: Path) -> None:
    async with open_keeper(*socket_of(place)) as keeper:
        assert await placeholders.make(keeper, place, [1, 2, 3]) == {1, 2, 3}
        waiting = reader(path_of(place, 1))
        with trio.fail_after(DEADLINE_S):
            assert await keeper.wanted() == 1
        pid = keeper.keeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        late_comer = reader(path_of(place, 2))
        with trio.fail_after(DEADLINE_S):
            assert await keeper.wanted() == 2, "the one that was told is not told again"
            assert keeper.keeper_pid not in (None, pid)
            assert is_waiting(waiting, path_of(place, 1))
            for ident in (1, 2):
                await placeholders.fill(keeper, Inode(ident))
            assert await trio.to_thread.run_sync(output_of, waiting) == content(1)
            assert await trio.to_thread.run_sync(output_of, late_comer) == content(2)
            process = reader(path_of(place, 3))
            assert await keeper.wanted() == 3
            await placeholders.fill(keeper, Inode(3))
            assert await trio.to_thread.run_sync(output_of, process) == content(3)


async def test_a_keeper_that_sleeps_is_replaced(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_link, "ANSWER_MAX_S", 1.0)
    monkeypatch.setattr(keeping, "PING_S", 0.1)
    async with open_keeper(*socket_of(one)) as keeper:
        await placeholders.make(keeper, one, [1])
        pid = keeper.keeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        process = reader(path_of(one, 1))
        with trio.fail_after(DEADLINE_S):
            assert await keeper.wanted() == 1
            assert keeper.keeper_pid != pid
            await placeholders.fill(keeper, Inode(1))
            assert await trio.to_thread.run_sync(output_of, process) == content(1)


async def test_what_was_filled_when_the_daemon_died_is_let_go_by_the_next(one: Path) -> None:
    async with open_keeper(*socket_of(one)) as keeper:
        await placeholders.make(keeper, one, [1, 2])
        fd = keeper.descriptor(Inode(1))
        os.pwrite(fd, content(1), 0)
        leases.clear_mark(fd)
    process = reader(path_of(one, 1))
    until(lambda: is_waiting(process, path_of(one, 1)), "a reader without a daemon")
    async with open_keeper(*socket_of(one)) as keeper:
        assert set(keeper.recovered) == {2}
        assert await trio.to_thread.run_sync(output_of, process) == content(1)


# Bytes that do not come in time.


@pytest.mark.history("L6")
async def test_what_does_not_come_in_time_is_empty_late_and_can_be_filled_later(place: Path) -> None:
    path = path_of(place, 1)
    async with open_keeper(*socket_of(place), late_after_s=SOON_S) as keeper:
        await placeholders.make(keeper, place, [1, 2])
        lent = keeper.descriptor(Inode(1))
        process = reader(path)
        with trio.fail_after(DEADLINE_S):
            assert await trio.to_thread.run_sync(output_of, process) == b""
            while not keeper.late():
                await trio.sleep(0.01)
        assert keeper.late() == {1}
        assert leases.absence(path) == leases.Absence("session-1", late=True)
        assert path.stat().st_size == 0
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(lent, b"too late", 0)
        with pytest.raises(PlaceholderLate, match="placeholder 1 "):
            await keeper.release(Inode(1))
        assert path.stat().st_size == 0

        fd = os.open(path, os.O_RDWR)
        assert await keeper.hold([(Inode(1), fd)]) == {1}
        leases.mark_absent(fd, "session-1")
        os.close(fd)
        assert keeper.late() == frozenset()
        process = reader(path)
        with trio.fail_after(DEADLINE_S):
            assert await keeper.wanted() == 1
            await placeholders.fill(keeper, Inode(1))
            assert await trio.to_thread.run_sync(output_of, process) == content(1)


@pytest.mark.history("L6")
def test_without_a_daemon_it_is_emptied_in_time_and_the_next_one_hears_of_it(place: Path) -> None:
    with running(place, 1, 2, f"late-after={SOON_S}"):
        pass
    assert output_of(reader(path_of(place, 1))) == b""
    assert leases.absence(path_of(place, 1)) == leases.Absence("session-1", late=True)
    daemon = Daemon(place, 10, 0, "fill")
    try:
        assert daemon.hear("ready")[4:] == ["1"]
        assert output_of(reader(path_of(place, 2))) == content(2)
    finally:
        daemon.kill()


@pytest.mark.history("L6")
async def test_a_fill_that_is_too_slow_leaves_nothing_of_itself(place: Path) -> None:
    """A thread writes on and on, through each write's own loan and not: the file is empty from the moment it opens."""
    stop = threading.Event()

    def write_on(fd: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                os.pwrite(fd, b"torn", 0)

    async with open_keeper(*socket_of(place), late_after_s=SOON_S) as keeper:
        await placeholders.make(keeper, place, [1])
        process = reader(path_of(place, 1))
        with trio.fail_after(DEADLINE_S):
            ident = await keeper.wanted()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, write_on, keeper.descriptor(ident))
                with contextlib.suppress(PlaceholderLate):
                    while True:
                        with keeper.writing(ident) as fd:
                            await trio.to_thread.run_sync(os.pwrite, fd, b"torn" * 10_000, 0)
                stop.set()
            assert await trio.to_thread.run_sync(output_of, process) == b""
        assert path_of(place, 1).stat().st_size == 0


@pytest.mark.history("L6")
def test_a_stopped_daemon_does_not_keep_a_reader(one: Path) -> None:
    with running(one, 1, 1, f"late-after={SOON_S}") as daemon:
        daemon.process.send_signal(signal.SIGSTOP)
        assert output_of(reader(path_of(one, 1))) == b""


# How many, how long, and who.


@pytest.mark.history("L5")
async def test_thousands_are_held_at_once_and_found_again(one: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY + keeping.DAEMON_DESCRIPTORS:
        pytest.skip(f"this user may have {hard} files open")
    async with open_keeper(*socket_of(one)) as keeper:
        room = keeper.room
        assert len(await placeholders.make(keeper, one, range(1, MANY + 1))) == MANY
        assert keeper.room == room - MANY
        inodes = {ident: os.fstat(keeper.descriptor(Inode(ident))).st_ino for ident in range(1, MANY + 1)}
    processes = [reader(path_of(one, ident)) for ident in (7, 2_000, MANY)]
    async with open_keeper(*socket_of(one)) as keeper:
        assert {ident: os.fstat(fd).st_ino for ident, fd in keeper.recovered.items()} == inodes
        with trio.fail_after(DEADLINE_S):
            for _ in processes:
                await placeholders.fill(keeper, await keeper.wanted())
            for ident, process in zip((7, 2_000, MANY), processes, strict=True):
                assert await trio.to_thread.run_sync(output_of, process) == content(ident)
        pid = keeper.keeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        process = reader(path_of(one, 1_000))
        with trio.fail_after(DEADLINE_S):
            assert await keeper.wanted() == 1_000
            await placeholders.fill(keeper, Inode(1_000))
            assert await trio.to_thread.run_sync(output_of, process) == content(1_000)
        assert keeper.room == room - MANY + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_exceeds_the_ration_is_not_held(one: Path) -> None:
    few = keeping.DAEMON_DESCRIPTORS + 250
    daemon = Daemon(one, 1, 400, "fill", prefix=("prlimit", f"--nofile={few}"))
    try:
        held, _, room, *_ = daemon.hear("ready")
        assert (int(held), int(room)) == (250, 0)
        assert len(list(one.glob("f*"))) == 250
        assert output_of(reader(path_of(one, 250))) == content(250)
    finally:
        daemon.kill()


async def test_who_waits_is_found_when_signals_are_lost(one: Path) -> None:
    async with open_keeper(*socket_of(one)) as keeper:
        await placeholders.make(keeper, one, [1, 2, 3])
        pid = keeper.keeper_pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_SIGPENDING, (0, 0))
        processes = [reader(path_of(one, ident)) for ident in (1, 3)]
        with trio.fail_after(DEADLINE_S):
            assert {await keeper.wanted(), await keeper.wanted()} == {1, 3}
        for ident, process in zip((1, 3), processes, strict=True):
            await placeholders.fill(keeper, Inode(ident))
            assert await trio.to_thread.run_sync(output_of, process) == content(ident)


async def test_a_file_in_use_or_without_a_mark_is_not_held(one: Path) -> None:
    async with open_keeper(*socket_of(one)) as keeper:
        marked, fd = placeholders.draft(one, 1)
        other = os.open(marked, os.O_RDONLY)
        assert await keeper.hold([(Inode(1), fd)]) == set()
        os.close(other)
        leases.clear_mark(fd)
        assert await keeper.hold([(Inode(1), fd)]) == set()
        leases.mark_absent(fd, "s")
        assert await keeper.hold([(Inode(1), fd)]) == {1}
        os.close(fd)
        await keeper.release(Inode(1))


async def test_a_keeper_that_holds_nothing_ends_and_one_that_holds_stays(one: Path) -> None:
    socket_path, log_path = socket_of(one)
    async with open_keeper(socket_path, log_path, idle_s=0.1) as keeper:
        await placeholders.make(keeper, one, [1])
        assert not await keeper.end()
        pid = keeper.keeper_pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        assert os.getsid(pid) != os.getsid(0)
    until(lambda: "not ending signal=15 held=1" in log_path.read_text(), "the keeper's word on SIGTERM")
    async with open_keeper(socket_path, log_path) as keeper:
        assert keeper.keeper_pid == pid
        await keeper.release(Inode(1))
    until(lambda: not socket_path.exists(), "the end of an idle keeper")
    async with open_keeper(socket_path, log_path) as keeper:
        assert keeper.keeper_pid != pid
        assert await keeper.end()


async def test_a_second_daemon_is_refused(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_link, "JOIN_MAX_S", 0.5)
    with running(one, 1, 1, "fill"):
        with pytest.raises(Unavailable, match="busy"):
            async with open_keeper(*socket_of(one)):
                pass
        assert output_of(reader(path_of(one, 1))) == content(1)


async def test_a_keeper_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"keeper\.log"):
        async with open_keeper(tmp_path / "s", tmp_path / "missing" / "keeper.log"):
            pass
