"""Does the FUSE skin do what the kernel and a user expect, with a real mount and an engine of a few dicts behind it?"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.fuse import mounting, underlay
from spotwarp_fs.fuse.launching import LaunchResult, launch_supervised
from spotwarp_fs.fuse.mountinfo import MountState, mounts_at, state_of, top_mount
from spotwarp_fs.fuse.mounting import AlreadyMounted, MountOptions
from tests.support.mounts import TROUBLE, Mounted, daemon_argv, detach, mounted, needs_fuse, wait_until

pytestmark = needs_fuse
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

BEFORE_1970_NS = -2_147_483_648 * 10**9 - 86_400 * 10**9 + 123_456_789
AFTER_2038_NS = 4_294_967_296 * 10**9 + 987_654_321


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounted]:
    with mounted(tmp_path) as found:
        yield found


def stop(mount: Mounted) -> None:
    """Kill the daemon as the OOM killer does."""
    mount.process.send_signal(signal.SIGKILL)
    mount.process.wait()


def options_of(mount: Mounted) -> MountOptions:
    return MountOptions(mountpoint=str(mount.path), workspace="tiny", cache_dir=mount.cache)


def errno_at(path: Path) -> int | None:
    with pytest.raises(OSError) as caught:
        os.stat(path)
    return caught.value.errno


@pytest.mark.parametrize("time_ns", [BEFORE_1970_NS, -1, AFTER_2038_NS])
def test_times_outside_32_bits_keep_every_nanosecond(mount: Mounted, time_ns: int) -> None:
    (mount.path / "f").touch()
    os.utime(mount.path / "f", ns=(time_ns, time_ns))
    found = os.stat(mount.path / "f")
    assert (found.st_atime_ns, found.st_mtime_ns) == (time_ns, time_ns)


def test_a_name_that_is_not_utf8_survives(mount: Mounted) -> None:
    name = b"caf\xe9 \xff\\x\n"
    with open(os.path.join(os.fsencode(mount.path), name), "wb") as file:
        file.write(b"1")
    assert os.listdir(os.fsencode(mount.path)) == [name]


def test_a_missing_name_is_asked_for_once(mount: Mounted) -> None:
    for _ in range(3):
        assert not (mount.path / "missing").exists()
    assert [event["name"] for event in mount.events("lookup")] == ["missing"]


def test_truncating_open_reaches_the_engine_as_a_flag(mount: Mounted) -> None:
    (mount.path / "f").write_bytes(b"12345")
    os.close(os.open(mount.path / "f", os.O_WRONLY | os.O_TRUNC))
    assert mount.events("open") == [{"request": "open", "truncate": True}]
    assert os.stat(mount.path / "f").st_size == 0


def test_the_kernel_asks_once_per_file_whether_a_write_takes_privileges_away(mount: Mounted) -> None:
    """Else it asks before every write, which then costs two requests (FUSE_HANDLE_KILLPRIV_V2)."""
    with open(mount.path / "f", "wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
    assert 1 <= len(mount.events("getxattr")) <= 2
    assert "each write" not in mount.log()


def test_listing_while_emptying_skips_and_repeats_nothing(mount: Mounted) -> None:
    for number in range(2000):
        (mount.path / f"f{number:04}").touch()
    seen = []
    with os.scandir(mount.path) as entries:
        for entry in entries:
            seen.append(entry.name)
            if int(entry.name[1:]) % 2:
                os.unlink(entry.path)
    assert len(seen) == len(set(seen))
    assert {f"f{number:04}" for number in range(0, 2000, 2)} <= set(seen)
    assert len(os.listdir(mount.path)) == 1000


def test_every_lookup_count_handed_out_is_given_back_no_more_and_no_less(mount: Mounted) -> None:
    for number in range(10):
        (mount.path / f"f{number}").touch()
    os.link(mount.path / "f0", mount.path / "hard")
    os.symlink("f1", mount.path / "soft")
    os.mkdir(mount.path / "dir")
    os.listdir(mount.path)
    for name in ["hard", "soft", *(f"f{number}" for number in range(10))]:
        os.unlink(mount.path / name)
    # 10 creates, 1 link, 1 symlink, 12 of the listing; the tiny filesystem itself objects to a count below zero.
    wait_until(lambda: sum(event["count"] for event in mount.events("forget")) >= 24, "forgets")
    assert "forget" not in mount.log()


def test_attributes_names_and_special_files_pass_through(mount: Mounted) -> None:
    path = mount.path
    (path / "f").write_bytes(b"x" * 1000)
    os.chmod(path / "f", 0o4751)
    assert stat.S_IMODE(os.stat(path / "f").st_mode) == 0o4751
    assert os.stat(path / "f").st_blocks == 2
    os.mkfifo(path / "fifo")
    assert stat.S_ISFIFO(os.stat(path / "fifo").st_mode)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "socket"))
    assert stat.S_ISSOCK(os.stat(path / "socket").st_mode)
    os.symlink(b"to\xff", os.fsencode(path / "link"))
    assert os.readlink(os.fsencode(path / "link")) == b"to\xff"
    os.rename(path / "f", path / "g")
    assert os.statvfs(path).f_bavail == (1 << 39) // 4096
    descriptor = os.open(path / "g", os.O_RDWR)
    os.fsync(descriptor)
    os.fdatasync(descriptor)
    os.close(descriptor)
    assert [event["datasync"] for event in mount.events("fsync")] == [False, True]


def test_xattrs_pass_through_and_acls_are_refused(mount: Mounted) -> None:
    (mount.path / "f").touch()
    os.setxattr(mount.path / "f", "user.a", b"1")
    assert os.getxattr(mount.path / "f", "user.a") == b"1"
    with pytest.raises(FileExistsError):
        os.setxattr(mount.path / "f", "user.a", b"2", os.XATTR_CREATE)
    assert os.listxattr(mount.path / "f") == ["user.a"]
    os.removexattr(mount.path / "f", "user.a")
    for wanted, call in [
        (errno.ENODATA, lambda: os.getxattr(mount.path / "f", "user.a")),
        (errno.ENODATA, lambda: os.removexattr(mount.path / "f", "user.a")),
        (errno.EOPNOTSUPP, lambda: os.setxattr(mount.path / "f", "system.posix_acl_access", ACL)),
    ]:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == wanted


ACL = bytes.fromhex("0200000001000700ffffffff02000500d204000004000500ffffffff10000500ffffffff20000500ffffffff")


def test_without_the_xattr_option_they_are_unsupported(tmp_path: Path) -> None:
    with mounted(tmp_path, xattrs=False) as mount:
        (mount.path / "f").write_bytes(b"1")
        with pytest.raises(OSError) as caught:
            os.setxattr(mount.path / "f", "user.a", b"1")
        assert caught.value.errno == errno.EOPNOTSUPP


def test_no_error_in_a_handler_ends_the_mount(mount: Mounted) -> None:
    wanted = {
        b"trouble-refused": errno.ENOTEMPTY,
        b"trouble-fenced": errno.EROFS,
        b"trouble-corrupt": errno.EIO,
        b"trouble-unavailable": errno.EIO,
        b"trouble-os": errno.ENOSPC,
        b"trouble-bug": errno.EIO,
        b"trouble-group": errno.EDQUOT,
    }
    assert wanted.keys() == TROUBLE.keys()
    for _ in range(2):
        assert {name: errno_at(mount.path / os.fsdecode(name)) for name in wanted} == wanted
    (mount.path / "f").write_bytes(b"alive")
    assert mount.log().count("ZeroDivisionError: a bug") == 1


WRITER = """
import os, sys, threading, time
path, how = sys.argv[1:]
def work():
    global file
    file = open(path, "wb", buffering=0)
    file.write(b"half")
    print("written", flush=True)
