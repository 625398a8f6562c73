"""The daemon's side of the keeper: hold placeholders, hear who waits for them, let them go when they are filled.

Invariants: a duplicate of every descriptor that is held stays here, so the death of the keeper opens nothing; a new one
is started and gets them all. Nothing is written to a placeholder that was given up: its descriptor is exchanged for one
that refuses writes before the keeper hears that it may empty the file.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import trio

from spotwarp_fs.core.errors import SpotwarpError, Unavailable
from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import keeper_wire, leases
from spotwarp_fs.directory.keeper_link import Link, Lost, join
from spotwarp_fs.directory.keeper_wire import FILES_PER_PACKET, Packet

log = logging.getLogger(__name__)

PING_S: Final = 5.0
RESTART_S: Final = 1.0
DAEMON_DESCRIPTORS: Final = 1024
"""What the daemon keeps for everything else."""


class PlaceholderLate(SpotwarpError):
    """The placeholder is not held any more: its bytes did not come in time, and it is empty."""


class Keeper:
    """What a daemon knows of its keeper, whichever process that is at the moment."""

    def __init__(self, socket_path: Path, log_path: Path, options: tuple[str, ...]) -> None:
        self._where = (socket_path, log_path, options)
        self._link: Link | None = None
        self._linked = trio.Event()
        self._lost_s = trio.current_time()
        self._room = 0
        self._held: dict[Inode, int] = {}
        self._waiting_since: dict[Inode, float] = {}
        self._to_tell: dict[Inode, None] = {}
        self._told = trio.Event()
        self._writers: Counter[Inode] = Counter()
        self._written = trio.Event()
        self._life = trio.CancelScope()
        self._late: dict[Inode, None] = {}
        self._revoked: list[int] = []
        self._limit = keeper_wire.raise_descriptor_limit() - DAEMON_DESCRIPTORS
        self.recovered: Mapping[Inode, int] = MappingProxyType({})
        """Placeholders that an earlier daemon left with the keeper, and their descriptors, borrowed."""

    @property
    def room(self) -> int:
        """How many more placeholders may be held: what either process has descriptors for."""
        return max(0, min(self._room, self._limit - len(self._held) - len(self._revoked)))

    @property
    def keeper_pid(self) -> int | None:
        """The process that keeps at the moment."""
        return self._link.pid if self._link else None

    async def hold(self, files: Sequence[tuple[Inode, int]]) -> set[Inode]:
        """Put *files* under lease, and return those that are; the caller closes its descriptors (O_RDWR) either way.

        A file must be marked absent, and nobody else may have it open. What is not returned must not get its name.
        """
        granted: set[Inode] = set()
        for start in range(0, len(files), FILES_PER_PACKET):
            batch = [file for file in files[start : start + FILES_PER_PACKET] if file[0] not in self._held]
            batch = batch[: self.room]
            duplicates = {ident: os.dup(fd) for ident, fd in batch}
            wishes = [(ident, 0.0) for ident in duplicates]
            try:
                answer = await self._ask({"op": "hold", "files": wishes}, list(duplicates.values()))
                for ident in answer["files"]:
                    self._held[ident] = duplicates.pop(ident)
                    self._late.pop(ident, None)
                    granted.add(ident)
            finally:
                keeper_wire.close_all(duplicates.values())
        return granted

    async def wanted(self) -> Inode:
        """Wait until somebody waits in the open (or truncation) of a placeholder, and return it: each one once."""
        while not self._to_tell:
            await self._told.wait()
        ident = next(iter(self._to_tell))
        del self._to_tell[ident]
        return ident

    def descriptor(self, ino: Inode) -> int:
        """Lend the descriptor of a placeholder, or raise PlaceholderLate: any other open would wait for ourselves.

        It stays good until `release`. If the file is given up, writing to it fails with EBADF; a call that is made at
        that very moment is waited for only if it is made inside `writing`.
        """
        fd = self._held.get(ino)
        if fd is None:
            raise PlaceholderLate(f"placeholder {ino} is not held: it was given up, released or never held")
        return fd

    @contextmanager
    def writing(self, ino: Inode) -> Iterator[int]:
        """Lend the descriptor for one write: the file is not given up while the block runs, so keep it short."""
        fd = self.descriptor(ino)
        self._writers[ino] += 1
        try:
            yield fd
        finally:
            self._writers[ino] -= 1
            if not self._writers[ino]:
                del self._writers[ino]
                self._written.set()
                self._written = trio.Event()

    async def release(self, ino: Inode) -> None:
        """Let in who waits: the bytes of *ino*, its times and all else are in place. Raises PlaceholderLate."""
        fd = self.descriptor(ino)
        assert ino not in self._writers, f"placeholder {ino} is released while it is being written"
        leases.clear_mark(fd)
        self._forget(ino)
        os.close(fd)
        await self._ask({"op": "release", "files": [ino]})

    def late(self) -> frozenset[Inode]:
        """Return those that were given up, and not held again since; some of them by an earlier daemon's keeper."""
        return frozenset(self._late)

    async def end(self) -> bool:
        """Tell the keeper to end now instead of a little later; False if it holds something."""
        answer = await self._ask({"op": "end"})
        return bool(answer["ended"])

    async def run(self, link: Link, task_status: trio.TaskStatus[None]) -> None:
        """Stay joined with a keeper, *link* to begin with, until `leave`."""
        with self._life:
            first = True
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(link.listen)
                    try:
                        await self._settle(link, first=first)
                        if first:
                            # From here on it must answer whoever still asks while everything is being cancelled.
                            self._life.shield, first = True, False
                            task_status.started()
                        nursery.start_soon(_ping, link)
                        await self._hear(link, nursery)
                    except Lost as error:
                        log.warning("keeper lost pid=%d error=%s", link.pid, error)
                    self._unlink(link)
                    nursery.cancel_scope.cancel()
                link = await self._another(may_kill=not first)

    def leave(self) -> None:
        """Let the keeper keep alone, and close everything here."""
        self._life.cancel()
        keeper_wire.close_all([*self._held.values(), *self._revoked])
        self._held, self._revoked = {}, []
        if self._link is not None:
            self._unlink(self._link)

    async def _another(self, *, may_kill: bool) -> Link:
        log.warning("keeper gone held=%d; starting another one", len(self._held))
        while True:
            try:
                return await join(*self._where, may_kill=may_kill)
            except Unavailable as error:
                log.error("no keeper held=%d error=%s", len(self._held), error)
                await trio.sleep(RESTART_S)

    def _unlink(self, link: Link) -> None:
        link.close()
        if self._link is link:
            self._link, self._linked, self._lost_s = None, trio.Event(), trio.current_time()

    async def _ask(self, request: Packet, fds: Sequence[int] = ()) -> Packet:
        """Have *request* answered by this keeper or the next; cancelled only while there is none."""
        while True:
            await self._linked.wait()
            link = self._link
            assert link is not None
            try:
                answer, _ = await link.ask(request, fds)
            except Lost:
                self._unlink(link)
                continue
            self._room = answer["room"]
            return answer

    async def _settle(self, link: Link, *, first: bool) -> None:
        """Bring both sides to the same placeholders: take what only the keeper has, hand over what only we have."""
        answer, _ = await link.ask({"op": "join"})
        for ident in answer["files"]:
            self._on_late(Inode(ident))
        found: dict[Inode, int] = {}
        more = True
        while more:
            answer, fds = await link.ask({"op": "take"})
            found.update(zip(map(Inode, answer["files"]), fds, strict=False))
            if len(fds) < len(answer["files"]):
                log.error("no descriptors left for %d placeholders", len(answer["files"]) - len(fds))
            more = answer["more"]
        self._room = answer["room"]
        if first:
            await self._recover(link, found)
        else:
            keeper_wire.close_all(found.values())  # known; or a request is under way, which is repeated
        await self._hand_over(link, [ident for ident in self._held if ident not in found])
        link.may_kill = True
        self._link = link
        self._linked.set()

    async def _recover(self, link: Link, found: dict[Inode, int]) -> None:
        """Take over what an earlier daemon left; what it had filled when it died is let go."""
        filled = [ident for ident, fd in found.items() if _is_filled(fd)]
        for ident in filled:
            os.close(found.pop(ident))
        for start in range(0, len(filled), FILES_PER_PACKET):
            await link.ask({"op": "release", "files": filled[start : start + FILES_PER_PACKET]})
        self._held = found
        self.recovered = MappingProxyType(dict(found))

    async def _hand_over(self, link: Link, idents: list[Inode]) -> None:
        now = trio.current_time()
        for start in range(0, len(idents), FILES_PER_PACKET):
            batch = idents[start : start + FILES_PER_PACKET]
            # Who began to wait unseen did so after the last keeper was lost, at the earliest.
            waited = [(ident, now - self._waiting_since.get(ident, self._lost_s)) for ident in batch]
            answer, _ = await link.ask({"op": "hold", "files": waited}, [self._held[ident] for ident in batch])
            self._room = answer["room"]
            for ident in set(batch) - set(answer["files"]):
                log.error("placeholder lost ident=%d reason=its lease had ended", ident)
                self._on_late(ident)

    async def _hear(self, link: Link, nursery: trio.Nursery) -> None:
        """Act on what the keeper tells, until it hangs up."""
        async for packet in link.events:
            idents = [Inode(ident) for ident in packet["files"]]
            match packet["event"]:
                case "wanted":
                    self._on_wanted(idents)
                case "stop":
                    nursery.start_soon(self._stop, link, idents)
                case "late":
                    for ident in idents:
                        self._on_late(ident)

    def _on_wanted(self, idents: list[Inode]) -> None:
        for ident in idents:
            if ident in self._held and ident not in self._waiting_since:
                self._waiting_since[ident] = trio.current_time()
                self._to_tell[ident] = None
        self._told.set()
        self._told = trio.Event()

    async def _stop(self, link: Link, idents: list[Inode]) -> None:
        """See to it that nothing is written to *idents* any more, then say so: the keeper will empty them."""
        with trio.CancelScope(shield=True):
            taken = {ident: self._held.pop(ident) for ident in idents if ident in self._held}
            while any(ident in self._writers for ident in taken):
                await self._written.wait()
            kept = {ident: os.dup(fd) for ident, fd in taken.items()}  # or the death of the keeper would open them
            self._revoke(taken.values())
            try:
                await link.ask({"op": "stopped", "files": idents})
            except Lost:
                self._held.update(kept)
            else:
                keeper_wire.close_all(kept.values())

    def _on_late(self, ident: Inode) -> None:
        fd = self._held.pop(ident, None)
        if fd is not None:
            self._revoke([fd])
        self._forget(ident)
        self._late[ident] = None

    def _revoke(self, fds: Iterable[int]) -> None:
        """Put something that refuses writes in the place of *fds*: a borrower must not meet another file there."""
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for fd in fds:
            os.dup2(null, fd, inheritable=False)
            self._revoked.append(fd)
        os.close(null)

    def _forget(self, ident: Inode) -> None:
        self._held.pop(ident, None)
        self._waiting_since.pop(ident, None)
        self._to_tell.pop(ident, None)


def _is_filled(fd: int) -> bool:
    """Say whether its daemon had removed the mark; one that cannot be read is there."""
    try:
        return leases.absence(fd) is None
    except OSError:
        return False


async def _ping(link: Link) -> None:
    """Notice a keeper that lives but does not work; asking kills it."""
    while True:
        await trio.sleep(PING_S)
        try:
            await link.ask({"op": "ping"})
        except Lost:
            return


@asynccontextmanager
async def open_keeper(
    socket_path: Path, log_path: Path, *, late_after_s: float | None = None, idle_s: float | None = None
) -> AsyncIterator[Keeper]:
    """Join the keeper at *socket_path*, started in a session of its own if there is none, or raise Unavailable.

    Leaving it lets the keeper go on alone. *late_after_s* and *idle_s* are for a keeper that is started here.
    """
    options = [("--late-after", late_after_s), ("--idle", idle_s)]
    given = tuple(word for name, value in options if value is not None for word in (name, str(value)))
    where = (socket_path, log_path, given)
    link = await join(*where, may_kill=False)
    keeper = Keeper(*where)
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(keeper.run, link)
            yield keeper
        finally:
            keeper.leave()
