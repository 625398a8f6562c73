"""Fresh nodes of the peers, and when each of them has brought everything into the store.

Invariant: as bench_node.py: nothing stays mounted, and each node begins with an empty cache. JuiceFS keeps its metadata
in a database beside the store: a fresh node finds it there, as it would find a Redis.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench_node import POLL_S, spotwarp_node, until_mounted
from bench_systems import (
    BUCKET,
    BenchFailed,
    Site,
    end,
    format_juicefs,
    plain_environment,
    rclone_environment,
)
from bench_systems import program as program_of

SETTLED_WITHIN_S = 1800.0
SETTLED_LOOKS = 3
"""So often nothing is left to upload: between two steps of an upload a queue may be empty for a moment."""


@dataclass(frozen=True)
class Place:
    """A mounted node of any system."""

    root: Path
    settle: Callable[[], None]
    """Return when everything is in the store."""


@contextmanager
def spotwarp(site: Site, name: str, volume: str, endpoint: str) -> Iterator[Place]:
    """SpotWarp with its defaults: an interval of 30 s."""
    with spotwarp_node(site, f"spotwarp-{name}", f"nodes/{volume}", endpoint=endpoint) as node:
        yield Place(node.root, node.sync)


@contextmanager
def juicefs(site: Site, name: str, volume: str, endpoint: str) -> Iterator[Place]:
    """JuiceFS with --writeback; settled when nothing is staged any more."""
    metadata = site.home / f"juicefs-{volume}.db"
    if not metadata.exists():
        format_juicefs(site, f"sqlite3://{metadata}", volume)
    root, cache = site.made(f"juicefs-{name}"), site.made(f"juicefs-{name}-cache")
    command = [
        program_of("juicefs"), "mount", "--writeback", "--no-usage-report", "--bucket", f"{endpoint}/{BUCKET}",
        "--cache-dir", str(cache), f"sqlite3://{metadata}", str(root),
    ]  # fmt: skip

    def staged() -> bool:
        return any(path.is_file() for path in cache.glob("*/rawstaging/**/*"))

    with _mounted(site, f"juicefs-{name}", command, root, plain_environment(), cache):
        yield Place(root, lambda: _until_nothing(staged))


@contextmanager
def rclone(site: Site, name: str, volume: str, endpoint: str) -> Iterator[Place]:
    """`rclone mount` with --vfs-cache-mode full; settled when its cache has nothing dirty."""
    root, cache = site.made(f"rclone-{name}"), site.made(f"rclone-{name}-cache")
    control = site.home / f"rclone-{name}.sock"
    command = [
        program_of("rclone"), "mount", f"bench:{BUCKET}/nodes-{volume}", str(root), "--vfs-cache-mode", "full",
        "--cache-dir", str(cache), "--rc", "--rc-no-auth", "--rc-addr", f"unix://{control}",
    ]  # fmt: skip

    def queued() -> bool:
        asked = [program_of("rclone"), "rc", "--unix-socket", str(control), "vfs/stats"]
        found = subprocess.run(asked, check=True, capture_output=True, timeout=60, env=plain_environment())
        cached = json.loads(found.stdout)["diskCache"]
        return bool(cached["uploadsInProgress"] or cached["uploadsQueued"])

    with _mounted(site, f"rclone-{name}", command, root, rclone_environment(endpoint), cache):
        yield Place(root, lambda: _until_nothing(queued))


NODES = {each.__name__: each for each in (spotwarp, juicefs, rclone)}


@contextmanager
def _mounted(
    site: Site, name: str, command: list[str], root: Path, environment: dict[str, str], cache: Path
) -> Iterator[None]:
    with site.log(name).open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment, start_new_session=True
        )
    try:
        until_mounted(process, name, root, site.log(name))
        os.listdir(root)
        yield
    finally:
        end(process, root)
        for left in (root, cache):
            shutil.rmtree(left, ignore_errors=True)


def _until_nothing(is_left: Callable[[], bool]) -> None:
    deadline_s, quiet = time.monotonic() + SETTLED_WITHIN_S, 0
    while quiet < SETTLED_LOOKS:
        quiet = 0 if is_left() else quiet + 1
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"a peer has not brought everything into the store within {SETTLED_WITHIN_S:.0f} s")
        time.sleep(10 * POLL_S)
