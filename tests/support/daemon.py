"""Mount a real workspace with the real command in a process of its own, and do to that process what happens to nodes.

Invariant: everything a node owns (mountpoint, cache, state) lies below one directory that no other node shares, only
the store is common; `close` leaves no process, no mount and no immutable directory behind, whatever the test did.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spotwarp_fs.cli import client
from spotwarp_fs.cli.mounts import find_mount, record_path
from spotwarp_fs.core.manifests import Manifest, decode
from tests.support.mounts import detach, wait_until

USABLE_WITHIN_S = 60.0
ENDED_WITHIN_S = 60.0
PR_SET_PDEATHSIG = 1
WORKSPACE = "work"


def _end_with_tests() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RefusedToMount(AssertionError):
    """`spotwarp mount` ended with this code before the workspace was usable."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"spotwarp mount ended with {code}: {said}")
        self.code = code


@dataclass
class Node:
    """One machine, as far as SpotWarp is concerned: a mountpoint, a cache, a state directory, and the daemon."""

    home: Path
    store: str
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ("--interval", "1s")
    form: str = "fuse"
    """`fuse`, or `directory`: then `root` is the plain directory itself."""
    process: subprocess.Popen[bytes] | None = None
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for directory in (self.root, self.state):
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        """Where the workspace is mounted."""
        return self.home / "mnt"

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def pid(self) -> int:
        """The daemon, whoever started it."""
        if self.process is not None:
            return self.process.pid
        return find_mount(self.state, self.root).daemon_pid

    @property
    def supervisor_pid(self) -> int:
        return find_mount(self.state, self.root).supervisor_pid

    def report_of_restart(self) -> int | None:
        """The daemon that the mount's record names now, if any."""
        try:
            return int(json.loads(record_path(self.state, self.root).read_text())["daemon_pid"])
        except (OSError, ValueError, KeyError):
            return None

    def log(self) -> str:
        """What the daemon has logged."""
        found = [self.home / "daemon.log", self.cache / "daemon.log"]
        return "".join(path.read_text() for path in found if path.exists())

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPOTWARP_", "AWS_"))}
        return {**kept, "HOME": str(self.home), "SPOTWARP_STATE_DIR": str(self.state), **self.environment}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from spotwarp_fs.cli.main import main\nmain()", *arguments]

    def _mount_arguments(self) -> list[str]:
        where = ["--store", self.store, "--cache-dir", str(self.cache), *self.flags, "--json"]
        if self.form == "directory":
            return ["start", "--workspace", str(self.root), "--name", WORKSPACE, *where]
        # Without a trial mount, which takes its time.
        return ["mount", str(self.root), "--workspace", WORKSPACE, "--mode", "fuse", *where]

    def start(self, *flags: str) -> Node:
        """Mount in the foreground of a process group of its own, and return once the workspace is usable."""
        log = self.home / "daemon.log"
        at = log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                self.command(*self._mount_arguments(), "--foreground", *flags), env=self._environment(), cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                preexec_fn=_end_with_tests,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = b""
        if select.select([self.process.stdout], [], [], USABLE_WITHIN_S)[0]:
            line = self.process.stdout.readline()
        said = json.loads(line) if line else {}
        if not said.get("ok"):
            with log.open() as file:
                file.seek(at)
                words = json.dumps(said) + file.read()
            if not line:
                self.process.kill()
            raise RefusedToMount(self.process.wait(ENDED_WITHIN_S), words)
        self.report = said
        return self

    def start_supervised(self, *flags: str) -> Node:
        """Mount as a user does: `spotwarp mount` returns, a supervisor and its daemon stay."""
        done = self.run(*self._mount_arguments(), *flags)
        if done.returncode != 0:
            raise RefusedToMount(done.returncode, done.stdout + done.stderr)
        self.report = json.loads(done.stdout)
        return self

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `spotwarp` on this node."""
        return subprocess.run(
            self.command(*arguments), env=self._environment(), capture_output=True, text=True, timeout=90, check=False
        )

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Ask the daemon over its control socket, as the command does."""
        return client.call(find_mount(self.state, self.root), operation, arguments)

    def sync(self) -> int:
        """Publish everything that was acknowledged, and return the manifest's number."""
        return int(self.call("sync")["manifest"])

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def umount(self) -> int:
        """Publish and unmount as a user does; returns the command's exit code."""
        code = self.run("umount" if self.form == "fuse" else "stop", str(self.root)).returncode
        if self.process is not None:
            self.process.wait(ENDED_WITHIN_S)
        return code

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, as the OOM killer sends it; the dead mount stays."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(ENDED_WITHIN_S)

    def ended(self) -> int:
        """Wait for the foreground daemon's end, and return its exit code."""
        assert self.process is not None
        return self.process.wait(ENDED_WITHIN_S)

    def restart(self) -> Node:
        """Start the daemon anew on the same cache, after it was killed."""
        return self.start()

    def lose(self) -> None:
        """The machine is gone, with everything on it."""
        self.close()
        lost = [self.cache, self.state] + ([self.root] if self.form == "directory" else [])
        for directory in lost:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """End what was started here, by its number, and take the mount away."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process.wait(ENDED_WITHIN_S)
        if self.form == "fuse":
            detach(self.root)
        self._end_keeper()
        record_path(self.state, self.root).unlink(missing_ok=True)

    def _end_keeper(self) -> None:
        """The keeper outlives daemons, but not the node."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"spotwarp_fs.directory.keeper" in words and os.fsencode(self.state) in b" ".join(words):
                    os.kill(int(process.name), signal.SIGKILL)

    def _pids(self) -> list[int]:
        pids = [] if self.process is None or self.process.poll() is not None else [self.process.pid]
        with suppress(OSError, ValueError, KeyError):
            known = json.loads(record_path(self.state, self.root).read_text())
            pids += [known["supervisor_pid"], known["daemon_pid"]]
        with suppress(OSError, ValueError, KeyError):
            known = json.loads((self.cache / "supervisor.json").read_text())
            pids = [known["supervisor"], *pids, known["daemon"]]
        return [pid for pid in pids if pid > 0 and _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    """Guard against a number that was given to somebody else since."""
    with suppress(OSError):
        return b"spotwarp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@dataclass
class Fleet:
    """Nodes that share one store."""

    home: Path
    store: str
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def node(self, *flags: str, interval: str = "1s", form: str = "fuse") -> Node:
        """Make a fresh machine; nothing is mounted on it yet."""
        home = self.home / f"node{len(self.nodes)}"
        node = Node(home, self.store, self.environment, ("--interval", interval, *flags), form)
        self.nodes.append(node)
        return node

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Nodes over a directory store."""
    made = Fleet(tmp_path, f"file://{tmp_path / 'store'}")
    try:
        yield made
    finally:
        made.close()


def await_true(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> None:
    """Wait for *condition*; generous, for a slow machine is no failure."""
    wait_until(condition, what, deadline_s)


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended (a zombie counts: nobody runs in it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def manifests_of(store: str) -> list[Manifest]:
    """Every manifest of the one workspace in a directory store, by number."""
    found = Path(store.removeprefix("file://")).rglob("manifests/*")
    return sorted((decode(path.read_bytes()) for path in found if path.is_file()), key=lambda each: each.number)


def packs_of(store: str) -> list[Path]:
    """Every pack in a directory store."""
    return sorted(path for path in Path(store.removeprefix("file://")).rglob("packs/**/*") if path.is_file())
