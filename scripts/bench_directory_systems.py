"""The ways to keep a plain directory in a bucket: SpotWarp's directory form, and what people run in a loop instead.

Invariant: whatever was started is gone when the `with` block of a system ends, also after an error, and the tree is as
it was. Every system has a server of its own, of the same kind, with nobody else's objects.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

CHECKOUT = Path(__file__).resolve().parents[1]
BUCKET = "bench"
INTERVAL_S = 30.0
"""How often changes are looked for."""
COMMAND_S_MAX = 7200.0


class BenchFailed(Exception):
    """A system could not be measured; the message says why."""


@dataclass(frozen=True)
class Site:
    """Where one system works in one round."""

    home: Path
    tree: Path
    server: Seaweed

    @property
    def target(self) -> Path:
        """Where the tree is restored."""
        return self.home / "restored"


class Mirror(ABC):
    """A way to keep a tree in the store."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.environment = {**_plain_environment(), **site.server.environment}

    @abstractmethod
    def publish(self) -> None:
        """Return when the store has what the tree holds."""

    @abstractmethod
    def idle(self, watched_s: float) -> float:
        """Let time pass in which nothing changes; returns how many minutes that stand for."""

    def cpu_s(self) -> float:
        """CPU seconds that its processes have taken so far, as far as they have ended or still run."""
        spent = os.times()
        return spent.children_user + spent.children_system

    @abstractmethod
    def restore(self) -> None:
        """Return when a job may start in the target."""

    @abstractmethod
    def fetched_bytes(self) -> int:
        """What has come from the store so far, since `restore` began."""

    @abstractmethod
    def expect_publishing(self) -> None:
        """From here on nothing is published before `publish` is called."""

    @abstractmethod
    def lose(self) -> None:
        """The node that published is gone."""

    @abstractmethod
    def close(self) -> None:
        """End everything, and leave nothing in the tree."""

    def call(self, *command: str) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            command, env=self.environment, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise BenchFailed(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")


class Looped(Mirror):
    """A program that compares both sides, and is called again every 30 s."""

    @abstractmethod
    def to_store(self) -> Sequence[str]: ...

    @abstractmethod
    def from_store(self) -> Sequence[str]: ...

    def publish(self) -> None:
        self.call(*self.to_store())

    def expect_publishing(self) -> None:
        return

    lose = close = expect_publishing

    def idle(self, watched_s: float) -> float:
        self.call(*self.to_store())
        return INTERVAL_S / 60

    def restore(self) -> None:
        self.call(*self.from_store())

    def fetched_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.site.target.rglob("*") if path.is_file())


