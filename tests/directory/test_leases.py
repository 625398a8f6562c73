"""Do leases and marks say what the directory form relies on, for an ordinary user too?"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotwarp_fs.directory import leases
from spotwarp_fs.directory.keeper_files import late_limit_s
from tests.support.placeholders import ROOT, give_to, is_waiting, ordinary, output_of, reader, until

ABSENT = leases.Absence(session="session 1", late=False)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory that any user may reach."""
    parent = "/dev/shm" if request.param == "memory" else tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="spotwarp-leases-", dir=parent))
    if why := leases.why_no_leases(path):
        pytest.skip(why)
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def file(place: Path) -> Path:
    path = place / "file"
    path.write_bytes(b"x" * 10_000)
    return path


def opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def test_a_mark_holds_until_it_is_cleared_and_remembers_its_session(file: Path) -> None:
    fd = opened(file, os.O_RDWR)
    assert leases.absence(fd) is None
    leases.mark_absent(fd, "session 1")
    assert leases.absence(fd) == leases.absence(file) == leases.absence(os.fsencode(file)) == ABSENT
    leases.mark_late(fd)
    assert leases.absence(file) == leases.Absence(session="session 1", late=True)
    leases.clear_mark(fd)
    leases.clear_mark(fd)
    assert leases.absence(file) is None
    os.close(fd)


@pytest.mark.history("C19")
def test_a_copy_of_a_mark_makes_nothing_absent(file: Path) -> None:
    fd = opened(file, os.O_RDWR)
    leases.mark_absent(fd, "session 1")
    os.close(fd)
    copy = file.with_name("copy")
    subprocess.run(["cp", "-a", "--preserve=xattr", file, copy], check=True)
    assert os.getxattr(copy, leases.MARK) == os.getxattr(file, leases.MARK)
    assert leases.absence(copy) is None
    assert leases.absence(file) == ABSENT

    link, symlink = file.with_name("link"), file.with_name("symlink")
    os.link(file, link)
    symlink.symlink_to(file)
    assert leases.absence(link) == ABSENT
    assert leases.absence(symlink) is None


@pytest.mark.parametrize("value", [b"", b"absent", b"absent 17", b"\xff\xfe a b"])
def test_what_is_no_mark_of_ours_is_none(file: Path, value: bytes) -> None:
    os.setxattr(file, leases.MARK, value)
    assert leases.absence(file) is None


