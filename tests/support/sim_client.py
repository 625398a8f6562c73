"""Programs of a simulated world: they draw requests, send them, and note what was acknowledged."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from spotwarp_fs.core.errors import Fenced, Refused
from spotwarp_fs.core.requests import AttributeChange, Handle, Node
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.session import Session
from tests.support.oracle import Op, Thing, Tree, differences, same, split
from tests.support.world import ACTOR, VirtualWall

T = TypeVar("T")
NAMES = (b"a", b"b", b"c", b"log", b"n" * 255)
EDGES = (
    0, 1, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES - 7, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES
)  # fmt: skip
LENGTHS = (1, 80, 4096, 10_000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 5, 2 * BLOCK_BYTES)
EXCHANGE = 2


@dataclass
class History:
    """Every state that one line of acknowledged requests went through, and when."""

    states: list[Tree]
    acked_s: list[float]
    published: int = 0
    """Index of the newest state that a manifest is known to hold."""
    barriers: list[int] = field(default_factory=list)
    """States that a barrier has promised."""
    pending: dict[int, Op] = field(default_factory=dict)
    ended_s: float | None = None
    """When its node was lost; None while it lives on somewhere."""
    died_ns: int = 0
    """When the process ended in the middle of a step."""
    trace: list[str] = field(default_factory=list)

    @property
    def tree(self) -> Tree:
        return self.states[-1]

    def add(self, op: Op) -> None:
        self.trace.append(f"{trio.current_time():.4f} {len(self.states)} {short(op)}")
        self.states.append(self.tree.apply(op))
        self.acked_s.append(trio.current_time())

    def acked_before(self, moment_s: float) -> int:
        """Newest state that was acknowledged by *moment_s*."""
        return max((at for at, acked_s in enumerate(self.acked_s) if acked_s <= moment_s), default=0)

    def note(self, what: str) -> None:
        self.trace.append(f"{trio.current_time():.4f} {what}")

    def index_of(self, seen: Tree, first: int) -> int:
        """Newest state equal to *seen* among those from *first* on, up to where it changes again; fails if none is."""
        for at in range(first, len(self.states)):
            if same(self.states[at], seen):
                while at + 1 < len(self.states) and same(self.states[at + 1], seen):
                    at += 1
                return at
        nearest = min(range(first, len(self.states)), key=lambda at: len(differences(self.states[at], seen)))
        raise AssertionError(
            f"no acknowledged prefix from {first} to {len(self.states) - 1} looks like this; the nearest is {nearest}: "
            + "; ".join(differences(self.states[nearest], seen)[:8])
        )


def short(op: Op) -> str:
    shown = [f"{len(x)}×{x[:2].hex()}" if isinstance(x, bytes) and len(x) > 8 else repr(x) for x in op.args]
    return f"{op.name}({', '.join(shown)})"


class Client:
    """A program: draws requests, sends them, and notes what was acknowledged."""

    def __init__(
        self,
        session: Session,
        history: History,
        rng: random.Random,
        *,
        number: int,
        requests: int,
        may_fail: bool,
    ) -> None:
        self.session = session
        self.fs = session.filesystem
        self.history = history
        self.rng = rng
        self.number = number
        self.requests = requests
        self.may_fail = may_fail
        """Damaged answers and long outages may end a request with EIO or ENOSPC."""
        self.handles: list[tuple[Handle, int]] = []

    async def run(self) -> None:
        actions = [
            (self.create, 4), (self.write, 14), (self.append, 4), (self.truncate, 6), (self.reopen, 3), (self.read, 5),
            (self.close, 4),
            (self.unlink, 3), (self.rename, 3), (self.link, 1), (self.mkdir, 1), (self.rmdir, 1), (self.symlink, 1),
            (self.chmod, 1), (self.utimens, 1), (self.xattr, 1), (self.fsync, 1), (self.barrier, 1), (self.pause, 5),
        ]  # fmt: skip
        calls, weights = zip(*actions, strict=True)
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            for _ in range(self.requests):
                if not await self._act(self.rng.choices(calls, weights)[0]):
                    break

    async def _act(self, call: Callable[[], Awaitable[None]]) -> bool:
        """Do one thing; False when the session is over."""
        try:
            await call()
        except Refused as refused:
            self.history.pending.pop(self.number, None)
            self.history.note(f"refused {refused.errno} {call.__name__} {refused}")
            if refused.errno in (5, 28) and not self.may_fail:
                raise
        except Fenced:
            return False
        if self.session.workspace.fenced is not None:
            return False
        if self.rng.random() < 0.3:
            await trio.sleep(self.rng.random() * self.rng.choice((0.01, 1.0)))
        return True

    async def send(self, name: str, args: tuple[object, ...], request: Awaitable[T]) -> T:
        op = Op(name, args)
        self.history.pending[self.number] = op
        answer = await request
        del self.history.pending[self.number]
        self.history.add(replace(op, now_ns=VirtualWall().now_ns()))
        return answer

    def directory(self) -> int:
        return self.rng.choice(self.history.tree.directories())

    def file(self) -> int | None:
        files = self.history.tree.files()
        return self.rng.choice(files) if files else None

    def place(self) -> tuple[int, bytes] | None:
        places = sorted(self.history.tree.entries)
        return self.rng.choice(places) if places else None

    async def make(
        self, mode: int, request: Callable[[Inode, bytes], Awaitable[tuple[Handle, Node] | Node]], target: bytes = b""
    ) -> tuple[Handle, Node] | Node:
        parent, name = self.directory(), self.rng.choice(NAMES)
        self.history.pending[self.number] = Op("make", (parent, name, 0, mode, target), VirtualWall().now_ns())
        answer = await request(Inode(parent), name)
        del self.history.pending[self.number]
        node = answer[1] if isinstance(answer, tuple) else answer
        self.history.add(Op("make", (parent, name, node.ino, mode, target), VirtualWall().now_ns()))
        return answer

    async def create(self) -> None:
        made = await self.make(
            stat.S_IFREG | 0o644, lambda parent, name: self.fs.create(parent, name, 0o644, os.O_RDWR, ACTOR)
        )
        assert isinstance(made, tuple)
        handle, node = made
        self.handles.append((handle, node.ino))
        await self.limit_handles()

    async def limit_handles(self) -> None:
        while len(self.handles) > 3:
            handle, _ = self.handles.pop(0)
            await self.fs.release(handle)

    async def mkdir(self) -> None:
        await self.make(stat.S_IFDIR | 0o755, lambda parent, name: self.fs.mkdir(parent, name, 0o755, ACTOR))

    async def symlink(self) -> None:
        target = b"t" * self.rng.choice((1, 300))
        await self.make(stat.S_IFLNK | 0o777, lambda parent, name: self.fs.symlink(parent, name, target, ACTOR), target)

    async def handle(self) -> tuple[Handle, int] | None:
        if self.handles and self.rng.random() < 0.7:
            return self.rng.choice(self.handles)
        ino = self.file()
        if ino is None:
            return None
        handle = await self.fs.open(Inode(ino), os.O_RDWR, ACTOR)
        self.handles.append((handle, ino))
        await self.limit_handles()
        return handle, ino

    def data(self, length: int) -> bytes:
        if self.rng.random() < 0.15:
            return bytes(length)
        pattern = self.rng.randbytes(self.rng.choice((1, 16))) + b"\1"
        return (pattern * (length // len(pattern) + 1))[:length]

    async def write(self) -> None:
        found = await self.handle()
        if found is not None:
            handle, ino = found
            offset, data = self.rng.choice(EDGES), self.data(self.rng.choice(LENGTHS))
            await self.send("write", (ino, offset, data), self.fs.write(handle, offset, data))

    async def append(self) -> None:
        found = await self.handle()
        if found is not None:
            handle, ino = found
            offset, data = self.history.tree.things[ino].size, self.data(self.rng.choice((80, 4096)))
            await self.send("write", (ino, offset, data), self.fs.write(handle, offset, data))

    async def truncate(self) -> None:
        ino = self.file()
        if ino is None:
            return
        size = self.rng.choice((0, 0, *EDGES))
        if self.rng.random() < 0.3:
            size = self.history.tree.things[ino].size // 2
        await self.send("truncate", (ino, size), self.fs.setattr(Inode(ino), AttributeChange(size=size), None, ACTOR))

    async def reopen(self) -> None:
        ino = self.file()
        if ino is not None:
            handle = await self.send("truncate", (ino, 0), self.fs.open(Inode(ino), os.O_RDWR | os.O_TRUNC, ACTOR))
            self.handles.append((handle, ino))
            await self.limit_handles()

    async def read(self) -> None:
        """Read; now and then without waiting for it, so that it meets what is written next."""
        ino = self.file()
        if ino is None:
            return
        handle = await self.fs.open(Inode(ino), os.O_RDONLY, ACTOR)
        if self.rng.random() < 0.5:
            self.nursery.start_soon(self._read, handle, ino)
        else:
            await self._read(handle, ino)

    async def _read(self, handle: Handle, ino: int) -> None:
        with suppress(Refused):
            await self._read_once(handle, ino)
        await self.fs.release(handle)

    async def _read_once(self, handle: Handle, ino: int) -> None:
        start, length = self.rng.choice(EDGES), self.rng.choice((100, 1 << 17, BLOCK_BYTES))
        first = len(self.history.states) - 1
        seen = await self.fs.read(handle, start, length)
        possible = {state.things[ino].content(start, start + length) for state in self.history.states[first:]}
        assert seen in possible, f"read of inode {ino:#x} at {start}, {length} bytes: what never was there"

    async def close(self) -> None:
        if self.handles:
            handle, _ = self.handles.pop(self.rng.randrange(len(self.handles)))
            await self.fs.flush(handle)
            await self.fs.release(handle)

    async def unlink(self) -> None:
        place = self.place()
        if place is not None:
            await self.send("unlink", place, self.fs.unlink(Inode(place[0]), place[1]))

    async def rmdir(self) -> None:
        place = self.place()
        if place is not None:
            await self.send("rmdir", place, self.fs.rmdir(Inode(place[0]), place[1]))

    async def rename(self) -> None:
        place, other = self.place(), (self.directory(), self.rng.choice(NAMES))
        if place is None:
            return
        exchange = other in self.history.tree.entries and self.rng.random() < 0.3
        request = self.fs.rename(Inode(place[0]), place[1], Inode(other[0]), other[1], EXCHANGE if exchange else 0)
        await self.send("rename", (*place, *other, exchange), request)

    async def link(self) -> None:
        ino = self.file()
        if ino is not None:
            place = self.directory(), self.rng.choice(NAMES)
            await self.send("link", (ino, *place), self.fs.link(Inode(ino), Inode(place[0]), place[1]))

    async def chmod(self) -> None:
        ino = self.file()
        if ino is not None:
            mode = self.rng.choice((0o600, 0o755))
            await self.send("chmod", (ino, mode), self.fs.setattr(Inode(ino), AttributeChange(mode=mode), None, ACTOR))

    async def utimens(self) -> None:
        ino = self.file()
        if ino is not None:
            change = AttributeChange(atime_ns=self.rng.randrange(10**18), mtime_ns=self.rng.randrange(10**18))
            request = self.fs.setattr(Inode(ino), change, None, ACTOR)
            await self.send("utimens", (ino, change.atime_ns, change.mtime_ns), request)

    async def xattr(self) -> None:
        ino = self.rng.choice([ROOT_INODE, self.file() or ROOT_INODE])
        held = [name for name, _ in self.history.tree.things[ino].xattrs]
        if held and self.rng.random() < 0.4:
            await self.send("removexattr", (ino, held[0]), self.fs.removexattr(Inode(ino), held[0]))
        else:
            name, value = self.rng.choice((b"user.a", b"user.b")), self.rng.randbytes(4)
            await self.send("setxattr", (ino, name, value), self.fs.setxattr(Inode(ino), name, value))

    async def fsync(self) -> None:
        if self.handles:
            await self.fs.fsync(self.handles[-1][0], datasync=False)

    async def barrier(self) -> None:
        at = len(self.history.states) - 1
        with trio.move_on_after(20) as patience:
            number = await self.session.streamer.barrier()
        if not patience.cancelled_caught:
            self.history.note(f"barrier: manifest {number} has state {at}")
            self.history.barriers.append(at)

    async def pause(self) -> None:
        await trio.sleep(self.rng.random() * self.rng.choice((0.1, 3.0)))


async def observe(session: Session) -> Tree:
    """Walk everything and read every byte, as a program would."""
    tree = await metadata(session, None)
    for ino, thing in list(tree.things.items()):
        if stat.S_ISREG(thing.mode):
            handle = await session.filesystem.open(Inode(ino), os.O_RDONLY, ACTOR)
            parts = [await patient_read(session, handle, at) for at in range(0, thing.size, BLOCK_BYTES)]
            await session.filesystem.release(handle)
            tree.things[ino] = replace(thing, blocks=split(b"".join(parts)))
    return tree


async def patient_read(session: Session, handle: Handle, at: int) -> bytes:
    """A bad network may damage three answers in a row, which is EIO; a program would try again."""
    for _ in range(20):
        try:
            return await session.filesystem.read(handle, at, BLOCK_BYTES)
        except Refused as refused:
            if refused.errno != errno.EIO:
                raise
    raise AssertionError(f"handle {handle} at {at} cannot be read")


async def metadata(session: Session, known: Tree | None) -> Tree:
    """Walk names and attributes; contents are taken from *known*."""
    fs = session.filesystem
    things: dict[int, Thing] = {}
    entries: dict[tuple[int, bytes], int] = {}
    pending = [ROOT_INODE]
    while pending:
        ino = pending.pop()
        if ino in things:
            continue
        record = (await fs.getattr(ino)).record
        xattrs = tuple(sorted([(name, await fs.getxattr(ino, name)) for name in await fs.listxattr(ino)]))
        blocks = known.things[ino].blocks if known is not None and ino in known.things else {}
        things[ino] = Thing.of(record, xattrs, blocks)
        if stat.S_ISDIR(record.mode):
            handle = await fs.opendir(ino, ACTOR)
            for item in list(await fs.readdir(handle, 0)):
                entries[ino, item.name] = item.node.ino
                pending.append(item.node.ino)
            await fs.releasedir(handle)
    return Tree(things, entries)
