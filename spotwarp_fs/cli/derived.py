"""Work out the values that settings leave open: the workspace's name, its cache directory, the cache's budget.

Invariant: the same machine, user and mountpoint always give the same name and directory, so that a remount finds both.
"""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import Final

from spotwarp_fs.cli.settings import MiB, Settings, check_workspace
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import format_size

CACHE_SHARE: Final = 0.8
CACHE_BYTES_MIN: Final = 16 * MiB


def default_workspace(mountpoint: Path, user: str | None = None) -> str:
    """Return `<user>-<last part of the mountpoint>`, in characters that every store takes.

    >>> default_workspace(Path("/mnt/My Run#7"), "Ada")
    'ada-my-run-7'
    """
    parts = [user if user is not None else _user(), mountpoint.name or "root"]
    cleaned = [re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-._") for part in parts]
    return check_workspace("-".join(part or "x" for part in cleaned)[:63].rstrip("-._"))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # Containers run with user ids that no passwd file knows.
        return f"uid{os.getuid()}"


def workspace_of(settings: Settings, mountpoint: Path) -> str:
    """Return the workspace's name for a mountpoint."""
    return settings.workspace or default_workspace(mountpoint)


def cache_directory(settings: Settings, workspace: str) -> Path:
    """Return the directory of the node's copy of *workspace*."""
    return settings.cache_dir or settings.state_dir / "cache" / workspace


def cache_budget(settings: Settings, *, free_bytes: int, cached_bytes: int, in_use: bool = False) -> int:
    """Return the cache's budget, or raise UserError (CACHE) when the disk has no room for any.

    *cached_bytes* is what this cache holds already: it counts as free, or each remount would shrink the budget. A cache
    *in_use* is never refused: it may hold what is nowhere else, and a daemon that died must come back to save it.
    """
    room = free_bytes + cached_bytes
    if settings.cache_size is not None:
        return settings.cache_size
    # A small disk cannot spare the reserve that is right for a large one, and a full one must still restart.
    budget = min(int(room * CACHE_SHARE), room - min(settings.free_reserve, room // 10))
    if budget < CACHE_BYTES_MIN and in_use:
        return CACHE_BYTES_MIN
    if budget < CACHE_BYTES_MIN:
        raise UserError(
            f"the cache's disk has {format_size(free_bytes)} free, of which free_reserve keeps "
            f"{format_size(settings.free_reserve)}; a cache needs {format_size(CACHE_BYTES_MIN)}. "
            "Free some space, or choose another disk with --cache-dir",
            ExitCode.CACHE,
        )
    return budget