if how == "thread":  # the opener is gone when the process dies
    thread = threading.Thread(target=work); thread.start(); thread.join()
else:
    work()
if how == "exit":
    os._exit(3)
time.sleep(60)
"""


@pytest.mark.history("C12")
@pytest.mark.parametrize(
    ("how", "number", "dying"),
    [
        ("main", signal.SIGKILL, True),
        ("main", signal.SIGTERM, True),
        ("thread", signal.SIGKILL, True),
        ("exit", None, False),
    ],
)
def test_flush_tells_a_killed_writer_from_a_close(
    mount: Mounted, how: str, number: signal.Signals | None, dying: bool
) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, mount.path / "f", how], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    if number is not None:
        writer.send_signal(number)
    writer.wait()
    writer.stdout.close()
    assert mount.await_events("flush", 1) == [{"request": "flush", "dying": dying}]
    mount.await_events("release", 1)


@pytest.mark.history("C12")
def test_a_child_that_closes_its_copy_is_no_dying_writer(mount: Mounted) -> None:
    with open(mount.path / "f", "wb", buffering=0) as file:
        file.write(b"half")
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert mount.await_events("flush", 1)[0]["dying"] is False


@pytest.mark.history("H1")
@needs_root
def test_readahead_and_background_queue_are_raised_and_many_hung_reads_stop_nobody(mount: Mounted) -> None:
    assert mount.report["refused"] == {}
    assert mount.report["done"] == {"read_ahead_kb": 4096, "max_background": 1024, "congestion_threshold": 768}
    hung = []
    try:
        for number in range(20):
            (mount.path / f"f{number}").write_bytes(b"hang")
            hung.append(subprocess.Popen(["cat", mount.path / f"f{number}"], stdout=subprocess.DEVNULL))
        mount.await_events("hang", 20)
        before = len(mount.events("release"))
        (mount.path / "local").write_bytes(b"served")
        assert (mount.path / "local").read_bytes() == b"served"
        mount.await_events("release", before + 2)
    finally:
        for reader in hung:
            reader.kill()
            reader.wait()


def waiting_writer(mount: Mounted) -> subprocess.Popen[bytes]:
    script = "import sys; open(sys.argv[1], 'wb', buffering=0).write(b'wait')"
    writer = subprocess.Popen([sys.executable, "-c", script, mount.path / "f"], stderr=subprocess.DEVNULL)
    mount.await_events("wait", 1)
    return writer


@pytest.mark.history("H1")
def test_more_waiting_writers_than_pyfuse3_has_tasks_by_itself_stop_nobody(mount: Mounted) -> None:
    script = """
