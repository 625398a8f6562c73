"""Look through a directory that is to become a workspace: its checkpoints, what would be saved, what would not.

Invariant: nothing is opened and no link is followed; a directory that changes meanwhile gives a slightly old answer.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from provisioner.cli.workload import Protection, Saved
from provisioner.core.errors import BadWish
from spotwarp_fs.api import Settings, format_size

FILES_MAX: Final = 2_000_000
SMALL_BYTES: Final = 1 << 20
"""Smaller files are code and settings: a comeback reads them before its first step."""
UNSAVED_SHOWN_MAX: Final = 6
_KINDS: Final = {stat.S_IFSOCK: "sockets", stat.S_IFIFO: "pipes", stat.S_IFBLK: "devices", stat.S_IFCHR: "devices"}


@dataclass
class _Tally:
    """What the walk has seen."""

    files: int = 0
    size_bytes: int = 0
    small_bytes: int = 0
    scratch_bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    outside: int = 0
    saved: dict[str, Saved] = field(default_factory=dict)


def look(directory: Path, settings: Settings) -> tuple[Protection, tuple[Saved, ...]]:
    """Walk *directory*, or raise BadWish when it is none."""
    if not directory.is_dir():
        raise BadWish(f"--from {directory}: is no directory")
    policies = settings.policies()
    tally = _Tally()
    for count, (path, status) in enumerate(_walk(directory, tally), 1):
        if count > FILES_MAX:
            raise BadWish(f"--from {directory}: more than {FILES_MAX:,} files; SpotWarp is made for less")
        relative = os.fsencode(os.path.relpath(path, directory))
        if policies.is_scratch(relative):
            tally.scratch_bytes += status.st_size
            continue
        _count(tally, path, status, directory)
        if stat.S_ISREG(status.st_mode) and (key := _checkpoint(relative, status.st_size, policies)) is not None:
            before = tally.saved.get(key, Saved(key, 0, 0.0))
            newest_s = max(before.modified_s, status.st_mtime)
            tally.saved[key] = Saved(key, before.size_bytes + status.st_size, newest_s)
    return _protection(tally, settings), tuple(sorted(tally.saved.values(), key=lambda one: one.path))


def _walk(directory: Path, tally: _Tally) -> Iterator[tuple[str, os.stat_result]]:
    def failed(error: OSError) -> None:
        tally.unreadable.append(os.path.relpath(error.filename or "?", directory))

    for base, directories, files in os.walk(directory, onerror=failed):
        links = [name for name in directories if os.path.islink(os.path.join(base, name))]
        for name in (*files, *links):
            path = os.path.join(base, name)
            try:
                yield path, os.lstat(path)
            except OSError:
                continue  # gone meanwhile


def _count(tally: _Tally, path: str, status: os.stat_result, directory: Path) -> None:
    if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
        tally.kinds[kind] += 1
        return
    if stat.S_ISLNK(status.st_mode):
        target = os.path.realpath(path)
        tally.outside += not (target == str(directory) or target.startswith(os.path.realpath(directory) + os.sep))
    elif not os.access(path, os.R_OK):
        tally.unreadable.append(os.path.relpath(path, directory))
        return
    tally.files += 1
    tally.size_bytes += status.st_size
    tally.small_bytes += status.st_size if status.st_size <= SMALL_BYTES else 0


class _Policies(Protocol):
    def is_atomic(self, name: bytes) -> bool: ...

    def is_atomic_dir(self, name: bytes) -> bool: ...


def _checkpoint(relative: bytes, size_bytes: int, policies: _Policies) -> str | None:
    """Return the outermost checkpoint directory that a file is in, else the file itself if it is a checkpoint."""
    parts = relative.split(b"/")
    inside = next((at for at, part in enumerate(parts[:-1]) if policies.is_atomic_dir(part)), None)
    if inside is not None:
        return os.fsdecode(b"/".join(parts[: inside + 1]))
    whole = policies.is_atomic(parts[-1]) and size_bytes > SMALL_BYTES
    return os.fsdecode(relative) if whole else None


def _protection(tally: _Tally, settings: Settings) -> Protection:
    unsaved = []
    if tally.scratch_bytes:
        unsaved.append(f"{format_size(tally.scratch_bytes)} below {', '.join(settings.scratch)} (setting scratch)")
    unsaved += [f"{count:,} {kind}: they mean nothing on another node" for kind, count in sorted(tally.kinds.items())]
    if tally.outside:
        unsaved.append(f"{tally.outside:,} links lead out of the directory: what they point at stays here")
    unsaved += [f"{path}: cannot be read" for path in sorted(tally.unreadable)[:UNSAVED_SHOWN_MAX]]
    if len(tally.unreadable) > UNSAVED_SHOWN_MAX:
        unsaved.append(f"and {len(tally.unreadable) - UNSAVED_SHOWN_MAX:,} more that cannot be read")
    return Protection(tally.files, tally.size_bytes, tally.small_bytes, tuple(unsaved))