class Rclone(Looped):
    """`rclone sync`, 16 files at a time."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.environment |= {
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_BENCH_ENDPOINT": site.server.endpoint,
            "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": ACCESS_KEY,
            "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": SECRET_KEY,
            "RCLONE_CONFIG_BENCH_FORCE_PATH_STYLE": "true",
        }

    def _sync(self, source: str, target: str) -> Sequence[str]:
        return [_program("rclone"), "sync", "--transfers", "16", "--fast-list", source, target]

    def to_store(self) -> Sequence[str]:
        return self._sync(str(self.site.tree), f"bench:{BUCKET}")

    def from_store(self) -> Sequence[str]:
        return self._sync(f"bench:{BUCKET}", str(self.site.target))


class Aws(Looped):
    """`aws s3 sync` with its defaults."""

    def _sync(self, source: str, target: str) -> Sequence[str]:
        endpoint = ["--endpoint-url", self.site.server.endpoint]
        return [_program("aws"), *endpoint, "s3", "sync", "--only-show-errors", source, target]

    def to_store(self) -> Sequence[str]:
        return self._sync(str(self.site.tree), f"s3://{BUCKET}")

    def from_store(self) -> Sequence[str]:
        return self._sync(f"s3://{BUCKET}", str(self.site.target))


class S5cmd(Looped):
    """`s5cmd sync` with its defaults."""

    def _sync(self, source: str, target: str) -> Sequence[str]:
        return [_program("s5cmd"), "--endpoint-url", self.site.server.endpoint, "sync", source, target]

    def to_store(self) -> Sequence[str]:
        return self._sync(f"{self.site.tree}/", f"s3://{BUCKET}/")

    def from_store(self) -> Sequence[str]:
        return self._sync(f"s3://{BUCKET}/*", f"{self.site.target}/")


class SpotWarp(Mirror):
    """`spotwarp start`, `sync` and `start --restore`, with the defaults."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.environment["PYTHONPATH"] = str(CHECKOUT)
        self._started: dict[Path, Path] = {}
        self._number = 0

    def _start(self, workspace: Path, interval_s: float, *flags: str) -> None:
        if workspace not in self._started:
            self._number += 1
            self._started[workspace] = self.site.home / f"node{self._number}"
        node = self._started[workspace]
        node.mkdir(exist_ok=True)
        self._spotwarp(
            workspace, "start", "--workspace", str(workspace), "--name", "bench",
            "--store", self.site.server.url(BUCKET, "spotwarp"), "--cache-dir", str(node / "cache"),
            "--interval", f"{interval_s:.0f}s", *flags,
        )  # fmt: skip

    def _spotwarp(self, workspace: Path, *arguments: str) -> str:
        self.environment["SPOTWARP_STATE_DIR"] = str(self._started[workspace] / "state")
        done = subprocess.run(
            [sys.executable, "-m", "spotwarp_fs", *arguments], env=self.environment, cwd="/",
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = (done.stderr or done.stdout)[-1500:]
            raise BenchFailed(f"spotwarp {arguments[0]} ended with {done.returncode}: {said}")
        return done.stdout

    def publish(self) -> None:
        tree = self.site.tree
        if tree not in self._started:
            self._start(tree, INTERVAL_S)
        self._spotwarp(tree, "sync", str(tree))

    def idle(self, watched_s: float) -> float:
        time.sleep(watched_s)
        return watched_s / 60

    def expect_publishing(self) -> None:
        tree = self.site.tree
        self._spotwarp(tree, "stop", str(tree))
        self._start(tree, 3600)
        self.publish()

    def lose(self) -> None:
        self._end(self.site.tree)

    def restore(self) -> None:
        self._start(self.site.target, INTERVAL_S, "--restore", "--takeover")

    def fetched_bytes(self) -> int:
        status: dict[str, Any] = json.loads(self._spotwarp(self.site.target, "status", "--json", str(self.site.target)))
        return int(status["totals"]["bytes_fetched"])

    def close(self) -> None:
        for workspace in list(self._started):
            self._end(workspace)
        shutil.rmtree(self.site.tree / ".spotwarp", ignore_errors=True)

    def _end(self, workspace: Path) -> None:
        """As when the node is lost: everything at once."""
        node = self._started.pop(workspace)
        for pid in self._pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(node, ignore_errors=True)

    def _pids(self, node: Path) -> list[int]:
        """Supervisor, daemon and keeper, the supervisor first: all of them name their node in their arguments."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if b"spotwarp_fs" in words and os.fsencode(node) in words and int(process.name) != os.getpid():
                    found.append((b"supervisor" not in words.split(b"\0--\0")[0], int(process.name)))
        return [pid for _, pid in sorted(found)]

    def cpu_s(self) -> float:
        ticks = 0
        for pid in (pid for node in self._started.values() for pid in self._pids(node)):
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return super().cpu_s() + ticks / os.sysconf("SC_CLK_TCK")


MIRRORS: dict[str, type[Mirror]] = {"spotwarp": SpotWarp, "rclone": Rclone, "aws": Aws, "s5cmd": S5cmd}


@contextmanager
def mirror(name: str, site: Site) -> Iterator[Mirror]:
    """Have a system for the length of the block."""
    site.target.mkdir()
    made = MIRRORS[name](site)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(site.target, ignore_errors=True)


def installed(name: str) -> bool:
    """Tell whether a system can take part."""
    return name == "spotwarp" or _found(name) is not None


def _found(name: str) -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name)


def _program(name: str) -> str:
    found = _found(name)
    if found is None:
        raise BenchFailed(f"{name} is not installed")
    return found


def _plain_environment() -> dict[str, str]:
    """The environment without anybody's credentials or settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SPOTWARP_", "RCLONE_"))}
