"""Bring the bytes of files that are not here: whole files, many requests at once, the most wanted first.

Invariant: every block has passed the digest of its record before it is written (P-08); a file that could not be filled
whole stays absent. Mark and witness change only when all bytes are there, and the lease goes last (L5).
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Corrupt, NotFound, SpotwarpError, StoreRefused, Unavailable
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import InodeRecord, inode_key
from spotwarp_fs.core.types import BLOCK_BYTES, Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.absent import Absent, Kind
from spotwarp_fs.directory.applying import write_all
from spotwarp_fs.directory.drafts import absent_link
from spotwarp_fs.directory.keeping import PlaceholderLate
from spotwarp_fs.directory.lateness import Latecomers
from spotwarp_fs.directory.order import Order, order
from spotwarp_fs.directory.plan import Thing, make_thing, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.witnessing import note, witness_of
from spotwarp_fs.engine.hydrate import Item
from spotwarp_fs.engine.through import Deliver, Through, Urgency, items_of
from spotwarp_fs.engine.turns import Rank

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fill:
    """A file on its way."""

    urgency: Urgency
    done: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the filling is."""

    files_left: int
    bytes_left: int
    files_filled: int
    bytes_brought: int
    bytes_per_s: float | None
    waiting: int
    """Files that somebody waits for."""
    part: str
    """What comes in background; empty once there is nothing more to do."""
    damaged: int


