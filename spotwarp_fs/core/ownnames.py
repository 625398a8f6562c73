"""Names that the directory form keeps for itself, and how it stands for what is not here.

    .spotwarp/identity        whose directory this is
    .spotwarp/new/            files that have no name of their own yet
    .spotwarp/replaced/       what a restore found and moved aside
    .spotwarp/absent/<ino>    never exists: a symlink to it stands for a file that cannot come in time

Invariant: nothing below `.spotwarp` in a workspace's root is published. A symlink to an absent file is the same
wherever it lies, so that it may be moved; it dangles everywhere, also for `open(O_CREAT)`, because its directory never
exists.
"""

from __future__ import annotations

import re
from typing import Final

from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, Witness

OWN_NAME: Final = b".spotwarp"
"""In the workspace's root only."""
IDENTITY_NAME: Final = b"identity"
NEW_NAME: Final = b"new"
REPLACED_NAME: Final = b"replaced"

_ABSENT: Final = re.compile(rb"\.spotwarp/absent/([0-9a-f]{16})")

UNMADE: Final = Witness(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, Seen.ABSENT)
"""Witness of something that this node cannot make (a device, a name too long): its record is carried over."""


def absent_target(ino: Inode) -> bytes:
    """Give the target of the symlink that stands for *ino*."""
    return b".spotwarp/absent/%016x" % ino


def absent_inode(target: bytes) -> Inode | None:
    """Tell for which file a symlink to *target* stands; None for an ordinary symlink."""
    match = _ABSENT.fullmatch(target)
    return Inode(int(match[1], 16)) if match else None


def is_unmade(witness: Witness) -> bool:
    """Tell whether this is the witness of something that was never made here."""
    return witness.ino == 0 and witness.dev == 0
