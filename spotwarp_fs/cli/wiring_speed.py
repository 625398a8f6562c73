"""Measure for `doctor` how fast a save is here, in a plain directory and through a mount, and whether leases work.

Invariant: at most `BYTES_MAX` are written to each, on the disk that the cache would use; nothing of it stays, and no
store but a directory beside it is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotwarp_fs.cli import wiring_mount
from spotwarp_fs.cli.mounts import find_mount
from spotwarp_fs.cli.options import settings_for
from spotwarp_fs.cli.reports import Check, MountWish
from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.units import format_duration, format_size
from spotwarp_fs.directory.leases import why_no_leases
from spotwarp_fs.fuse.mounting import NoFuse
from spotwarp_fs.fuse.trying import try_mount
from spotwarp_fs.local.disk import disk_free_bytes, fdatasync, write_all

BYTES_MAX: Final = 256 << 20
WRITE_S: Final = 1.0
"""Writing ends after this, then comes a sync. A mount begins to stream what has been cold for a second."""
CHUNK_BYTES: Final = 8 << 20
FREE_BYTES_MIN: Final = 4 * BYTES_MAX
SLOWER: Final = 2.0
"""A mount so many times slower than the disk is worth a word."""
DRAIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What a short write came to, synced."""

    written: int
    took_s: float

    def time_for(self, size: int) -> float:
        """Say how long *size* bytes would take at this rate."""
        return size * self.took_s / self.written

    def __str__(self) -> str:
        return f"{format_size(self.written / self.took_s)}/s"


def measure(directory: Path) -> Speed:
    """Write and sync a file in *directory*, which is removed again; raises OSError."""
    fd, path = tempfile.mkstemp(prefix="spotwarp-speed-", dir=directory)
    took_s, written = 0.0, 0
    try:
        while written < BYTES_MAX and took_s < WRITE_S:
            data = os.urandom(CHUNK_BYTES)
            started_s = time.monotonic()
            write_all(fd, written, data)
            took_s += time.monotonic() - started_s
            written += len(data)
        started_s = time.monotonic()
        fdatasync(fd)
        return Speed(written, took_s + time.monotonic() - started_s)
    finally:
        os.close(fd)
        os.unlink(path)


@contextmanager
def trial_workspace(place: Path) -> Iterator[Path]:
    """Mount a new workspace whose cache, store and state lie in *place*; raises SpotwarpError."""
    root, state = place / "mnt", place / "state"
    loaded = settings_for(
        store=f"file://{place / 'store'}", workspace="trial", state_dir=str(state), cache_dir=str(place / "cache"),
        interval="1h", mode="fuse", fsync="local",
    )  # fmt: skip
    wiring_mount.mount(loaded, MountWish(mountpoint=root, tried=True), lambda report: None)
    record = find_mount(state, root)
    try:
        yield root
    finally:
        try:
            wiring_mount.umount(record, state, timeout_s=DRAIN_S, force=True, on_progress=lambda values: None)
        except SpotwarpError:
            for pid in (record.supervisor_pid, record.daemon_pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wiring_mount.clean_away(record, state)


def save_check(cache: Path, save_bytes: int) -> Check:
    """Tell how long a save of *save_bytes* would block in either form, with the cache's disk under both."""
    free = disk_free_bytes(cache)
    if free < FREE_BYTES_MIN:
        return Check("save", "warn", f"not measured: {cache} has only {format_size(free)} free")
    place = Path(tempfile.mkdtemp(prefix="spotwarp-doctor-", dir=cache))
    try:
        disk = measure(place)
        try:
            try_mount()
            with trial_workspace(place) as root:
                mount = measure(root)
        except NoFuse as error:
            return _directory_only(disk, save_bytes, f"no mount is possible here: {error.cause}")
        except SpotwarpError as error:
            return _directory_only(disk, save_bytes, f"a trial workspace could not be mounted: {error}")
    except OSError as error:
        return Check("save", "warn", f"not measured: {error}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return verdict(disk, mount, save_bytes)


def _directory_only(disk: Speed, save_bytes: int, why: str) -> Check:
    text = f"{format_size(save_bytes)} would block {format_duration(disk.time_for(save_bytes))} in a plain directory"
    return Check("save", "ok", f"{text} ({disk} measured for {format_size(disk.written)}); {why}")


def verdict(disk: Speed, mount: Speed, save_bytes: int) -> Check:
    """Compare the forms, and say when the directory form is the better one."""
    mounted_s, plain_s = mount.time_for(save_bytes), disk.time_for(save_bytes)
    detail = (
        f"{format_size(save_bytes)} would block {format_duration(mounted_s)} through a mount, "
        f"{format_duration(plain_s)} in a plain directory (measured {mount} and {disk}, in short synced writes on this "
        "machine as it is now: a long one may be slower, in both)"
    )
    if mounted_s < plain_s * SLOWER:
        return Check("save", "ok", detail)
    remedy = "if your job waits for its saves: `spotwarp run --mode directory`, or `spotwarp start`"
    return Check("save", "warn", detail, remedy)


def lease_check(directory: Path) -> Check:
    """Tell whether a restore into *directory* may leave large files for later."""
    why = why_no_leases(directory)
    if not why:
        return Check("file leases", "ok", f"work in {directory}: a plain directory there is usable before it is full")
    remedy = "nothing has to be done, a restore only takes longer; a directory on ext4, overlay or tmpfs has leases"
    return Check("file leases", "warn", why, remedy)
