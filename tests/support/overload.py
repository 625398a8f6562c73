"""A link that takes so many bytes a second of virtual time, and a job that saves checkpoints whatever the link takes.

Invariant: the link is fair, as a real one is: what is sent at the same time shares it, and nothing is sent twice as
fast because it is sent in parallel.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.requests import AttributeChange, Handle
from spotwarp_fs.core.types import ROOT_INODE, Inode, ObjectKey
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.faults import FaultStore
from spotwarp_fs.store.memory import MemoryStore
from tests.support.world import ACTOR

SHARE_BYTES = 4096
MARKER = b"trainer_state.json"


class Uplink(FaultStore):
    """The way of one node to the store; answers come at once, what is sent takes its time."""

    def __init__(self, inner: MemoryStore, bytes_per_s: float) -> None:
        super().__init__(inner, random.Random(1))
        self.bytes_per_s = bytes_per_s
        self.pack_bytes = 0
        self._turn = trio.StrictFIFOLock()

    async def _send(self, count: int) -> None:
        while count > 0:
            async with self._turn:
                await trio.sleep(min(count, SHARE_BYTES) / self.bytes_per_s)
            count -= SHARE_BYTES

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        await self._send(len(body))
        return await super().put(key, body, lane=lane)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        await self._send(len(body))
        if "/packs/" in key:
            self.pack_bytes += len(body)
        return await super().put_if_absent(key, body, lane=lane)


def payload(step: int, file: int, length: int) -> bytes:
    """What a file of a checkpoint holds: different in each, and nothing to compress."""
    return random.Random(f"{step} {file}").randbytes(length)


@dataclass
class Saver:
    """Saves one checkpoint after the other: in place, by rename, or in directories of which the newest few stay."""

    session: Session
    style: str
    save_s: float
    pause_s: float
    files: int = 12
    file_bytes: int = 20_000
    steps: int = 0
    complete_s: dict[int, float] = field(default_factory=dict)
    removing_s: dict[int, float] = field(default_factory=dict)
    newest: int = 0
    """The newest checkpoint that is whole in the newest published state."""
    worst_age_s: float = 0.0
    cuts: list[float] = field(default_factory=list)

    @property
    def keep(self) -> int:
        return int(self.style.removeprefix("keep ")) if self.style.startswith("keep") else 1

    @property
    def checkpoint_bytes(self) -> int:
        return self.files * self.file_bytes

    def whole_at(self, moment_s: float) -> int:
        """The newest checkpoint that a state of that moment has whole."""
        whole = [
            step
            for step, done_s in self.complete_s.items()
            if done_s <= moment_s < self.removing_s.get(step, float("inf"))
        ]
        return max(whole, default=0)

    def published(self, begun_s: float) -> None:
        self.cuts.append(trio.current_time() - begun_s)
        self.newest = max(self.newest, self.whole_at(begun_s))

    async def run(self) -> None:
        """Save for ever."""
        streamer = self.session.streamer
        streamer.on_published.append(lambda head, changes: self.published(streamer._last_begun_s))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            while True:
                self.steps += 1
                await self._save(self.steps)
                await trio.sleep(self.pause_s)

    async def _watch(self) -> None:
        while True:
            await trio.sleep(0.5)
            if self.newest:
                self.worst_age_s = max(self.worst_age_s, trio.current_time() - self.complete_s[self.newest])

    async def _save(self, step: int) -> None:
        filesystem = self.session.filesystem
        match self.style:
            case "in place":
                self.removing_s[step - 1] = trio.current_time()
                await self._write_all(ROOT_INODE, step, "model-{}.pt")
            case "renamed":
                await self._write_all(ROOT_INODE, step, ".tmp-{}")
                self.removing_s[step - 1] = trio.current_time()
                for file in range(self.files):
                    names = f".tmp-{file}".encode(), f"model-{file}.pt".encode()
                    await filesystem.rename(ROOT_INODE, names[0], ROOT_INODE, names[1], 0)
            case _:
                made = await filesystem.mkdir(ROOT_INODE, b"checkpoint-%d" % step, 0o755, ACTOR)
                await self._write_all(made.ino, step, "model-{}.pt")
                await filesystem.release(await self._open(made.ino, MARKER))
        self.complete_s[step] = trio.current_time()
        if self.style.startswith("keep") and step > self.keep:
            await self._remove(step - self.keep)

    async def _write_all(self, parent: Inode, step: int, name: str) -> None:
        filesystem = self.session.filesystem
        for file in range(self.files):
            handle = await self._open(parent, name.format(file).encode())
            data = payload(step, file, self.file_bytes)
            await filesystem.write(handle, 0, data)
            await trio.sleep(self.save_s / self.files)
            await filesystem.flush(handle)
            await filesystem.release(handle)

    async def _open(self, parent: Inode, name: bytes) -> Handle:
        """open(O_CREAT | O_TRUNC), as it reaches the filesystem."""
        filesystem = self.session.filesystem
        try:
            node = await filesystem.lookup(parent, name)
        except Refused:
            return (await filesystem.create(parent, name, 0o644, os.O_WRONLY, ACTOR))[0]
        handle = await filesystem.open(node.ino, os.O_WRONLY, ACTOR)
        await filesystem.setattr(node.ino, AttributeChange(size=0), handle, ACTOR)
        return handle

    async def _remove(self, step: int) -> None:
        filesystem, name = self.session.filesystem, b"checkpoint-%d" % step
        directory = await filesystem.lookup(ROOT_INODE, name)
        self.removing_s[step] = trio.current_time()
        for name_in in [*(f"model-{file}.pt".encode() for file in range(self.files)), MARKER]:
            await filesystem.unlink(directory.ino, name_in)
        await filesystem.rmdir(ROOT_INODE, name)


@asynccontextmanager
async def saving(saver: Saver) -> AsyncIterator[Saver]:
    """Let the job run while the body does."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        yield saver
        nursery.cancel_scope.cancel()
