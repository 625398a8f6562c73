"""A simulated node: disk, worker threads and network, whose process may die at any change of the disk."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar

import trio

from spotwarp_fs.core.errors import PreconditionFailed
from spotwarp_fs.core.ports import Lane, ObjectInfo, Work
from spotwarp_fs.core.types import Inode, ObjectKey
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryJournal, MemoryKV, _MemoryWrite
from spotwarp_fs.store.faults import FaultSchedule, FaultStore, Method
from spotwarp_fs.store.memory import MemoryStore
from tests.support.world import VirtualWall

T = TypeVar("T")


class Killed(BaseException):
    """The daemon's process ends here."""


SITES = ("commit", "pwrite", "truncate", "punch", "set_aside", "append_aside_block", "remove", "journal")


class Switch:
    """Ends the process at the n-th change of the node's disk (or of one kind, or just after it).

    A dead process changes nothing more.
    """

    def __init__(self) -> None:
        self.countdown: int | None = None
        self.only = ""
        self.then = 0
        """How many more changes of any kind are made after those counted down."""
        self.dead = False
        self.site = ""
        self.hits = 0
        self.died_ns = 0

    def hit(self, site: str) -> None:
        self.hits += 1
        if not self.dead and self.countdown is not None:
            if self.countdown > 0 and site.startswith(self.only):
                self.countdown -= 1
            elif self.countdown == 0:
                self.then -= 1
            if self.countdown == 0 and self.then <= 0:
                self.dead, self.site, self.died_ns = True, site, VirtualWall().now_ns()
        if self.dead:
            raise Killed(site)


class FragileWrite(_MemoryWrite):
    def __init__(self, kv: MemoryKV, switch: Switch) -> None:
        super().__init__(kv)
        self._switch = switch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._switch.hit("commit")
            except Killed as killed:
                super().__exit__(Killed, killed, None)
                raise
        super().__exit__(kind, error, trace)


class FragileKV(MemoryKV):
    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.switch = switch

    def write(self) -> FragileWrite:
        return FragileWrite(self, self.switch)


class FragileData(MemoryDataFiles):
    """A data directory whose process may die before any change, and in the middle of a `pwrite`."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.switch = switch

    def pwrite(self, ino: Inode, offset: int, data: bytes | memoryview) -> None:
        try:
            self.switch.hit("pwrite")
        except Killed:
            if self.switch.countdown == 0:
                self.switch.countdown = -1
                super().pwrite(ino, offset, data[: len(data) // 2])
            raise
        super().pwrite(ino, offset, data)

    def truncate(self, ino: Inode, size: int) -> None:
        self.switch.hit("truncate")
        super().truncate(ino, size)

    def punch(self, ino: Inode, offset: int, length: int) -> None:
        self.switch.hit("punch")
        super().punch(ino, offset, length)

    def set_aside(self, ino: Inode, token: str) -> None:
        self.switch.hit("set_aside")
        super().set_aside(ino, token)

    def append_aside_block(self, token: str, ino: Inode, block: int, data: bytes | memoryview) -> None:
        self.switch.hit("append_aside_block")
        super().append_aside_block(token, ino, block, data)

    def remove(self, ino: Inode) -> None:
        self.switch.hit("remove")
        super().remove(ino)


class FragileJournal(MemoryJournal):
    def __init__(self, switch: Switch, stream: bytes = b"") -> None:
        super().__init__(stream)
        self.switch = switch

    def append(self, records: object) -> None:
        self.switch.hit("journal")
        super().append(records)  # type: ignore[arg-type]

    def rewrite(self, records: object) -> None:
        self.switch.hit("journal rewrite")
        super().rewrite(records)  # type: ignore[arg-type]


class SimNode:
    """What one node keeps; `restarted` is what its next process finds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.switch = Switch()
        self.kv = FragileKV(self.switch)
        self.data = FragileData(self.switch)
        self.journal = FragileJournal(self.switch)

    def restarted(self) -> SimNode:
        node = SimNode(self.name)
        node.kv._rows = self.kv.reopened()._rows
        node.data._files = self.data.restarted()._files
        node.journal = FragileJournal(node.switch, bytes(self.journal._stream))
        return node


@contextmanager
def killed(node: SimNode) -> Iterator[None]:
    """Expect that the daemon on *node* is killed inside."""
    try:
        yield
    except* Killed:
        pass
    assert node.switch.dead, "nobody was killed"


class SimWorkers:
    """Worker threads: a call happens some time after it was asked for, and its answer comes some time after that."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        await self._pause()
        result = call(*arguments)
        await self._pause()
        return result

    async def _pause(self) -> None:
        if self._rng.random() < 0.5:
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep(self._rng.random() * 0.02)


class NodeNetwork(FaultStore):
    """One node's way to the store. What a dying process had sent may still arrive, also much later."""

    def __init__(
        self, inner: MemoryStore, rng: random.Random, schedule: FaultSchedule, world: trio.Nursery, late_s: float
    ) -> None:
        super().__init__(inner, rng, schedule)
        self._random = rng
        self._world = world
        self._late_s = late_s
        self.switch = Switch()

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        try:
            return await super().put_if_absent(key, body, lane=lane)
        except trio.Cancelled:
            if self._late_s and self._random.random() < 0.5:
                self._world.start_soon(self._arrive, key, body, self._random.random() * self._late_s)
            raise

    async def _arrive(self, key: ObjectKey, body: bytes, after_s: float) -> None:
        await trio.sleep(after_s)
        with suppress(PreconditionFailed):
            await self._inner.put_if_absent(key, body)

    async def _suffer(self, method: Method, call: Callable[[], Awaitable[T]]) -> T:
        if self.switch.dead:
            raise Killed("network")
        return await super()._suffer(method, call)
