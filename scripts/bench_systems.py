"""The systems of the bench: how each is mounted, unmounted, and what it has made durable when a call returns.

Invariant: whatever was mounted or started is gone when the `with` block of a system ends, also after an error.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

READY_WITHIN_S = 60.0
ENDED_WITHIN_S = 30.0
BUCKET = "bench"
CHECKOUT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Durability:
    """What would survive, once the call has returned."""

    write: str
    close: str
    fsync: str


@dataclass(frozen=True)
class System:
    """A place to work in."""

    name: str
    root: Path
    durability: Durability
    directories: bool = True
    """It has directories; the pass-through is one flat one."""


@dataclass(frozen=True)
class Site:
    """What all systems share."""

    home: Path
    server: Seaweed
    streaming: bool

    def made(self, name: str) -> Path:
        """Make a directory of the bench's own."""
        path = self.home / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        """Where a system's words go."""
        return self.home / f"{name}.log"


class BenchFailed(Exception):
    """A system could not be measured; the message says why."""


@contextmanager
def ext4(site: Site) -> Iterator[System]:
    """The file system below everything else (of whatever kind it is)."""
    root = site.made("ext4")
    page_cache = "a kill of the program (page cache)"
    yield System("ext4", root, Durability(page_cache, page_cache, "power loss"))


@contextmanager
def passthrough(site: Site) -> Iterator[System]:
    """The fixed denominator."""
    root, backing = site.made("passthrough"), site.made("passthrough-backing")
    command = [sys.executable, str(CHECKOUT / "scripts" / "bench_passthrough.py"), str(root), str(backing)]
    nothing = "nothing: names and times are in the daemon's memory"
    with _process(site, "passthrough", command, root):
        yield System("passthrough", root, Durability(nothing, nothing, nothing), directories=False)


@contextmanager
def spotwarp(site: Site) -> Iterator[System]:
    """SpotWarp, mounted with its command and its defaults."""
    root, state = site.made("spotwarp"), site.made("spotwarp-state")
    environment = {
        **plain_environment(),
        **site.server.environment,
        "SPOTWARP_STATE_DIR": str(state),
        "PYTHONPATH": str(CHECKOUT),
    }
    interval = "1s" if site.streaming else "1h"
    command = [
        sys.executable, "-m", "spotwarp_fs", "mount", str(root), "--workspace", "bench",
        "--store", site.server.url(BUCKET, "spotwarp"), "--cache-dir", str(site.made("spotwarp-cache")),
        "--interval", interval, "--foreground",
    ]  # fmt: skip
    kept = "a kill of the daemon (data in the page cache, metadata in LMDB)"
    durability = Durability(kept, kept, "power loss (data synced, metadata in a synced journal)")
    with _process(site, "spotwarp", command, root, environment):
        yield System("spotwarp", root, durability)


@contextmanager
def juicefs(site: Site) -> Iterator[System]:
    """JuiceFS with --writeback and its metadata in SQLite."""
    root, metadata = site.made("juicefs"), f"sqlite3://{site.home / 'juicefs.db'}"
    format_juicefs(site, metadata, "bench")
    command = [
        program("juicefs"), "mount", "--writeback", "--no-usage-report", "--cache-dir", str(site.made("juicefs-cache")),
        metadata, str(root),
    ]  # fmt: skip
    staged = "a kill of the daemon (data in a staging directory, metadata in SQLite)"
    durability = Durability("nothing: the daemon's buffer", staged, staged)
    with _process(site, "juicefs", command, root):
        yield System("juicefs", root, durability)


@contextmanager
def rclone(site: Site) -> Iterator[System]:
    """`rclone mount` with --vfs-cache-mode full."""
    root = site.made("rclone")
    command = [
        program("rclone"), "mount", f"bench:{BUCKET}/rclone", str(root), "--vfs-cache-mode", "full",
        "--cache-dir", str(site.made("rclone-cache")),
    ]  # fmt: skip
    cached = "a kill of the daemon (data in its cache; uploaded 5 s after the close)"
    with _process(site, "rclone", command, root, rclone_environment(site.server.endpoint)):
        yield System("rclone", root, Durability(cached, cached, "as close: the mount answers fsync at once"))


def format_juicefs(site: Site, metadata: str, volume: str) -> None:
    """Make a volume; its keys go where JuiceFS wants them, and are worth nothing beyond this run."""
    store = ["--storage", "s3", "--bucket", f"{site.server.endpoint}/{BUCKET}"]
    keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY]
    subprocess.run(
        [program("juicefs"), "format", *store, *keys, "--trash-days", "0", metadata, volume],
        check=True, capture_output=True, timeout=READY_WITHIN_S, env=plain_environment(),
    )  # fmt: skip


def rclone_environment(endpoint: str) -> dict[str, str]:
    """What rclone needs to find the store as `bench:`."""
    return {
        **plain_environment(),
        "RCLONE_CONFIG_BENCH_TYPE": "s3",
        "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
        "RCLONE_CONFIG_BENCH_ENDPOINT": endpoint,
        "RCLONE_CONFIG_BENCH_ACCESS_KEY_ID": ACCESS_KEY,
        "RCLONE_CONFIG_BENCH_SECRET_ACCESS_KEY": SECRET_KEY,
        "RCLONE_CONFIG_BENCH_FORCE_PATH_STYLE": "true",
    }


SYSTEMS = {each.__name__: each for each in (spotwarp, passthrough, ext4, juicefs, rclone)}
PEERS = ("juicefs", "rclone")


def installed(name: str) -> bool:
    """Tell whether a system can take part."""
    return name not in PEERS or _found(name) is not None


def _found(name: str) -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name)


def program(name: str) -> str:
    """Where a peer's program is."""
    found = _found(name)
    if found is None:
        raise BenchFailed(f"{name} is not installed: pip install -e '.[bench]'")
    return found


def plain_environment() -> dict[str, str]:
    """The environment without anybody's credentials or settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SPOTWARP_", "RCLONE_"))}


@contextmanager
def _process(
    site: Site, name: str, command: list[str], root: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a daemon in the foreground, with its mount, for the length of the block."""
    with site.log(name).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
            env=plain_environment() if environment is None else environment,
        )  # fmt: skip
    try:
        _await_mount(process, name, root, site.log(name))
        yield
    finally:
        end(process, root)


def _await_mount(process: subprocess.Popen[bytes], name: str, root: Path, log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not is_mounted(root):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BenchFailed(f"{name} did not mount; its log ends with:\n{log.read_text()[-1500:]}")
        time.sleep(0.05)
    time.sleep(0.5)  # each of them tunes its mount once it answers


def is_mounted(root: Path) -> bool:
    """Tell whether something is mounted at *root*."""
    return any(line.split()[1] == str(root) for line in Path("/proc/mounts").read_text().splitlines())


def end(process: subprocess.Popen[bytes], root: Path) -> None:
    """Unmount; a daemon that does not end then is ended."""
    if is_mounted(root):
        subprocess.run(["fusermount3", "-u", "-z", str(root)], check=False, capture_output=True)
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDED_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while is_mounted(root):
        subprocess.run(["fusermount3", "-u", "-z", str(root)], check=True, capture_output=True)
