"""Choose how each large file comes: filled before the command starts, as a placeholder, or as a dangling symlink.

Invariant: no lease, no placeholder; and no placeholder for what cannot arrive before the kernel opens it anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory.limits import RestoreLimits


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the large files."""

    placeholders: tuple[Inode, ...]
    at_once: tuple[Inode, ...]
    """Filled before the command starts."""
    links: tuple[Inode, ...]
    """Cannot be opened until they are here."""
    without_room: int = 0
    """How many of those at once would be placeholders if more could be held."""


def choose(
    sizes: dict[Inode, int],
    checkpoint: Collection[Inode],
    *,
    room: int,
    bytes_per_s: float | None,
    limits: RestoreLimits,
) -> Choice:
    """Choose by the bytes that have to come; *checkpoint* is the newest complete one, *room* what leases may be held.

    The room is for the largest: that defers the most. A rate that is not known counts as too slow.
    """
    if not room:
        return Choice((), tuple(sizes), ())
    in_time = max(limits.sure_bytes, (bytes_per_s or 0.0) * limits.arrival_s)
    wanted = set(checkpoint)
    late = {ino for ino, count in sizes.items() if count > in_time}
    soon = {ino for ino, count in sizes.items() if count <= limits.small_file_bytes_max}
    rest = sorted(sizes.keys() - late - soon, key=lambda ino: (-sizes[ino], ino))
    held = set(rest[:room])
    at_once = [ino for ino in sizes if ino not in held and (ino not in late or ino in wanted)]
    links = [ino for ino in sizes if ino in late and ino not in wanted]
    return Choice(tuple(rest[:room]), tuple(at_once), tuple(links), len(rest) - len(held))
