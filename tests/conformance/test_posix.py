"""Is a mounted workspace POSIX enough? Errno by errno, as root and as ordinary users, on the real engine."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, Node
from tests.support.mounts import needs_fuse
from tests.support.syscalls import rename2

pytestmark = needs_fuse
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as other users: needs root")

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
LONGEST, TOO_LONG = "n" * 255, "n" * 256
BEFORE_1970_NS = -2_147_483_648 * 10**9 - 86_400 * 10**9 + 123_456_789
AFTER_2038_NS = 4_294_967_296 * 10**9 + 987_654_321


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    # pytest's own directories are closed to the other users that some tests act as.
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        home.chmod(0o755)
        fleet = Fleet(home, f"file://{home / 'store'}")
        try:
            yield fleet.node().start()
        finally:
            fleet.close()


@pytest.fixture
def place(node: Node, request: pytest.FixtureRequest) -> Path:
    """A directory of the test's own."""
    path = node.root / f"{abs(hash(request.node.nodeid)):x}"
    path.mkdir()
    return path


def refused(call: Callable[[], object]) -> int | None:
    """The errno that *call* fails with, None if it does not."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def opened(path: Path, flags: int, mode: int = 0o644) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags, mode))


class TestOpen:
    def test_errors_of_open(self, place: Path) -> None:
        (place / "file").write_text("1")
        (place / "link").symlink_to("file")
        (place / "loop").symlink_to("loop")
        (place / "dangling").symlink_to("nowhere")
        for wanted, call in [
            (errno.EEXIST, opened(place / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
            (errno.EEXIST, opened(place / "dangling", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
            (errno.EISDIR, opened(place, os.O_WRONLY)),
            (errno.EISDIR, opened(place, os.O_RDWR)),
            (errno.ENOENT, opened(place / "missing", os.O_RDONLY)),
            (errno.ENOENT, opened(place / "missing" / "x", os.O_CREAT | os.O_WRONLY)),
            (errno.ENOTDIR, opened(place / "file" / "x", os.O_RDONLY)),
            (errno.ENOTDIR, opened(place / "file", os.O_RDONLY | os.O_DIRECTORY)),
            (errno.ELOOP, opened(place / "link", os.O_RDONLY | os.O_NOFOLLOW)),
            (errno.ELOOP, opened(place / "loop", os.O_RDONLY)),
            (errno.ENAMETOOLONG, opened(place / TOO_LONG, os.O_CREAT | os.O_WRONLY)),
        ]:
            assert refused(call) == wanted
        assert (place / "file").read_text() == "1"

    def test_created_through_a_dangling_link(self, place: Path) -> None:
        (place / "dangling").symlink_to("made")
        (place / "dangling").write_text("1")
        assert (place / "made").read_text() == "1"

    def test_truncating_at_open_changes_size_and_times_and_nothing_else_does(self, place: Path) -> None:
        path = place / "f"
        path.write_bytes(b"12345")
        os.utime(path, ns=(1, 1))
        opened(path, os.O_WRONLY)()
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (5, 1)
        opened(path, os.O_WRONLY | os.O_TRUNC)()
        assert path.stat().st_size == 0
        assert path.stat().st_mtime_ns > 1

    def test_access_modes_are_kept(self, place: Path) -> None:
        (place / "f").write_text("1")
        reader, writer = os.open(place / "f", os.O_RDONLY), os.open(place / "f", os.O_WRONLY)
        try:
            assert refused(lambda: os.write(reader, b"x")) == errno.EBADF
            assert refused(lambda: os.read(writer, 1)) == errno.EBADF
            assert refused(lambda: os.ftruncate(reader, 0)) in (errno.EINVAL, errno.EBADF)
        finally:
            os.close(reader)
            os.close(writer)

    def test_a_file_made_with_mode_zero_is_still_written_by_its_maker(self, place: Path) -> None:
        fd = os.open(place / "f", os.O_CREAT | os.O_RDWR, 0)
        assert os.write(fd, b"1") == 1
        os.close(fd)
        assert stat.S_IMODE((place / "f").stat().st_mode) == 0

    def test_a_size_beyond_the_largest_file_is_efbig(self, place: Path) -> None:
        (place / "f").touch()
        assert refused(lambda: os.truncate(place / "f", 1 << 62)) == errno.EFBIG
        assert refused(lambda: os.truncate(place / "f", -1)) == errno.EINVAL
        assert refused(lambda: os.truncate(place, 0)) == errno.EISDIR
        assert (place / "f").stat().st_size == 0

    def test_o_tmpfile_is_refused_as_unsupported(self, place: Path) -> None:
        assert refused(opened(place, os.O_TMPFILE | os.O_RDWR)) == errno.EOPNOTSUPP


class TestNames:
    @pytest.mark.parametrize("name", [b"\xff\xfe\x80", b"new\nline", b" ", b"-rf", b"\\", "ü".encode(), b"n" * 255])
    def test_names_are_bytes(self, place: Path, name: bytes) -> None:
        path = os.fsencode(place) + b"/" + name
        with open(path, "wb") as file:
            file.write(name)
        assert os.listdir(os.fsencode(place)) == [name]
        os.rename(path, path[:-1] + b"x")
        assert os.listdir(os.fsencode(place)) == [name[:-1] + b"x"]

    def test_too_long_names_and_paths(self, place: Path) -> None:
        for call in (
            lambda: os.mkdir(place / TOO_LONG),
            lambda: os.stat(place / TOO_LONG),
            lambda: os.symlink("x", place / TOO_LONG),
            lambda: os.mkfifo(place / TOO_LONG),
            lambda: os.rename(place, place / TOO_LONG),
            lambda: os.stat(str(place) + "/x" * 4096),
        ):
            assert refused(call) == errno.ENAMETOOLONG
        os.mkdir(place / LONGEST)
        assert os.statvfs(place).f_namemax == 255

    def test_directories_and_their_link_counts(self, place: Path) -> None:
        (place / "d" / "e").mkdir(parents=True)
        (place / "d" / "f").touch()
        assert (place / "d").stat().st_nlink == 3
        assert refused(lambda: os.rmdir(place / "d")) == errno.ENOTEMPTY
        assert refused(lambda: os.rmdir(place / "d" / "f")) == errno.ENOTDIR
        assert refused(lambda: os.rmdir(f"{place}/d/.")) == errno.EINVAL
        assert refused(lambda: os.rmdir(f"{place}/d/..")) == errno.ENOTEMPTY
        assert refused(lambda: os.unlink(place / "d")) in (errno.EISDIR, errno.EPERM)
        assert refused(lambda: os.mkdir(place / "d")) == errno.EEXIST
        assert refused(lambda: os.rmdir(place / "missing")) == errno.ENOENT
        os.rmdir(place / "d" / "e")
        assert (place / "d").stat().st_nlink == 2

    def test_a_removed_directory_takes_no_names(self, place: Path) -> None:
        (place / "d").mkdir()
        fd = os.open(place / "d", os.O_RDONLY)
        try:
            os.rmdir(place / "d")
            assert refused(lambda: os.mkdir("x", dir_fd=fd)) == errno.ENOENT
            assert os.listdir(fd) == []
            assert os.fstat(fd).st_nlink == 0
        finally:
            os.close(fd)

    def test_hard_links(self, place: Path) -> None:
        first, second = place / "a", place / "b"
        first.write_text("1")
        os.link(first, second)
        assert first.stat().st_ino == second.stat().st_ino
        assert second.stat().st_nlink == 2
        second.write_text("22")
        assert first.read_text() == "22"
        assert refused(lambda: os.link(first, second)) == errno.EEXIST
        assert refused(lambda: os.link(place, place / "c")) == errno.EPERM
        assert refused(lambda: os.link(place / "missing", place / "c")) == errno.ENOENT
        os.rename(first, second)  # both names of one file: nothing happens
        assert sorted(os.listdir(place)) == ["a", "b"]
        first.unlink()
        assert second.stat().st_nlink == 1

    def test_symbolic_links(self, place: Path) -> None:
        target = b"t" * 4095
        os.symlink(target, os.fsencode(place / "long"))
        assert os.readlink(os.fsencode(place / "long")) == target
        assert (place / "long").lstat().st_size == 4095
        assert refused(lambda: os.symlink("", place / "empty")) == errno.ENOENT
        assert refused(lambda: os.symlink("x", place / "long")) == errno.EEXIST
        assert refused(lambda: os.readlink(place)) == errno.EINVAL
        os.symlink("long", place / "s")
        os.link(place / "s", place / "hard", follow_symlinks=False)
        assert (place / "hard").lstat().st_nlink == 2

    def test_special_files(self, place: Path) -> None:
        os.mkfifo(place / "fifo", 0o640)
        assert stat.S_ISFIFO((place / "fifo").stat().st_mode)
        with socket.socket(socket.AF_UNIX) as listener:
            before = os.getcwd()
            os.chdir(place)
            try:
                listener.bind("socket")
            finally:
                os.chdir(before)
        assert stat.S_ISSOCK((place / "socket").stat().st_mode)
        reader = os.open(place / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(place / "fifo", os.O_WRONLY)
        os.write(writer, b"through")
        assert os.read(reader, 10) == b"through"
        os.close(reader)
        os.close(writer)

    @needs_root
    def test_devices_keep_their_numbers(self, place: Path) -> None:
        os.mknod(place / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(place / "disk", stat.S_IFBLK | 0o600, os.makedev(259, 70_000))
        assert (place / "null").stat().st_rdev == os.makedev(1, 3)
        assert (place / "disk").stat().st_rdev == os.makedev(259, 70_000)


class TestRename:
    def test_errors(self, place: Path) -> None:
        (place / "file").touch()
        (place / "dir" / "inner").mkdir(parents=True)
        (place / "empty").mkdir()
        for wanted, source, target in [
            (errno.ENOENT, "missing", "x"),
            (errno.EISDIR, "file", "dir"),
            (errno.ENOTDIR, "dir", "file"),
            (errno.ENOTEMPTY, "empty", "dir"),
            (errno.EINVAL, "dir", "dir/inner/below"),
            (errno.ENOTDIR, "dir", "file/x"),
            (errno.ENOENT, "dir", "missing/x"),
        ]:
            assert refused(lambda s=source, t=target: os.rename(place / s, place / t)) == wanted, (source, target)
        os.rename(place / "dir", place / "empty")
        assert os.listdir(place / "empty") == ["inner"]
        assert place.stat().st_nlink == 3

    def test_over_an_open_file(self, place: Path) -> None:
        (place / "old").write_text("old")
        (place / "new").write_text("new")
        with (place / "old").open() as file:
            os.rename(place / "new", place / "old")
            assert file.read() == "old"
            assert os.fstat(file.fileno()).st_nlink == 0
        assert (place / "old").read_text() == "new"

    def test_of_a_directory_moves_its_parent_link(self, place: Path) -> None:
        (place / "a" / "x").mkdir(parents=True)
        (place / "b").mkdir()
        os.rename(place / "a" / "x", place / "b" / "x")
        assert ((place / "a").stat().st_nlink, (place / "b").stat().st_nlink) == (2, 3)
        assert os.stat(place / "b" / "x" / "..").st_ino == (place / "b").stat().st_ino

    def test_flags(self, place: Path) -> None:
        one, two, three = (os.fsencode(place / name) for name in ("one", "two", "three"))
        (place / "one").write_text("1")
        (place / "two").mkdir()
        assert refused(lambda: rename2(one, two, NOREPLACE)) == errno.EEXIST
        rename2(one, three, NOREPLACE)
        rename2(three, two, EXCHANGE)
        assert (place / "two").read_text() == "1"
        assert (place / "three").is_dir()
        assert refused(lambda: rename2(one, two, EXCHANGE)) == errno.ENOENT
        assert refused(lambda: rename2(two, three, NOREPLACE | EXCHANGE)) == errno.EINVAL
        assert refused(lambda: rename2(two, one, WHITEOUT)) == errno.EINVAL
        (place / "three" / "in").mkdir()
        assert refused(lambda: rename2(three, three + b"/in", EXCHANGE)) == errno.EINVAL


class TestAttributes:
    @pytest.mark.parametrize("time_ns", [0, -1, BEFORE_1970_NS, AFTER_2038_NS, 1_490_219_287_999_999_900])
    def test_times_keep_every_nanosecond(self, place: Path, time_ns: int) -> None:
        (place / "f").touch()
        os.utime(place / "f", ns=(time_ns + 7, time_ns))
        assert ((place / "f").stat().st_atime_ns, (place / "f").stat().st_mtime_ns) == (time_ns + 7, time_ns)

    def test_what_changes_which_time(self, place: Path) -> None:
        path = place / "f"
        path.touch()
        long_ago = 10**9

        def after(call: Callable[[], object], watched: Path = path) -> set[str]:
            os.utime(watched, ns=(long_ago, long_ago))
            before = watched.stat()
            call()
            now = watched.stat()
            return {
                name for name in ("mtime", "ctime") if getattr(now, f"st_{name}_ns") > getattr(before, f"st_{name}_ns")
            }

        assert after(lambda: path.write_text("x")) == {"mtime", "ctime"}
        assert after(lambda: os.truncate(path, 5)) == {"mtime", "ctime"}
        assert after(lambda: path.chmod(0o600)) == {"ctime"}
        assert after(lambda: os.link(path, place / "g")) == {"ctime"}
        assert after(lambda: os.setxattr(path, "user.a", b"1")) == {"ctime"}
        assert after(path.read_text) == set()
        assert after(lambda: (place / "h").touch(), place) == {"mtime", "ctime"}
        assert after(lambda: (place / "h").unlink(), place) == {"mtime", "ctime"}
        assert after(lambda: os.rename(place / "g", place / "i"), place) == {"mtime", "ctime"}
        assert after(lambda: path.write_text("y"), place) == set()

    def test_blocks_tell_what_a_file_takes(self, place: Path) -> None:
        (place / "small").write_bytes(b"x" * 1000)
        assert 0 < (place / "small").stat().st_blocks <= 8
        (place / "empty").touch()
        assert (place / "empty").stat().st_blocks == 0
        os.truncate(place / "empty", 1 << 30)
        assert (place / "empty").stat().st_blocks == 0
        assert subprocess.run(["du", "-k", place / "empty"], capture_output=True, check=True).stdout.split()[0] == b"0"

    def test_statfs(self, node: Node) -> None:
        found = os.statvfs(node.root)
        assert 0 < found.f_bavail <= found.f_blocks
        assert 0 < found.f_favail <= found.f_files
        done = subprocess.run(["df", "-P", node.root], capture_output=True, check=True)
        assert str(node.root).encode() in done.stdout

    def test_xattrs(self, place: Path) -> None:
        path = place / "f"
        path.touch()
        os.setxattr(path, "user.a", b"1" * 60_000)
        assert os.getxattr(path, "user.a") == b"1" * 60_000
        assert refused(lambda: os.setxattr(path, "user.a", b"", os.XATTR_CREATE)) == errno.EEXIST
        assert refused(lambda: os.setxattr(path, "user.b", b"", os.XATTR_REPLACE)) == errno.ENODATA
        os.setxattr(path, "user.empty", b"")
        assert os.getxattr(path, "user.empty") == b""
        assert sorted(os.listxattr(path)) == ["user.a", "user.empty"]
        assert refused(lambda: os.getxattr(path, "user.missing")) == errno.ENODATA
        assert refused(lambda: os.removexattr(path, "user.missing")) == errno.ENODATA
        assert refused(lambda: os.setxattr(path, "user." + "n" * 251, b"")) == errno.ERANGE
        os.setxattr(place, "user.on-a-directory", b"1")
        assert os.listxattr(place) == ["user.on-a-directory"]


def write_at(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)


def as_user(uid: int, *calls: Callable[[], object]) -> int:
    """The errno that *calls* end with when user *uid* makes them, 0 if they do not."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            for call in calls:
                code = refused(call) or 0
                if code:
                    break
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_root
class TestUsers:
    def test_sticky_directory(self, place: Path) -> None:
        place.chmod(0o1777)
        assert as_user(1234, (place / "f").touch) == 0
        assert (place / "f").stat().st_uid == 1234
        assert as_user(1235, (place / "f").unlink) == errno.EPERM
        assert as_user(1235, lambda: os.rename(place / "f", place / "g")) == errno.EPERM
        assert as_user(1234, (place / "f").unlink) == 0

    def test_setgid_directory_gives_its_group(self, place: Path) -> None:
        os.chown(place, 0, 4321)
        place.chmod(0o2777)
        assert as_user(1234, (place / "d").mkdir, (place / "f").touch) == 0
        assert (place / "d").stat().st_gid == 4321
        assert (place / "d").stat().st_mode & stat.S_ISGID
        assert (place / "f").stat().st_gid == 4321
        assert not (place / "f").stat().st_mode & stat.S_ISGID

    def test_permissions_are_checked(self, place: Path) -> None:
        place.chmod(0o755)
        secret, new = place / "secret", place / "new"
        secret.write_text("1")
        secret.chmod(0o600)
        for wanted, call in [
            (errno.EACCES, secret.read_text),
            (errno.EACCES, new.touch),
            (errno.EACCES, new.mkdir),
            (errno.EACCES, secret.unlink),
            (errno.EACCES, lambda: os.truncate(secret, 0)),
            (errno.EPERM, lambda: secret.chmod(0o777)),
            (errno.EPERM, lambda: os.chown(secret, 1234, 1234)),
            (errno.EPERM, lambda: os.utime(secret, ns=(1, 1))),
            (errno.EACCES, lambda: os.utime(secret)),
            (0, secret.stat),
        ]:
            assert as_user(1234, call) == wanted, call
        place.chmod(0o700)
        assert as_user(1234, secret.stat) == errno.EACCES

    def test_writing_and_giving_away_clear_the_setuid_bit(self, place: Path) -> None:
        path = place / "f"
        path.touch()
        os.chown(path, 1234, 1234)
        path.chmod(0o6777)
        assert as_user(1235, lambda: path.write_text("x")) == 0
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
        path.chmod(0o6777)
        os.chown(path, 1236, 1236)
        assert not path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)

    def test_any_small_write_or_truncation_of_a_user_clears_the_setuid_bit(self, place: Path) -> None:
        path = place / "f"
        path.write_bytes(bytes(10_000))
        os.chown(path, 1234, 1234)
        with open(path, "r+b", buffering=0) as by_root:
            by_root.write(b"1")
            for mode, left in [(0o6777, 0o777), (0o6767, 0o2767), (0o4755, 0o755)]:
                path.chmod(mode)
                by_root.write(b"2")
                os.truncate(path, 9_000)
                assert stat.S_IMODE(path.stat().st_mode) == mode
                assert as_user(1234, lambda: write_at(path, 5, b"3")) == 0
                assert stat.S_IMODE(path.stat().st_mode) == left
                path.chmod(mode)
                assert as_user(1234, lambda: os.truncate(path, 8_000)) == 0
                assert stat.S_IMODE(path.stat().st_mode) == left

    def test_a_bit_that_is_set_between_two_writes_of_a_user_is_cleared(self, place: Path) -> None:
        path = place / "f"
        path.touch()
        os.chown(path, 1234, 1234)

        def write_chmod_write() -> None:
            with open(path, "r+b", buffering=0) as file:
                file.write(b"1")
                os.fchmod(file.fileno(), 0o4755)
                file.write(b"2")

        assert as_user(1234, write_chmod_write) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o755

    def test_a_write_takes_file_capabilities_away(self, place: Path) -> None:
        path, capability = place / "f", bytes.fromhex("0100000200040000000000000000000000000000")
        path.write_bytes(bytes(4096))
        os.setxattr(path, "security.capability", capability)
        with open(path, "r+b", buffering=0) as file:
            file.write(b"1")
        assert refused(lambda: os.getxattr(path, "security.capability")) == errno.ENODATA

    def test_umask_applies(self, place: Path) -> None:
        place.chmod(0o777)
        assert as_user(1234, lambda: os.umask(0o027), (place / "d").mkdir, (place / "f").touch) == 0
        assert stat.S_IMODE((place / "d").stat().st_mode) == 0o750
        assert stat.S_IMODE((place / "f").stat().st_mode) == 0o640


