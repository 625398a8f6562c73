"""Read one file of the directory so that what is published of it was its content at one moment (C19).

Invariants: a placeholder is never read; a file is *trusted* only if it was read under an unbroken read lease (nobody
had it open for writing or mapped writable) and its last change was 2 s old by then; what was read without a lease
counts only if a second read finds the same bytes (so that all of them were there in between), or if its last change is
old. A writer who wants in is let in at once: the lease is given back, and the read does not count.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import trio

from spotwarp_fs.core.frames import digest, holds, is_zero
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, ino_range, key_block
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.core.witness import Seen, is_settled
from spotwarp_fs.directory import leases
from spotwarp_fs.engine.jobs import Offer
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.workspace import Workspace

RUN_BLOCKS: Final = 4
"""Blocks that one call in a worker thread reads and digests."""
LEASE_LOOK_S: Final = 0.02
"""How long a writer's `open` may wait for the lease of a read."""
TRIES_MAX: Final = 3
"""A file that never settles is published after so many tries, flagged."""
QUIET_NS: Final = 10_000_000_000
"""A `write` notes the time before it copies its bytes, so without a lease an unchanged `stat` says little about a
younger change; and where there are no leases, an atomic file counts as closed when it was unchanged for so long."""


class Outcome(Enum):
    """How a read ended."""

    SETTLED = "settled"
    """The content is what the file held while it was read."""
    GROWN = "grown"
    """What was read is the beginning of the file as it is now."""
    UNSETTLED = "unsettled"
    """It changed meanwhile."""
    IN_FLIGHT = "in flight"
    """An atomic file that somebody is writing, or one of a checkpoint that is read later: not read."""
    ABSENT = "absent"
    """A placeholder."""
    GONE = "gone"
    """Not there any more, or something else."""
    FAILED = "failed"
    """It cannot be read, or the store did not take it; see `reason`."""


COUNTED: Final = (Outcome.SETTLED, Outcome.GROWN)
"""Reads whose content goes into the map."""


