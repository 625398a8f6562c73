"""What stands for a file whose bytes are in the store only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from spotwarp_fs.core.records import InodeRecord


class Kind(Enum):
    """What stands for a file that is not here."""

    PLACEHOLDER = "placeholder"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Absent:
    """A file whose bytes are in the store only."""

    kind: Kind
    bytes: int
    """What has to come."""


def bytes_to_come(record: InodeRecord) -> int:
    """What of a file has to be fetched, at most: no holes, and nothing behind its end."""
    return min(record.allocated, record.size)
