"""Set what belongs to a mount's kernel connection and can't be negotiated; to be done again after every remount.

Invariant: a setting that is refused costs speed or liveness, never correctness: it is reported, and the mount goes on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spotwarp_fs.fuse.mountinfo import top_mount
from spotwarp_fs.fuse.mounting import MountOptions, connection_of


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What was set, and what was refused with the reason and the price."""

    done: dict[str, int]
    refused: dict[str, str]


def tune(mountpoint: str, options: MountOptions) -> TuningReport:
    """Raise readahead and the background queue of the mount at *mountpoint* (a real path).

    Asks the mount for its figures first, and so must run in a worker thread while the mount is served: the kernel
    overwrites the readahead when it receives the answer to INIT, and only a request proves that it has.
    """
    report = TuningReport({}, {})
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        report.refused["root"] = f"{error.strerror}: the mount does not answer"
        return report
    entry = top_mount(mountpoint)
    if entry is None:
        report.refused["root"] = "unmounted already"
        return report
    readahead = Path(f"/sys/class/bdi/{entry.major}:{entry.minor}/read_ahead_kb")
    connection = connection_of(entry)
    background = options.max_background
    _set(report, readahead, options.read_ahead_kb, "reads arrive in pieces of 128 KiB")
    _set(report, connection / "max_background", background, "12 reads that wait in an outage stop all others")
    _set(report, connection / "congestion_threshold", background * 3 // 4, "the kernel thinks the mount is congested")
    return report


def _set(report: TuningReport, path: Path, value: int, price: str) -> None:
    try:
        path.write_text(str(value))
        report.done[path.name] = int(path.read_text())
    except OSError as error:
        report.refused[path.name] = f"{error.strerror}: {price}"