import sys, threading
def work(number):
    try: open(f"{sys.argv[1]}/w{number}", "wb", buffering=0).write(b"wait")
    except OSError: pass
for number in range(120): threading.Thread(target=work, args=(number,)).start()
"""
    # Not one of theirs: the kernel holds a file's lock while its writer waits, and `unlink` wants that lock.
    (mount.path / "old").write_bytes(b"1")
    writers = subprocess.Popen([sys.executable, "-c", script, mount.path])
    try:
        mount.await_events("wait", 120)
        assert subprocess.Popen(["rm", mount.path / "old"]).wait(20) == 0
    finally:
        stop(mount)
        writers.wait(10)


@pytest.mark.history("H2")
def test_a_cancelled_serve_answers_waiting_writers_and_leaves_nowhere_to_write(mount: Mounted) -> None:
    writer = waiting_writer(mount)
    mount.process.send_signal(signal.SIGTERM)
    assert mount.process.wait(10) == 0
    assert writer.wait(10) != 0
    assert mounts_at(str(mount.path)) == []
    assert names_below(mount.path) == []


@pytest.mark.history("H2")
@needs_root
def test_abort_frees_a_writer_that_not_even_sigkill_ends(mount: Mounted) -> None:
    writer = waiting_writer(mount)
    assert mounting.abort_connection(str(mount.path))
    assert writer.wait(10) != 0
    assert state_of(str(mount.path)) is MountState.DEAD


def test_killing_the_daemon_frees_waiting_writers(mount: Mounted) -> None:
    writer = waiting_writer(mount)
    stop(mount)
    assert writer.wait(10) != 0


def test_a_child_of_the_daemon_does_not_hold_the_channel(tmp_path: Path) -> None:
    with mounted(tmp_path) as mount:
        process = Path(f"/proc/{mount.process.pid}")
        devices = [link.name for link in (process / "fd").iterdir() if os.readlink(link) == "/dev/fuse"]
        assert len(devices) == 1
        flags = (process / "fdinfo" / devices[0]).read_text()
        assert int(flags.split("flags:")[1].split()[0], 8) & os.O_CLOEXEC


def test_a_dead_mount_is_cleared_and_answers_enotconn_until_then(mount: Mounted) -> None:
    stop(mount)
    assert errno_at(mount.path / "f") == errno.ENOTCONN
    with mounted(mount.path.parent) as again:
        (again.path / "f").write_bytes(b"1")
        assert len(mounts_at(str(again.path))) == 1


@needs_root
def test_stacked_dead_mounts_are_all_cleared(tmp_path: Path) -> None:
    path, cache = tmp_path / "mnt", tmp_path / "cache"
    path.mkdir()
    cache.mkdir()
    try:
        with mounted(tmp_path) as first:
            subprocess.run(["mount", "--bind", path, path], check=True)
            stop(first)
            assert len(mounts_at(str(path))) == 2
            mounting.clear_dead_mounts(str(path))
            assert mounts_at(str(path)) == []
    finally:
        detach(path)


def test_a_live_mount_is_never_touched(mount: Mounted) -> None:
    with pytest.raises(AlreadyMounted) as caught:
        mounting.prepare_mountpoint(options_of(mount))
    assert caught.value.workspace == "tiny"
    assert caught.value.exit_code == ExitCode.MOUNTPOINT
    (mount.path / "f").write_bytes(b"alive")


def test_a_stuck_mount_is_named_and_left_alone(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounting, "state_of", lambda path: state_of(path, deadline_s=0.5))
    mount.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match="does not answer"):
            mounting.prepare_mountpoint(options_of(mount))
        assert len(mounts_at(str(mount.path))) == 1
    finally:
        mount.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda path: None, "mkdir -p"),
        (lambda path: path.touch(), "not a directory"),
        (lambda path: (path.mkdir(), (path / "x").touch()), "not empty"),
        (lambda path: (path.mkdir(), (path / "cache").mkdir()), "inside the mountpoint"),
    ],
)
def test_a_wrong_mountpoint_is_refused_with_the_remedy(tmp_path: Path, build, words: str) -> None:
    path = tmp_path / "mnt"
    build(path)
    cache = path / "cache" if "inside" in words else tmp_path / "cache"
    with pytest.raises(UserError, match=words) as caught:
        mounting.prepare_mountpoint(MountOptions(mountpoint=str(path), workspace="w", cache_dir=cache))
    assert caught.value.exit_code == ExitCode.MOUNTPOINT
    assert str(path) in str(caught.value)


def names_below(path: Path) -> list[str]:
    for number in range(3):
        try:
            (path / f"ckpt{number}").write_bytes(b"lost")
        except OSError:
            continue
    return os.listdir(path) if os.access(path, os.R_OK) else []


@pytest.mark.history("M-f")
def test_below_a_dead_mount_nothing_can_be_written_and_a_clean_unmount_gives_the_directory_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mnt"
    path.mkdir(mode=0o750)
    with mounted(tmp_path) as mount:
        stop(mount)
        mounting.unmount(str(path), lazy=True)
        assert names_below(path) == []
        assert json.loads((mount.cache / "underlay.json").read_text())[0]["mode"] == 0o750
        with pytest.raises(OSError):
            (path / "more").mkdir()
    # `mounted` made it writable; close it off again as a crash leaves it, with the record still there.
    descriptor = os.open(path, os.O_RDONLY)
    underlay.close_off(descriptor, str(path), tmp_path / "cache" / "underlay.json")
    os.close(descriptor)
    with mounted(tmp_path) as again:
        mounting.unmount(str(path))
        assert again.process.wait(10) == 0
        assert not (again.cache / "underlay.json").exists()
        assert stat.S_IMODE(path.stat().st_mode) == 0o750
        (path / "plain").touch()
        (path / "plain").unlink()


@needs_root
def test_a_directory_that_someone_else_made_immutable_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    path.mkdir()
    if subprocess.run(["chattr", "+i", path], check=False, capture_output=True).returncode != 0:
        pytest.skip("no inode flags on this filesystem")
    with mounted(tmp_path) as mount:
        mounting.unmount(str(path))
        assert mount.process.wait(10) == 0
        with pytest.raises(PermissionError):
            (path / "plain").touch()


CHECK = """
from spotwarp_fs.core.errors import UserError
from spotwarp_fs.fuse.mounting import check_fuse
try:
    check_fuse()
