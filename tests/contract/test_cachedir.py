"""Is a cache directory used by one daemon, for one workspace, where it can work? When is its map believed?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.types import BlockIndex, Inode
from spotwarp_fs.local import cachedir, punching
from spotwarp_fs.local.boot import boot_id
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.mountinfo import fuse_mount_of

WORKSPACE = "s3://bucket/prefix run-1 (0f0f)"


def refusal(path: Path, workspace: str = WORKSPACE, *, mountpoint: Path | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        CacheDir.open(path, workspace, mountpoint=mountpoint)
    assert caught.value.exit_code is ExitCode.CACHE
    assert str(path) in str(caught.value)
    return caught.value


def test_a_cache_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cache"
    cache = CacheDir.open(path, WORKSPACE)
    assert cache.state.is_dir()
    assert cache.free_bytes() > 0
    cache.close()
    CacheDir.open(path, WORKSPACE).close()


def test_another_workspaces_cache_is_refused_and_both_are_named(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, WORKSPACE)
    cache.note_workspace_id("0f0f")
    cache.close()
    message = str(refusal(tmp_path, "s3://bucket/prefix run-2 (1e1e)"))
    assert WORKSPACE in message
    assert "run-2" in message
    CacheDir.open(tmp_path, WORKSPACE).close()


def test_a_cache_that_never_held_anything_may_become_another_workspaces(tmp_path: Path) -> None:
    """The first mount named a store that does not exist; the second one is right."""
    CacheDir.open(tmp_path, WORKSPACE).close()
    CacheDir.open(tmp_path, "s3://the-right-one run-1").close()
    cache = CacheDir.open(tmp_path, "s3://the-right-one run-1")
    cache.set_aside_as_salvage("a test")
    cache.close()
    assert "the-right-one" in str(refusal(tmp_path, WORKSPACE)), "what was set aside belongs to somebody"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity").write_text('{"format": 3, "workspace": "x"}')
    with pytest.raises(UserError, match="format 3, this program knows 2") as caught:
        CacheDir.open(tmp_path, WORKSPACE)
    assert caught.value.exit_code is ExitCode.NEWER_FORMAT


def test_what_format_1_placed_otherwise_is_found(tmp_path: Path) -> None:
    CacheDir.open(tmp_path, WORKSPACE).close()
    (tmp_path / "identity").write_text(f'{{"format": 1, "workspace": "{WORKSPACE}"}}')
    inodes = [Inode(0x1_0000_0003), Inode(0x1_0000_1003)]
    for ino in inodes:
        earlier = tmp_path / "state" / "data" / "03" / f"{ino:x}"
        earlier.parent.mkdir(exist_ok=True)
        earlier.write_bytes(b"bytes of %x" % ino)

    cache = CacheDir.open(tmp_path, WORKSPACE)
    files = SparseDataFiles(cache.state)
    assert [files.pread(ino, 0, 20).rstrip(b"\0") for ino in inodes] == [b"bytes of %x" % ino for ino in inodes]
    assert sorted(files.inodes()) == inodes
    files.close()
    cache.close()
    assert '"format": 2' in (tmp_path / "identity").read_text(), "an older program would not find them any more"


HOLDER = """
import sys
from pathlib import Path
from spotwarp_fs.local.cachedir import CacheDir

