"""Placeholders for tests: what is in them, how they are made and filled, and a daemon that may be killed.

    python -m tests.support.placeholders DIRECTORY FIRST COUNT [fill] [late-after=S] [mode=OCTAL]

makes COUNT placeholders from ident FIRST on, says "ready …", and "wanted IDENT" for each that somebody waits for; with
`fill` it fills those, and those that an earlier daemon left.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.keeping import Keeper, PlaceholderLate, open_keeper

ROOT = Path(__file__).resolve().parents[2]
CONTENT_BYTES = 300_000
DEADLINE_S = 60.0
NOBODY = 65_534


def content(ident: int) -> bytes:
    """Bytes that nobody takes for zeros or for another file's, and that are a script which prints its ident."""
    script = f"#!/bin/sh\necho placeholder {ident}\nexit 0\n".encode()
    seed = hashlib.sha256(str(ident).encode()).hexdigest().encode() + b"\n"
    return (script + seed * (CONTENT_BYTES // len(seed)))[:CONTENT_BYTES]


def socket_of(directory: Path) -> tuple[Path, Path]:
    """Socket and log of the keeper of *directory*."""
    return directory / "keeper.sock", directory / "keeper.log"


def path_of(directory: Path, ident: int) -> Path:
    return directory / f"f{ident}"


def draft(directory: Path, ident: int, mode: int = 0o644) -> tuple[Path, int]:
    """Make a placeholder under a temporary name, and return that and its descriptor."""
    path = directory / f".draft-{ident}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, CONTENT_BYTES)
    leases.mark_absent(fd, "session-1")
    os.fchmod(fd, mode)
    return path, fd


async def make(keeper: Keeper, directory: Path, idents: Sequence[int], mode: int = 0o644) -> set[Inode]:
    """Make placeholders; those under lease get their names, the others go."""
    held: set[Inode] = set()
    for start in range(0, len(idents), 500):  # few drafts open at a time
        drafts = {Inode(ident): draft(directory, ident, mode) for ident in idents[start : start + 500]}
        granted = await keeper.hold([(ident, fd) for ident, (_, fd) in drafts.items()])
        for ident, (path, fd) in drafts.items():
            os.close(fd)
            if ident in granted:
                path.rename(path_of(directory, ident))
            else:
                path.unlink()
        held |= granted
    return held


async def fill(keeper: Keeper, ident: Inode) -> None:
    """Fill in two writes and let go."""
    whole = content(ident)
    for start in (CONTENT_BYTES // 2, 0):
        with keeper.writing(ident) as fd:
            os.pwrite(fd, whole[start : start + CONTENT_BYTES // 2], start)
        await trio.lowlevel.checkpoint()
    await keeper.release(ident)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for *condition*, as long as a loaded machine may take."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s in vain for {what}"
        time.sleep(0.01)


def is_waiting(process: subprocess.Popen[bytes], path: Path) -> bool:
    """Say whether *process* waits for the lease of *path*: the kernel lists a break, and nothing has ended."""
    inode = path.stat().st_ino
    breaks = [line for line in Path("/proc/locks").read_text().splitlines() if "LEASE" in line and "BREAKING" in line]
    return process.poll() is None and any(f":{inode} " in line for line in breaks)


def reader(path: Path) -> subprocess.Popen[bytes]:
    """Start an unrelated process that reads *path*."""
    return subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def output_of(process: subprocess.Popen[bytes]) -> bytes:
    """Return what *process* wrote until its end, which must be a good one."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors.decode()
    return output


@functools.cache
def ordinary() -> tuple[str, ...]:
    """The prefix that runs a command without any capability, as another user if that one can start this interpreter."""
    if os.geteuid() != 0:
        return ()
    bare = ("--bounding-set=-all", "--inh-caps=-all")
    nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *bare)
    start = (
        "import subprocess, sys, trio, spotwarp_fs; subprocess.run([sys.executable, '-c', 'import trio'], check=True)"
    )
    tried = subprocess.run([*nobody, sys.executable, "-c", start], cwd=ROOT, capture_output=True, check=False)
    return nobody if tried.returncode == 0 else ("setpriv", *bare)


def give_to(directory: Path, prefix: Sequence[str]) -> None:
    """Let whoever runs under *prefix* own *directory*."""
    if any("--reuid" in word for word in prefix):
        os.chown(directory, NOBODY, NOBODY)


class Daemon:
    """A daemon in a process of its own; what it said is in `lines`."""

    def __init__(self, directory: Path, *arguments: object, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "tests.support.placeholders", str(directory), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self.log = directory / "daemon.log"
        with open(self.log, "ab") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def hear(self, word: str) -> list[str]:
        """Wait until the daemon says a line that begins with *word*, and return the rest of that."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[0] == word:
                return line.split()[1:]
        raise AssertionError(f"the daemon ended without saying {word}: {self.log.read_text()}")

    def kill(self) -> None:
        """SIGKILL it, and see it gone."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def running(directory: Path, *arguments: object, prefix: Sequence[str] = ()) -> Iterator[Daemon]:
    """Run a daemon that is ready, and kill it."""
    daemon = Daemon(directory, *arguments, prefix=prefix)
    try:
        daemon.hear("ready")
        yield daemon
    finally:
        daemon.kill()


def end_keeper(directory: Path) -> None:
    """Kill the keeper of *directory*, whatever it holds."""
    log = socket_of(directory)[1]
    lines = log.read_text().splitlines() if log.exists() else []
    pids = [word.removeprefix("pid=") for line in lines for word in line.split() if word.startswith("pid=")]
    ended = bool(lines) and lines[-1].endswith("ended")
    for pid in [] if ended else pids[-1:]:
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and str(directory).encode() in command.read_bytes():
            os.kill(int(pid), 9)


async def main(arguments: list[str]) -> None:
    directory, first, count, *words = arguments
    given = dict(word.split("=") for word in words if "=" in word)
    where = Path(directory)
    late_after_s = float(given["late-after"]) if "late-after" in given else None
    async with open_keeper(*socket_of(where), late_after_s=late_after_s, idle_s=1) as keeper:
        idents = range(int(first), int(first) + int(count))
        held = await make(keeper, where, idents, int(given.get("mode", "644"), 8))
        late = ",".join(map(str, sorted(keeper.late())))
        print("ready", len(held), len(keeper.recovered), keeper.room, keeper.keeper_pid, late, flush=True)
        while True:
            ident = await keeper.wanted()
            print("wanted", ident, flush=True)
            if "fill" in words:
                try:
                    await fill(keeper, ident)
                except PlaceholderLate:
                    print("late", ident, flush=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
