"""Which mount a path lies on, from /proc/self/mountinfo: text only, so that a hung mount cannot hang the question."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
_HARMLESS: Final = ("fuse.fuse-overlayfs",)
"""The root of rootless containers: it never waits for a daemon of ours."""


def fuse_mount_of(path: Path, *, mountinfo: str | None = None) -> str | None:
    """Return the FUSE mountpoint that *path* (absolute) lies on, or None."""
    if mountinfo is None:
        try:
            mountinfo = _MOUNTINFO.read_text(errors="surrogateescape")
        except OSError:
            return None
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if not after:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        # Later lines lie over earlier ones at the same point.
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, after.split()[0]
    is_fuse = kind in ("fuse", "fuseblk") or (kind.startswith("fuse.") and kind not in _HARMLESS)
    return os.fspath(best) if is_fuse else None
