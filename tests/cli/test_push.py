"""push, snapshot and doctor without a mount."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from spotwarp_fs.cli import main
from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.directory import DirectoryStore
from tests.support.command_line import RUN, CommandLine, build, mkdir, write
from tests.support.world import ACTOR, Node, start

DATA = os.urandom(4 << 20)
Described = dict[str, tuple[object, ...]]


@pytest.fixture
def spotwarp(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path, f"file://{tmp_path}/store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "checkpoint-5").mkdir(parents=True)
    (source / "checkpoint-5" / "model.pt").write_bytes(DATA)
    (source / "empty").mkdir(mode=0o700)
    (source / "notes.txt").write_text("one\n")
    os.link(source / "notes.txt", source / "empty" / "again.txt")
    os.symlink("checkpoint-5", source / "newest")
    os.mkfifo(source / "pipe")
    with (source / "sparse").open("wb") as sparse:
        sparse.truncate(40 << 20)
        sparse.seek(20 << 20)
        sparse.write(b"middle")
    os.setxattr(source / "notes.txt", "user.origin", b"lab")
    (source / "notes.txt").chmod(0o604)
    os.utime(source / "notes.txt", ns=(1, 1_500_000_000_000_000_001))
    os.utime(source / "checkpoint-5", ns=(1, 1_500_000_000_000_000_002))
    return source


def described(root: Path) -> Described:
    """Everything that must come back, and which names are one file."""
    found: Described = {}
    first: dict[int, str] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        name = str(path.relative_to(root))
        is_regular = stat.S_ISREG(status.st_mode)
        found[name] = (
            oct(status.st_mode),
            status.st_mtime_ns if name != "." else 0,
            path.read_bytes() if is_regular else b"",
            os.readlink(path) if path.is_symlink() else "",
            first.setdefault(status.st_ino, name),
            sorted(os.listxattr(path, follow_symlinks=False)) if is_regular else [],
        )
    return found


def pushed(spotwarp: CommandLine, source: Path, *options: str) -> dict[str, object]:
    return dict(json.loads(spotwarp.ok("push", str(source), "run7", "--json", *options)))


def test_what_was_pushed_comes_back_the_same(spotwarp: CommandLine, source: Path, tmp_path: Path) -> None:
    report = pushed(spotwarp, source)
    assert report["files"] == 6
    spotwarp.here("cp", "-r", "run7:", str(tmp_path / "out"))
    assert described(tmp_path / "out") == described(source)
    assert (tmp_path / "out" / "sparse").stat().st_blocks * 512 < 4 << 20
    assert not any((tmp_path / ".spotwarp" / "tmp").iterdir())
    (line,) = json.loads(spotwarp.here("ls", "--json"))["workspaces"]
    assert line["live"] is False
    # Nothing of it is in flight, though a checkpoint directory has just been made.
    assert spotwarp.here("ls", "run7", "--at", "quiescent") == spotwarp.here("ls", "run7")


def test_a_second_push_sends_only_what_changed_and_is_one_state(
    spotwarp: CommandLine, source: Path, tmp_path: Path
) -> None:
    before = pushed(spotwarp, source)
    # What the takeover says of itself, no data.
    assert int(str(pushed(spotwarp, source)["bytes_sent"])) < 1000
    (source / "checkpoint-5").rename(source / "checkpoint-6")
    with (source / "checkpoint-6" / "model.pt").open("r+b") as model:
        model.seek(2 << 20)
        model.write(b"changed")
        model.truncate((3 << 20) + 5)
    (source / "newest").unlink()
    (source / "newest").mkdir()
    (source / "empty" / "again.txt").unlink()
    (source / "empty" / "again.txt").write_text("a file of its own\n")
    os.removexattr(source / "notes.txt", "user.origin")
    (source / "pipe").unlink()
    after = pushed(spotwarp, source)
    # The renamed file's other blocks are known by their digests.
    assert len(DATA) // 4 < int(str(after["bytes_sent"])) < len(DATA) // 2
    # The takeover of each push, and its one state.
    assert after["manifest"] == int(str(before["manifest"])) + 4
    spotwarp.here("cp", "-r", "run7:", str(tmp_path / "out"))
    assert described(tmp_path / "out") == described(source)
    assert "pipe" in spotwarp.here("ls", "run7", "--at", str(before["manifest"]))


@pytest.mark.promise("P-18")
def test_an_empty_or_unrelated_directory_is_refused_with_both_sides(
    spotwarp: CommandLine, source: Path, tmp_path: Path
) -> None:
    before = pushed(spotwarp, source)
    empty, other = tmp_path / "nothing", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    for number in range(20):
        (other / f"photo-{number}").write_bytes(b"x" * 1000)
    for directory, files in ((empty, 0), (other, 20)):
        done = spotwarp.run("push", str(directory), "run7")
        assert done.returncode == ExitCode.WOULD_WIPE, done.stderr
        assert f"workspace run7 has 6 files, 44 MiB, at manifest {before['manifest']}" in done.stderr
        assert f"{directory} has {files} files" in done.stderr
        assert "--replace" in done.stderr
    assert json.loads(spotwarp.here("ls", "--json"))["workspaces"][0]["head_number"] == before["manifest"]
    pushed(spotwarp, empty, "--replace")
    assert spotwarp.here("ls", "run7") == ""
    assert spotwarp.here("cat", "run7:notes.txt", "--at", str(before["manifest"])) == "one\n"


@pytest.mark.history("H13")
def test_a_live_writer_is_not_disturbed_unless_taken_over(spotwarp: CommandLine, source: Path) -> None:
    async def world() -> None:
        store = DirectoryStore(spotwarp.home / "store")
        async with start(store, Node()) as session:
            await write(session, "notes.txt", b"live\n")
            number = await session.streamer.barrier()
            await session.heartbeat.beat()
            for command in (("push", str(source), "test"), ("snapshot", "create", "s", "--workspace", "test")):
                done = await trio.to_thread.run_sync(spotwarp.run, *command)
                assert done.returncode == ExitCode.LIVE_WRITER, done.stderr
                assert "--takeover" in done.stderr
            assert session.streamer.head.manifest.number == number
            assert (await trio.to_thread.run_sync(spotwarp.ok, "cat", "test:notes.txt")) == "live\n"
            await trio.to_thread.run_sync(lambda: spotwarp.ok("push", str(source), "test", "--takeover"))
            with trio.fail_after(30):
                await session.fenced.wait()
        assert (await trio.to_thread.run_sync(spotwarp.ok, "cat", "test:notes.txt")) == "one\n"

    build(DirectoryStore(spotwarp.home / "store"))
    trio.run(world)


def test_a_push_that_is_killed_leaves_the_state_before_it(spotwarp: CommandLine, source: Path) -> None:
    before = pushed(spotwarp, source)
    packs = spotwarp.home / "store" / "workspaces"
    known = set(packs.rglob("packs/*/*"))
    (source / "checkpoint-5" / "model.pt").write_bytes(os.urandom(48 << 20))
    (source / "notes.txt").write_text("two\n")
    command = [sys.executable, "-c", RUN, "push", str(source), "run7"]
    with subprocess.Popen(command, env=spotwarp.whole_environment) as process:
        while process.poll() is None and len(set(packs.rglob("packs/*/*")) - known) < 2:
            pass
        process.kill()
    listed = spotwarp.here("ls", "-lR", "run7")
    # Whole or not at all, however far it got.
    assert (spotwarp.here("cat", "run7:notes.txt") == "two\n") == ("50,331,648" in listed)
    if process.returncode != 0:
        assert listed == spotwarp.here("ls", "-lR", "run7", "--at", str(before["manifest"]))
    pushed(spotwarp, source, "--takeover")
    assert spotwarp.here("cat", "run7:notes.txt") == "two\n"
    assert not any((spotwarp.home / ".spotwarp" / "tmp").iterdir())


def test_snapshots_name_states_until_they_are_deleted(spotwarp: CommandLine, source: Path) -> None:
    first = pushed(spotwarp, source)["manifest"]
    assert (
        json.loads(spotwarp.here("snapshot", "create", "before lr", "--workspace", "run7", "--json"))["manifest"]
        == first
    )
    (source / "notes.txt").write_text("two\n")
    pushed(spotwarp, source)
    assert spotwarp.here("cat", "run7:notes.txt") == "two\n"
    assert spotwarp.here("cat", "run7:notes.txt", "--at", "before lr") == "one\n"
    listed = json.loads(spotwarp.here("snapshot", "list", "--workspace", "run7", "--json"))["snapshots"]
    assert [(item["name"], item["manifest"]) for item in listed] == [("before lr", first)]
    taken = spotwarp.here("snapshot", "create", "before lr", "--workspace", "run7", code=ExitCode.USAGE)
    assert f"manifest {first}" in taken
    spotwarp.here("snapshot", "delete", "before lr", "--workspace", "run7")
    spotwarp.here("snapshot", "delete", "before lr", "--workspace", "run7", code=ExitCode.NOT_FOUND)
    assert json.loads(spotwarp.here("snapshot", "list", "--workspace", "run7", "--json"))["snapshots"] == []


@pytest.mark.parametrize("name", ["12", "2h", "latest", "2026-01-01", "a/b", ""])
def test_names_that_at_reads_otherwise_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main.run(["snapshot", "create", name, "--workspace", "run7"]) == ExitCode.USAGE
    assert capsys.readouterr().err


def test_doctor_lists_locks_sockets_and_pid_files_of_a_lost_node(spotwarp: CommandLine) -> None:
    async def step(session: Session) -> None:
        git = await mkdir(session, ".git")
        for name in ("index.lock", "index"):
            await write(session, name, b"", parent=git)
        for name in ("uv.lock", "db.sqlite-journal", "server.pid", "plan.txt"):
            await write(session, name, b"")
        await session.filesystem.mknod(ROOT_INODE, b"agent", stat.S_IFSOCK | 0o600, 0, ACTOR)

    build(DirectoryStore(spotwarp.home / "store"), step)
    document = json.loads(spotwarp.here("doctor", "--quick", "--workspace", "test", "--json"))
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["conditional writes"]["outcome"] == "ok"
    found = checks["workspace test"]
    assert found["outcome"] == "warn"
    assert found["detail"].split(": ")[1].split(", ") == [
        ".git/index.lock", "agent", "db.sqlite-journal", "server.pid", "uv.lock",
    ]  # fmt: skip


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_an_unreachable_store_is_said_to_be_one(closed_port: int, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    spotwarp = CommandLine(tmp_path, f"s3://bucket/runs?endpoint=http://127.0.0.1:{closed_port}", keys)
    document = json.loads(spotwarp.here("doctor", "--quick", "--json", code=ExitCode.STORE_UNREACHABLE))
    assert document["checks"][-1]["name"] == "store"
    assert "endpoint" in document["checks"][-1]["remedy"]