@dataclass(slots=True)
class Reading:
    """What was read of a file. `changed` has every block whose content is not that of the record; None: a hole."""

    outcome: Outcome
    status: os.stat_result
    seen: Seen = Seen.NOTHING
    changed: dict[BlockIndex, Offer | None] = field(default_factory=dict)
    reason: str = ""
    written: bool = False
    """Somebody had it open for writing, as far as can be told: what was read may be the beginning of more."""

    @property
    def offers(self) -> list[Offer]:
        """The frames that this read asked for."""
        return [offer for offer in self.changed.values() if offer is not None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One block as it was read."""

    block: BlockIndex
    name: bytes | None
    """Its digest; None: all zeros."""
    raw: bytes | None
    """Its bytes, if they are not what the record says."""


class FileReader:
    """Reads files for one session."""

    def __init__(self, session: Session) -> None:
        self._ws: Workspace = session.workspace
        self._sealer: Sealer = session.sealer
        self._session = session
        self.bytes_read = 0

    async def read(
        self, path: bytes, found: os.stat_result, ino: Inode | None, *, atomic: bool, tries: int = 0
    ) -> Reading:
        """Read the file at *path* (absolute), which a walk found as *found*; *ino* is its inode in the map, if any.

        What comes back counts once `answered` has been awaited; `let_go` ends it in any case.
        Raises what loading the block map raises when the store is away.
        """
        try:
            fd = _open(path)
        except OSError as error:
            return _not_opened(path, found, error)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != (found.st_dev, found.st_ino):
                return Reading(Outcome.GONE, found)
            if leases.absence(fd) is not None:
                return Reading(Outcome.ABSENT, status)
            known = await self._known(ino)
            reading = None
            with leases.read_lease(fd) as lease:
                if lease.held:
                    reading = await self._read_leased(fd, known, lease)
            if reading is None:
                reading = await self._read_open(fd, known, atomic=atomic, refused=lease.refused, tries=tries)
            if reading.outcome is Outcome.UNSETTLED:
                self._sealer.let_go(reading.offers)
            return reading
        except OSError as error:
            return Reading(Outcome.FAILED, found, reason=f"{os.fsdecode(path)} cannot be read: {error.strerror}")
        finally:
            os.close(fd)

    async def _known(self, ino: Inode | None) -> dict[BlockIndex, FrameRef]:
        """The frames of a file as the map has it."""
        if ino is None:
            return {}
        await self._session.files.load_map(ino)
        with self._ws.kv.read() as view:
            rows = [(key_block(key), value) for key, value in view.scan(*ino_range(BLOCK_TABLE, ino)) if value]
        states = {block: BlockState.decode(value) for block, value in rows}
        return {block: state.frame for block, state in states.items() if state.frame is not None}

    async def _read_leased(self, fd: int, known: Mapping[BlockIndex, FrameRef], lease: leases.ReadLease) -> Reading:
        """Read while nobody can write; whoever wants to ends this read."""
        # The lease first, then the clock: from here on any change shows.
        status = os.fstat(fd)
        trusted = is_settled(status, self._ws.wall.now_ns())
        reading = Reading(Outcome.UNSETTLED, status, reason="somebody wants to write")
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                while lease.unbroken():
                    await trio.sleep(LEASE_LOOK_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            await self._blocks(fd, known, status.st_size, reading.changed)
            nursery.cancel_scope.cancel()
        if lease.unbroken() and _same(status, os.fstat(fd)):
            reading.outcome, reading.reason = Outcome.SETTLED, ""
            reading.seen = Seen.TRUSTED if trusted else Seen.NOTHING
        return reading

    async def _read_open(
        self, fd: int, known: Mapping[BlockIndex, FrameRef], *, atomic: bool, refused: bool, tries: int
    ) -> Reading:
        """Read a file that somebody has open for writing, or on a filesystem without leases."""
        now_ns = self._ws.wall.now_ns()
        status = os.fstat(fd)
        written = refused or now_ns - status.st_ctime_ns < QUIET_NS
        if atomic and written:
            return Reading(Outcome.IN_FLIGHT, status)
        reading = Reading(Outcome.UNSETTLED, status, reason="it changes while it is read", written=written)
        names = await self._blocks(fd, known, status.st_size, reading.changed)
        after = os.fstat(fd)
        if _same(status, after) and now_ns - status.st_ctime_ns >= QUIET_NS:
            reading.outcome = Outcome.SETTLED
        elif after.st_size >= status.st_size and await self._has_still(fd, names, status.st_size):
            reading.outcome = Outcome.SETTLED if _same(status, os.fstat(fd)) else Outcome.GROWN
        elif tries + 1 >= TRIES_MAX and not atomic:
            reading.outcome, reading.seen = Outcome.GROWN, Seen.FUZZY
        return reading

    async def _blocks(
        self,
        fd: int,
        known: Mapping[BlockIndex, FrameRef],
        size: int,
        changed: dict[BlockIndex, Offer | None],
    ) -> dict[BlockIndex, bytes | None]:
        """Read every block below *size*, and offer what the record has not; returns all digests (None: zeros)."""
        names: dict[BlockIndex, bytes | None] = {}
        count = -(-size // BLOCK_BYTES)
        sparse = os.fstat(fd).st_blocks * 512 < size
        for first in range(0, count, RUN_BLOCKS):
            blocks = range(first, min(first + RUN_BLOCKS, count))
            expected = {block: known.get(BlockIndex(block)) for block in blocks}
            for piece in await self._ws.workers.run(Work.DISK, _read_run, fd, expected, size, sparse):
                names[piece.block] = piece.name
                if piece.raw is not None and piece.name is not None:
                    changed[piece.block] = await self._sealer.offer(piece.raw, piece.name)
                elif piece.name is None and expected[piece.block] is not None:
                    changed[piece.block] = None
            self.bytes_read += min(size, (first + RUN_BLOCKS) * BLOCK_BYTES) - first * BLOCK_BYTES
        return names

    async def _has_still(self, fd: int, names: Mapping[BlockIndex, bytes | None], size: int) -> bool:
        """Read everything below *size* once more: the same bytes, twice, were there in between."""
        blocks = sorted(names)
        for at in range(0, len(blocks), RUN_BLOCKS):
            expected: dict[int, FrameRef | None] = dict.fromkeys(blocks[at : at + RUN_BLOCKS])
            for piece in await self._ws.workers.run(Work.DISK, _read_run, fd, expected, size, False):
                if piece.name != names[piece.block]:
                    return False
        return True

    async def answered(self, readings: Iterable[Reading]) -> None:
        """Wait until the store has what these readings offered; one that it did not take has failed."""
        readings = list(readings)
        await self._sealer.answered(offer for reading in readings for offer in reading.offers)
        for reading in readings:
            if reading.outcome in COUNTED and any(offer.frame is None for offer in reading.offers):
                reading.outcome, reading.reason = Outcome.FAILED, "the store did not take it yet"

    def let_go(self, readings: Iterable[Reading]) -> None:
        """The map has what these readings offered, or it is not wanted."""
        for reading in readings:
            self._sealer.let_go(reading.offers)


def _open(path: bytes) -> int:
    """Open for reading without waiting for a lease of somebody else, and without leaving an access time behind."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # O_NOATIME is for the owner
        return os.open(path, flags)


def _not_opened(path: bytes, found: os.stat_result, error: OSError) -> Reading:
    if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        return Reading(Outcome.GONE, found)
    if error.errno == errno.EAGAIN:
        # Under somebody's lease: a placeholder, or a file that another program guards.
        return Reading(Outcome.UNSETTLED, found, reason="another program has a lease on it")
    return Reading(Outcome.FAILED, found, reason=f"{os.fsdecode(path)} cannot be opened: {error.strerror}")


def _same(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )


def _read_run(fd: int, expected: Mapping[int, FrameRef | None], size: int, sparse: bool) -> list[_Piece]:
    """Read and digest neighbouring blocks (blocking)."""
    pieces = []
    for block, ref in expected.items():
        start = block * BLOCK_BYTES
        length = min(BLOCK_BYTES, size - start)
        if sparse and _is_hole(fd, start, length):
            pieces.append(_Piece(BlockIndex(block), None, None))
            continue
        raw = _pread(fd, start, length)
        name = None if is_zero(raw) else digest(raw)
        same = name is None or (ref is not None and holds(ref, raw, name))
        pieces.append(_Piece(BlockIndex(block), name, None if same else raw))
    return pieces


def _is_hole(fd: int, start: int, length: int) -> bool:
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= start + length
    except OSError as error:
        return error.errno == errno.ENXIO


def _pread(fd: int, start: int, length: int) -> bytes:
    """Read *length* bytes; where the file became shorter meanwhile, zeros: its `stat` has changed then."""
    found = os.pread(fd, length, start)
    while len(found) < length:
        more = os.pread(fd, length - len(found), start + len(found))
        if not more:
            return found.ljust(length, b"\0")
        found += more
    return found
