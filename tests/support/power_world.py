"""Seeded worlds in which the power fails: a program on the real engine, then the next boot, checked against an oracle.

The oracle knows every content that a file ever had and every set of names that the directory ever had. An fsync or a
published manifest says which of them are old: those may never be seen again. Between them, a file that was changed
without an fsync may be any mixture of what it was since.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import trio

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.journal import encode_record
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.session import Session
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryJournal, MemoryKV
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.memory import MemoryStore
from tests.support.sim_node import SimWorkers
from tests.support.virtual import content, evict_everything, in_virtual_time
from tests.support.world import ACTOR, FAST, new_store, start

T = TypeVar("T")
NAMES = (b"a", b"b", b"c", b"d")
OFFSETS = (0, 0, 90, 5000, BLOCK_BYTES - 50, BLOCK_BYTES, BLOCK_BYTES + 4090, 2 * BLOCK_BYTES + 10)
LENGTHS = (1, 80, 4096, 9000, BLOCK_BYTES)
REQUESTS = 18
BOOTS = 3
NO_ANSWER = FaultSchedule(lose_answer=1.0, methods=frozenset({Method.PUT_IF_ABSENT}))
OUTAGE = FaultSchedule(fail_before=1.0)


class PowerJournal(MemoryJournal):
    """A journal that knows what is on its way to the disk: any part of it may be there after a power loss."""

    coming: bytes = b""

    def lose_power(self, rng: random.Random) -> PowerJournal:
        torn = self.coming[: rng.randrange(len(self.coming) + 1)]
        return PowerJournal(bytes(self._stream) + torn + b"SWJ\x01 half a record"[: rng.randrange(20)])


class PowerWorkers(SimWorkers):
    """Worker threads that may be writing the journal when the power fails."""

    def __init__(self, rng: random.Random, journal: PowerJournal) -> None:
        super().__init__(rng)
        self._journal = journal

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        if getattr(call, "__func__", None) is MemoryJournal.append:
            (records,) = arguments
            assert isinstance(records, Sequence)
            self._journal.coming = b"".join(map(encode_record, records))

            def written(*_: object) -> T:
                self._journal.coming = b""
                return call(records)

            return await super().run(work, written)
        return await super().run(work, call, *arguments)


@dataclass
class PowerNode:
    """What the power leaves, or a kill."""

    kv: MemoryKV = field(default_factory=MemoryKV)
    data: MemoryDataFiles = field(default_factory=MemoryDataFiles)
    journal: PowerJournal = field(default_factory=PowerJournal)

    def killed(self) -> PowerNode:
        return PowerNode(self.kv.reopened(), self.data.restarted(), PowerJournal(bytes(self.journal._stream)))

    def lose_power(self, rng: random.Random) -> PowerNode:
        return PowerNode(MemoryKV(), self.data.power_loss(rng), self.journal.lose_power(rng))


@dataclass
class Known:
    """What may be found, and what no longer: all states are numbered, and none is forgotten."""

    contents: dict[Inode, list[bytes]] = field(default_factory=dict)
    oldest: dict[Inode, int] = field(default_factory=dict)
    names: list[dict[bytes, Inode]] = field(default_factory=lambda: [{}])
    oldest_names: int = 0

    def now(self, ino: Inode) -> bytes:
        return self.contents[ino][-1]

    def changed(self, ino: Inode, data: bytes) -> None:
        self.contents.setdefault(ino, []).append(data)
        self.oldest.setdefault(ino, 0)

    def renamed(self, names: dict[bytes, Inode]) -> None:
        self.names.append(names)

    def moment(self, inodes: Sequence[Inode]) -> tuple[dict[Inode, int], int]:
        return {ino: len(self.contents[ino]) - 1 for ino in inodes}, len(self.names) - 1

    def promised(self, moment: tuple[dict[Inode, int], int]) -> None:
        contents, names = moment
        for ino, at in contents.items():
            self.oldest[ino] = max(self.oldest[ino], at)
        self.oldest_names = max(self.oldest_names, names)

    def check(self, found: dict[bytes, tuple[Inode, bytes]]) -> None:
        """Every name as at some time since the last promise, every byte from a content since the last promise."""
        names = {name: ino for name, (ino, _) in found.items()}
        assert names in self.names[self.oldest_names :], (names, self.names[self.oldest_names :])
        for name, (ino, data) in found.items():
            self._check_content(name, data, self.contents[ino][self.oldest[ino] :])
        self.names.append(names)
        self.oldest_names = len(self.names) - 1
        for ino, data in found.values():
            self.contents[ino].append(data)
            self.oldest[ino] = len(self.contents[ino]) - 1

    def _check_content(self, name: bytes, data: bytes, versions: list[bytes]) -> None:
        sizes = [len(version) for version in versions]
        assert min(sizes) <= len(data) <= max(sizes), (name, len(data), sizes)
        if data in versions:
            return
        possible = np.zeros(len(data), dtype=bool)
        seen = np.frombuffer(data, dtype=np.uint8)
        for version in versions:
            shared = min(len(version), len(data))
            possible[:shared] |= seen[:shared] == np.frombuffer(version, dtype=np.uint8)[:shared]
        at = int(np.argmin(possible))
        assert possible.all(), (name, at, data[at : at + 8], len(data), sizes)


class PowerWorld:
    """One workspace on one node, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store: MemoryStore = new_store()
        self.node = PowerNode()
        self.known = Known()
        self.settings = replace(
            FAST,
            interval_s=self.rng.choice((0.2, 1.0, 1e6)),
            heartbeat_s=1e6,
            cold_after_s=self.rng.choice((0.0, 0.2, 1e6)),
            early_upload_period_s=0.05,
            pack_linger_s=0.05,
            write_wait_max_s=1.0,
            read_wait_max_s=0.6,
            journal_linger_s=self.rng.choice((0.01, 0.5, 1e6)),
            journal_bytes_max=self.rng.choice((600, 1 << 26)),
            cache_bytes_max=self.rng.choice((12 * BLOCK_BYTES, 1 << 40)),
            rebase_bytes_min=self.rng.choice((1, 1 << 22)),
            rebase_manifests_max=self.rng.choice((2, 256)),
        )
        self.marks = self.rng.randrange(1, 200)
        self.trace: list[str] = []
        self.killed = False
        """The last session ended by SIGKILL, which loses nothing, and promises nothing."""

    async def run(self) -> None:
        for _ in range(BOOTS):
            ends = self.rng.random()
            async with trio.open_nursery() as nursery:
                network = FaultStore(self.store, random.Random(self.rng.random()))
                workers = PowerWorkers(random.Random(self.rng.random()), self.node.journal)
                entropy = random.Random(self.rng.random())
                async with start(network, self.node, rng=entropy, settings=self.settings, workers=workers) as session:
                    await self._look(session)
                    await self._work(session, network, nursery)
                    nursery.cancel_scope.cancel()
                    await trio.lowlevel.checkpoint()
            self.killed = ends < 0.2
            self.trace.append("kill" if self.killed else "power loss")
            self.node = self.node.killed() if self.killed else self.node.lose_power(self.rng)
        await self._publish_and_compare()

    async def _look(self, session: Session) -> None:
        found = await contents(session)
        if self.killed:
            assert found == {name: (ino, self.known.now(ino)) for name, ino in self.known.names[-1].items()}
        else:
            self.known.check(found)

    async def _publish_and_compare(self) -> None:
        """Publishing goes on, and a fresh node sees the same."""
        async with start(self.store, self.node, rng=self.rng, settings=self.settings) as session:
            await self._look(session)
            found = await contents(session)
            await session.streamer.barrier()
            assert await contents(session) == found
        async with start(self.store, PowerNode(), rng=self.rng, settings=self.settings) as session:
            assert await contents(session) == found

    async def _work(self, session: Session, network: FaultStore, nursery: trio.Nursery) -> None:
        actions: list[tuple[Callable[[Session], Awaitable[None]], int]] = [
            (self._write, 8), (self._truncate, 3), (self._rewrite, 2), (self._create, 3), (self._rename, 2),
            (self._unlink, 1),
        ]  # fmt: skip
        await self._create(session)
        for _ in range(self.rng.randrange(4, REQUESTS)):
            draw = self.rng.random()
            if draw < 0.5:
                action = self.rng.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
                try:
                    await action(session)
                except Refused as error:
                    if error.errno not in (errno.ENOSPC, errno.EIO):  # an outage
                        raise
            elif draw < 0.75:
                self._promise(session, nursery, self._fsync)
            elif draw < 0.85:
                evict_everything(session)
            elif draw < 0.9:
                self._promise(session, nursery, self._publish)
            else:
                network.schedule = self.rng.choice((FaultSchedule(), FaultSchedule(), NO_ANSWER, OUTAGE))
            if self.rng.random() < 0.6:
                await trio.sleep(self.rng.choice((0.0, 0.005, 0.03, 0.3, 2.0)))

    def _pick(self) -> tuple[bytes, Inode]:
        return self.rng.choice(sorted(self.known.names[-1].items()))

    async def _create(self, session: Session) -> None:
        names = self.known.names[-1]
        name = self.rng.choice(NAMES)
        if name not in names:
            handle, node = await session.filesystem.create(ROOT_INODE, name, 0o644, os.O_RDWR, ACTOR)
            self.known.changed(node.ino, b"")
            self._named(names | {name: node.ino}, b"create " + name)
            await session.filesystem.release(handle)

    def _named(self, names: dict[bytes, Inode], what: bytes) -> None:
        self.trace.append(what.decode())
        self.known.renamed(names)

    async def _write(self, session: Session) -> None:
        await self._write_to(session, *self._pick(), self.rng.choice(OFFSETS), self.rng.choice(LENGTHS))

    async def _write_to(self, session: Session, name: bytes, ino: Inode, offset: int, length: int) -> None:
        self.marks = self.marks % 250 + 1
        data = bytes([self.marks]) * length
        handle = await session.filesystem.open(ino, os.O_RDWR, ACTOR)
        try:
            await session.filesystem.write(handle, offset, data)
        finally:
            await session.filesystem.release(handle)
        before = self.known.now(ino).ljust(offset, b"\0")
        self.trace.append(f"write {name!r} {offset}+{length} of {self.marks}")
        self.known.changed(ino, before[:offset] + data + before[offset + length :])

    async def _truncate(self, session: Session) -> None:
        name, ino = self._pick()
        size = self.rng.choice(OFFSETS)
        await session.filesystem.setattr(ino, AttributeChange(size=size), None, ACTOR)
        self.trace.append(f"truncate {name!r} to {size}")
        self.known.changed(ino, self.known.now(ino)[:size].ljust(size, b"\0"))

    async def _rewrite(self, session: Session) -> None:
        name, ino = self._pick()
        handle = await session.filesystem.open(ino, os.O_RDWR | os.O_TRUNC, ACTOR)
        self.trace.append(f"rewrite {name!r}")
        self.known.changed(ino, b"")
        await session.filesystem.release(handle)
        await self._write_to(session, name, ino, 0, self.rng.choice(LENGTHS))

    async def _rename(self, session: Session) -> None:
        name, ino = self._pick()
        target = self.rng.choice(NAMES)
        if target != name:
            await session.filesystem.rename(ROOT_INODE, name, ROOT_INODE, target, 0)
            names = {other: found for other, found in self.known.names[-1].items() if other != name}
            self._named(names | {target: ino}, b"rename " + name + b" " + target)

    async def _unlink(self, session: Session) -> None:
        name, _ = self._pick()
        names = {other: found for other, found in self.known.names[-1].items() if other != name}
        if names:
            await session.filesystem.unlink(ROOT_INODE, name)
            self._named(names, b"unlink " + name)

    def _promise(self, session: Session, nursery: trio.Nursery, ask: Callable[..., Awaitable[None]]) -> None:
        """Ask now; whatever comes before the answer is not part of what is promised."""
        nursery.start_soon(ask, session, *self._pick())

    async def _fsync(self, session: Session, name: bytes, ino: Inode) -> None:
        try:
            handle = await session.filesystem.open(ino, os.O_RDONLY, ACTOR)
        except Refused:
            return
        moment = self.known.moment([ino])
        await session.filesystem.fsync(handle, datasync=False)
        self.trace.append(f"fsynced {name!r}")
        self.known.promised(moment)
        await session.filesystem.release(handle)

    async def _publish(self, session: Session, _name: bytes, _ino: Inode) -> None:
        moment = self.known.moment(list(self.known.names[-1].values()))
        await session.streamer.barrier()
        self.trace.append("published")
        self.known.promised(moment)


async def contents(session: Session) -> dict[bytes, tuple[Inode, bytes]]:
    """Every name in the root, with inode and bytes."""
    handle = await session.filesystem.opendir(ROOT_INODE, ACTOR)
    names = [item.name for item in await session.filesystem.readdir(handle, 0)]
    await session.filesystem.releasedir(handle)
    found = {}
    for name in names:
        node = await session.filesystem.lookup(ROOT_INODE, name)
        found[name] = (node.ino, await content(session, name))
    return found


def run_power_world(seed: int) -> PowerWorld:
    world = PowerWorld(seed)
    try:
        in_virtual_time(world.run)
    except BaseException as error:
        error.add_note(f"SPOTWARP_SEED={seed}: " + "; ".join(world.trace[-60:]))
        raise
    return world
