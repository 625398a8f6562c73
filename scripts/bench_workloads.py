"""What the bench measures: each workload works in a directory of its own and says how fast that went.

Invariant: a workload leaves nothing behind, and what it does to prepare is never inside its clock.
"""

import multiprocessing
import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
KIB = 1 << 10
SETTLE_S = 0.3
"""After dropping caches: a file system is told of every inode that the kernel forgot."""

PER_S, MB_PER_S, SECONDS, MB = "per s", "MB/s", "s", "MB"
LESS_IS_BETTER = frozenset({SECONDS, MB})

Figures = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """How much is written."""

    divisor: int = 1
    source: Path = Path()
    """The repository that is cloned."""

    def of(self, count: int) -> int:
        """Give a full size, or the quick run's."""
        return max(1, count // self.divisor)


@dataclass(frozen=True)
class Workload:
    """One body, which measures one or more keys in turn."""

    units: dict[str, str]
    run: Callable[[Path, Scale], Figures]
    needs_root: frozenset[str] = frozenset()
    needs_directories: bool = False


def drop_caches(what: int) -> None:
    """Forget clean pages (1), names and inodes (2), or both (3)."""
    Path("/proc/sys/vm/drop_caches").write_text(str(what))
    time.sleep(SETTLE_S)


def may_drop_caches() -> bool:
    """Only root may, and not in every container."""
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def _write(path: Path, total: int, piece: int) -> None:
    data = memoryview(os.urandom(MIB))[:piece]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for _ in range(total // piece):
            os.write(fd, data)
    finally:
        os.close(fd)


def _stream(root: Path, scale: Scale) -> Figures:
    """Write one large file, then read it with no page of it in memory."""
    total = scale.of(1024) * MIB
    path = root / "stream"
    start_s = time.perf_counter()
    _write(path, total, MIB)
    figures = {"seq_write_1m": total / 1e6 / (time.perf_counter() - start_s)}
    if may_drop_caches():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # dirty pages below cannot be dropped
        os.close(fd)
        drop_caches(3)
        start_s = time.perf_counter()
        read_through(path)
        figures["seq_read_cold"] = total / 1e6 / (time.perf_counter() - start_s)
    path.unlink()
    return figures


def read_through(path: Path) -> int:
    """Read a file from front to back; returns its length."""
    buffer, total = bytearray(MIB), 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [buffer]):
            total += count
    finally:
        os.close(fd)
    return total


def _eight_writers(root: Path, scale: Scale) -> Figures:
    total = scale.of(256) * MIB
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(root / f"part{number}", total, MIB)) for number in range(8)]
    start_s = time.perf_counter()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    took_s = time.perf_counter() - start_s
    for number in range(8):
        (root / f"part{number}").unlink()
    if any(writer.exitcode for writer in writers):
        raise OSError(f"a writer failed: exit codes {[writer.exitcode for writer in writers]}")
    return {"write_8x_1m": 8 * total / 1e6 / took_s}


def _small_writes(root: Path, scale: Scale) -> Figures:
    total = scale.of(200) * MIB
    path = root / "small"
    start_s = time.perf_counter()
    _write(path, total, 4 * KIB)
    took_s = time.perf_counter() - start_s
    path.unlink()
    return {"seq_write_4k": total / 1e6 / took_s}


def _files(root: Path, scale: Scale) -> Figures:
    """Create files, look at them for the first time, change their modes, remove them."""
    paths = [str(root / f"file{number:05d}") for number in range(scale.of(5000))]
    data = os.urandom(1000)

    def create(path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, data)
        os.close(fd)

    def rate(step: Callable[[str], object]) -> float:
        start_s = time.perf_counter()
        for path in paths:
            step(path)
        return len(paths) / (time.perf_counter() - start_s)

    figures = {"create_1k": rate(create)}
    if may_drop_caches():
        drop_caches(2)
        figures["stat_first"] = rate(os.stat)
    figures["chmod"] = rate(lambda path: os.chmod(path, 0o600))
    figures["unlink"] = rate(os.unlink)
    return figures


def _git(root: Path, scale: Scale) -> Figures:
    clone = root / "clone"
    start_s = time.perf_counter()
    git("clone", "-q", "--no-hardlinks", str(scale.source), str(clone))
    figures = {"git_clone": time.perf_counter() - start_s}
    start_s = time.perf_counter()
    git("-C", str(clone), "status", "--porcelain")
    figures["git_status"] = time.perf_counter() - start_s
    shutil.rmtree(clone)
    return figures


def git(*arguments: str) -> None:
    """Run git without anybody's settings."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"]
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True, env=environment)


def make_repository(path: Path, scale: Scale) -> int:
    """Commit the standard library's own sources, and tests where they are installed; returns the number of files."""
    library = Path(sysconfig.get_path("stdlib"))
    found = sorted(each for each in library.rglob("*.py") if "site-packages" not in each.parts)
    for number, source in enumerate(found):
        if number % scale.divisor:
            continue
        target = path / source.relative_to(library)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            shutil.copyfile(source, target)
    git("init", "-q", str(path))
    git("-C", str(path), "add", "-A")
    git("-C", str(path), "commit", "-q", "-m", "the standard library")
    return len(found) // scale.divisor


def _synced_writes(root: Path, scale: Scale) -> Figures:
    count = scale.of(1000)
    path = root / "synced"
    data = os.urandom(4 * KIB)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    start_s = time.perf_counter()
    for _ in range(count):
        os.write(fd, data)
        os.fsync(fd)
    took_s = time.perf_counter() - start_s
    os.close(fd)
    path.unlink()
    return {"fsync_4k": count / took_s}


WORKLOADS = (
    Workload({"seq_write_1m": MB_PER_S, "seq_read_cold": MB_PER_S}, _stream, frozenset({"seq_read_cold"})),
    Workload({"write_8x_1m": MB_PER_S}, _eight_writers),
    Workload({"seq_write_4k": MB_PER_S}, _small_writes),
    Workload(
        {"create_1k": PER_S, "stat_first": PER_S, "chmod": PER_S, "unlink": PER_S}, _files, frozenset({"stat_first"})
    ),
    Workload({"git_clone": SECONDS, "git_status": SECONDS}, _git, needs_directories=True),
    Workload({"fsync_4k": PER_S}, _synced_writes),
)
KEYS = tuple(key for workload in WORKLOADS for key in workload.units)
