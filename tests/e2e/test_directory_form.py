"""Does the directory form keep its promises between real processes? start, kill, lose, restore, take over, stop."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import Fleet, Node, RefusedToMount, await_true
from tests.support.daemon import fleet as fleet

MiB = 1 << 20


def noise(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count)


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, mtime and content of every file, read by an unrelated process' rules: plain opens."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.relative_to(root).parts[0] == ".spotwarp":
            continue
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns if path.is_file() else 0, data)
    return found


def fill(root: Path) -> None:
    (root / "data").mkdir()
    for number in range(30):
        (root / "data" / f"small{number}").write_bytes(noise(2000, number))
    for step in (100, 200):
        place = root / f"checkpoint-{step}"
        place.mkdir()
        (place / "model.safetensors").write_bytes(noise(5 * MiB + step, step))
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    os.link(root / "data" / "small0", root / "again")
    (root / "newest").symlink_to("checkpoint-200")
    os.chmod(root / "data" / "small1", 0o600)
    os.utime(root / "data" / "small2", ns=(1, 1_600_000_000_123_456_789))


def published(node: Node) -> int:
    done = node.run("sync", str(node.root))
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.promise("P-11")
@pytest.mark.promise("P-07")
def test_a_lost_node_comes_back_in_an_empty_directory(fleet: Fleet) -> None:
    first = fleet.node(form="directory")
    fill(first.root)
    first.start_supervised()
    published(first)
    before = tree(first.root)
    first.lose()
    second = fleet.node(form="directory")
    second.start_supervised("--restore", "--takeover")
    assert tree(second.root) == before
    assert (second.root / "again").stat().st_ino == (second.root / "data" / "small0").stat().st_ino
    (second.root / "new").write_text("goes on")
    published(second)
    assert second.umount() == ExitCode.OK
    assert second.run("cat", "--store", second.store, "e2e:new").stdout in ("goes on", "")


@pytest.mark.promise("P-01")
def test_a_killed_daemon_comes_back_and_goes_on(fleet: Fleet) -> None:
    node = fleet.node(form="directory")
    node.start_supervised()
    (node.root / "one").write_text("1")
    number = published(node)
    pid = node.pid
    os.kill(pid, signal.SIGKILL)
    (node.root / "two").write_text("2")
    await_true(lambda: node.report_of_restart() not in (None, pid), "the supervisor starts another daemon")
    assert published(node) > number
    assert node.status()["files"] == 2


@pytest.mark.promise("P-18")
def test_an_empty_or_foreign_directory_is_refused_with_both_sides_named(fleet: Fleet) -> None:
    first = fleet.node(form="directory")
    fill(first.root)
    first.start_supervised()
    published(first)
    first.umount()
    second = fleet.node(form="directory")
    with pytest.raises(RefusedToMount) as empty:
        second.start_supervised("--takeover")
    assert empty.value.code == ExitCode.WOULD_WIPE
    assert "--restore" in str(empty.value)
    assert "--adopt-local" in str(empty.value)
    (second.root / "something else").write_text("x")
    with pytest.raises(RefusedToMount) as foreign:
        second.start_supervised("--takeover")
    assert foreign.value.code == ExitCode.WOULD_WIPE
    assert "35 files" in str(foreign.value)
    second.start_supervised("--takeover", "--restore")
    assert tree(second.root) == tree(first.root)
    (kept,) = (second.root / ".spotwarp" / "replaced").rglob("something else")
    assert kept.read_text() == "x"


@pytest.mark.promise("P-18")
@pytest.mark.parametrize("how", ["emptied", "covered"])
def test_a_directory_that_goes_away_while_it_is_watched_never_becomes_an_empty_state(fleet: Fleet, how: str) -> None:
    node = fleet.node(form="directory")
    fill(node.root)
    node.start_supervised()
    number = published(node)
    files = node.status()["files"]
    aside = node.root.with_name("aside")
    if how == "emptied":
        shutil.rmtree(node.root)
        node.root.mkdir()
    else:
        node.root.rename(aside)
        node.root.mkdir()
        (node.root / "something else").write_text("x")
    refused = node.run("sync", str(node.root))
    assert refused.returncode == ExitCode.WOULD_WIPE, refused.stderr
    assert "identity" in refused.stderr
    assert node.status()["files"] == files, "what was deleted is still in the state: nobody said that it should go"
    if how == "covered":
        shutil.rmtree(node.root)
        aside.rename(node.root)
        (node.root / "new").write_text("back again")
        assert published(node) > number


@pytest.mark.promise("P-06")
def test_a_fenced_directory_publishes_nothing_more_and_says_so(fleet: Fleet) -> None:
    old, new = fleet.node(form="directory"), fleet.node(form="directory")
    (old.root / "f").write_text("old")
    old.start_supervised()
    published(old)
    new.start_supervised("--restore", "--takeover")
    (new.root / "f").write_text("new")
    number = published(new)
    (old.root / "f").write_text("zombie")
    await_true(lambda: old.status()["fenced"], "the old writer notices")
    assert old.run("sync", str(old.root)).returncode == ExitCode.FENCED
    assert (old.root / "f").read_text() == "zombie", "nothing in the directory is touched"
    assert old.umount() == ExitCode.FENCED
    assert new.status()["head_number"] == number
    assert new.run("cat", "--store", new.store, "e2e:f").returncode in (0, ExitCode.NOT_FOUND)


@pytest.mark.promise("P-12")
@pytest.mark.parametrize("how", ["stop", "SIGTERM"])
def test_the_end_publishes_what_was_written_last(fleet: Fleet, how: str) -> None:
    node = fleet.node(form="directory", interval="1h")
    node.start_supervised()
    (node.root / "late").write_bytes(noise(3 * MiB, 1))
    if how == "stop":
        assert node.umount() == ExitCode.OK
    else:
        pid = node.pid
        os.kill(pid, signal.SIGTERM)
        await_true(lambda: not Path(f"/proc/{pid}").exists(), "the daemon ends")
    before = tree(node.root)
    other = fleet.node(form="directory")
    other.start_supervised("--restore")
    assert tree(other.root) == before


MMAP = """
import mmap, sys
file = open(sys.argv[1], "rb")
sys.stdout.buffer.write(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:])
"""
SENDFILE = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
left = os.fstat(fd).st_size
while left:
    left -= os.sendfile(1, fd, os.fstat(fd).st_size - left, left)
"""
READERS = {
    "cat": ["cat", "FILE"],
    "cp": ["sh", "-c", "cp FILE OUT && cat OUT"],
    "tar": ["sh", "-c", "tar -C $(dirname FILE) -cf - $(basename FILE) | tar -xOf -"],
    "mmap": [sys.executable, "-c", MMAP, "FILE"],
    "sendfile": [sys.executable, "-c", SENDFILE, "FILE"],
}