cache = CacheDir.open(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_cache_held_by_a_live_daemon_is_refused_with_its_pid_and_free_after_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), WORKSPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert f"pid {child.pid}" in str(refusal(tmp_path))
        os.kill(child.pid, signal.SIGKILL)
    CacheDir.open(tmp_path, WORKSPACE).close()


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, WORKSPACE)
    command = [sys.executable, "-c", "print('running', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        cache.close()
        CacheDir.open(tmp_path, WORKSPACE).close()
        child.communicate(b"\n")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "a file stands" in str(refusal(tmp_path / "file"))
    assert "a file stands" in str(refusal(tmp_path / "file" / "below"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "may not write" in str(refusal(tmp_path))


@pytest.mark.skipif(not os.access("/sys/kernel", os.F_OK), reason="needs a filesystem where nothing can be made")
def test_a_filesystem_that_takes_no_files_is_refused() -> None:
    refusal(Path("/sys/kernel/spotwarp-cache"))


def test_a_mountpoint_over_the_cache_is_refused(tmp_path: Path) -> None:
    assert "inside the mountpoint" in str(refusal(tmp_path / "ws" / "cache", mountpoint=tmp_path / "ws"))
    (tmp_path / "link").symlink_to(tmp_path / "ws")
    assert "inside the mountpoint" in str(refusal(tmp_path / "link" / "cache", mountpoint=tmp_path / "ws"))
    CacheDir.open(tmp_path / "ws-cache", WORKSPACE, mountpoint=tmp_path / "ws").close()


@pytest.mark.history("H18")
def test_H18_a_full_disk_is_refused_for_a_new_cache_and_not_for_one_that_has_something_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CacheDir.open(tmp_path / "old", WORKSPACE).close()
    monkeypatch.setattr(cachedir, "disk_free_bytes", lambda path: 4096)
    assert "full" in str(refusal(tmp_path / "new"))
    CacheDir.open(tmp_path / "old", WORKSPACE).close()


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
90 22 0:50 / /mnt/ws rw,nosuid - fuse.spotwarp run-1 rw,user_id=0
91 22 0:51 / /mnt/with\\040space rw - fuse spotwarp rw
92 90 0:52 / /mnt/ws/local rw - tmpfs tmpfs rw
93 22 0:53 / /containers rw - fuse.fuse-overlayfs overlay rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/mnt/ws", "/mnt/ws"),
        ("/mnt/ws/a/b", "/mnt/ws"),
        ("/mnt/ws2/a", None),
        ("/mnt/with space/a", "/mnt/with space"),
        ("/mnt/ws/local/cache", None),
        ("/containers/x", None),
        ("/home", None),
    ],
)
def test_a_path_inside_a_fuse_mount_is_found_out_without_touching_it(path: str, mount: str | None) -> None:
    assert fuse_mount_of(Path(path), mountinfo=MOUNTS) == mount


def test_a_cache_inside_a_fuse_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"90 22 0:50 / {tmp_path} rw - fuse.spotwarp run-1 rw\n"
    monkeypatch.setattr(cachedir, "fuse_mount_of", lambda path: fuse_mount_of(path, mountinfo=MOUNTS + line))
    assert f"inside the FUSE mount {tmp_path}" in str(refusal(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_filesystem_without_holes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punching, "_fallocate", None)
    assert "cannot punch holes" in str(refusal(tmp_path))


@pytest.mark.history("H8")
def test_H8_spools_of_an_earlier_daemon_are_gone_at_the_start(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, WORKSPACE)
    files = SparseDataFiles(cache.state)
    files.pwrite(Inode(5), 0, b"frozen")
    files.set_aside(Inode(5), "cut-1")
    files.append_aside_block("cut-1", Inode(6), BlockIndex(0), b"old")
    files.pwrite(Inode(7), 0, b"kept")
    files.close()
    cache.close()
    again = CacheDir.open(tmp_path, WORKSPACE)
    assert os.listdir(again.state / "spool") == []
    after = SparseDataFiles(again.state)
    assert list(after.inodes()) == [Inode(7)]
    after.close()
    again.close()


@pytest.mark.history("C4")
def test_C4_a_map_is_believed_only_if_this_boot_completed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheDir.open(tmp_path, WORKSPACE)
    assert not cache.map_trusted
    kv = LmdbKV(cache.map_path)
    kv.close()
    assert not cache.map_trusted, "a load that was killed half way is no map"
    cache.certify_map()
    cache.close()

    same_boot = CacheDir.open(tmp_path, WORKSPACE)
    assert same_boot.map_trusted
    monkeypatch.setattr(cachedir, "boot_id", lambda: "another boot")
    assert not same_boot.map_trusted
    same_boot.discard_map()
    assert os.listdir(same_boot.map_path) == []
    same_boot.certify_map()
    assert same_boot.map_trusted
    monkeypatch.setattr(cachedir, "boot_id", lambda: None)
    assert not same_boot.map_trusted
    same_boot.certify_map()
    assert not same_boot.map_trusted, "without a boot id nothing unsynced is ever believed"
    same_boot.close()


def test_a_copied_map_is_not_believed(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path / "one", WORKSPACE)
    cache.certify_map()
    cache.close()
    subprocess.run(["cp", "-a", tmp_path / "one", tmp_path / "two"], check=True)
    copied = CacheDir.open(tmp_path / "two", WORKSPACE)
    assert not copied.map_trusted
    copied.close()


@pytest.mark.history("C15")
def test_C15_a_foreign_head_sets_the_whole_state_aside_and_nothing_of_it_is_served(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, WORKSPACE)
    files = SparseDataFiles(cache.state)
    files.pwrite(Inode(1001), 0, b"a.pt")
    files.close()
    cache.journal_path.write_bytes(b"journal")
    cache.certify_map()

    first = cache.set_aside_as_salvage("head 12 is of session 77, epoch 4")
    assert (first / "reason").read_text() == "head 12 is of session 77, epoch 4\n"
    assert (first / "journal").read_bytes() == b"journal"
    salvaged = SparseDataFiles(first)
    assert salvaged.pread(Inode(1001), 0, 4) == b"a.pt"
    salvaged.close()

    assert not cache.map_trusted
    assert not cache.journal_path.exists()
    fresh = SparseDataFiles(cache.state)
    assert list(fresh.inodes()) == []
    fresh.close()
    second = cache.set_aside_as_salvage("again")
    assert cache.salvages() == [first, second]
    cache.close()


def test_the_boot_id_stays_the_same() -> None:
    assert boot_id() == boot_id()
    assert boot_id() is None or len(boot_id() or "") >= 32
