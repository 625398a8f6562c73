"""Turn published files of older checkpoints back into placeholders: the disk may be smaller than the workspace.

Invariant: a file is dropped only under its own write lease, with the `stat` that was published, and when every block of
it is in a published state; its witness says "absent" before its first byte goes.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from spotwarp_fs.core.inflight import family
from spotwarp_fs.core.paths import subtree
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead, Work
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    BlockState,
    EntryRecord,
    FrameState,
    InodeRecord,
    NodeTable,
    ino_range,
    inode_key,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.scratch import published
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Look, Seen, Witness, look
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.absent import Absent, Kind, bytes_to_come
from spotwarp_fs.directory.filling import Filler
from spotwarp_fs.directory.order import is_in_checkpoint, is_numbered
from spotwarp_fs.directory.plan import Thing, make_thing, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.witnessing import note, witness_of

log = logging.getLogger(__name__)

OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a round gave back."""

    files: int
    bytes: int


class Dropper:
    """Gives local bytes back to the disk."""

    def __init__(self, site: Site, filler: Filler) -> None:
        self._site = site
        self._ws = site.session.workspace
        self._filler = filler

    async def keep_newest(self, count: int) -> Dropped:
        """Drop what belongs to checkpoints older than the newest *count* complete ones of their series."""
        unsafe = {item.ino for item in self._site.session.publisher.head.manifest.in_flight}
        with self._ws.kv.read() as view:
            wanted = older_files(view, self._ws.policies, unsafe, count, self._site.limits.small_file_bytes_max)
        files = total = 0
        for ino in wanted:
            given_back = await self.drop(ino)
            files += bool(given_back)
            total += given_back
        return Dropped(files, total)

    async def drop(self, ino: Inode) -> int:
        """Make a file a placeholder; gives the bytes that it had, or 0 if it is not the published one, or in use."""
        placeholders = self._site.placeholders
        if placeholders is None or not placeholders.room or ino in self._filler.absent:
            return 0
        await self._site.session.files.load_map(ino)
        with self._ws.kv.read() as view:
            witness = witness_of(view, ino)
            if witness is None or not is_published(view, ino):
                return 0
            thing = make_thing(view, ino)
        try:
            fd = os.open(place_of(self._site.root, thing.paths[0]), OPEN_FLAGS)
        except OSError:
            return 0  # somebody's lease, read-only for this user, or gone
        try:
            return await self._drop(thing, fd, witness)
        finally:
            os.close(fd)

    async def _drop(self, thing: Thing, fd: int, witness: Witness) -> int:
        """The lease first: under it nothing can change any more."""
        placeholders, ino = self._site.placeholders, thing.ino
        assert placeholders is not None
        try:
            leases.take(fd, leases.Kind.WRITE)
        except OSError:
            return 0  # open somewhere
        status = os.fstat(fd)
        if look(witness, status) is not Look.CLEAN or status.st_size != thing.record.size:
            leases.release(fd)
            return 0
        leases.mark_absent(fd, self._site.session_id)
        if ino not in await placeholders.hold([(ino, fd)]):
            leases.clear_mark(fd)
            await self._see(ino, Witness.of(os.fstat(fd), witness.seen))
            leases.release(fd)
            return 0
        await self._see(ino, Witness.of(os.fstat(fd), Seen.ABSENT))
        with placeholders.writing(ino) as held:
            await self._ws.workers.run(Work.DISK, _empty, held, status)
        await self._see(ino, Witness.of(os.fstat(fd), Seen.ABSENT))
        self._filler.add(ino, Absent(Kind.PLACEHOLDER, bytes_to_come(thing.record)))
        log.info("dropped inode=%#x bytes=%d", ino, status.st_blocks * 512)
        return status.st_blocks * 512

    async def _see(self, ino: Inode, witness: Witness) -> None:
        note(self._ws, [(ino, witness)], {})
        await self._filler.tell(ino, witness)


def _empty(fd: int, status: os.stat_result) -> None:
    """Give the space back; a kill in between leaves a wrong size, which the next start sets right."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, status.st_size)
    if os.fstat(fd).st_mode != status.st_mode:
        os.chmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def is_published(view: KVRead, ino: Inode) -> bool:
    """Tell whether a published state has the file exactly as the map does; its block map must be loaded."""
    if view.get(NodeTable.CHANGES + inode_key(ino)) is not None:
        return False
    start, stop = ino_range(NodeTable.CHANGES + BLOCK_TABLE, ino)
    if next(iter(view.scan(start, stop)), None) is not None:
        return False
    states = (BlockState.decode(value) for _, value in view.scan(*ino_range(BLOCK_TABLE, ino)) if value)
    return all(state.state is FrameState.PUBLISHED for state in states)


def older_files(
    snapshot: KVRead, policies: Policies, unsafe: Collection[int], count: int, small_bytes: int
) -> list[Inode]:
    """Return large files of all but the newest *count* complete checkpoints of each series, the oldest first."""
    view = published(snapshot)
    series: dict[tuple[Inode, bytes, bool], list[tuple[int, Inode]]] = defaultdict(list)
    for key, value in view.scan(*table_range(ENTRY_TABLE)):
        name, entry = key_name(key), EntryRecord.decode(value)
        directory = entry.dtype == stat.S_IFDIR >> 12
        atomic = policies.is_atomic_dir(name) if directory else policies.is_atomic(name)
        record = view.get(inode_key(entry.ino))
        if not atomic or not is_numbered(name) or entry.ino in unsafe or record is None:
            continue
        if is_in_checkpoint(view, policies, key_ino(key), name):
            continue
        mtime_ns = InodeRecord.decode(record).mtime_ns
        series[key_ino(key), family(name), directory].append((mtime_ns, entry.ino))
    found: dict[Inode, None] = {}
    for members in series.values():
        for _, ino in sorted(members)[: max(0, len(members) - count)]:
            found |= dict.fromkeys(
                node.ino
                for _, node in subtree(view, ino)
                if stat.S_ISREG(node.record.mode) and node.record.size > small_bytes
            )
    return list(found)
