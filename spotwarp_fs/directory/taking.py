"""Take up placeholders that an earlier daemon left: those that the keeper still holds, and those that lost their lease.

Invariant: what has a name and no lease is held again, or loses its name, before anything else happens: anybody who
opened it would read zeros. What somebody wrote into one meanwhile is theirs, and is kept.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from spotwarp_fs.core.ownnames import absent_target
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import NodeTable, inode_key, key_ino, table_range
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.absent import Absent, Kind, bytes_to_come
from spotwarp_fs.directory.comparing import Compared, Verdict, holds
from spotwarp_fs.directory.drafts import absent_link
from spotwarp_fs.directory.filling import Filler, has_data
from spotwarp_fs.directory.plan import Plan, Thing, make_thing, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.witnessing import note, witness_of
from spotwarp_fs.engine.through import items_of

OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class _Left:
    """A placeholder as it was found."""

    thing: Thing
    path: bytes
    mtime_ns: int
    """As it was laid out."""


class PlaceholderTaker:
    """Looks after what earlier daemons left."""

    def __init__(self, site: Site, filler: Filler) -> None:
        self._site = site
        self._ws = site.session.workspace
        self._filler = filler

    def is_marked(self, place: bytes) -> bool:
        """Tell whether the file at *place* is a placeholder."""
        try:
            return leases.absence(place) is not None
        except OSError:
            return False

    def _is_late(self, place: bytes) -> bool:
        try:
            found = leases.absence(place)
        except OSError:
            return False
        return found is not None and found.late

    def clear_out(self, place: bytes) -> None:
        """Prepare something to be moved aside (blocking): a placeholder in it that holds nothing goes.

        One that somebody has written to is theirs, and is moved with the rest.
        """
        status = os.lstat(place)
        if stat.S_ISREG(status.st_mode) and self.is_marked(place):
            self._clear_out_file(place, status)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(place) as entries:
                inside = [entry.path for entry in entries]
            for each in inside:
                self.clear_out(each)

    def _clear_out_file(self, place: bytes, status: os.stat_result) -> None:
        placeholders = self._site.placeholders
        if placeholders is not None and any(
            os.path.samestat(os.fstat(fd), status) for fd in placeholders.recovered.values()
        ):
            os.unlink(place)  # under a lease all the time: nobody can have written to it
            return
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if has_data(fd):
                leases.clear_mark(fd)
            else:
                os.unlink(place)
        finally:
            os.close(fd)

    async def take(self, plan: Plan, compared: Compared) -> None:
        """Keep what is absent and as it should be; the rest of it is taken out of *compared*, to be laid out anew."""
        left: list[_Left] = []
        for ino, match in list(compared.matches.items()):
            thing = plan.things[ino]
            if match.verdict is Verdict.LINK:
                self._filler.add(ino, Absent(Kind.LINK, bytes_to_come(thing.record)))
            elif match.verdict is Verdict.ABSENT and not self._is_held(ino, match.status):
                left.append(_Left(thing, match.path, self._mtime_ns(thing)))
            elif match.verdict is Verdict.ABSENT:
                self._set_right(thing)
                self._filler.add(ino, Absent(Kind.PLACEHOLDER, bytes_to_come(thing.record)))
        for lost in await self._hold_again(left):
            del compared.matches[lost.thing.ino]
            compared.foreign.append(lost.path)

    def _is_held(self, ino: Inode, status: os.stat_result) -> bool:
        placeholders = self._site.placeholders
        if placeholders is None or ino not in placeholders.recovered:
            return False
        return os.path.samestat(os.fstat(placeholders.recovered[ino]), status)

    def _set_right(self, thing: Thing) -> None:
        """Put back what a fill, or a drop, that was cut short has changed: size and time."""
        assert self._site.placeholders is not None
        fd = self._site.placeholders.recovered[thing.ino]
        status = os.fstat(fd)
        resized = status.st_size != thing.record.size
        if resized:
            os.ftruncate(fd, thing.record.size)
        if resized or has_data(fd):
            os.utime(fd, ns=(status.st_atime_ns, self._mtime_ns(thing)))

    def _mtime_ns(self, thing: Thing) -> int:
        with self._ws.kv.read() as view:
            witness = witness_of(view, thing.ino)
        return witness.mtime_ns if witness is not None and witness.absent else thing.record.mtime_ns

    async def _hold_again(self, left: list[_Left]) -> list[_Left]:
        """Put placeholders under a lease again; gives those that are lost: open, written to, or too many.

        One that was written to is no placeholder any more: its mark is taken away.
        """
        opened: dict[Inode, int] = {}
        try:
            for each in left:
                fd = self._open_again(each)
                if fd is not None:
                    opened[each.thing.ino] = fd
            held = await self._site.placeholders.hold(list(opened.items())) if self._site.placeholders else set()
        finally:
            for fd in opened.values():
                os.close(fd)
        for each in left:
            if each.thing.ino in held:
                self._filler.add(each.thing.ino, Absent(Kind.PLACEHOLDER, bytes_to_come(each.thing.record)))
        return [each for each in left if each.thing.ino not in held]

    def _open_again(self, left: _Left) -> int | None:
        with suppress(OSError):  # somebody's lease, no permission, gone: lost in any case
            fd = os.open(place_of(self._site.root, left.path), OPEN_FLAGS)
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) == (left.thing.record.size, left.mtime_ns):
                return fd
            leases.clear_mark(fd)
            os.close(fd)
        return None

    async def forget_others(self, compared: Compared) -> None:
        """Let go of what the keeper holds and no name of the state leads to."""
        placeholders = self._site.placeholders
        if placeholders is None:
            return
        for ino in sorted(placeholders.recovered.keys() - self._filler.absent.keys()):
            await self._let_go(ino)

    async def _let_go(self, ino: Inode) -> None:
        placeholders = self._site.placeholders
        assert placeholders is not None
        fd = placeholders.descriptor(ino)
        if os.fstat(fd).st_nlink:
            os.ftruncate(fd, 0)  # it has a name that nobody knows of: empty is an error that shows, zeros are not
        await placeholders.release(ino)

    async def take_up(self) -> None:
        """Look after everything whose witness says that it is absent, where its name leads to it still.

        What lost its lease and cannot be held again becomes a dangling symlink, and is fetched before this returns.
        """
        for ino in await self._still_held():
            thing = self._thing(ino)
            self._set_right(thing)
            self._filler.add(ino, Absent(Kind.PLACEHOLDER, bytes_to_come(thing.record)))
        left: list[_Left] = []
        for ino, witness in self._absent_rows():
            if ino in self._filler.absent:
                continue
            thing = self._thing(ino)
            for path in thing.paths:
                found = await self._what_is_at(thing, path, witness)
                if found is not None:
                    left.append(found)
                    break
        lost = await self._hold_again(left)
        for each in lost:
            self._stand_in(each)
        for each in lost:
            await self._filler.fill(each.thing.ino)

    def _thing(self, ino: Inode) -> Thing:
        with self._ws.kv.read() as view:
            return make_thing(view, ino)

    def _absent_rows(self) -> list[tuple[Inode, Witness]]:
        with self._ws.kv.read() as view:
            rows = [(key_ino(key), Witness.decode(value)) for key, value in view.scan(*table_range(NodeTable.WITNESS))]
            known = {ino for ino, _ in rows if view.get(inode_key(ino)) is not None}
        return [(ino, witness) for ino, witness in rows if witness.absent and ino in known]

    async def _still_held(self) -> list[Inode]:
        """What the keeper has kept, as far as the workspace still knows it."""
        placeholders = self._site.placeholders
        if placeholders is None:
            return []
        held = []
        for ino in sorted(placeholders.recovered):
            with self._ws.kv.read() as view:
                known = view.get(inode_key(ino)) is not None
            if known and os.fstat(placeholders.recovered[ino]).st_nlink:
                held.append(ino)
            else:
                await self._let_go(ino)
        return held

    async def _what_is_at(self, thing: Thing, path: bytes, witness: Witness) -> _Left | None:
        """Sort what a name leads to: a symlink that stands for it, a placeholder without a lease, or a whole file."""
        place = place_of(self._site.root, path)
        if absent_link(place) == thing.ino:
            self._filler.add(thing.ino, Absent(Kind.LINK, bytes_to_come(thing.record)))
            return None
        try:
            status = os.lstat(place)
        except OSError:
            return None
        if not witness.same_file(status):
            return None
        if self._is_late(place):
            self._filler.late.add(thing.ino)
            self._filler.add(thing.ino, Absent(Kind.PLACEHOLDER, bytes_to_come(thing.record)))
            return None
        if self.is_marked(place):
            return _Left(thing, path, witness.mtime_ns)
        # The mark goes when the bytes are there; a kill came between that and the witness. Or it is the user's now.
        await self._site.session.files.load_map(thing.ino)
        with self._ws.kv.read() as view:
            items = items_of(view, thing.ino)
        whole = await self._ws.workers.run(Work.DISK, holds, place, thing.record.size, items)
        note(self._ws, [(thing.ino, Witness.of(os.lstat(place), Seen.TRUSTED if whole else Seen.NOTHING))], {})
        return None

    def _stand_in(self, lost: _Left) -> None:
        """Let a dangling symlink take the place of a placeholder that nobody guards, in one step."""
        thing, drafts = lost.thing, self._site.drafts
        for path in thing.paths:
            place = place_of(self._site.root, path)
            if not os.path.lexists(place) or not self.is_marked(place):
                continue
            draft = drafts.path(thing.ino, b".link")
            with suppress(FileNotFoundError):
                os.unlink(draft)
            os.symlink(absent_target(thing.ino), draft)
            os.replace(draft, place)
            self._filler.add(thing.ino, Absent(Kind.LINK, bytes_to_come(thing.record)))
