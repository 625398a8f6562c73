"""Move a stale cache out of the way: to salvage if it has something that no manifest has, else to nowhere.

Invariant: what was moved is on disk before this returns, because a map that was never synced is not believed after the
next boot.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from spotwarp_fs.core.journal import Changes
from spotwarp_fs.core.salvage import has_unpublished
from spotwarp_fs.engine.load import HEAD_KEY
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.kv import LmdbKV

SYNCED: Final = "synced"
"""File in a salvage: all of it reached the disk."""


def set_cache_aside(cache: CacheDir, reason: str) -> Path | None:
    """Begin an empty cache; gives where the old one is kept, or None when all of it was published."""
    if not _holds_unpublished(cache):
        cache.clear()
        return None
    where = cache.set_aside_as_salvage(reason)
    os.sync()
    (where / SYNCED).touch()
    return where


def _holds_unpublished(cache: CacheDir) -> bool:
    if cache.rest is not None:
        return True  # what a damaged map alone could have told
    kv = LmdbKV(cache.map_path)
    try:
        with kv.read() as view:
            if view.get(HEAD_KEY) is not None:
                return has_unpublished(view)
    finally:
        kv.close()
    # Without a map that may be believed, the journal says whether there was anything.
    journal = Journal(cache.journal_path)
    try:
        return any(isinstance(record, Changes) for record in journal.records())
    finally:
        journal.close()
