"""Placeholders that timed out: the keeper has emptied them and let everybody in.

Invariant: one that nobody has open and nobody has written to is put under a lease again, and filled; once written it is
the user's file, and the published content is laid beside it. Nothing of either is lost (L6).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import trio

from spotwarp_fs.core.errors import SpotwarpError
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.plan import Thing, make_thing, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.witnessing import note
from spotwarp_fs.engine.through import Urgency
from spotwarp_fs.engine.turns import Rank

if TYPE_CHECKING:
    from spotwarp_fs.directory.filling import Filler

OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
BESIDE: Final = b".spotwarp-published"
"""Appended to the name of a file that was written before its published content came."""


class Latecomers:
    """Looks after the files that were given up."""

    def __init__(self, site: Site, filler: Filler) -> None:
        self._site = site
        self._ws = site.session.workspace
        self._filler = filler
        self._said: set[Inode] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        placeholders = self._site.placeholders
        assert placeholders is not None
        while True:
            for ino in sorted(placeholders.late() | self._filler.late):
                if ino in self._filler.absent:
                    try:
                        await self._look_after(ino)
                    except (SpotwarpError, OSError) as error:
                        self._ws.report(f"inode {ino:#x}, which came too late, cannot be looked after: {error}")
            await trio.sleep(self._site.limits.late_look_s)

    async def _look_after(self, ino: Inode) -> None:
        with self._ws.kv.read() as view:
            thing = make_thing(view, ino)
        found = next(((path, place) for path, place in self._places(thing) if _is_late(place)), None)
        if found is None:
            self._forget(ino)  # deleted, or replaced by a file of the user's
            return
        path, place = found
        if ino not in self._said:
            self._said.add(ino)
            await self._see(ino, Witness.of(os.lstat(place), Seen.LATE))
            self._ws.report(
                f"{os.fsdecode(path)} did not come in time: who opened it got an empty file; it is tried again"
            )
        try:
            fd = os.open(place, OPEN_FLAGS)
        except BlockingIOError:
            return
        try:
            if not await self._hold_again(thing, fd) and os.fstat(fd).st_size:
                await self._lay_beside(thing, path, fd)
        finally:
            os.close(fd)

    def _forget(self, ino: Inode) -> None:
        self._filler.absent.pop(ino, None)
        self._filler.late.discard(ino)

    def _places(self, thing: Thing) -> list[tuple[bytes, bytes]]:
        return [(path, place_of(self._site.root, path)) for path in thing.paths]

    async def _hold_again(self, thing: Thing, fd: int) -> bool:
        """Make it a placeholder again, unless somebody has it open or has written to it."""
        placeholders, ino = self._site.placeholders, thing.ino
        assert placeholders is not None
        if os.fstat(fd).st_size or ino not in await placeholders.hold([(ino, fd)]):
            return False
        if os.fstat(fd).st_size:  # written in the moment before
            await placeholders.release(ino)
            return False
        leases.mark_absent(fd, self._site.session_id)
        os.ftruncate(fd, thing.record.size)
        self._site.drafts.apply(fd, thing)
        await self._see(ino, Witness.of(os.fstat(fd), Seen.ABSENT))
        self._filler.late.discard(ino)
        self._filler.start(ino)
        return True

    async def _lay_beside(self, thing: Thing, path: bytes, fd: int) -> None:
        """It is the user's file now; what was published of it gets a name of its own."""
        await self._filler.bring_draft(thing, Urgency(Rank.DEMAND))
        drafts = self._site.drafts
        beside = path + BESIDE
        try:
            os.link(drafts.path(thing.ino), place_of(self._site.root, beside))
        except FileExistsError:
            drafts.move_aside(beside)
            os.link(drafts.path(thing.ino), place_of(self._site.root, beside))
        drafts.drop(thing.ino)
        leases.clear_mark(fd)
        await self._see(thing.ino, Witness.of(os.fstat(fd), Seen.NOTHING))
        self._forget(thing.ino)
        self._ws.report(
            f"{os.fsdecode(path)} was written before its bytes came: the file is as it was written, what was published "
            f"of it is in {os.fsdecode(beside)}"
        )

    async def _see(self, ino: Inode, witness: Witness) -> None:
        note(self._ws, [(ino, witness)], self._site.drafts.take_refused())
        await self._filler.tell(ino, witness)


def _is_late(place: bytes) -> bool:
    try:
        found = leases.absence(place)
    except OSError:
        return False
    return found is not None and found.late
