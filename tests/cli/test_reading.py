"""ls, cat, cp and snapshot list from a machine that has the store and nothing else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from spotwarp_fs.cli import main
from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.core.layout import encode_identity, manifest_key, workspace_identity_key, workspace_root
from spotwarp_fs.core.manifests import decode, digest_of, encode
from spotwarp_fs.core.types import ROOT_INODE, ManifestNumber
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.directory import DirectoryStore
from tests.support.command_line import RUN, CommandLine, build, mkdir, set_times, write
from tests.support.world import ACTOR, WORKSPACE_ID

BIG = os.urandom(5_000_000)
MTIME_NS = 1_234_567_890_123_456_789
HOLE_BYTES = 20 << 20


async def first(session: Session) -> None:
    filesystem = session.filesystem
    await write(session, "train.log", b"step 1\n")
    runs = await mkdir(session, "runs")
    big = await write(session, "runs/weights.bin", BIG, at=HOLE_BYTES)
    await filesystem.setxattr(big, b"user.kind", b"weights")
    await filesystem.link(big, ROOT_INODE, b"best.bin")
    await filesystem.symlink(runs, b"latest", b"weights.bin", ACTOR)
    await write(session, "runs/\udcff odd".encode("utf-8", "surrogateescape").decode("latin-1"), b"")
    await set_times(session, big, MTIME_NS, 0o600)
    await set_times(session, runs, MTIME_NS + 7, 0o500)


async def second(session: Session) -> None:
    await write(session, "later.txt", b"second state\n")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[CommandLine, list[int]]:
    home = tmp_path_factory.mktemp("home")
    numbers = build(DirectoryStore(home / "store"), first, second)
    return CommandLine(home, f"file://{home}/store"), numbers


@pytest.fixture
def spotwarp(world: tuple[CommandLine, list[int]]) -> CommandLine:
    return world[0]


def test_workspaces_are_listed(world: tuple[CommandLine, list[int]]) -> None:
    spotwarp, numbers = world
    found = json.loads(spotwarp.ok("ls", "--json"))["workspaces"]
    assert [line["name"] for line in found] == ["test"]
    assert found[0]["head_number"] == numbers[-1]
    assert found[0]["files"] == 5
    assert found[0]["live"] is False


def test_files_are_listed_as_they_were_at_a_state(world: tuple[CommandLine, list[int]]) -> None:
    spotwarp, (before, after) = world
    assert spotwarp.ok("ls", "test").split() == ["best.bin", "later.txt", "runs", "train.log"]
    assert spotwarp.ok("ls", "test", "--at", str(before)).split() == ["best.bin", "runs", "train.log"]
    assert spotwarp.ok("ls", "test", "--at", "quiescent") == spotwarp.ok("ls", "test", "--at", str(after))
    assert spotwarp.ok("ls", "test:train.log").split() == ["train.log"]
    deep = {item["path"]: item for item in json.loads(spotwarp.ok("ls", "-R", "test:", "--json"))["files"]}
    assert deep["runs/latest"]["target"] == "weights.bin"
    assert deep["runs/weights.bin"]["mtime_ns"] == MTIME_NS
    assert deep["runs/weights.bin"]["links"] == 2


def test_a_file_is_printed_with_its_holes(spotwarp: CommandLine) -> None:
    done = spotwarp.run("cat", "test:runs/latest", text=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bytes(HOLE_BYTES) + BIG


def test_a_reader_that_leaves_early_is_no_error_worth_a_traceback(spotwarp: CommandLine) -> None:
    command = [sys.executable, "-c", RUN, "cat", "test:best.bin"]
    environment = {**os.environ, "HOME": str(spotwarp.home), "SPOTWARP_STORE": spotwarp.store}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1000)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 141
    assert b"Traceback" not in said


@pytest.mark.promise("P-11")
def test_a_tree_is_copied_with_everything_that_stat_tells(spotwarp: CommandLine, tmp_path: Path) -> None:
    target = tmp_path / "out"
    report = json.loads(spotwarp.ok("cp", "-r", "test:", str(target), "--json"))
    assert report["bytes_copied"] == len(BIG) + len(b"step 1\n") + len(b"second state\n")
    weights = target / "runs" / "weights.bin"
    assert weights.read_bytes() == bytes(HOLE_BYTES) + BIG
    status = weights.stat()
    assert status.st_mtime_ns == MTIME_NS
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 < len(BIG) + (2 << 20)
    assert status.st_ino == (target / "best.bin").stat().st_ino
    assert os.getxattr(weights, "user.kind") == b"weights"
    assert os.readlink(target / "runs" / "latest") == "weights.bin"
    assert (target / "runs").stat().st_mtime_ns == MTIME_NS + 7
    assert stat.S_IMODE((target / "runs").stat().st_mode) == 0o500
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (ACTOR.uid, ACTOR.gid)
    left = [path for path in target.rglob("*") if path.name.startswith(".spotwarp")]
    assert not left


def test_a_copy_goes_into_a_directory_and_over_what_is_there(spotwarp: CommandLine, tmp_path: Path) -> None:
    for _ in range(2):
        spotwarp.ok("cp", "test:train.log", str(tmp_path))
        spotwarp.ok("cp", "-r", "test:runs", str(tmp_path))
    assert (tmp_path / "train.log").read_text() == "step 1\n"
    assert (tmp_path / "runs" / "weights.bin").stat().st_size == HOLE_BYTES + len(BIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.log"]


def test_nothing_but_the_head_hint_and_a_heartbeat_is_left_behind(spotwarp: CommandLine) -> None:
    root = spotwarp.home / "store" / workspace_root("test", WORKSPACE_ID)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    spotwarp.ok("ls", "test")
    spotwarp.ok("cat", "test:train.log")
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ls", "tset"), ExitCode.NOT_FOUND, "did you mean test?"),
        (("ls", "test:nowhere"), ExitCode.NOT_FOUND, "test:nowhere"),
        (("cat", "test:train.log/x"), ExitCode.NOT_FOUND, "Not a directory"),
        (("cat", "test:runs"), ExitCode.USAGE, "is not a file"),
        (("cp", "test:runs", "."), ExitCode.USAGE, "add -r"),
        (("ls", "test", "--at", "999"), ExitCode.NOT_FOUND, "from 1 to"),
        (("ls", "test", "--at", "before-lr"), ExitCode.NOT_FOUND, "no snapshot 'before-lr'"),
        (("ls", "test", "--at", "2020-01-01T00:00Z"), ExitCode.NOT_FOUND, "no state is that old"),
        (("ls", "test", "--at", "2020-01-01T00:00"), ExitCode.USAGE, "time zone"),
    ],
)
def test_errors_name_the_thing_and_have_their_exit_code(
    spotwarp: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: ExitCode,
    said: str,
) -> None:
    monkeypatch.setenv("HOME", str(spotwarp.home))
    monkeypatch.setenv("SPOTWARP_STORE", spotwarp.store)
    assert main.run(list(arguments)) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.promise("P-08")
def test_a_damaged_block_is_named_by_its_path_and_never_copied(tmp_path: Path) -> None:
    numbers = build(DirectoryStore(tmp_path / "store"), first)
    assert numbers
    spotwarp = CommandLine(tmp_path, f"file://{tmp_path}/store")
    packs = sorted((tmp_path / "store" / workspace_root("test", WORKSPACE_ID) / "packs").rglob("*-*"))
    data = max(packs, key=lambda pack: pack.stat().st_size)
    body = bytearray(data.read_bytes())
    body[len(body) // 2] ^= 1
    data.write_bytes(body)
    done = spotwarp.run("cp", "-r", "test:", str(tmp_path / "out"))
    assert done.returncode == ExitCode.CORRUPT, done.stderr
    assert "test:best.bin" in done.stderr or "test:runs/weights.bin" in done.stderr
    assert not (tmp_path / "out" / "best.bin").exists()
    assert not (tmp_path / "out" / "runs" / "weights.bin").exists()
    assert spotwarp.ok("cat", "test:train.log") == "step 1\n"
    data.unlink()
    done = spotwarp.run("cat", "test:best.bin")
    assert done.returncode == ExitCode.CORRUPT, done.stderr
    assert "missing" in done.stderr


def test_a_newer_format_is_said_to_be_one(tmp_path: Path) -> None:
    (number,) = build(DirectoryStore(tmp_path / "store"), second)
    spotwarp = CommandLine(tmp_path, f"file://{tmp_path}/store")
    path = tmp_path / "store" / workspace_root("test", WORKSPACE_ID) / manifest_key(ManifestNumber(number))
    newer = encode(decode(path.read_bytes())).replace(b'"format":1,', b'"format":99,')
    head = b'{"check":"'
    rest = b"{" + newer[len(head) + 64 + 2 :]
    path.write_bytes(head + digest_of(rest).encode() + b'",' + rest[1:])
    done = spotwarp.run("ls", "test")
    assert done.returncode == ExitCode.NEWER_FORMAT, done.stderr
    assert "upgrade spotwarp" in done.stderr
    identity = tmp_path / "store" / workspace_identity_key("test")
    identity.write_bytes(encode_identity(WORKSPACE_ID).replace(b'"format": 1', b'"format": 99'))
    assert spotwarp.run("cat", "test:later.txt").returncode == ExitCode.NEWER_FORMAT


def test_a_damaged_head_is_named_and_keeps_nobody_from_older_states(tmp_path: Path) -> None:
    numbers = build(DirectoryStore(tmp_path / "store"), first, second)
    spotwarp = CommandLine(tmp_path, f"file://{tmp_path}/store")
    head = tmp_path / "store" / workspace_root("test", WORKSPACE_ID) / manifest_key(ManifestNumber(numbers[-1]))
    body = bytearray(head.read_bytes())
    body[len(body) // 2] ^= 0x40
    head.chmod(0o600)
    head.write_bytes(body)

    done = spotwarp.run("ls", "test:")
    assert done.returncode == ExitCode.CORRUPT
    assert f"manifest {numbers[-1]} is damaged" in done.stderr
    assert f"--at {numbers[-1] - 1}" in done.stderr
    assert "train.log" in spotwarp.ok("ls", "test:", "--at", str(numbers[0]))
    assert spotwarp.ok("cat", "test:train.log", "--at", str(numbers[0])) == "step 1\n"