@pytest.mark.history("L5")
@pytest.mark.history("C19")
@pytest.mark.promise("P-08")
@pytest.mark.parametrize("how", READERS)
def test_any_process_that_opens_a_placeholder_gets_its_bytes(fleet: Fleet, tmp_path: Path, how: str) -> None:
    first = fleet.node(form="directory")
    first.start_supervised()
    data = noise(9 * MiB + 5, 7)
    (first.root / "old.bin").write_bytes(data)
    published(first)
    first.lose()
    second = fleet.node(form="directory")
    second.start_supervised("--restore", "--takeover")
    path = second.root / "old.bin"
    assert path.stat().st_size == len(data)
    command = [word.replace("FILE", str(path)).replace("OUT", str(tmp_path / "out")) for word in READERS[how]]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stdout == data


@pytest.mark.history("C19")
@pytest.mark.history("L5")
def test_C19_placeholders_survive_the_daemon_and_are_never_published_as_zeros(fleet: Fleet) -> None:
    """(b): the daemon dies after laying out; the next one scans, finds the right size and zeros, and publishes them."""
    first = fleet.node(form="directory")
    first.start_supervised()
    data = {f"f{number}.bin": noise(2 * MiB, number) for number in range(8)}
    for name, content in data.items():
        (first.root / name).write_bytes(content)
    published(first)
    first.lose()
    second = fleet.node(form="directory")
    second.start_supervised("--restore", "--takeover")
    for _ in range(2):
        pid = second.pid
        os.kill(pid, signal.SIGKILL)
        await_true(lambda pid=pid: second.report_of_restart() not in (None, pid), "another daemon")  # type: ignore[misc]
        published(second)
    third = fleet.node(form="directory")
    third.start_supervised("--restore", "--takeover")
    for name, content in data.items():
        assert (third.root / name).read_bytes() == content
        assert (second.root / name).read_bytes() == content


def test_a_workspace_moves_between_the_forms(fleet: Fleet) -> None:
    """One format: written in a directory, gone on with in a mount, and back."""
    first = fleet.node(form="directory")
    fill(first.root)
    first.start_supervised()
    published(first)
    before = tree(first.root)
    first.lose()
    mounted = fleet.node()
    mounted.start("--takeover")
    assert tree(mounted.root) == before
    (mounted.root / "from the mount").write_text("written there")
    mounted.sync()
    mounted.lose()
    third = fleet.node(form="directory")
    third.start_supervised("--restore", "--takeover")
    after = tree(third.root)
    assert after.pop("from the mount")[2] == b"written there"
    assert after == before


def test_a_restore_that_was_killed_goes_on_and_fetches_nothing_twice(fleet: Fleet) -> None:
    first = fleet.node(form="directory")
    fill(first.root)
    first.start_supervised()
    published(first)
    before = tree(first.root)
    first.lose()
    second = fleet.node(form="directory")
    for pause_s in (0.3, 0.6, 0.9, 1.2):
        starting = subprocess.Popen(
            second.command(*second._mount_arguments(), "--restore", "--takeover", "--foreground"),
            env=second._environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(pause_s)
        starting.kill()
        starting.wait()
    second.start_supervised("--restore", "--takeover")
    assert tree(second.root) == before


def test_a_directory_survives_being_copied_with_its_spotwarp_directory(fleet: Fleet) -> None:
    node = fleet.node(form="directory")
    (node.root / "f").write_text("x")
    node.start_supervised()
    published(node)
    copy = fleet.node(form="directory")
    shutil.rmtree(copy.root)
    shutil.copytree(node.root, copy.root, symlinks=True)
    node.umount()
    with pytest.raises(RefusedToMount) as refused:
        copy.start_supervised("--takeover")
    assert refused.value.code == ExitCode.WOULD_WIPE


def test_a_state_directory_that_was_named_to_start_is_named_to_the_others(fleet: Fleet, tmp_path: Path) -> None:
    node = fleet.node(form="directory")
    there = ["--state-dir", str(tmp_path / "there")]
    node.start_supervised(*there)
    assert node.run("status", str(node.root)).returncode != 0, "it is not among those of the default place"
    for command in ("status", "sync", "stop"):
        done = node.run(command, str(node.root), *there)
        assert done.returncode == 0, (command, done.stderr)