class TestDirectories:
    @pytest.mark.parametrize(
        "count", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
    )
    def test_a_big_directory(self, node: Node, place: Path, count: int) -> None:
        for number in range(count):
            os.close(os.open(place / f"f{number:06}", os.O_CREAT | os.O_WRONLY))
        names = os.listdir(place)
        assert len(names) == count
        assert set(names) == {f"f{number:06}" for number in range(count)}
        with os.scandir(place) as entries:
            assert all(entry.is_file(follow_symlinks=False) for entry in entries)
        for name in names[::2]:
            os.unlink(place / name)
        assert set(os.listdir(place)) == set(names[1::2])
        assert refused(lambda: os.rmdir(place)) == errno.ENOTEMPTY

    def test_a_listing_skips_and_repeats_nothing_while_names_come_and_go(self, place: Path) -> None:
        stable = {f"stable{number:04}" for number in range(600)}
        for name in stable:
            (place / name).touch()
        seen: list[str] = []
        with os.scandir(place) as entries:
            for number, entry in enumerate(entries):
                seen.append(entry.name)
                (place / f"new{number}").touch()
                if number % 3 == 0 and number:
                    (place / f"new{number - 1}").unlink()
        assert len(seen) == len(set(seen))
        assert stable <= set(seen)

    def test_dot_and_dotdot_lead_where_they_should(self, node: Node, place: Path) -> None:
        (place / "d").mkdir()
        assert os.stat(place / "d" / ".").st_ino == (place / "d").stat().st_ino
        assert os.stat(f"{place}/d/..").st_ino == place.stat().st_ino
        assert os.stat(f"{node.root}/..").st_ino == node.home.stat().st_ino

    def test_locks_work_between_processes(self, place: Path) -> None:
        with (place / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            code = f"import fcntl; fcntl.flock(open({str(place / 'lock')!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
            assert b"BlockingIOError" in done.stderr
