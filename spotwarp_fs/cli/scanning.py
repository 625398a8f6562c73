"""Look at a directory that is to become a state: every entry once, parents before children.

Invariant: symlinks are never followed, so what is found is what lies below the directory and nothing else.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from spotwarp_fs.cli.copying import join
from spotwarp_fs.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Found:
    """One entry; its path is relative."""

    path: bytes
    status: os.stat_result


@dataclass(slots=True)
class Scan:
    """A whole directory."""

    root: bytes
    top: os.stat_result
    entries: list[Found] = field(default_factory=list)
    files: int = 0
    logical_bytes: int = 0

    def paths(self) -> set[bytes]:
        """Return every path."""
        return {entry.path for entry in self.entries}


def scan_directory(root: bytes) -> Scan:
    """Scan *root* (blocking), or raise UserError naming what cannot be read."""
    try:
        scan = Scan(root, os.lstat(root))
        pending = [b""]
        while pending:
            directory = pending.pop()
            with os.scandir(join(root, directory)) as entries:
                found = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in entries)
            for name, status in found:
                _add(scan, Found(join(directory, name), status))
            pending.extend(join(directory, name) for name, status in reversed(found) if stat.S_ISDIR(status.st_mode))
    except OSError as error:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else os.fsdecode(root)
        raise UserError(f"{where} cannot be read: {error.strerror}; nothing was pushed") from error
    return scan


def _add(scan: Scan, found: Found) -> None:
    scan.entries.append(found)
    if not stat.S_ISDIR(found.status.st_mode):
        # As the engine counts: everything but directories is a file.
        scan.files += 1
        scan.logical_bytes += found.status.st_size
