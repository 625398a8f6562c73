"""Look at other processes through /proc: who descends from whom, which files they write.

Invariant: a process that ends while it is looked at, or that is another user's, is passed over.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that some process has open for writing."""

    path: str
    identity: tuple[int, int]
    """Device and inode."""
    size: int
    position: int
    appends: bool


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for process in PROC.iterdir():
        if process.name.isdecimal():
            try:
                text = (process / "stat").read_text(errors="replace")
                found[int(process.name)] = int(text.rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
    return found


def descendants(root: int, *, leave_out: frozenset[int] = frozenset()) -> list[int]:
    """Return every process below *root*, but not those of *leave_out* nor what is below them."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in parents().items():
        children[parent].append(pid)
    found, unseen = [], list(children[root])
    while unseen:
        pid = unseen.pop()
        if pid not in leave_out:
            found.append(pid)
            unseen += children[pid]
    return found


def chars_written(pid: int) -> int:
    """Return how many bytes a process has passed to `write`, to whatever; 0 where the system does not say."""
    try:
        lines = (PROC / str(pid) / "io").read_text().splitlines()
        return int(dict(line.split(": ", 1) for line in lines)["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def files_changed(directory: str, since_ns: int, *, leave_out: tuple[str, ...], entries_max: int) -> Iterator[OpenFile]:
    """Yield the files below *directory* that were changed since then, as if they were open; looks at so many names."""
    unseen, seen = [directory], 0
    while unseen and seen < entries_max:
        try:
            with os.scandir(unseen.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if entry.is_symlink() or entry.path in leave_out:
                        continue
                    if entry.is_dir():
                        unseen.append(entry.path)
                        continue
                    about = entry.stat()
                    if stat.S_ISREG(about.st_mode) and about.st_mtime_ns >= since_ns:
                        identity = about.st_dev, about.st_ino
                        yield OpenFile(entry.path, identity, about.st_size, about.st_size, False)
        except OSError:
            continue


def files_written(pid: int) -> Iterator[OpenFile]:
    """Yield the regular files with a name that a process has open for writing."""
    try:
        links = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            path = os.readlink(link)
            if not path.startswith("/") or path.endswith(DELETED) or path.startswith("/dev/"):
                continue
            lines = (PROC / str(pid) / "fdinfo" / link.name).read_text().splitlines()
            details = dict(line.split(":", 1) for line in lines[:2])
            flags = int(details["flags"], 8)
            if flags & os.O_ACCMODE == os.O_RDONLY:
                continue
            about = os.stat(link)
            if stat.S_ISREG(about.st_mode):
                appends = bool(flags & os.O_APPEND)
                yield OpenFile(path, (about.st_dev, about.st_ino), about.st_size, int(details["pos"]), appends)
        except (OSError, ValueError, KeyError):
            continue
