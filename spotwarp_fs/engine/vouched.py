"""Which local bytes the fsync journal vouches for: they may not go before the journal, or a manifest, says so (L4).

Invariant: bytes are vouched for if a journalled record says that this block is only here, and the journal says of its
file that it was synced. What is being journalled counts from the step that looked at the map, long before it is on
disk; what it takes back counts only once it is. Files that were never fsynced are never vouched for, and pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotwarp_fs.core.journal import LocalClaims, Published, Record, Synced
from spotwarp_fs.core.types import BlockIndex, ChangeSeq, Inode, ManifestNumber

FIRST = BlockIndex(0)


class Vouched:
    """What a rebuild would take from this disk."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._claims = LocalClaims()
        self._synced: dict[Inode, ChangeSeq] = {}
        self._coming = LocalClaims()
        self._coming_synced: set[Inode] = set()
        self._coming_unknown = False
        self._note(records)

    def begin(self, syncing: Iterable[Inode]) -> None:
        """A record of the present map is being made, and these files will be called synced."""
        self._coming_synced.update(syncing)
        self._coming_unknown = True

    def coming(self, record: Record) -> None:
        """What the record begun says; it may be on disk from now on."""
        self._coming.note(record)
        self._coming_unknown = False

    def arrived(self, records: Sequence[Record], *, alone: bool) -> None:
        """These records are on disk, behind all others or *alone*; without this call they may be, or not."""
        if alone:
            self._claims, self._synced = LocalClaims(), {}
        self._note(records)
        self._coming, self._coming_synced, self._coming_unknown = LocalClaims(), set(), False

    def published(self, seq: ChangeSeq) -> None:
        """A manifest has everything up to *seq*: a rebuild begins there."""
        for claims in (self._claims, self._coming):
            claims.note(Published(seq, ManifestNumber(0), ""))
        self._synced = {ino: synced for ino, synced in self._synced.items() if synced > seq}

    def _note(self, records: Iterable[Record]) -> None:
        for record in records:
            self._claims.note(record)
            if isinstance(record, Synced):
                self._synced[record.ino] = max(record.seq, self._synced.get(record.ino, ChangeSeq(0)))

    def holds(self, ino: Inode, block: BlockIndex) -> bool:
        """Return whether the journal vouches for the local bytes of this block, or is about to."""
        if ino not in self._synced and ino not in self._coming_synced:
            return False
        return self._coming_unknown or self._claims.holds(ino, block) or self._coming.holds(ino, block)

    def holds_any(self, ino: Inode, first: BlockIndex = FIRST) -> bool:
        """Return whether the journal vouches for any block of *ino* from *first* on, or is about to."""
        if ino not in self._synced and ino not in self._coming_synced:
            return False
        return self._coming_unknown or self._claims.holds_any(ino, first) or self._coming.holds_any(ino, first)

    def named(self, ino: Inode) -> list[BlockIndex]:
        """Blocks of *ino* that the journal says are only here, whether or not it calls the file synced."""
        return self._claims.blocks_of(ino)

    @property
    def synced(self) -> set[Inode]:
        """Files that the journal calls synced."""
        return set(self._synced)
