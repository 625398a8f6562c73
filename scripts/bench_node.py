"""A node of SpotWarp's: an empty cache, a mount, a daemon that can be asked; and how long that took.

Invariant: when the `with` block ends the daemon is gone, its mount too, and its cache is deleted.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_systems import BUCKET, CHECKOUT, READY_WITHIN_S, BenchFailed, Site, end, is_mounted, plain_environment

from spotwarp_fs.cli.client import call
from spotwarp_fs.cli.mounts import current_records, find_mount

POLL_S = 0.005
ANSWER_WITHIN_S = 600.0


@dataclass(frozen=True)
class Node:
    """A mounted workspace."""

    root: Path
    state: Path
    mount_s: float
    """From the start of the command until a first look into the workspace was answered."""

    def ask(self, operation: str) -> dict[str, Any]:
        """Ask the daemon what the commands `sync` and `status` ask it, without the start of a command."""
        return call(find_mount(self.state, self.root), operation, silence_max_s=ANSWER_WITHIN_S)

    def sync(self) -> None:
        """Return when everything is in the store."""
        self.ask("sync")

    @property
    def daemon(self) -> int:
        """Process id of the daemon."""
        return find_mount(self.state, self.root).daemon_pid

    def rss_bytes(self) -> int:
        """Return the daemon's resident memory."""
        return _memory(self.daemon, "VmRSS")

    def rss_most_bytes(self) -> int:
        """Return the most that it ever was."""
        return _memory(self.daemon, "VmHWM")

    def cpu_s(self) -> float:
        """Return the CPU time that the daemon has used."""
        fields = Path(f"/proc/{self.daemon}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise BenchFailed(f"the daemon {pid} has no {name}")


@contextmanager
def spotwarp_node(
    site: Site, name: str, prefix: str, *, endpoint: str = "", interval: str = "30s", quiet: bool = False
) -> Iterator[Node]:
    """Mount the workspace at *prefix* on a node that has never seen it; *quiet*: it does not stream."""
    root = site.made(name)
    options = ["mount", str(root), "--workspace", "bench", "--interval", interval, "--takeover"]
    program = [str(CHECKOUT / "scripts" / "bench_quiet_mount.py")] if quiet else ["-m", "spotwarp_fs"]
    yield from _node(site, name, [*program, *options], _store(site, prefix, endpoint), root)


@contextmanager
def spotwarp_directory(site: Site, name: str, prefix: str, *, endpoint: str = "") -> Iterator[Node]:
    """Serve a plain directory."""
    root = site.made(name)
    options = ["-m", "spotwarp_fs", "start", "--workspace", str(root), "--name", "bench"]
    yield from _node(site, name, options, _store(site, prefix, endpoint), root, mounts=False)


def _store(site: Site, prefix: str, endpoint: str) -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint or site.server.endpoint}"


def _node(site: Site, name: str, options: list[str], store: str, root: Path, *, mounts: bool = True) -> Iterator[Node]:
    state, cache = site.made(f"{name}-state"), site.made(f"{name}-cache")
    command = [sys.executable, *options, "--store", store, "--cache-dir", str(cache), "--foreground"]
    environment = {
        **plain_environment(), **site.server.environment, "SPOTWARP_STATE_DIR": str(state), "PYTHONPATH": str(CHECKOUT),
    }  # fmt: skip
    with site.log(name).open("ab") as log:
        begun_s = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment, start_new_session=True
        )
    try:
        if mounts:
            until_mounted(process, name, root, site.log(name))
        os.listdir(root)
        mount_s = time.perf_counter() - begun_s
        _until(lambda: bool(current_records(state)), process, name, site.log(name))  # where it listens is said later
        yield Node(root, state, mount_s)
    finally:
        if not mounts:
            process.terminate()
        end(process, root)
        for left in (root, state, cache):
            shutil.rmtree(left, ignore_errors=True)


def until_mounted(process: subprocess.Popen[bytes], name: str, root: Path, log: Path) -> None:
    """Return as soon as *root* is a mount."""
    _until(lambda: is_mounted(root), process, name, log)


def _until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BenchFailed(f"{name} did not start; its log ends with:\n{log.read_text()[-1500:]}")
        time.sleep(POLL_S)
