"""Are the FUSE skin's decisions right, where no mount is needed to tell?"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pyfuse3
import pytest
import trio

from spotwarp_fs.core.errors import Corrupt, Fenced, Refused, Unavailable
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.requests import FilesystemFigures, Node
from spotwarp_fs.core.types import Inode
from spotwarp_fs.fuse import attributes, dying, operations, underlay
from spotwarp_fs.fuse.mountinfo import MountEntry, parse
from spotwarp_fs.fuse.mounting import MountOptions, kernel_options


def test_mountinfo_lines_with_escapes_and_optional_fields_are_read() -> None:
    text = (
        r"36 25 0:47 / /mnt/a\040b\134c rw,nosuid shared:1 master:2 - fuse.spotwarp spotwarp:run\0401 rw,user_id=0"
        "\n25 1 254:0 /sub /mnt rw,relatime - ext4 /dev/vda rw\n"
    )
    ours, disk = parse(text)
    assert ours == MountEntry("/mnt/a b\\c", "fuse.spotwarp", "spotwarp:run 1", 0, 47)
    assert (ours.is_fuse, ours.workspace) == (True, "run 1")
    assert (disk.is_fuse, disk.workspace) == (False, None)


@pytest.mark.parametrize(
    ("kind", "is_fuse"), [("fuse", True), ("fuseblk", True), ("fuse.sshfs", True), ("fusectl", False)]
)
def test_only_fuse_mounts_count_as_fuse(kind: str, is_fuse: bool) -> None:
    assert MountEntry("/m", kind, "s", 0, 1).is_fuse is is_fuse


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (Refused(errno.ENOTEMPTY), errno.ENOTEMPTY),
        (Fenced("x"), errno.EROFS),
        (Corrupt("x"), errno.EIO),
        (Unavailable("x"), errno.EIO),
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC),
        (OSError("without a number"), errno.EIO),
        (KeyError("x"), None),
    ],
)
def test_each_error_has_its_errno(error: Exception, wanted: int | None) -> None:
    assert operations.errno_of(error) == wanted


async def test_the_gate_lets_a_cancellation_pass() -> None:
    @operations.gate
    async def handler(self: operations.Operations) -> None:
        await trio.sleep_forever()

    with trio.move_on_after(0) as scope:
        await handler(None)  # type: ignore[arg-type]
    assert scope.cancelled_caught


async def test_the_gate_answers_a_surprise_with_eio_and_reports_it_once(caplog: pytest.LogCaptureFixture) -> None:
    @operations.gate
    async def handler(self: operations.Operations) -> None:
        raise AssertionError("never seen before")

    for _ in range(3):
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await handler(None)  # type: ignore[arg-type]
        assert caught.value.errno == errno.EIO
    assert [record.exc_info is not None for record in caplog.records] == [True]


@pytest.mark.parametrize("time_ns", [-1, -(10**18) - 1, 0, 5 * 10**18 + 7])
def test_attributes_keep_times_sizes_and_mode(time_ns: int) -> None:
    record = InodeRecord(
        stat.S_IFREG | 0o4755, 3, 1000, 2000, 1 << 51, allocated=513, rdev=9,
        atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns,
    )  # fmt: skip
    answer = attributes.entry(Node(Inode(7 << 40 | 5), record))
    assert (answer.st_atime_ns, answer.st_mtime_ns, answer.st_ctime_ns) == (time_ns, time_ns, time_ns)
    assert (answer.st_ino, answer.st_size, answer.st_blocks) == (7 << 40 | 5, 1 << 51, 2)
    assert (answer.st_mode, answer.st_nlink, answer.st_uid, answer.st_gid) == (stat.S_IFREG | 0o4755, 3, 1000, 2000)
    assert (answer.entry_timeout, answer.attr_timeout) == (3600, 3600)


def test_a_missing_name_is_cached() -> None:
    assert (attributes.no_entry().st_ino, attributes.no_entry().entry_timeout) == (0, 3600)


def test_figures_are_given_in_blocks() -> None:
    answer = attributes.figures(FilesystemFigures(4096, 8192, 4096, 10, 4))
    assert (answer.f_blocks, answer.f_bavail, answer.f_files, answer.f_ffree) == (2, 1, 10, 4)


def test_a_workspace_name_cannot_smuggle_in_mount_options(tmp_path: Path) -> None:
    options = MountOptions(mountpoint="/m", workspace="a,dev,suid\\é", cache_dir=tmp_path, allow_other=False)
    assert kernel_options(options) == {
        "default_permissions",
        "fsname=spotwarp:a\\,dev\\,suid\\\\?",
        "subtype=spotwarp",
    }


def test_a_thread_leads_to_its_process_and_the_dead_lead_nowhere() -> None:
    assert dying.thread_group(os.getpid()) == os.getpid()
    assert dying.thread_group(0) is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert dying.thread_group(child) is None
    assert not dying.dying_of_signal(child)


def test_a_running_process_and_one_that_exited_well_are_not_dying_of_a_signal() -> None:
    assert not dying.dying_of_signal(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(5)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not dying.dying_of_signal(child)
    os.waitpid(child, 0)


@pytest.fixture
def directory(tmp_path: Path):
    path = tmp_path / "below"
    path.mkdir(mode=0o711)
    path.chmod(0o711)
    yield path
    underlay.reopen(str(path), tmp_path / "record.json")


def close_off(path: Path, record: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        underlay.close_off(descriptor, str(path), record)
    finally:
        os.close(descriptor)


def test_a_closed_off_directory_comes_back_as_it_was_also_after_a_crash(directory: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    close_off(directory, record)
    with pytest.raises(OSError):
        (directory / "x").touch()
    close_off(directory, record)  # the start after a crash finds it closed off already
    underlay.reopen(str(directory), record)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o711
    (directory / "x").touch()
    assert not record.exists()


def test_a_record_of_another_directory_is_neither_applied_nor_lost(directory: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    close_off(directory, record)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    close_off(other, record)
    underlay.reopen(str(other), record)
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    underlay.reopen(str(directory), record)
    (directory / "x").touch()


def test_a_directory_that_took_the_place_of_a_closed_off_one_is_left_alone(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    path, aside = tmp_path / "path", tmp_path / "aside"
    path.mkdir(mode=0o711)
    close_off(path, record)
    kept = record.read_bytes()
    underlay.reopen(str(path), record)
    path.rename(aside)
    path.mkdir(mode=0o700)
    record.write_bytes(kept)
    underlay.reopen(str(path), record)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
