"""Keep one daemon running: start it, wait, and start it anew when it dies in a way that a restart can cure.

Invariant: the supervisor has no thread, no FUSE descriptor and nothing mounted; at most one runs per cache directory (a
lock on `supervisor.lock`), and a new daemon starts only after the old process is gone with every lock it held.

    python -m spotwarp_fs.fuse.supervisor MOUNTPOINT LOG READY_FD -- DAEMON ARGV...

All paths are absolute, for the supervisor leaves its directory. The daemon gets `--ready-fd N` appended to its argv and
tells through it that it is usable (`readiness`). SIGTERM and SIGINT go to the daemon, whose end is then the end.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import ExitCode, SpotwarpError
from spotwarp_fs.fuse import mounting, readiness
from spotwarp_fs.fuse.mountinfo import mounts_at

log = logging.getLogger("spotwarp.supervisor")

FINAL_CODES: Final = frozenset(
    {
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.CONFIG,
        ExitCode.FENCED,
        ExitCode.NOT_SAVED,
        ExitCode.WOULD_WIPE,
        ExitCode.NEWER_FORMAT,
    }
)
"""Exit codes that a restart would only repeat, or that say the daemon was done."""
BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before the next start, when one daemon after the other dies young."""
YOUNG_S: Final = 60.0
FIRST_TRIES: Final = 3
"""Starts that may die of a signal before the workspace was usable even once."""
LOG_BYTES_MAX: Final = 16 << 20
STATE_FILE: Final = "supervisor.json"
LOG_LOOK_S: Final = 10.0
LOG_TAIL_BYTES: Final = 2000
RESTARTED: Final = "--restarted"
"""Appended to the daemon's argv after a death: such a daemon never takes a workspace over from anybody else (L11)."""
OOM_ADJUST: Final = -800
"""A trainer that eats the memory is to be killed before the daemon that holds its checkpoints."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """What is written to `supervisor.json` beside the log at every start of a daemon."""

    supervisor: int
    daemon: int
    mountpoint: str
    starts: int


Record = Callable[[Supervised], None]


@dataclass
class _Watch:
    """The supervisor's state: which signals came, and what the daemon said."""

    wakeup: int
    ready_fd: int
    """To whoever waits for the workspace; -1 once that is settled."""
    stopping: bool = False
    """A signal asked for the end."""
    usable: bool = False
    """Some daemon was ready once."""
    failure: str = ""
    received: bytes = field(default=b"", repr=False)

    def relay(self, line: bytes) -> None:
        """Note what the daemon says, and pass it on."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        self.usable = self.usable or "ready" in said
        self.failure = said.get("failed", "")
        if "ready" in said:
            self.settle(**said)

    def settle(self, **line: object) -> None:
        """Tell the waiting launcher how it ended, once."""
        if self.ready_fd >= 0:
            readiness.tell(self.ready_fd, **line)
            os.close(self.ready_fd)
            self.ready_fd = -1


def supervise(argv: list[str], *, mountpoint: str, log_path: Path, ready_fd: int, record: Record) -> int:
    """Run the daemon *argv* until it ends for good; gives the exit code to end with.

    A daemon of the same argv that has outlived its supervisor is adopted. Changes this process's signal handlers, so
    call it in a process made for it. *record* hears of every start.
    """
    lock = _lock(log_path.parent / "supervisor.lock")
    if lock is None:
        readiness.tell(ready_fd, busy=str(log_path.parent))
        return ExitCode.LIVE_WRITER
    watch = _Watch(_catch_signals(), ready_fd)
    readiness.tell(ready_fd, supervisor=os.getpid())
    orphan = _orphan(argv, log_path.with_name(STATE_FILE))
    young = 0
    for starts in range(1, sys.maxsize):
        begun_s = time.monotonic()
        if orphan is not None:
            code, orphan = _wait_for_orphan(orphan, watch, mountpoint), None
        else:
            daemon, said = _start(argv if starts == 1 else [*argv, RESTARTED], log_path)
            readiness.tell(watch.ready_fd, daemon=daemon.pid)
            record(Supervised(os.getpid(), daemon.pid, mountpoint, starts))
            code = _wait(daemon, watch, said, log_path)
        if code not in FINAL_CODES:
            _detach(mountpoint)
        if _is_final(code, watch, starts):
            watch.settle(failed=watch.failure or _tail(log_path), exit_code=_exit_code(code))
            log.info("daemon ended code=%d", code)
            break
        young = 0 if time.monotonic() - begun_s > YOUNG_S else young
        pause_s = BACKOFF_S[min(young, len(BACKOFF_S) - 1)]
        young += 1
        log.error("daemon died code=%d starts=%d next_in_s=%.1f", code, starts, pause_s)
        _pause(watch, pause_s)
        if watch.stopping:
            break
    return _exit_code(code)


def _is_final(code: int, watch: _Watch, starts: int) -> bool:
    if watch.stopping or code in FINAL_CODES:
        return True
    if watch.usable:
        return False
    return code >= 0 or starts >= FIRST_TRIES


def _exit_code(code: int) -> int:
    """Say an end by a signal as a shell would."""
    return 128 - code if code < 0 else code


def _start(argv: list[str], log_path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a daemon; gives it, and the pipe on which it tells how it does."""
    said, told = os.pipe()
    with open(log_path, "ab") as output:
        daemon = subprocess.Popen(
            [*argv, "--ready-fd", str(told)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(told,), cwd="/",
        )  # fmt: skip
    os.close(told)
    for process in (daemon.pid, os.getpid()):
        with suppress(OSError):
            Path(f"/proc/{process}/oom_score_adj").write_text(str(OOM_ADJUST))
    return daemon, said


def _wait(daemon: subprocess.Popen[bytes], watch: _Watch, said: int, log_path: Path) -> int:
    """Wait for the daemon's end, its messages and signals; gives its exit code, negative: the signal it died of."""
    sources = [watch.wakeup, said]
    code = None
    while code is None:
        readable, _, _ = select.select(sources, [], [], LOG_LOOK_S)
        if watch.wakeup in readable:
            for number in _stop_signals(watch):
                daemon.send_signal(number)
        code = daemon.poll()
        if said in sources and not _take_messages(watch, said):
            sources.remove(said)
        rotate(log_path)
    os.close(said)
    return code


def _orphan(argv: list[str], state_path: Path) -> int | None:
    """Find a daemon of this argv whose supervisor was killed."""
    try:
        pid = int(json.loads(state_path.read_bytes())["daemon"])
        running = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if running[: len(argv)] == [os.fsencode(part) for part in argv] else None


def _wait_for_orphan(pid: int, watch: _Watch, mountpoint: str) -> int:
    """Wait for the end of a daemon that is not our child: its mount tells whether that was an accident."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return -signal.SIGKILL
    log.info("daemon adopted pid=%d", pid)
    readiness.tell(watch.ready_fd, daemon=pid)
    watch.relay(json.dumps({"ready": f"adopted the running daemon {pid}"}).encode())
    while True:
        readable, _, _ = select.select([watch.wakeup, process], [], [])
        if process in readable:
            os.close(process)
            return -signal.SIGKILL if mounts_at(mountpoint) else ExitCode.OK
        for number in _stop_signals(watch):
            signal.pidfd_send_signal(process, number)


def _take_messages(watch: _Watch, said: int) -> bool:
    """Read what the daemon wrote; False at the end of the pipe."""
    if not select.select([said], [], [], 0)[0]:
        return True
    chunk = os.read(said, 1 << 16)
    *lines, watch.received = (watch.received + chunk).split(b"\n")
    for line in lines:
        watch.relay(line)
    return bool(chunk)


def _stop_signals(watch: _Watch) -> list[int]:
    """Read which signals came; from the first request to stop on, no daemon is started any more."""
    with suppress(BlockingIOError):
        stops = [number for number in os.read(watch.wakeup, 256) if number in (signal.SIGTERM, signal.SIGINT)]
        watch.stopping = watch.stopping or bool(stops)
        return stops
    return []


def _pause(watch: _Watch, pause_s: float) -> None:
    """Sleep, but wake at a request to stop."""
    end_s = time.monotonic() + pause_s
    while not watch.stopping and (left_s := end_s - time.monotonic()) > 0:
        if select.select([watch.wakeup], [], [], left_s)[0]:
            _stop_signals(watch)


def _catch_signals() -> int:
    """Make SIGCHLD, SIGTERM and SIGINT arrive as bytes in a pipe, so that one `select` waits for everything."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return woken


def _detach(mountpoint: str) -> None:
    """Take a dead mount away; until the next daemon mounts, visitors meet the closed-off directory below."""
    try:
        mounting.clear_dead_mounts(mountpoint)
    except (SpotwarpError, OSError) as error:
        log.error("dead mount stays mountpoint=%s reason=%s", mountpoint, error)


def _lock(path: Path) -> int | None:
    """Lock for as long as this process lives; children do not inherit it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def rotate(log_path: Path) -> None:
    """Move a log that has grown too large to `.1`; the daemon goes on writing at the start of the emptied file.

    What it writes between the copy and the emptying is lost: a few lines of a log, once in 16 MiB.
    """
    with suppress(OSError):
        if log_path.stat().st_size > LOG_BYTES_MAX:
            shutil.copyfile(log_path, log_path.with_name(log_path.name + ".1"))
            os.truncate(log_path, 0)


def _tail(log_path: Path) -> str:
    """Give the end of the log, for a daemon that died without a word."""
    with suppress(OSError), open(log_path, "rb") as file:
        file.seek(max(0, log_path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
    return ""


def write_record(path: Path) -> Record:
    """Make a *record* that keeps the newest state in *path*, replaced whole."""

    def record(state: Supervised) -> None:
        draft = path.with_name(path.name + ".new")
        try:
            draft.write_text(json.dumps(asdict(state)))
            draft.replace(path)
        except OSError as error:  # a full disk must not leave the daemon without its supervisor
            log.error("not recorded path=%s reason=%s", path, error)

    return record


def main(arguments: list[str]) -> int:
    """Leave the caller's session and directory, then supervise."""
    mountpoint, log_path, ready_fd, dashes, *argv = arguments
    assert dashes == "--", "usage: MOUNTPOINT LOG READY_FD -- ARGV..."
    if os.fork() != 0:
        os._exit(0)  # the launcher waits for this one, and init adopts the other
    os.setsid()
    os.chdir("/")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    record = write_record(Path(log_path).with_name(STATE_FILE))
    return supervise(argv, mountpoint=mountpoint, log_path=Path(log_path), ready_fd=int(ready_fd), record=record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
