"""The systems of the bench: how each is mounted, unmounted, and what it has made durable when a call returns.

Invariant: whatever was mounted or started is gone when the `with` block of a system ends, also after an error.
"""

import os
import shutil
import signal
import socket
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


_PAGE_CACHE = "a kill of the program (page cache)"
_NOTHING = "nothing: names and times are in the daemon's memory"
_KEPT = "a kill of the daemon (data in the page cache, metadata in LMDB)"
_STAGED = "a kill of the daemon (data in a staging directory, metadata in {})"
_CACHED = "a kill of the daemon (data in its cache; uploaded 5 s after the close)"
_SPOTWARP = Durability(_KEPT, _KEPT, "power loss (data synced, metadata in a synced journal)")
PROMISES = {
    "spotwarp": _SPOTWARP,
    "spotwarp-streaming": _SPOTWARP,
    "passthrough": Durability(_NOTHING, _NOTHING, _NOTHING),
    "ext4": Durability(_PAGE_CACHE, _PAGE_CACHE, "power loss"),
    "juicefs": Durability("nothing: the daemon's buffer", _STAGED.format("SQLite"), _STAGED.format("SQLite")),
    "juicefs-redis": Durability("nothing: the daemon's buffer", _STAGED.format("Redis"), _STAGED.format("Redis")),
    "rclone": Durability(_CACHED, _CACHED, "as close: the mount answers fsync at once"),
}
"""What each system has made safe when the call returns."""


@dataclass(frozen=True)
class System:
    """A place to work in."""

    name: str
    root: Path
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
    yield System("ext4", root)


@contextmanager
def passthrough(site: Site) -> Iterator[System]:
    """The fixed denominator."""
    root, backing = site.made("passthrough"), site.made("passthrough-backing")
    command = [sys.executable, str(CHECKOUT / "scripts" / "bench_passthrough.py"), str(root), str(backing)]
    with _process(site, "passthrough", command, root):
        yield System("passthrough", root, directories=False)


@contextmanager
def spotwarp(site: Site) -> Iterator[System]:
    """SpotWarp, mounted with its command and its defaults; nothing is published while measuring."""
    with _spotwarp(site, "spotwarp", "1s" if site.streaming else "1h") as system:
        yield system


@contextmanager
def spotwarp_streaming(site: Site) -> Iterator[System]:
    """The same, publishing every second."""
    with _spotwarp(site, "spotwarp-streaming", "1s") as system:
        yield system


@contextmanager
def _spotwarp(site: Site, name: str, interval: str) -> Iterator[System]:
    root, state = site.made(name), site.made(f"{name}-state")
    environment = {
        **plain_environment(),
        **site.server.environment,
        "SPOTWARP_STATE_DIR": str(state),
        "PYTHONPATH": str(CHECKOUT),
    }
    command = [
        sys.executable, "-m", "spotwarp_fs", "mount", str(root), "--workspace", "bench",
        "--store", site.server.url(BUCKET, name), "--cache-dir", str(site.made(f"{name}-cache")),
        "--interval", interval, "--foreground",
    ]  # fmt: skip
    with _process(site, name, command, root, environment):
        yield System(name, root)


@contextmanager
def juicefs(site: Site) -> Iterator[System]:
    """JuiceFS with --writeback and its metadata in SQLite."""
    with _juicefs(site, "juicefs", f"sqlite3://{site.home / 'juicefs.db'}") as system:
        yield system


@contextmanager
def juicefs_redis(site: Site) -> Iterator[System]:
    """JuiceFS with its metadata in a Redis of the bench's own, which keeps them as Redis does by default: in memory."""
    port = free_port()
    command = [
        program("redis-server"),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(site.home),
    ]
    with site.log("redis").open("ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=plain_environment())
    try:
        _await_port(server, port)
        with _juicefs(site, "juicefs-redis", f"redis://127.0.0.1:{port}/1") as system:
            yield system
    finally:
        server.terminate()
        server.wait()


@contextmanager
def _juicefs(site: Site, name: str, metadata: str) -> Iterator[System]:
    root = site.made(name)
    format_juicefs(site, metadata, name)
    command = [
        program("juicefs"), "mount", "--writeback", "--no-usage-report", "--cache-dir", str(site.made(f"{name}-cache")),
        metadata, str(root),
    ]  # fmt: skip
    with _process(site, name, command, root):
        yield System(name, root)


@contextmanager
def rclone(site: Site) -> Iterator[System]:
    """`rclone mount` with --vfs-cache-mode full."""
    root = site.made("rclone")
    command = [
        program("rclone"), "mount", f"bench:{BUCKET}/rclone", str(root), "--vfs-cache-mode", "full",
        "--cache-dir", str(site.made("rclone-cache")),
    ]  # fmt: skip
    with _process(site, "rclone", command, root, rclone_environment(site.server.endpoint)):
        yield System("rclone", root)


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


SYSTEMS = {
    each.__name__.replace("_", "-"): each
    for each in (spotwarp, spotwarp_streaming, passthrough, ext4, juicefs, juicefs_redis, rclone)
}
PEERS = {"juicefs": ("juicefs",), "juicefs-redis": ("juicefs", "redis-server"), "rclone": ("rclone",)}
"""What each peer needs."""


def installed(name: str) -> bool:
    """Tell whether a system can take part."""
    return all(_found(needed) is not None for needed in PEERS.get(name, ()))


def free_port() -> int:
    """Find a port for a server that takes none by itself."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _await_port(server: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise BenchFailed(f"redis-server does not listen on port {port}: {error}") from error
            time.sleep(0.05)


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
