"""Lay the workspace's tree out in a plain directory: everything small at once, large files as placeholders (P-07).

Invariant: a name appears only when what it leads to is whole, or cannot be opened before it is. Nothing that was there
is deleted: what differs from the state is moved to `.spotwarp/replaced`. Killed at any moment and begun again it comes
to the same tree, and fetches nothing again that was complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from spotwarp_fs.core.errors import Corrupt, ExitCode, NotFound, SpotwarpError, UserError
from spotwarp_fs.core.ownnames import UNMADE
from spotwarp_fs.core.ports import KVSnapshot, Work
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import identity
from spotwarp_fs.directory.applying import NOT_HERE, Applier
from spotwarp_fs.directory.comparing import Compared, Match, Verdict, compare, holds
from spotwarp_fs.directory.drafts import Drafts, hold_writable
from spotwarp_fs.directory.filling import Filler
from spotwarp_fs.directory.identity import Owner
from spotwarp_fs.directory.laying import FileLayer, LayingOut, Report
from spotwarp_fs.directory.limits import RestoreLimits
from spotwarp_fs.directory.placeholders import Placeholders
from spotwarp_fs.directory.plan import Plan, Thing, make_plan, place_of
from spotwarp_fs.directory.site import Site
from spotwarp_fs.directory.taking import PlaceholderTaker
from spotwarp_fs.directory.witnessing import note
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.through import items_of

T = TypeVar("T")


class Restorer:
    """One session's restore into one directory."""

    def __init__(
        self,
        session: Session,
        root: bytes,
        owner: Owner,
        *,
        session_id: str,
        placeholders: Placeholders | None,
        why_no_leases: str = "",
        limits: RestoreLimits | None = None,
    ) -> None:
        self._ws = session.workspace
        self._root = root
        self._owner = owner
        self._why_no_leases = why_no_leases
        self._stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(self._ws.wall.now_ns() // 1_000_000_000))
        applier = Applier(owners=True)
        self.site = Site(
            session, root, Drafts(root, applier, self._stamp.encode()), applier,
            None if why_no_leases else placeholders, session_id, limits or RestoreLimits(),
        )  # fmt: skip
        self.filler = Filler(self.site)
        self.laying_out = LayingOut()
        self._report = Report()
        self._files = FileLayer(self.site, self.filler, self._report, self.laying_out)
        self._taker = PlaceholderTaker(self.site, self.filler)

    async def lay_out(self) -> Report:
        """Make the directory the tree of the session's state; returns when the command may start.

        Raises UserError when the directory does not let us, Unavailable when the store stays away too long.
        """
        return await self._guarded(self._lay_out)

    async def take_up(self) -> Report:
        """Go on in a directory that is this map's own: only what is still absent is looked after."""
        return await self._guarded(self._take_up)

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> Report:
        error: OSError | SpotwarpError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.filler.serve)
            try:
                await run()
            except (OSError, SpotwarpError) as found:
                error = found
            nursery.cancel_scope.cancel()
        if isinstance(error, OSError):
            raise _unusable(error, self._root) from error
        if error is not None:
            raise error
        return self._finished()

    def _finished(self) -> Report:
        report, drafts = self._report, self.site.drafts
        report.left_out = dict(self.site.applier.left_out)
        report.replaced = [os.fsdecode(path) for path in drafts.moved_aside]
        report.replaced_in = os.fsdecode(drafts.replaced) if report.replaced else ""
        report.absent_bytes = sum(each.bytes for each in self.filler.absent.values())
        if self._why_no_leases:
            report.said.append(
                f"no placeholders: {self._why_no_leases}; every file was filled before the command starts"
            )
        return report

    async def _blocking(self, call: Callable[..., T], *arguments: object) -> T:
        return await self._ws.workers.run(Work.DISK, call, *arguments)

    async def _with_snapshot(self, call: Callable[[KVSnapshot], T]) -> T:
        snapshot = self._ws.kv.snapshot()
        try:
            return await self._blocking(call, snapshot)
        finally:
            snapshot.close()

    async def _lay_out(self) -> None:
        identity.settle(self._ws, self._root, self._owner, complete=False)
        await self._blocking(self.site.drafts.clear)
        plan = await self._with_snapshot(make_plan)
        is_absent = self._taker.is_marked
        compared = await self._with_snapshot(lambda view: compare(plan, self._root, view, is_absent))
        for match in await self._wrong(plan, compared):
            compared.foreign.append(match.path)
        await self._taker.take(plan, compared)
        await self._blocking(self._move_aside, compared.foreign)
        await self._blocking(self._remove_spare, compared.spare)
        await self._taker.forget_others(compared)
        self.laying_out.phase = "names"
        await self._blocking(self._make_directories, plan.directories)
        note(self._ws, await self._blocking(self._make_specials, plan, compared), self.site.drafts.take_refused())
        note(self._ws, await self._blocking(self._keep, plan, compared), self.site.drafts.take_refused())
        files = plan.files()
        missing = [thing for thing in files if thing.ino not in compared.matches]
        self._report.files, self._report.kept = len(files), len(files) - len(missing)
        self.laying_out.files = self.laying_out.files_total = self._report.kept
        await self._files.lay(missing)
        self.laying_out.phase = "directories"
        note(self._ws, await self._blocking(self._finish_directories, plan), self.site.drafts.take_refused())
        identity.settle(self._ws, self._root, self._owner, complete=True)
        self.laying_out.phase = ""
        if plan.not_laid_out:
            self._report.said.append(f"{len(plan.not_laid_out):,} names below .spotwarp in the state are not laid out")

    async def _wrong(self, plan: Plan, compared: Compared) -> list[Match]:
        """Compare by digests the files that no witness speaks for; gives those that are not as in the state."""
        wrong: list[Match] = []
        slots = trio.Semaphore(self.site.limits.checked_at_once)

        async def check(thing: Thing, match: Match) -> None:
            async with slots:
                if not await self._holds(thing, match):
                    wrong.append(match)
                    del compared.matches[thing.ino]

        async with trio.open_nursery() as nursery:
            for ino, match in list(compared.matches.items()):
                if match.verdict is Verdict.UNREAD:
                    nursery.start_soon(check, plan.things[ino], match)
        return wrong

    async def _holds(self, thing: Thing, match: Match) -> bool:
        try:
            await self.site.session.files.load_map(thing.ino)
        except (Corrupt, NotFound):
            return False
        with self._ws.kv.read() as view:
            items = items_of(view, thing.ino)
        return await self._blocking(holds, place_of(self._root, match.path), thing.record.size, items)

    def _move_aside(self, paths: Sequence[bytes]) -> None:
        for path in paths:
            place = place_of(self._root, path)
            if not os.path.lexists(place):
                continue  # it went with its directory
            self._taker.clear_out(place)
            if os.path.lexists(place):
                self.site.drafts.move_aside(path)

    def _remove_spare(self, paths: Sequence[bytes]) -> None:
        """Remove names of files that stay under others: the state has no such link, and no byte is lost."""
        for path in paths:
            os.unlink(place_of(self._root, path))
        if paths:
            shown = ", ".join(os.fsdecode(path) for path in paths[: self.site.limits.named_max])
            self._report.said.append(f"removed {len(paths):,} hard links that the state does not have: {shown}")

    def _make_directories(self, directories: Sequence[Thing]) -> None:
        for thing in directories:
            place = place_of(self._root, thing.paths[0])
            if os.path.lexists(place):
                hold_writable(place)
            else:
                self.site.drafts.make_directory(thing)

    def _make_specials(self, plan: Plan, compared: Compared) -> list[tuple[Inode, Witness]]:
        """Make symlinks, fifos, sockets and devices."""
        made: list[tuple[Inode, Witness]] = []
        for thing in plan.things.values():
            if thing.is_file or thing.ino in compared.matches:
                continue
            witness = UNMADE
            try:
                if self.site.drafts.make_special(thing):
                    witness = self.site.drafts.name(thing, Seen.TRUSTED)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                self.site.applier.left_out[f"links and special files ({error.strerror})"] += 1
            made.append((thing.ino, witness))
        return made

    def _keep(self, plan: Plan, compared: Compared) -> list[tuple[Inode, Witness]]:
        """Give what is here already its attributes and other names; what is absent stays as it is."""
        kept: list[tuple[Inode, Witness]] = []
        for ino, match in compared.matches.items():
            thing, place = plan.things[ino], place_of(self._root, match.path)
            if match.verdict is Verdict.LINK:
                kept.append((ino, self._files.make_links(thing)))
                continue
            if match.verdict is Verdict.UNREAD or not thing.is_file:
                self.site.drafts.apply(place, thing)
            self.site.drafts.link_others(thing, match.path)
            kept.append((ino, self._seen(match, place)))
        return kept

    def _seen(self, match: Match, place: bytes) -> Witness:
        return Witness.of(os.lstat(place), Seen.ABSENT if match.verdict is Verdict.ABSENT else Seen.TRUSTED)

    def _finish_directories(self, plan: Plan) -> list[tuple[Inode, Witness]]:
        """Give directories their attributes, the deepest first: each name that is made changes the one above."""
        finished = []
        for thing in reversed(plan.directories):
            place = place_of(self._root, thing.paths[0])
            try:
                self.site.drafts.apply(place, thing)
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                self.site.applier.left_out[f"attributes of directories ({error.strerror})"] += 1
            finished.append((thing.ino, Witness.of(os.lstat(place), Seen.TRUSTED)))
        return finished

    async def _take_up(self) -> None:
        """The rows of the map say what is absent; nothing else is touched."""
        await self._blocking(self.site.drafts.clear)
        await self._taker.take_up()
        self._report.kept = len(self.filler.absent)


def _unusable(error: OSError, root: bytes) -> UserError:
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else os.fsdecode(root)
    return UserError(
        f"{where}: {error.strerror}; the restore stopped there. What is laid out stays, and the next start goes on",
        ExitCode.MOUNTPOINT,
    )
