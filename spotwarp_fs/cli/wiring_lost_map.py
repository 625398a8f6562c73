"""`salvage` for a damaged map: what is kept are local bytes by inode, with names as far as the rebuilt tree had them.

Invariant: what is copied says of itself that it is in parts; nothing is read out of the damaged map.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotwarp_fs.cli.reports import SalvageReport
from spotwarp_fs.engine.recover import LostMap
from spotwarp_fs.local.rest import RestPlace, copy_sparse, rest_files

if TYPE_CHECKING:
    from spotwarp_fs.cli.copying import Progress

NAMELESS: Final = b"files-without-name"
"""Directory for data files of inodes that the rebuilt tree does not have."""


def lost_map_of(place: Path) -> LostMap | None:
    """A cache that was set aside while its damaged map was being replaced: its other bytes go where that map is."""
    try:
        rest = place.parent / (place / "rest").read_text()
    except FileNotFoundError:
        return None
    return LostMap("found when this cache was last used", RestPlace(place, rest))


def kept_bytes(place: Path) -> tuple[int, int]:
    """Return how many files are kept, and what they occupy."""
    found = rest_files(place)
    return len(found), sum(file.size for file in found)


def copy_lost(place: Path, target: Path, on_progress: Progress) -> SalvageReport:
    """Copy the local bytes of every file kept in *place*; what was elsewhere is a hole."""
    found = [file for file in rest_files(place) if file.path.exists()]
    total, done = sum(file.size for file in found), 0
    for file in found:
        name = file.name if file.name is not None else NAMELESS + b"/%x" % file.inode
        destination = Path(os.fsdecode(os.path.join(os.fsencode(target), name)))
        destination.parent.mkdir(parents=True, exist_ok=True)
        done += copy_sparse(file.path, destination)
        on_progress({"done_bytes": done, "total_bytes": total})
    target.mkdir(exist_ok=True)
    names = tuple(os.fsdecode(file.name or NAMELESS + b"/%x" % file.inode) for file in found)
    return SalvageReport(files=len(found), bytes_copied=done, manifest=0, damaged=names)
