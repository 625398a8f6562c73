"""Every limit of laying out and filling.

Invariant: no other module of restoring holds a number that bounds memory, time or retries.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotwarp_fs.core.types import BLOCK_BYTES

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class RestoreLimits:
    """Seconds, bytes and counts."""

    small_file_bytes_max: int = 256 << 10
    """Files up to this size are filled at once, many in one request."""
    small_bytes_max: int = 2 << 30
    """Of these files, so much in all; the others are placeholders like large ones."""
    small_files_at_once: int = 4096
    """Files whose block maps are loaded before the first of them is fetched."""
    batch: int = 256
    """Placeholders that are handed to the keeper together."""
    arrival_s: float = 30.0
    """What cannot arrive within this is no placeholder: the kernel opens it after 45 s in any case."""
    sure_bytes: int = 32 * MiB
    """What is not larger than this arrives in time by any link."""
    rate_sample_bytes: int = 16 * MiB
    """A rate is believed when so much has come."""
    background_files: int = 4
    """Files that are filled at the same time although nobody waits."""
    disk_reserve_bytes: int = 256 * MiB
    """What the background leaves free on the disk."""
    no_room_pause_s: float = 10.0
    """The disk is full: so long until the background looks again."""
    late_look_s: float = 0.5
    """How often it is looked whether a placeholder that was given up can be one again."""
    checked_at_once: int = 4
    """Local files that are compared with the state at the same time."""
    named_max: int = 20
    """Things that a report names one by one."""

    def __post_init__(self) -> None:
        assert self.small_file_bytes_max <= BLOCK_BYTES, "a small file is one block: one delivery completes it"
