"""What of a state is in the directory already, and what is there that the state does not have.

Invariant: "right" means right bytes: a trusted witness with an unchanged `stat`, or the digests of every block. A
placeholder is never read. Nothing is changed here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from spotwarp_fs.core.frames import digest, is_zero
from spotwarp_fs.core.ownnames import OWN_NAME, absent_inode
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import FrameRef, NodeTable, ino_key
from spotwarp_fs.core.types import BLOCK_BYTES, Inode
from spotwarp_fs.core.witness import Look, Witness, look
from spotwarp_fs.directory.plan import Plan, Thing, place_of
from spotwarp_fs.engine.hydrate import Item

READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

IsAbsent = Callable[[bytes], bool]
"""Tells whether the file at a path is a placeholder."""


class Verdict(Enum):
    """How something that is there stands to the state."""

    RIGHT = "right"
    """As it was laid out or published."""
    UNREAD = "unread"
    """A file of the right size: its digests decide."""
    ABSENT = "absent"
    """A placeholder."""
    LINK = "link"
    """A dangling symlink that stands for it."""


@dataclass(frozen=True, slots=True)
class Match:
    """One of a thing's names leads to it, more or less."""

    path: bytes
    verdict: Verdict
    status: os.stat_result


@dataclass(slots=True)
class Compared:
    """Outcome of the comparison."""

    matches: dict[Inode, Match] = field(default_factory=dict)
    foreign: list[bytes] = field(default_factory=list)
    """Paths that the state does not have, or has as something else, parents before children."""
    spare: list[bytes] = field(default_factory=list)
    """Such paths that are one more name of a file which stays."""
    directories: set[bytes] = field(default_factory=set)
    """Those of the state that are there."""


def compare(plan: Plan, root: bytes, view: KVRead, is_absent: IsAbsent) -> Compared:
    """Compare (blocking); *view* holds the witnesses."""
    compared, here = Compared(), _look_around(plan, root)
    for directory in plan.directories:
        status = here.pop(directory.paths[0], None)
        if status is not None and stat.S_ISDIR(status.st_mode):
            compared.directories.add(directory.paths[0])
        elif status is not None:
            compared.foreign.append(directory.paths[0])
    taken: set[tuple[int, int]] = set()
    for thing in plan.things.values():
        match = _best(thing, root, _Looker(here, taken, view, is_absent))
        if match is not None:
            compared.matches[thing.ino] = match
            taken.add((match.status.st_dev, match.status.st_ino))
        for path in thing.paths:
            status = here.pop(path, None)
            if status is not None and not _fits(thing, root, path, status, match):
                here[path] = status
    for path, status in here.items():
        spare = stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) in taken
        (compared.spare if spare else compared.foreign).append(path)
    return compared


def _look_around(plan: Plan, root: bytes) -> dict[bytes, os.stat_result]:
    """Give everything that lies in directories of the plan."""
    here = {b"": os.lstat(root)}
    for directory in plan.directories:
        path = directory.paths[0]
        status = here.get(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        with os.scandir(place_of(root, path)) as entries:
            for entry in entries:
                if path or entry.name != OWN_NAME:
                    here[os.path.join(path, entry.name)] = entry.stat(follow_symlinks=False)
    return here


@dataclass(frozen=True, slots=True)
class _Looker:
    """What a thing is compared with."""

    here: dict[bytes, os.stat_result]
    taken: set[tuple[int, int]]
    """Files that are another thing already: two inodes of a state are never one here."""
    view: KVRead
    is_absent: IsAbsent


def _best(thing: Thing, root: bytes, looker: _Looker) -> Match | None:
    """Find what counts as the thing: the first of its names that leads to something like it."""
    row = looker.view.get(ino_key(NodeTable.WITNESS, thing.ino))
    witness = Witness.decode(row) if row else None
    for path in thing.paths:
        status = looker.here.get(path)
        if status is None or (status.st_dev, status.st_ino) in looker.taken:
            continue
        place = place_of(root, path)
        if thing.is_file:
            verdict = _file_verdict(thing, place, status, witness, looker.is_absent)
        else:
            verdict = Verdict.RIGHT if _is_special(thing, place, status) else None
        if verdict is not None:
            return Match(path, verdict, status)
    return None


def _is_special(thing: Thing, place: bytes, status: os.stat_result) -> bool:
    record = thing.record
    if stat.S_IFMT(status.st_mode) != stat.S_IFMT(record.mode):
        return False
    if stat.S_ISLNK(record.mode):
        return os.readlink(place) == record.target
    is_device = stat.S_ISCHR(record.mode) or stat.S_ISBLK(record.mode)
    return not is_device or status.st_rdev == record.rdev


def _file_verdict(
    thing: Thing, place: bytes, status: os.stat_result, witness: Witness | None, is_absent: IsAbsent
) -> Verdict | None:
    if stat.S_ISLNK(status.st_mode):
        return Verdict.LINK if absent_inode(os.readlink(place)) == thing.ino else None
    if not stat.S_ISREG(status.st_mode) or status.st_size != thing.record.size:
        return None
    if is_absent(place):
        return Verdict.ABSENT
    if witness is not None and look(witness, status) is Look.CLEAN:
        return Verdict.RIGHT
    return Verdict.UNREAD


def _fits(thing: Thing, root: bytes, path: bytes, status: os.stat_result, match: Match | None) -> bool:
    """Tell whether another name of the thing is as it should be."""
    if match is None:
        return False
    if match.verdict is Verdict.LINK:
        return stat.S_ISLNK(status.st_mode) and absent_inode(os.readlink(place_of(root, path))) == thing.ino
    return (status.st_dev, status.st_ino) == (match.status.st_dev, match.status.st_ino)


def holds(place: bytes, size: int, items: Sequence[Item]) -> bool:
    """Tell whether a file has exactly these blocks, and holes or zeros elsewhere (blocking)."""
    try:
        fd = os.open(place, READ_FLAGS)
    except (BlockingIOError, PermissionError):
        return False
    try:
        before = os.fstat(fd)
        frames = {int(item.block): item.frame for item in items}
        for block in range((size + BLOCK_BYTES - 1) // BLOCK_BYTES):
            data = os.pread(fd, BLOCK_BYTES, block * BLOCK_BYTES)
            if not _is_block(data, frames.get(block)):
                return False
        after = os.fstat(fd)
        return (before.st_size, before.st_ctime_ns) == (size, after.st_ctime_ns)
    finally:
        os.close(fd)


def _is_block(data: bytes, frame: FrameRef | None) -> bool:
    if frame is None:
        return is_zero(data)
    return digest(data[: frame.raw_bytes]) == frame.digest and is_zero(data[frame.raw_bytes :])
