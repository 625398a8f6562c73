"""Start a supervised daemon and come back when the workspace is usable, or with the reason why it is not.

Invariant: when this reports a failure, nothing that it started is left running.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.fuse.mountinfo import MountState, mounts_at, real_path, state_of
from spotwarp_fs.fuse.supervisor import STATE_FILE, Supervised

STOP_DEADLINE_S: Final = 10.0
JOIN_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended: `exit_code` OK means usable; `message` is for the user."""

    exit_code: int
    message: str
    supervisor_pid: int | None
    daemon_pid: int | None


def launch_supervised(argv: list[str], mountpoint: str, log_path: Path, timeout_s: float) -> LaunchResult:
    """Run the daemon *argv* under a supervisor of its own session, and wait until it is usable.

    Paths, those in *argv* too, are absolute. `--ready-fd N` is appended to *argv*. Output goes to *log_path*. After
    *timeout_s* the supervisor is asked to stop, and killed with its daemon if it does not.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    mountpoint = real_path(mountpoint)
    heard, told = os.pipe()
    command = [sys.executable, "-m", "spotwarp_fs.fuse.supervisor", mountpoint, str(log_path), str(told), "--", *argv]
    try:
        with open(log_path, "ab") as output:
            starter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(told,)
            )  # fmt: skip
        os.close(told)
        starter.wait()
        ended = _listen(heard, mountpoint, log_path, time.monotonic() + timeout_s)
    finally:
        os.close(heard)
    late = f"the workspace was not usable within {timeout_s:.0f} s; see {log_path}"
    return ended or LaunchResult(ExitCode.FAILED, late, None, None)


def _listen(heard: int, mountpoint: str, log_path: Path, end_s: float) -> LaunchResult | None:
    """Follow the pipe until it says how it ended; None when time is up. Giving up stops the supervisor."""
    pids: dict[str, int] = {}
    received = b""
    try:
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([heard], [], [], left_s)[0]:
                continue
            chunk = os.read(heard, 1 << 16)
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "busy" in said:
                    return _join(mountpoint, log_path, end_s)
                ended = _outcome(said, pids)
                if ended is not None:
                    return ended
            if not chunk:
                return LaunchResult(ExitCode.FAILED, f"the supervisor ended without a word; see {log_path}", None, None)
    except KeyboardInterrupt:
        _end(pids)
        raise
    _end(pids)
    return None


def _outcome(said: dict[str, Any], pids: dict[str, int]) -> LaunchResult | None:
    """Read one line; process ids are noted in *pids*."""
    if "ready" in said:
        return LaunchResult(ExitCode.OK, said["ready"], pids.get("supervisor"), pids.get("daemon"))
    if "failed" in said:
        return LaunchResult(said["exit_code"], said["failed"], None, None)
    pids.update(said)
    return None


def _join(mountpoint: str, log_path: Path, end_s: float) -> LaunchResult | None:
    """Wait for the supervisor that is at work already: it may be in the middle of a restart."""
    while time.monotonic() < end_s:
        with suppress(OSError, ValueError, TypeError):
            known = Supervised(**json.loads(log_path.with_name(STATE_FILE).read_bytes()))
            if known.mountpoint != mountpoint:
                message = f"the cache directory {log_path.parent} serves another mount: {known.mountpoint}"
                return LaunchResult(ExitCode.LIVE_WRITER, message, known.supervisor, known.daemon)
            if mounts_at(mountpoint) and state_of(mountpoint) is MountState.ALIVE:
                return LaunchResult(ExitCode.OK, "mounted already", known.supervisor, known.daemon)
        select.select([], [], [], JOIN_LOOK_S)
    return None


def _end(pids: dict[str, int]) -> None:
    """Stop a supervisor that took too long, and its daemon with it."""
    supervisor, daemon = pids.get("supervisor"), pids.get("daemon")
    if supervisor is None:
        return
    with suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)
    if _gone(supervisor, STOP_DEADLINE_S):
        return
    for pid in (supervisor, daemon):
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _gone(pid: int, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            # One that nobody has collected yet, as under a first process that waits for us, is gone too.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        select.select([], [], [], 0.05)
    return False