def test_a_missing_file_is_not_said_to_be_here(place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        leases.absence(place / "missing")


def test_a_write_lease_makes_an_open_wait_and_does_not_kill_its_holder(file: Path) -> None:
    fd = opened(file, os.O_RDWR)
    leases.take(fd, leases.Kind.WRITE)
    assert leases.is_leased(fd)
    assert not leases.is_breaking(fd, leases.Kind.WRITE)
    file.rename(file.with_name("renamed"))
    os.chmod(file.with_name("renamed"), 0o600)
    os.utime(file.with_name("renamed"))
    assert not leases.is_breaking(fd, leases.Kind.WRITE)

    process = reader(file.with_name("renamed"))
    until(lambda: leases.is_breaking(fd, leases.Kind.WRITE), "the break of a lease")
    assert leases.is_leased(fd)
    os.pwrite(fd, b"y" * 10_000, 0)
    assert process.poll() is None
    leases.release(fd)
    assert output_of(process) == b"y" * 10_000
    assert not leases.is_leased(fd)
    leases.release(fd)
    os.close(fd)


def test_a_write_lease_is_refused_while_somebody_has_the_file_open(file: Path) -> None:
    fd, other = opened(file, os.O_RDWR), opened(file, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        leases.take(fd, leases.Kind.WRITE)
    os.close(other)
    leases.take(fd, leases.Kind.WRITE)
    os.close(fd)


def test_a_read_lease_is_unbroken_until_a_writer_comes_and_lets_it_in(file: Path) -> None:
    fd = opened(file, os.O_RDONLY)
    with leases.read_lease(fd) as lease:
        assert lease.held
        assert output_of(reader(file)) == b"x" * 10_000
        assert lease.unbroken()
        writer = subprocess.Popen(["sh", "-c", 'echo more >> "$0"', file])
        until(lambda: not lease.unbroken(), "a writer")
        assert writer.wait(timeout=60) == 0, "it was let in while the block went on"
        assert not lease.unbroken()
    assert file.read_bytes() == b"x" * 10_000 + b"more\n"
    os.close(fd)


def test_a_read_lease_ends_with_its_block(file: Path) -> None:
    fd = opened(file, os.O_RDONLY)
    with leases.read_lease(fd) as lease:
        assert leases.is_leased(fd)
    assert not leases.is_leased(fd)
    assert not lease.unbroken()
    os.close(opened(file, os.O_WRONLY | os.O_NONBLOCK))
    os.close(fd)


@pytest.mark.history("C19")
def test_a_read_lease_is_not_held_beside_a_writer_or_a_writable_mapping(file: Path) -> None:
    writer, fd = opened(file, os.O_RDWR), opened(file, os.O_RDONLY)
    with leases.read_lease(fd) as lease:
        assert not lease.held
        assert not lease.unbroken()
    mapping = mmap.mmap(writer, 0)
    os.close(writer)
    with leases.read_lease(fd) as lease:
        assert not lease.held
    mapping.close()
    with leases.read_lease(fd) as lease:
        assert lease.held
    os.close(fd)


def test_a_closed_descriptor_is_an_error_and_not_a_missing_lease() -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"), leases.read_lease(fd):
        pass


def test_a_directory_without_leases_says_why() -> None:
    why = leases.why_no_leases("/proc")
    assert why.startswith("/proc: no file can be made there"), why


def test_the_probe_leaves_nothing_behind(place: Path) -> None:
    assert leases.why_no_leases(place) == ""
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("break_time_s", "limit_s"), [(45, 40), (90, 85), (4, 2), (0, 40)])
def test_a_placeholder_is_given_up_before_the_kernel_opens_it(break_time_s: float, limit_s: float) -> None:
    assert late_limit_s(break_time_s) == limit_s
    assert leases.lease_break_time_s() >= 0


ORDINARY = """
import os, sys, subprocess
sys.path.insert(0, sys.argv[1])
from spotwarp_fs.directory import leases
assert int([l for l in open("/proc/self/status") if l.startswith("CapEff")][0].split()[1], 16) == 0
directory = sys.argv[2]
assert leases.why_no_leases(directory) == "", leases.why_no_leases(directory)
path = directory + "/read-only"
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 1000)
leases.mark_absent(fd, "s")
os.fchmod(fd, 0o440)
leases.take(fd, leases.Kind.WRITE)
process = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
while not leases.is_breaking(fd, leases.Kind.WRITE):
    assert process.poll() is None
os.pwrite(fd, b"z" * 1000, 0)
leases.mark_late(fd)
assert leases.absence(fd) == leases.Absence("s", True)
leases.clear_mark(fd)
assert leases.absence(fd) is None and os.fstat(fd).st_mode & 0o7777 == 0o440
leases.release(fd)
assert process.communicate()[0] == b"z" * 1000
reading = os.open(path, os.O_RDONLY)
os.close(fd)
with leases.read_lease(reading) as lease:
    assert lease.held and lease.unbroken()
print("done")
"""


def interpreters() -> list[list[str]]:
    """Ways to run Python without capabilities: this one, and another user's if there is one that it may run."""
    found = [[*ordinary(), sys.executable]]
    system = shutil.which("python3", path="/usr/bin:/bin")
    if os.geteuid() == 0 and system is not None and not any("--reuid" in word for word in found[0]):
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", system]
        found.append(nobody)
    return found


@pytest.mark.parametrize(
    "command", interpreters(), ids=lambda command: "other" if "--reuid=65534" in command else "own"
)
def test_an_ordinary_user_needs_no_right_for_any_of_it(place: Path, command: list[str]) -> None:
    version = subprocess.run([*command, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout != b"True\n" or not os.access(ROOT, os.X_OK):
        pytest.skip(f"no Python 3.11 that another user may run: {version.stderr.decode()}")
    give_to(place, command)
    run = subprocess.run(
        [*command, "-B", "-c", ORDINARY, ROOT, place], capture_output=True, text=True, cwd="/", timeout=60, check=False
    )
    assert run.stdout == "done\n", run.stderr


def test_the_list_of_locks_shows_who_waits(file: Path) -> None:
    """`is_waiting` carries the keeper's tests; it must be able to say no."""
    fd = opened(file, os.O_RDWR)
    leases.take(fd, leases.Kind.WRITE)
    other = subprocess.Popen(["sleep", "60"])
    assert not is_waiting(other, file)
    other.kill()
    other.wait()
    process = reader(file)
    until(lambda: is_waiting(process, file), "a reader that waits")
    leases.release(fd)
    output_of(process)
    assert not is_waiting(process, file)
    os.close(fd)