except UserError as error:
    print(int(error.exit_code), error)
"""


@needs_root
@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("mount -t tmpfs none /mnt; touch /mnt/x; mount --bind /mnt/x /dev/fuse", "not a character device"),
        ("mount -t tmpfs none /dev", "/dev/fuse is missing"),
        ("mount -t tmpfs none /mnt; cp -a /dev/fuse /mnt/f; mount --bind -o nodev /mnt /mnt; "
         "mount -o remount,bind,nodev /mnt; mount --bind /mnt/f /dev/fuse", "Permission denied"),
    ],
)  # fmt: skip
def test_a_node_without_fuse_is_refused_with_cause_and_alternative(setup: str, words: str) -> None:
    script = f"{setup}; exec {sys.executable} -c '{CHECK}'"
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith(f"{ExitCode.NO_FUSE:d} "), done
    assert words in done.stdout
    assert "--mode directory" in done.stdout


@needs_root
def test_a_container_that_may_not_mount_is_refused_before_anything_starts() -> None:
    script = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", CHECK]
    done = subprocess.run(script, capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith(f"{ExitCode.NO_FUSE:d} "), done
    assert "CAP_SYS_ADMIN" in done.stdout


def test_what_libfuse_says_about_a_failed_mount_reaches_the_user(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "cache").mkdir()
    done = subprocess.run(
        ["unshare", "-m", *daemon_argv(tmp_path / "mnt", tmp_path / "cache", workspace="w" * 5000)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == ExitCode.NO_FUSE, done
    assert "FUSE refused to mount" in done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "cache").mkdir()
    yield tmp_path
    for _ in range(2):
        state = supervised(tmp_path)
        for key in ("supervisor", "daemon"):
            if state is not None:
                kill(state[key], signal.SIGKILL)
    detach(tmp_path / "mnt")


def supervised(place: Path) -> dict | None:
    try:
        return json.loads((place / "cache" / "supervisor.json").read_text())
    except FileNotFoundError:
        return None


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    if number == signal.SIGKILL:
        wait_until(lambda: not running(pid), f"end of {pid}")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def launch(place: Path, timeout_s: float = 20, **options: object) -> LaunchResult:
    argv = daemon_argv(place / "mnt", place / "cache", **options)
    return launch_supervised(argv, str(place / "mnt"), place / "cache" / "daemon.log", timeout_s)


def alive(place: Path) -> bool:
    top = top_mount(str(place / "mnt"))
    return top is not None and state_of(str(place / "mnt")) is MountState.ALIVE


@pytest.mark.history("M-f")
def test_launch_returns_when_usable_and_a_killed_daemon_comes_back(place: Path) -> None:
    result = launch(place)
    assert (result.exit_code, result.message) == (ExitCode.OK, "mounted")
    assert result.supervisor_pid is not None
    assert result.daemon_pid is not None
    (place / "mnt" / "f").write_bytes(b"1")
    for starts in (2, 3):
        state = supervised(place)
        assert state is not None
        kill(state["daemon"], signal.SIGKILL)
        wait_until(lambda n=starts: (supervised(place) or {}).get("starts") == n and alive(place), "remount")
        assert len(mounts_at(str(place / "mnt"))) == 1
    assert not any("/dev/fuse" in os.readlink(link) for link in Path(f"/proc/{result.supervisor_pid}/fd").iterdir())
    assert len(list(Path(f"/proc/{result.supervisor_pid}/task").iterdir())) == 1


def test_a_clean_unmount_ends_the_supervisor_too(place: Path) -> None:
    result = launch(place)
    mounting.unmount(str(place / "mnt"))
    assert result.supervisor_pid is not None
    wait_until(lambda: not running(result.supervisor_pid), "supervisor's end")
    assert mounts_at(str(place / "mnt")) == []


def test_a_signal_to_the_supervisor_ends_both(place: Path) -> None:
    result = launch(place)
    assert result.supervisor_pid is not None
    assert result.daemon_pid is not None
    kill(result.supervisor_pid, signal.SIGTERM)
    wait_until(lambda: not running(result.supervisor_pid), "supervisor's end")
    assert not running(result.daemon_pid)
    assert mounts_at(str(place / "mnt")) == []


def test_after_both_are_killed_the_next_launch_cleans_up(place: Path) -> None:
    result = launch(place)
    assert result.supervisor_pid is not None
    assert result.daemon_pid is not None
    kill(result.supervisor_pid, signal.SIGKILL)
    kill(result.daemon_pid, signal.SIGKILL)
    assert launch(place).exit_code == ExitCode.OK
    assert alive(place)
    assert len(mounts_at(str(place / "mnt"))) == 1


def test_a_daemon_that_outlived_its_supervisor_is_adopted(place: Path) -> None:
    result = launch(place)
    assert result.supervisor_pid is not None
    assert result.daemon_pid is not None
    kill(result.supervisor_pid, signal.SIGKILL)
    (place / "mnt" / "f").write_bytes(b"kept")
    again = launch(place)
    assert again.exit_code == ExitCode.OK
    assert again.daemon_pid == result.daemon_pid
    assert (place / "mnt" / "f").read_bytes() == b"kept"
    kill(result.daemon_pid, signal.SIGKILL)
    wait_until(lambda: (supervised(place) or {}).get("supervisor") == again.supervisor_pid and alive(place), "remount")


def test_a_second_launch_joins_the_first(place: Path) -> None:
    first = launch(place)
    second = launch(place)
    assert second == LaunchResult(ExitCode.OK, "mounted already", first.supervisor_pid, first.daemon_pid)


def test_a_refusal_reaches_the_launcher_with_its_exit_code(place: Path) -> None:
    (place / "mnt" / "mine").touch()
    result = launch(place)
    assert result.exit_code == ExitCode.MOUNTPOINT
    assert "not empty" in result.message


@pytest.mark.parametrize("code", [ExitCode.FENCED, ExitCode.FAILED])
def test_a_daemon_that_ends_at_once_is_not_restarted_for_ever(place: Path, code: ExitCode) -> None:
    result = launch(place, exit=int(code))
    assert result.exit_code == code
    state = supervised(place)
    assert state is not None
    wait_until(lambda: not running(state["supervisor"]), "supervisor's end")
    assert state["starts"] == 1


def test_a_launch_that_takes_too_long_leaves_nothing_running(place: Path) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    result = launch_supervised(slow, str(place / "mnt"), place / "cache" / "daemon.log", 0.5)
    assert result.exit_code == ExitCode.FAILED
    assert "not usable within" in result.message
    state = supervised(place)
    assert state is not None
    wait_until(lambda: not running(state["daemon"]) and not running(state["supervisor"]), "the end of both")
