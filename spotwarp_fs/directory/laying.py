"""Bring files of a state into the directory: small ones whole, large ones as `choosing` says.

Invariant: a small file is one block, so one delivery completes it; a placeholder gets its names only when it is held
under a lease; a file that is damaged in the store gets a name that nobody can open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.errors import Corrupt, NotFound, SpotwarpError, StoreRefused, Unavailable
from spotwarp_fs.core.ownnames import UNMADE, absent_target
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.units import format_size
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.absent import Absent, Kind, bytes_to_come
from spotwarp_fs.directory.applying import NOT_HERE, write_all
from spotwarp_fs.directory.choosing import Choice, choose
from spotwarp_fs.directory.drafts import absent_link
from spotwarp_fs.directory.filling import Filler
from spotwarp_fs.directory.order import checkpoint_inodes
from spotwarp_fs.directory.plan import Thing, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.witnessing import note
from spotwarp_fs.engine.hydrate import Item
from spotwarp_fs.engine.through import Urgency, by_place, items_of
from spotwarp_fs.engine.turns import Rank


@dataclass(slots=True)
class Report:
    """What laying out came to, for the user."""

    files: int = 0
    """Regular files of the state."""
    kept: int = 0
    """Those that were here already, whole or as placeholders."""
    filled: int = 0
    filled_bytes: int = 0
    placeholders: int = 0
    links: int = 0
    """Files that cannot be opened until they are here."""
    absent_bytes: int = 0
    replaced: list[str] = field(default_factory=list)
    """What was moved aside, as it was called."""
    replaced_in: str = ""
    damaged: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    """What this node cannot keep, and how often."""
    said: list[str] = field(default_factory=list)
    """What else the user should know."""


@dataclass(slots=True)
class LayingOut:
    """How far it is; may be looked at at any time."""

    phase: str = "comparing"
    files: int = 0
    files_total: int = 0
    bytes_total: int = 0
    """To be fetched before the command starts."""


class FileLayer:
    """Lays files out."""

    def __init__(self, site: Site, filler: Filler, report: Report, state: LayingOut) -> None:
        self._site = site
        self._ws = site.session.workspace
        self._filler = filler
        self._report = report
        self._state = state

    async def lay(self, files: Sequence[Thing]) -> None:
        """Bring *files*, none of which has a name here yet."""
        limits, total = self._site.limits, 0
        small, large = list[Thing](), list[Thing]()
        for thing in files:
            total += thing.record.size if thing.record.size <= limits.small_file_bytes_max else 0
            fits = thing.record.size <= limits.small_file_bytes_max and total <= limits.small_bytes_max
            (small if fits else large).append(thing)
        self._state.files_total += len(files)
        self._state.bytes_total += sum(bytes_to_come(thing.record) for thing in small)
        self._state.phase = "small files"
        for at in range(0, len(small), limits.small_files_at_once):
            await self._small(small[at : at + limits.small_files_at_once])
        if large:
            await self._large({thing.ino: thing for thing in large})

    async def _small(self, things: Sequence[Thing]) -> None:
        """Bring small files, those that lie together in one request."""
        of = {thing.ino: thing for thing in things}
        damaged = await self._load_maps(things)
        with self._ws.kv.read() as view:
            items = {ino: items_of(view, ino) for ino in of if ino not in damaged}
        placed: list[tuple[Inode, Witness]] = []

        def make(run: list[Item], contents: list[bytes]) -> None:
            for item, data in zip(run, contents, strict=True):
                placed.append((item.ino, self._make(of[item.ino], data)))

        async def write(run: list[Item], contents: list[bytes]) -> None:
            await self._ws.workers.run(Work.DISK, make, run, contents)

        hollow = [ino for ino, found in items.items() if not found]
        await self._ws.workers.run(Work.DISK, self._make_hollow, [of[ino] for ino in hollow], placed)
        runs = self._filler.through.runs(by_place(item for found in items.values() for item in found))
        for item, error in await self._filler.through.bring(runs, write, Urgency(Rank.DEMAND), go_on=True):
            damaged[item.ino] = error
        self._note(placed)
        for ino, error in damaged.items():
            await self._give_up(of[ino], error)

    async def _load_maps(self, things: Iterable[Thing]) -> dict[Inode, SpotwarpError]:
        damaged: dict[Inode, SpotwarpError] = {}
        for thing in things:
            try:
                await self._site.session.files.load_map(thing.ino)
            except (Corrupt, NotFound) as error:
                damaged[thing.ino] = error
            await trio.lowlevel.checkpoint()
        return damaged

    def _make_hollow(self, things: Sequence[Thing], placed: list[tuple[Inode, Witness]]) -> None:
        placed += [(thing.ino, self._make(thing, b"")) for thing in things]

    def _make(self, thing: Thing, data: bytes) -> Witness:
        """Make a small file, whole, under all its names (blocking)."""
        size = thing.record.size
        fd = self._site.drafts.create(thing.ino)
        try:
            write_all(fd, data[:size], 0)
            os.ftruncate(fd, size)
            self._site.drafts.apply(fd, thing)
        finally:
            os.close(fd)
        return self._name(thing, Seen.TRUSTED)

    def _name(self, thing: Thing, seen: Seen) -> Witness:
        """Give a draft its names (blocking); a name that this filesystem cannot have is left out."""
        try:
            return self._site.drafts.name(thing, seen)
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
            self._site.applier.left_out[f"files ({error.strerror})"] += 1
            return UNMADE

    def _note(self, placed: list[tuple[Inode, Witness]]) -> None:
        note(self._ws, placed, self._site.drafts.take_refused())
        self._report.filled += len(placed)
        self._report.filled_bytes += sum(witness.size for _, witness in placed)
        self._state.files += len(placed)

    async def _large(self, of: dict[Inode, Thing]) -> None:
        sizes = {ino: bytes_to_come(thing.record) for ino, thing in of.items()}
        choice = await self._choose(sizes)
        self._state.phase = "placeholders"
        refused = await self._hold([of[ino] for ino in choice.placeholders])
        for ino in choice.links:
            await self._stand_in(of[ino])
        if refused:
            self._report.said.append(f"{len(refused):,} files got no lease: they are filled before the command starts")
        at_once = set(choice.at_once) | set(refused)
        self._state.phase = "large files"
        self._state.bytes_total += sum(sizes[ino] for ino in at_once)
        await self._at_once([of[ino] for ino in self._first_things_first(at_once, sizes)])

    def _checkpoint(self) -> list[Inode]:
        unsafe = {item.ino for item in self._site.session.publisher.head.manifest.in_flight}
        with self._ws.kv.read() as view:
            return checkpoint_inodes(view, self._ws.policies, unsafe)

    def _first_things_first(self, inodes: set[Inode], sizes: dict[Inode, int]) -> list[Inode]:
        """The newest checkpoint, then the smallest: when the disk is full, the largest of the rest stay out."""
        wanted = set(self._checkpoint())
        return sorted(inodes, key=lambda ino: (ino not in wanted, sizes[ino]))

    async def _choose(self, sizes: dict[Inode, int]) -> Choice:
        limits, placeholders = self._site.limits, self._site.placeholders
        room = placeholders.room if placeholders is not None else 0
        wanted = self._checkpoint()
        if room and max(sizes.values()) > limits.sure_bytes:
            await self._measure(max(sizes, key=lambda ino: sizes[ino]))
        rate = self._filler.through.meter.bytes_per_s
        choice = choose(sizes, wanted, room=room, bytes_per_s=rate, limits=limits)
        if choice.without_room:
            self._report.said.append(
                f"{choice.without_room:,} files are filled before the command starts: only {room:,} leases may be held"
            )
        if choice.links:
            speed = f"at {format_size(rate)}/s" if rate else "at a rate that is not known"
            self._report.said.append(
                f"{len(choice.links):,} files cannot come within {limits.arrival_s:.0f} s {speed}: "
                "they cannot be opened until they are here"
            )
        return choice

    async def _measure(self, ino: Inode) -> None:
        """Find out how fast the store is, by some bytes of a large file, unless enough have come already."""
        limits, through = self._site.limits, self._filler.through
        if through.meter.bytes_brought >= limits.rate_sample_bytes:
            return
        try:
            await self._site.session.files.load_map(ino)
        except (Corrupt, NotFound):
            return
        with self._ws.kv.read() as view:
            items = items_of(view, ino)
        runs = through.runs(items)[: max(1, limits.rate_sample_bytes // through.run_bytes)]
        await through.bring(runs, _forget, Urgency(Rank.DEMAND))

    async def _hold(self, things: Sequence[Thing]) -> list[Inode]:
        """Make placeholders; gives those that got no lease."""
        refused: list[Inode] = []
        for at in range(0, len(things), self._site.limits.batch):
            refused += await self._hold_batch(things[at : at + self._site.limits.batch])
        return refused

    async def _hold_batch(self, things: Sequence[Thing]) -> list[Inode]:
        drafts, placeholders = self._site.drafts, self._site.placeholders
        assert placeholders is not None
        made: dict[Inode, int] = {}
        try:
            await self._ws.workers.run(Work.DISK, self._make_absent, things, made)
            held = await placeholders.hold(list(made.items()))
            kept = [thing for thing in things if thing.ino in held]
            # Only now: who gives a file away first gets no lease on it, unless he may lease everybody's.
            await self._ws.workers.run(Work.DISK, self._apply_all, kept, made)
        finally:
            for fd in made.values():
                os.close(fd)
        for thing in kept:
            self._filler.add(thing.ino, Absent(Kind.PLACEHOLDER, bytes_to_come(thing.record)))
        placed = await self._ws.workers.run(Work.DISK, self._name_all, kept)
        note(self._ws, placed, drafts.take_refused())
        self._report.placeholders += len(kept)
        self._state.files += len(kept)
        return [thing.ino for thing in things if thing.ino not in held]

    def _make_absent(self, things: Sequence[Thing], made: dict[Inode, int]) -> None:
        """Make files of the right size without bytes, and mark them (blocking)."""
        for thing in things:
            fd = self._site.drafts.create(thing.ino)
            try:
                leases.mark_absent(fd, self._site.session_id)
                os.ftruncate(fd, thing.record.size)
            except OSError as error:
                os.close(fd)
                if error.errno not in NOT_HERE:
                    raise
                continue
            made[thing.ino] = fd

    def _apply_all(self, things: Sequence[Thing], made: dict[Inode, int]) -> None:
        for thing in things:
            self._site.drafts.apply(made[thing.ino], thing)

    def _name_all(self, things: Sequence[Thing]) -> list[tuple[Inode, Witness]]:
        return [(thing.ino, self._name(thing, Seen.ABSENT)) for thing in things]

    async def _stand_in(self, thing: Thing) -> None:
        """Let a file be a dangling symlink under each of its names."""
        witness = await self._ws.workers.run(Work.DISK, self.make_links, thing)
        note(self._ws, [(thing.ino, witness)], {})
        self._filler.add(thing.ino, Absent(Kind.LINK, bytes_to_come(thing.record)))
        self._report.links += 1
        self._state.files += 1

    def make_links(self, thing: Thing) -> Witness:
        """Put the symlink where names are missing (blocking); one inode, like what it stands for."""
        drafts, root = self._site.drafts, self._site.root
        there = [path for path in thing.paths if absent_link(place_of(root, path)) == thing.ino]
        if not there:
            drafts.stand_in(thing.paths[0], absent_target(thing.ino), drafts.path(thing.ino, b".link"))
        first = there[0] if there else thing.paths[0]
        drafts.link_others(thing, first)
        return Witness.of(os.lstat(place_of(root, first)), Seen.ABSENT)

    async def _at_once(self, things: Sequence[Thing]) -> None:
        """Fill large files before the command starts, a few at a time."""
        errors: list[Exception] = []
        slots = trio.Semaphore(self._site.limits.background_files)
        async with trio.open_nursery() as nursery:
            for thing in things:
                await slots.acquire()
                if errors:
                    break
                nursery.start_soon(self._one_at_once, thing, slots, errors)
        if errors:
            raise errors[0]

    async def _one_at_once(self, thing: Thing, slots: trio.Semaphore, errors: list[Exception]) -> None:
        try:
            if self._site.free_bytes() - bytes_to_come(thing.record) < self._site.limits.disk_reserve_bytes:
                size = format_size(bytes_to_come(thing.record))
                self._report.said.append(
                    f"{os.fsdecode(thing.paths[0])} ({size}) has no room on this disk: it cannot be opened here"
                )
                await self._stand_in(thing)
            else:
                await self._fill_draft(thing)
        except (Corrupt, NotFound) as error:
            await self._give_up(thing, error)
        except (Unavailable, StoreRefused, OSError) as error:
            errors.append(error)
        finally:
            slots.release()

    async def _fill_draft(self, thing: Thing) -> None:
        await self._filler.bring_draft(thing, Urgency(Rank.DEMAND))
        placed = await self._ws.workers.run(Work.DISK, self._name, thing, Seen.TRUSTED)
        self._note([(thing.ino, placed)])

    async def _give_up(self, thing: Thing, error: SpotwarpError) -> None:
        """What is damaged in the store gets a name that nobody can open; an outage is no damage."""
        if not isinstance(error, Corrupt | NotFound):
            raise error
        self._filler.damaged[thing.ino] = str(error)
        self._report.damaged[os.fsdecode(thing.paths[0])] = str(error)
        self._ws.report(f"{os.fsdecode(thing.paths[0])} cannot be restored, and cannot be opened: {error}")
        await self._stand_in(thing)


async def _forget(run: list[Item], contents: list[bytes]) -> None:
    """It was the time that counted."""
