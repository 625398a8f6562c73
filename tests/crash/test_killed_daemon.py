"""Does an acknowledged write survive a real SIGKILL of the daemon, whenever it comes?"""

from __future__ import annotations

import random
import sqlite3
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, await_true, is_gone
from tests.support.daemon import fleet as fleet
from tests.support.load import Load, Prefix, nearest, tree_of
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-01")]

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))]


def check_all_there(load: Load) -> None:
    """What is mounted is every acknowledged step, and at most the one in doubt."""
    seen = tree_of(load.root)
    acknowledged = len(load.done)
    found = [prefix for prefix in load.prefixes(seen) if prefix.count >= acknowledged]
    assert found, f"{acknowledged} steps were acknowledged; {nearest(load, seen)}"
    load.settle(found[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_acknowledged_step_is_there_after_the_restart(fleet: Fleet, seed: int) -> None:
    rng = random.Random(seed)
    node = fleet.node().start()
    load = Load(node.root, seed)
    for _ in range(2):
        load.start()
        time.sleep(rng.uniform(0.3, 2.2))
        node.kill()
        await_true(lambda: not load.running, "the load meets a filesystem without a daemon")
        load.stop()
        node.restart()
        check_all_there(load)
    assert len(load.done) > 50
    node.sync()
    other = fleet.node()
    node.kill()
    other.start("--takeover")
    seen = tree_of(other.root)
    assert Prefix(len(load.done)) in load.prefixes(seen), nearest(load, seen)


def test_the_supervisor_brings_a_killed_daemon_back_by_itself(fleet: Fleet) -> None:
    node = fleet.node().start_supervised()
    load = Load(node.root, 7).start()
    time.sleep(1.0)
    killed = node.pid
    node.kill()
    load.stop()
    await_true(lambda: is_gone(killed) and node.report_of_restart() not in (None, killed), "the new daemon")
    await_true(node.root.is_mount, "the mount is back")
    check_all_there(load)
    load.start()
    time.sleep(0.5)
    assert load.stop().error is None
    done = node.run("umount", str(node.root))
    assert done.returncode == 0, done.stderr


class Sqlite:
    """Commits rows as fast as they go; `committed` counts what was acknowledged."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path, self.mode, self.committed = path, mode, 0
        with sqlite3.connect(path) as db:
            db.execute(f"pragma journal_mode={mode}")
            db.execute("create table rows (number integer primary key, body blob)")
        db.close()

    def run(self, stop: threading.Event) -> None:
        db = sqlite3.connect(self.path, timeout=20)
        while not stop.is_set():
            with db:
                db.execute("insert into rows values (?, randomblob(3000))", (self.committed + 1,))
            self.committed += 1

    def check(self) -> None:
        db = sqlite3.connect(self.path, timeout=20)
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
        (rows,) = db.execute("select count(*) from rows").fetchone()
        assert self.committed <= rows <= self.committed + 1
        db.close()


class Git:
    """Commits to a repository; a commit counts once git has said so."""

    def __init__(self, path: Path) -> None:
        self.path, self.committed = path, 0
        path.mkdir()
        self._git("init", "-q")

    def _git(self, *arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.path, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(done.stderr)
        return done.stdout

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            (self.path / f"file{self.committed % 5}").write_text(f"{self.committed}\n" * 200)
            self._git("add", "-A")
            self._git("commit", "-q", "-m", str(self.committed))
            self.committed += 1

    def check(self) -> None:
        (self.path / ".git" / "index.lock").unlink(missing_ok=True)
        self._git("fsck", "--full", "--strict")
        assert int(self._git("rev-list", "--count", "HEAD") or 0) - self.committed in (0, 1)


class Log:
    """Several writers append lines to one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.committed = path, 0

    def run(self, stop: threading.Event) -> None:
        with self.path.open("ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b"%09d\n" % self.committed)
                self.committed += 1

    def check(self) -> None:
        lines = self.path.read_bytes().splitlines()
        assert [int(line) for line in lines] == list(range(len(lines)))
        assert len(lines) - self.committed in (0, 1)


@dataclass
class Running:
    """A program in a thread: it runs until its filesystem fails."""

    program: Sqlite | Git | Log
    stop: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.program.run(self.stop)
        except (OSError, sqlite3.Error) as error:
            self.error = error


def test_programs_find_what_they_were_promised(fleet: Fleet) -> None:
    node = fleet.node().start()
    running = [
        Running(Sqlite(node.root / "wal.db", "wal")),
        Running(Sqlite(node.root / "rollback.db", "delete")),
        Running(Git(node.root / "repository")),
        Running(Log(node.root / "train.log")),
    ]
    await_true(lambda: all(each.program.committed > 3 for each in running), "every program has done something")
    time.sleep(1.5)
    node.kill()
    for each in running:
        each.thread.join(60)
        assert not each.thread.is_alive(), "a request hangs after the daemon's death"
        assert each.error is not None
    node.restart()
    for each in running:
        each.program.check()