class Filler:
    """Everything that is absent, and how it comes."""

    def __init__(self, site: Site) -> None:
        self._site = site
        session = self._site.session
        self._session = session
        self._ws = session.workspace
        self._root = site.root
        self._drafts = site.drafts
        self._placeholders = site.placeholders
        self._limits = site.limits
        self.through = Through(session.workspace, session.packs, session.health)
        self.absent: dict[Inode, Absent] = {}
        self.late: set[Inode] = set()
        """Placeholders that timed out under an earlier daemon; of this one's the keeper knows."""
        self.tree = trio.Lock()
        """Held while a file takes the place of a symlink, and while `on_seen` is told; the scanner's, where there is
        one: so no walk sees half of it."""
        self.on_seen: Callable[[Inode, Witness], None] = lambda ino, witness: None
        """Told of each new witness, once it is written: who keeps them in memory takes it before the next look."""
        self.damaged: dict[Inode, str] = {}
        """What could not be fetched, and why."""
        self._filling: dict[Inode, _Fill] = {}
        self._wanted: set[Inode] = set()
        self._added = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._files_filled = 0
        self._full = False
        self._part = "none yet"

    def progress(self) -> Progress:
        """Say how far it is."""
        meter = self.through.meter
        return Progress(
            len(self.absent), sum(each.bytes for each in self.absent.values()), self._files_filled,
            meter.bytes_brought, meter.bytes_per_s, len(self._wanted), self._part, len(self.damaged),
        )  # fmt: skip

    async def run(self) -> None:
        """Serve whoever waits, and fill in background, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            nursery.start_soon(self.serve)
            if self._placeholders is not None:
                nursery.start_soon(Latecomers(self._site, self).run)
            await self._background()

    async def serve(self) -> None:
        """Fill what somebody waits for in `open`, until cancelled; the next call goes on with what is not done then."""
        if self._placeholders is None:
            return
        async with trio.open_nursery() as nursery:
            for ino in self._wanted:
                nursery.start_soon(self._fill_for_somebody, ino)
            while True:
                ino = await self._placeholders.wanted()
                if ino not in self._wanted:
                    self._wanted.add(ino)
                    nursery.start_soon(self._fill_for_somebody, ino)

    async def _fill_for_somebody(self, ino: Inode) -> None:
        while ino not in self.absent:  # the keeper knows it from an earlier daemon, before it was found here
            await self._added.wait()
        while not await self.fill(ino) and ino not in self.damaged and self._is_held(ino):
            await trio.sleep(self._limits.no_room_pause_s)
        self._wanted.discard(ino)

    def _is_held(self, ino: Inode) -> bool:
        try:
            return self._placeholders is not None and self._placeholders.descriptor(ino) >= 0
        except PlaceholderLate:
            return False

    def start(self, ino: Inode) -> None:
        """Fill a file as if somebody waited for it, without waiting for that."""
        if self._nursery is not None and ino not in self._wanted:
            self._wanted.add(ino)
            self._nursery.start_soon(self._fill_for_somebody, ino)

    def add(self, ino: Inode, absent: Absent) -> None:
        """Note that a file is not here."""
        self.absent[ino] = absent
        self._added.set()
        self._added = trio.Event()

    async def fill(self, ino: Inode, rank: Rank = Rank.DEMAND) -> bool:
        """Return when the file is whole (True), or could not be filled; what was wrong with it is in `damaged`."""
        fill = self._filling.get(ino)
        if fill is not None:
            if rank is Rank.DEMAND:
                self.through.promote(fill.urgency)
            await fill.done.wait()
            return ino not in self.absent
        absent = self.absent.get(ino)
        if absent is None:
            return True
        fill = self._filling[ino] = _Fill(Urgency(rank))
        try:
            await self._fill(ino, absent, fill.urgency)
        finally:
            del self._filling[ino]
            fill.done.set()
        return ino not in self.absent

    async def _fill(self, ino: Inode, absent: Absent, urgency: Urgency) -> None:
        try:
            if self._is_gone(ino):
                await self._forget(ino, absent)
            elif absent.kind is Kind.PLACEHOLDER:
                await self._fill_placeholder(ino, urgency)
            else:
                await self._replace_link(ino, urgency)
        except PlaceholderLate:
            log.warning("inode %#x did not come in time", ino)
        except (Corrupt, NotFound) as error:
            self.damaged[ino] = str(error)
            self._ws.report(f"{self._called(ino)} cannot be restored, and stays absent: {error}")
        except (Unavailable, StoreRefused) as error:
            self._ws.report(f"{self._called(ino)} did not come yet: {error}")
        except OSError as error:
            self._full = True
            self._ws.report(f"{self._called(ino)} cannot be written: {error.strerror}")
        else:
            self.damaged.pop(ino, None)

    def _record(self, ino: Inode) -> InodeRecord | None:
        with self._ws.kv.read() as view:
            value = view.get(inode_key(ino))
        return InodeRecord.decode(value) if value else None

    def _is_gone(self, ino: Inode) -> bool:
        record = self._record(ino)
        return record is None or not record.nlink

    def _called(self, ino: Inode) -> str:
        with self._ws.kv.read() as view:
            path = paths.path_of(view, ino)
        return os.fsdecode(path) if path else f"inode {ino:#x}"

    async def _forget(self, ino: Inode, absent: Absent) -> None:
        """The file was deleted before its bytes came."""
        if absent.kind is Kind.PLACEHOLDER and self._placeholders is not None:
            await self._placeholders.release(ino)
        self.absent.pop(ino, None)

    async def bring_into(self, fd: int, ino: Inode, size: int, urgency: Urgency) -> None:
        """Fetch a whole file into a descriptor; raises what was wrong with the first block that did not come."""

        async def write(run: list[Item], contents: list[bytes]) -> None:
            await self._ws.workers.run(Work.DISK, _write_run, fd, run, contents, size)

        await self._bring(ino, write, urgency)

    async def _bring(self, ino: Inode, write: Deliver, urgency: Urgency) -> None:
        await self._session.files.load_map(ino)
        with self._ws.kv.read() as view:
            items = items_of(view, ino)
        failures = await self.through.bring(self.through.runs(items), write, urgency)
        for item, error in failures:
            raise _about(item, error)

    async def _fill_placeholder(self, ino: Inode, urgency: Urgency) -> None:
        placeholders = self._placeholders
        assert placeholders is not None
        was_begun, before = has_data(placeholders.descriptor(ino)), os.fstat(placeholders.descriptor(ino))
        if not before.st_nlink:
            await self._forget(ino, self.absent[ino])
            return

        async def write(run: list[Item], contents: list[bytes]) -> None:
            with placeholders.writing(ino) as fd:
                await self._ws.workers.run(Work.DISK, _write_run, fd, run, contents, before.st_size)

        await self._bring(ino, write, urgency)
        with self._ws.kv.read() as view:
            laid_out = witness_of(view, ino)
        with placeholders.writing(ino) as fd:
            witness = await self._ws.workers.run(Work.DISK, self._complete, fd, before, laid_out, was_begun)
        note(self._ws, [(ino, witness)], {})
        await placeholders.release(ino)
        self._filled(ino)
        await self.tell(ino, witness)

    def _complete(self, fd: int, before: os.stat_result, laid_out: Witness | None, was_begun: bool) -> Witness:
        """Put back what writing changed, and take the mark away; the lease still keeps everybody out (blocking)."""
        # What an interrupted fill has left means that the time is its own, not that of the file.
        mtime_ns = before.st_mtime_ns if laid_out is None or not was_begun else laid_out.mtime_ns
        mode = os.fstat(fd).st_mode
        lost = before.st_mode & ~mode & (stat.S_ISUID | stat.S_ISGID)
        if lost:  # set-user-id bits do not survive a write
            os.chmod(fd, stat.S_IMODE(mode) | lost)
        os.utime(fd, ns=(before.st_atime_ns, mtime_ns))
        leases.clear_mark(fd)
        witness = Witness.of(os.fstat(fd), Seen.TRUSTED)
        if laid_out is None:
            return witness
        # What somebody changed since it was laid out is for the scanner to see, which may not have come by yet.
        return replace(witness, mode=laid_out.mode, uid=laid_out.uid, gid=laid_out.gid)

    async def tell(self, ino: Inode, witness: Witness) -> None:
        """Tell whoever keeps witnesses in memory."""
        async with self.tree:
            self.on_seen(ino, witness)

    def _filled(self, ino: Inode) -> None:
        self.absent.pop(ino, None)
        self._files_filled += 1
        log.info("filled inode=%#x left=%d", ino, len(self.absent))

    async def _replace_link(self, ino: Inode, urgency: Urgency) -> None:
        """Bring a file that a dangling symlink stands for, and put it in its place."""
        thing = self._thing(ino)
        if thing is None:
            return
        await self.bring_draft(thing, urgency)
        async with self.tree:
            witness = await self._ws.workers.run(Work.DISK, self._put_in_place, thing)
            if witness is not None:
                note(self._ws, [(ino, witness)], self._drafts.take_refused())
                self.on_seen(ino, witness)
        self._filled(ino)

    async def bring_draft(self, thing: Thing, urgency: Urgency) -> None:
        """Fetch a whole file into a draft with all its attributes; without a name, and none is left if this raises."""
        fd = self._drafts.create(thing.ino)
        try:
            await self.bring_into(fd, thing.ino, thing.record.size, urgency)
            await self._ws.workers.run(Work.DISK, self._finish_draft, fd, thing)
        except BaseException:
            self._drafts.drop(thing.ino)
            raise
        finally:
            os.close(fd)

    def _finish_draft(self, fd: int, thing: Thing) -> None:
        os.ftruncate(fd, thing.record.size)
        self._drafts.apply(fd, thing)

    def _thing(self, ino: Inode) -> Thing | None:
        """The file under the names that still have its symlink."""
        with self._ws.kv.read() as view:
            thing = make_thing(view, ino)
        thing.paths = [path for path in thing.paths if absent_link(place_of(self._root, path)) == ino]
        return thing if thing.paths else None

    def _put_in_place(self, thing: Thing) -> Witness | None:
        """Replace symlinks by the file (blocking); their directories keep their times. None if none was left."""
        placed = []
        for path in thing.paths:
            place = place_of(self._root, path)
            above = os.path.dirname(place)
            status = os.stat(above)
            if self._drafts.replace_link(thing.ino, path):
                placed.append(place)
                with suppress(OSError):
                    os.utime(above, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._drafts.drop(thing.ino)
        # Last: each name that comes or goes changes the link count and the ctime.
        return Witness.of(os.lstat(placed[0]), Seen.TRUSTED) if placed else None

    async def _background(self) -> None:
        """Fill what will be wanted, in the order in which it will be; a file that fails is left to whoever opens it."""
        found = await self.order()
        small = tuple(ino for ino in found.plain if self.absent[ino].bytes <= self._limits.small_file_bytes_max)
        parts = [("trace", found.traced), ("small", small), ("checkpoint", found.checkpoint)]
        links = tuple(ino for ino in found.plain if self.absent[ino].kind is Kind.LINK)
        parts.append(("too long to wait for", links))
        if self._ws.settings.hydrate_all:
            parts += [("rest", found.plain), ("older checkpoints", found.older)]
        for name, inodes in parts:
            self._part = name
            await self._in_background(inodes)
        self._part = ""

    async def order(self) -> Order:
        """Say in which order what is absent comes."""
        unsafe = {item.ino for item in self._session.publisher.head.manifest.in_flight}
        sizes = {ino: absent.bytes for ino, absent in self.absent.items()}
        snapshot = self._ws.kv.snapshot()
        try:
            return await self._ws.workers.run(Work.DISK, order, snapshot, self._ws.policies, unsafe, sizes)
        finally:
            snapshot.close()

    async def _in_background(self, inodes: tuple[Inode, ...]) -> None:
        slots = trio.Semaphore(self._limits.background_files)
        async with trio.open_nursery() as nursery:
            for ino in inodes:
                await slots.acquire()
                absent = self.absent.get(ino)
                if self._ws.fenced is not None or self._ws.stopping:
                    return
                if absent is None or not await self._has_room(absent.bytes):
                    slots.release()
                    continue
                nursery.start_soon(self._one_in_background, ino, slots)

    async def _one_in_background(self, ino: Inode, slots: trio.Semaphore) -> None:
        try:
            await self.fill(ino, Rank.BACKGROUND)
        finally:
            slots.release()

    async def _has_room(self, count: int) -> bool:
        if self._full:
            await trio.sleep(self._limits.no_room_pause_s)
            self._full = False
        return self._site.free_bytes() - count >= self._limits.disk_reserve_bytes


def has_data(fd: int) -> bool:
    """Tell whether anything was written to a file, ever so little."""
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    return True


def _write_run(fd: int, run: list[Item], contents: list[bytes], size: int) -> None:
    for item, data in zip(run, contents, strict=True):
        offset = item.block * BLOCK_BYTES
        write_all(fd, data[: max(0, size - offset)], offset)


def _about(item: Item, error: SpotwarpError) -> SpotwarpError:
    """Say which block; the kind of error stays."""
    return type(error)(f"block {item.block} of inode {item.ino:#x}: {error}")
