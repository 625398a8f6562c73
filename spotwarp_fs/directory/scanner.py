"""Keep the map in step with the directory: walk, plan, read, adopt, again and again.

Invariants: additions before deletions: a name that vanished goes only after a complete walk that began after it was
first missed, and after everything that this walk found was read (C19 a); the known tree does not change while it is
walked; whatever goes wrong with one file stops neither the others nor the next walk.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import trio

from spotwarp_fs.core import treediff
from spotwarp_fs.core.errors import ExitCode, Fenced, SpotwarpError, UserError
from spotwarp_fs.core.ownnames import is_unmade
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.records import NodeTable, ino_key
from spotwarp_fs.core.status import Scanning
from spotwarp_fs.core.treeplan import Link, Plan
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.walked import Found, Walked
from spotwarp_fs.core.witness import Look, Seen, Witness, look
from spotwarp_fs.directory.adopting import Adopter, Arrival, Batch
from spotwarp_fs.directory.arriving import arrivals
from spotwarp_fs.directory.attention import Attention, shown
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.reading import COUNTED, FileReader, Outcome, Reading
from spotwarp_fs.directory.walking import walk
from spotwarp_fs.directory.watching import Watcher
from spotwarp_fs.engine.session import Session

log = logging.getLogger(__name__)

SMALL_BYTES: Final = 8 << 20
"""Files up to this size are read together, and adopted in batches; a larger one comes by itself, beside later walks."""
BATCH_ENTRIES: Final = 1_000
BATCH_BYTES: Final = 48 << 20
SMALL_AT_ONCE: Final = 8
LARGE_AT_ONCE: Final = 3
WHOLE_WALK_S: Final = 600.0
"""How often the whole tree is walked while watching is intact."""
SYNC_TRIES: Final = 4
SYNC_PAUSE_S: Final = 0.5
"""A barrier looks again at files that changed under its read, this many times."""
CUT_AFTER_S: Final = 0.2
"""A cut follows a scan so soon: `interval` says how often the directory is scanned."""
REPORTED_MAX: Final = 1_000


class Scanner:
    """Scans for one session; `run` must be running."""

    def __init__(
        self,
        session: Session,
        root: bytes,
        known: KnownTree,
        watcher: Watcher,
        *,
        interval_s: float,
        why_foreign: Callable[[], str] = lambda: "",
    ) -> None:
        self._session = session
        self._ws = session.workspace
        self._root = root
        self._known = known
        self._watcher = watcher
        self._interval_s = interval_s
        self._why_foreign = why_foreign
        """Says why the directory is not the one that was started any more; empty if it is."""
        self._reader = FileReader(session)
        self._adopter = Adopter(session, known)
        self.tree = trio.Lock()
        """Held while the known tree is walked, and for each change of it."""
        self._cycling = trio.Lock()
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)
        self._links: list[Link] = []
        self._fresh: set[bytes] = set()
        """Files that replace another one which the map has at their path."""
        self._reading: dict[bytes, int] = {}
        """Large files that are being read, and the walk that found them."""
        self._attention = Attention(interval_s)
        self._pending: dict[bytes, int] = {}
        """Names that were missed, and the walk that first did."""
        self._needs_whole = False
        self._removals: dict[bytes, int] = {}
        """Names that may go once everything that this walk found was read."""
        self._reported: set[tuple[bytes, str]] = set()
        self._last_begun_s = self._last_whole_s = -1e9
        self._finished = trio.Event()
        self.oldest_unseen_s: float | None = None
        """Since when something on disk may not be in the map yet (trio's clock)."""
        self.figures = Scanning()

    async def run(self) -> None:
        """Scan until cancelled or fenced."""
        async with trio.open_nursery() as self._nursery:
            while self._ws.fenced is None:
                await self._until_due()
                try:
                    await self._cycle(whole=False)
                except Fenced:
                    break
                except Exception as error:  # an edge: the daemon lives on, says so loudly, and scans again
                    self._failed(b"", error)
            self._nursery.cancel_scope.cancel()

    def saw(self, ino: Inode, witness: Witness) -> None:
        """Take over what a file looks like now that it was filled, or dropped; `tree` is held."""
        for entry in self._known.entries_by_inode(ino)[:1]:
            self._known.put(entry.path, ino, witness)

    async def sync(self) -> None:
        """Return when everything that is in the directory now is in the map, except what is in flight."""
        for _ in range(SYNC_TRIES):
            self._attention.hurry()
            await self._cycle(whole=True)
            if self._needs_whole:
                await self._cycle(whole=True)
            while self._reading:
                await self._finished.wait()
            self._apply_removals()
            if not self._attention.unread:
                return
            await trio.sleep(SYNC_PAUSE_S)

    async def _until_due(self) -> None:
        """Wait until something may have changed, and at least `interval` since the last scan began."""
        soon_s = self._last_begun_s + self._interval_s
        late_s = soon_s if self._looks_again() else self._last_whole_s + WHOLE_WALK_S
        with trio.move_on_at(late_s):
            await self._watcher.changed()
            if self.oldest_unseen_s is None:
                self.oldest_unseen_s = trio.current_time()
        await trio.sleep_until(max(soon_s, trio.current_time()))

    def _looks_again(self) -> bool:
        return bool(self._needs_whole or self._removals or self._attention) or self._watcher.state != "intact"

    async def _cycle(self, *, whole: bool) -> None:
        """Walk once, and adopt what was found, except what large files hold: these come when they are read."""
        async with self._cycling:
            self._last_begun_s = trio.current_time()
            walked, plan, number = await self._walk(whole=whole)
            if plan.needs_complete_walk or plan.removals:
                self._check_ours()
            readable = [found for found in await self._names(plan) if self._is_due(found)]
            await self._hold(readable)
            await self._small([found for found in readable if found.status.st_size <= SMALL_BYTES])
            for found in readable:
                if found.status.st_size > SMALL_BYTES:
                    self._reading[found.path] = number
                    self._nursery.start_soon(self._read_large, found)
            self._removals.update(dict.fromkeys(plan.removals, number))
            self._apply_removals()
            self._ask_for_a_cut()
            for path, reason in walked.unreadable:
                self._report(path, reason)
            self._attention.prune(self._is_gone)
            if not self._reading and not self._needs_whole and not self._attention.unread:
                self.oldest_unseen_s = None

    def _check_ours(self) -> None:
        """Before anything is said to be gone: it may be the directory itself that is (P-18)."""
        reason = self._why_foreign()
        if reason:
            self._needs_whole = True
            raise UserError(f"nothing is published: {reason}", ExitCode.WOULD_WIPE)

    def _is_gone(self, path: bytes) -> bool:
        return self._known.get(path) is None and not os.path.lexists(os.path.join(self._root, path))

    async def _walk(self, *, whole: bool) -> tuple[Walked, Plan, int]:
        hints = self._watcher.take()
        now_s = trio.current_time()
        whole = whole or hints.whole or self._needs_whole or now_s - self._last_whole_s >= WHOLE_WALK_S
        directories = None if whole else {*hints.directories, *self._attention.directories(now_s)}
        async with self.tree:
            walked = await self._ws.workers.run(
                Work.DISK, lambda: walk(self._root, self._known, skip=self._is_scratch, directories=directories)
            )
            walked.vanished[:] = [path for path in walked.vanished if not self._was_never_made(path)]
            self.figures.walks += 1
            number = self.figures.walks
            if walked.complete:
                self.figures.whole_walks += 1
                self._last_whole_s = now_s
            plan = await self._ws.workers.run(Work.DISK, treediff.plan, walked, self._known, self._pending, number)
            self._pending = dict(plan.pending)
            self._needs_whole = plan.needs_complete_walk
        self.figures.last_walk_s = trio.current_time() - now_s
        self.figures.watching = self._watcher.state
        return walked, plan, number

    def _is_scratch(self, path: bytes) -> bool:
        return self._ws.policies.scratch.matches(path)

    def _was_never_made(self, path: bytes) -> bool:
        """What this node could not make (a device, say) has not vanished from it: its record is carried over (M-i)."""
        entry = self._known.get(path)
        return entry is not None and entry.witness is not None and is_unmade(entry.witness)

    async def _names(self, plan: Plan) -> list[Found]:
        """Adopt renames and everything but file contents; returns the files that must be read."""
        made = {found.path for found in plan.steps if isinstance(found, Found)}
        looked = {each.path: each for each in await self._look_at([f for f in plan.steps if isinstance(f, Found)])}
        steps = [looked.get(step.path) if isinstance(step, Found) else step for step in plan.steps]
        async with self.tree:
            self._commit(Batch(steps=[step for step in steps if step is not None]))
        appeared = {found.path for found in plan.appeared}
        self._fresh |= {path for path in appeared if self._known.get(path) is not None}
        names, readable, absent = [], [], set()
        for found in (*plan.appeared, *plan.changed):
            if found.path in made or not self._stands(found.path):
                continue
            seen = self._look(found) if stat.S_ISREG(found.status.st_mode) else Look.CLEAN
            if seen in (Look.WRITTEN, Look.READ):
                readable.append(found)
                continue
            names.append(found)
            if seen is Look.ABSENT:
                absent.add(found.path)
        await self._adopt(names, {}, absent)
        self._links = list(plan.links)
        return readable

    def _stands(self, path: bytes) -> bool:
        """The directory above is in the map: else it vanished between the walk and a closer look."""
        return self._known.get(path.rpartition(b"/")[0]) is not None

    def _look(self, found: Found) -> Look:
        """Tell whether a file's content must be read now; else only its name and attributes are taken."""
        return look(self._witness(found.path), found.status)

    def _was_filled(self, path: bytes) -> bool:
        """Tell whether what was a placeholder is one no more; what it shows now is for another walk."""
        witness = self._witness(path)
        if witness is None or witness.absent:
            return False
        try:
            unchanged = witness.unchanged(os.lstat(os.path.join(self._root, path)))
        except OSError:
            unchanged = False
        self._needs_whole = self._needs_whole or not unchanged
        return True

    def _witness(self, path: bytes) -> Witness | None:
        """What was last seen there, by the map, which knows of a file that was filled before the known tree does."""
        entry = self._known.get(path)
        if entry is None or path in self._fresh:
            return None
        with self._ws.kv.read() as view:
            value = view.get(ino_key(NodeTable.WITNESS, entry.ino))
        return Witness.decode(value) if value is not None else None

    def _is_due(self, found: Found) -> bool:
        if found.path in self._reading:
            return False
        return self._attention.is_due(found.path, trio.current_time(), unchanged=not self._has_changed(found))

    async def _look_at(
        self, found: list[Found], readings: Mapping[bytes, Reading] = MappingProxyType({})
    ) -> list[Arrival]:
        return await self._ws.workers.run(Work.DISK, arrivals, self._root, found, readings)

    async def _adopt(
        self, found: Iterable[Found], readings: Mapping[bytes, Reading], absent: Container[bytes] = ()
    ) -> None:
        """Take entries into the map, some at a time.

        Those of *absent* were found while they were placeholders. One that was filled since is left out: the times that
        were found may be those of the filling.
        """
        waiting = list(found)
        for at in range(0, len(waiting), BATCH_ENTRIES):
            arrived = await self._look_at(waiting[at : at + BATCH_ENTRIES], readings)
            async with self.tree:
                for arrival in arrived:
                    arrival.fresh = arrival.path in self._fresh
                    self._fresh.discard(arrival.path)
                stale = {each.path for each in arrived if each.path in absent and self._was_filled(each.path)}
                self._commit(Batch(arrivals=[e for e in arrived if self._stands(e.path) and e.path not in stale]))

    async def _hold(self, files: list[Found]) -> None:
        """What is to be read of a checkpoint holds its directory, if it does not come into the map in one step."""
        if sum(found.status.st_size for found in files) <= SMALL_BYTES and len(files) <= BATCH_ENTRIES:
            return
        held = [found for found in files if self._must_be_whole(found.path) and self._has_changed(found)]
        await self._adopt(held, {found.path: Reading(Outcome.IN_FLIGHT, found.status) for found in held})

    def _has_changed(self, found: Found) -> bool:
        """Tell whether its `stat` is another one; else it is read once more for safety."""
        witness = self._witness(found.path)
        return witness is None or not witness.unchanged(found.status)

    def _must_be_whole(self, path: bytes) -> bool:
        """Tell whether a file is of a checkpoint: half of it must not be taken for all."""
        *above, name = path.split(b"/")
        policies = self._ws.policies
        return policies.is_atomic(name) or any(map(policies.is_atomic_dir, above))

    async def _small(self, files: list[Found]) -> None:
        """Read small files together, and adopt them in batches; then the names that are links to files."""
        batch: list[Found] = []
        size = 0
        for found in files:
            if batch and (len(batch) >= BATCH_ENTRIES or size + found.status.st_size > BATCH_BYTES):
                await self._read_batch(batch)
                batch, size = [], 0
            batch.append(found)
            size += found.status.st_size
        if batch:
            await self._read_batch(batch)
        await self._link()

    async def _link(self) -> None:
        """Adopt further names of files that the map has; a file that is not there yet comes with a later walk."""
        links, self._links = self._links, []
        async with self.tree:
            for link in links:
                if self._known.get(link.source) is not None and self._stands(link.target):
                    self._commit(Batch(links=[link]))

    async def _read_batch(self, files: list[Found]) -> None:
        readings: dict[bytes, Reading] = {}
        slots = trio.CapacityLimiter(SMALL_AT_ONCE)

        async def read(found: Found) -> None:
            async with slots:
                readings[found.path] = await self._read(found)

        async with trio.open_nursery() as nursery:
            for found in files:
                nursery.start_soon(read, found)
        await self._finish(files, readings)

    async def _read_large(self, found: Found) -> None:
        """Read one large file beside everything else."""
        try:
            async with self._large:
                reading = await self._read(found)
                await self._finish([found], {found.path: reading})
        except Exception as error:  # an edge, as in `run`
            self._failed(found.path, error)
        finally:
            del self._reading[found.path]
            self.figures.reading = shown(self._reading)
            self._apply_removals()
            self._ask_for_a_cut()
            self._finished.set()
            self._finished = trio.Event()

    async def _read(self, found: Found) -> Reading:
        """Read a file; whatever goes wrong is a failed reading."""
        path = found.path
        entry = self._known.get(path)
        atomic = self._ws.policies.is_atomic(path.rpartition(b"/")[2])
        begun_s = trio.current_time()
        try:
            reading = await self._reader.read(
                os.path.join(self._root, path),
                found.status,
                entry.ino if entry is not None else None,
                atomic=atomic,
                tries=self._attention.tries(path),
            )
        except Fenced:
            raise
        except SpotwarpError as error:
            reading = Reading(Outcome.FAILED, found.status, reason=str(error))
        now_s = trio.current_time()
        young = self._ws.wall.now_ns() - reading.status.st_ctime_ns < 2 * self._interval_s * 1e9
        whole = self._must_be_whole(path)
        self._attention.read(path, reading, now_s, now_s - begun_s, young=young, whole=whole)
        return reading

    async def _finish(self, files: list[Found], readings: dict[bytes, Reading]) -> None:
        """Wait for the store, then take over what counts."""
        try:
            await self._reader.answered(readings.values())
            for path, reading in readings.items():
                self._tell(path, reading)
            counted = [found for found in files if self._goes_in(found.path, readings[found.path])]
            await self._adopt(counted, readings)
        finally:
            self._reader.let_go(readings.values())
            self.figures.bytes_read = self._reader.bytes_read
            self.figures.reading = shown(self._reading)
            self._attention.show(self.figures)

    def _goes_in(self, path: bytes, reading: Reading) -> bool:
        failed = reading.outcome is Outcome.FAILED and self._must_be_whole(path)
        return reading.outcome in COUNTED or failed or self._attention.in_flight(path)

    def _tell(self, path: bytes, reading: Reading) -> None:
        if reading.outcome is Outcome.FAILED:
            self._report(path, reading.reason)
        if reading.seen & Seen.FUZZY:
            self._report(path, "it changes all the time: what is published of it may never have been its content")

    def _commit(self, batch: Batch) -> None:
        if batch and self._ws.fenced is None:
            self._adopter.commit(batch)

    def _apply_removals(self) -> None:
        """Let names go that two walks missed, as soon as what the second one found was read."""
        unread = min(self._reading.values(), default=None)
        ready = [path for path, number in self._removals.items() if unread is None or number < unread]
        if self.tree.locked() or not ready:
            return
        gone = []
        for path in ready:
            del self._removals[path]
            self._attention.forget(path)
            if not os.path.lexists(os.path.join(self._root, path)):
                gone.append(path)
        self._commit(Batch(removals=gone))

    def _ask_for_a_cut(self) -> None:
        if self._ws.oldest_unpublished_s is not None:
            self._ws.note_change(CUT_AFTER_S)

    def _failed(self, path: bytes, error: Exception) -> None:
        if not isinstance(error, SpotwarpError | OSError):
            log.exception("a scan was stopped by an error; trying again")
        self._report(path, f"the scan was stopped: {error}")

    def _report(self, path: bytes, reason: str) -> None:
        if (path, reason) in self._reported:
            return
        if len(self._reported) >= REPORTED_MAX:
            self._reported.clear()
        self._reported.add((path, reason))
        self._ws.report(f"{os.fsdecode(path)}: {reason}" if path else reason)
