"""Find and end what a local node runs: every process that carries its mark in the environment it started with.

A container's end takes everything in it, also what moved to a session of its own (a filesystem daemon does). Process
groups alone would miss that, and a number kept in a file may belong to somebody else by now; a mark is neither.
Zombies have no environment left, so they do not count. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

MARK: Final = "LOCAL_NODE"
"""Not SPOTWARP_…: the program refuses variables of its own prefix that it does not know."""
LOOK_EVERY_S: Final = 0.02
KILL_S: Final = 10.0
UNMOUNT_S: Final = 10.0
_PROC: Final = Path("/proc")
_MOUNT_POINT_FIELD: Final = 4


def marked(variable: str = MARK) -> Mapping[str, set[int]]:
    """Return the living processes of this user that began with *variable* in their environment, by its value."""
    found: dict[str, set[int]] = {}
    prefix = f"{variable}=".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        # Others' processes cannot be read, and any process may end while it is looked at.
        with contextlib.suppress(OSError):
            for line in (entry / "environ").read_bytes().split(b"\0"):
                if line.startswith(prefix):
                    found.setdefault(os.fsdecode(line[len(prefix) :]), set()).add(int(entry.name))
    return found


async def kill_all(mark: str) -> bool:
    """Kill every process with *mark*, again until none is left; return whether that came true in time."""
    with trio.move_on_after(KILL_S):
        while pids := marked().get(mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await trio.sleep(LOOK_EVERY_S)
        return True
    return not marked().get(mark)


def mounts_under(directory: Path) -> list[Path]:
    """Return the mount points below *directory*, the deepest first."""
    lines = (_PROC / "self" / "mountinfo").read_text().splitlines()
    points = [Path(line.split(" ")[_MOUNT_POINT_FIELD].replace("\\040", " ")) for line in lines]
    return sorted((point for point in points if directory in point.parents), key=lambda point: -len(point.parts))


async def unmount_under(directory: Path) -> bool:
    """Detach what a dead node left mounted, or its workspace is deleted through the mount; say if none is left."""
    for point in mounts_under(directory):
        with trio.move_on_after(UNMOUNT_S), contextlib.suppress(OSError):
            await trio.run_process(
                ["fusermount3", "-u", "-z", str(point)],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    return not mounts_under(directory)
