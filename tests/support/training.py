"""A training program as it really behaves: checkpoint directories written in place, the oldest removed, a log open.

Nothing is renamed and nothing is synced: what makes it safe to resume from is the takeover's business.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.types import ROOT_INODE
from spotwarp_fs.engine.session import Session
from tests.support.world import ACTOR

FILES = ("model-1.pt", "model-2.pt", "optimizer.pt", "trainer_state.json")
KEEP = 2


def content(step: int, file: str) -> bytes:
    """What the file of a checkpoint holds; different in each."""
    return random.Random(f"{step} {file}").randbytes(40_000 + 7_000 * len(file) + step)


@dataclass
class Trainer:
    """Saves a checkpoint every few seconds, until it is cancelled."""

    session: Session
    rng: random.Random
    steps: int = 0
    complete_s: dict[int, float] = field(default_factory=dict)
    removing_s: dict[int, float] = field(default_factory=dict)
    safe: set[int] = field(default_factory=set)
    """Checkpoints that were complete at the cut of a published state."""

    def watch(self) -> None:
        """Note at each publish which checkpoints the state has whole."""
        streamer = self.session.streamer
        streamer.on_published.append(lambda head, changes: self._published(streamer._last_begun_s))

    def _published(self, begun_s: float) -> None:
        for step, done_s in self.complete_s.items():
            if done_s < begun_s and begun_s < self.removing_s.get(step, float("inf")):
                self.safe.add(step)

    async def run(self) -> None:
        """Train for ever."""
        self.watch()
        filesystem = self.session.filesystem
        log, _ = await filesystem.create(ROOT_INODE, b"train.log", 0o644, os.O_WRONLY, ACTOR)
        written = 0
        while True:
            for _ in range(self.rng.randrange(3)):
                line = b"step %d\n" % self.steps
                await filesystem.write(log, written, line)
                written += len(line)
                await self._pause()
            self.steps += 1
            await self._save(self.steps)
            if self.steps > KEEP:
                await self._remove(self.steps - KEEP)

    async def _pause(self) -> None:
        await trio.sleep(self.rng.choice((0.0, 0.1, 0.4, 1.3)))

    async def _save(self, step: int) -> None:
        filesystem = self.session.filesystem
        directory = await filesystem.mkdir(ROOT_INODE, b"checkpoint-%d" % step, 0o755, ACTOR)
        for file in FILES:
            data = content(step, file)
            handle, _ = await filesystem.create(directory.ino, file.encode(), 0o644, os.O_WRONLY, ACTOR)
            await self._pause()
            for at in range(0, len(data), 30_000):
                await filesystem.write(handle, at, data[at : at + 30_000])
                await self._pause()
            await filesystem.flush(handle)
            await filesystem.release(handle)
            await self._pause()
        self.complete_s[step] = trio.current_time()
        await trio.sleep(0.001)

    async def _remove(self, step: int) -> None:
        filesystem = self.session.filesystem
        name = b"checkpoint-%d" % step
        directory = await filesystem.lookup(ROOT_INODE, name)
        self.removing_s[step] = trio.current_time()
        for file in FILES:
            await filesystem.unlink(directory.ino, file.encode())
            await self._pause()
        await filesystem.rmdir(ROOT_INODE, name)


async def read_at(session: Session, path: bytes) -> bytes:
    """Read a whole file by its path."""
    ino = ROOT_INODE
    for name in path.split(b"/"):
        node = await session.filesystem.lookup(ino, name)
        ino = node.ino
    handle = await session.filesystem.open(ino, os.O_RDONLY, ACTOR)
    parts = [await session.filesystem.read(handle, at, 1 << 17) for at in range(0, node.record.size, 1 << 17)]
    await session.filesystem.release(handle)
    return b"".join(parts)


async def names(session: Session, directory: bytes = b"") -> list[str]:
    """List a directory."""
    ino = ROOT_INODE
    if directory:
        ino = (await session.filesystem.lookup(ROOT_INODE, directory)).ino
    handle = await session.filesystem.opendir(ino, ACTOR)
    found = [item.name.decode() for item in await session.filesystem.readdir(handle, 0)]
    await session.filesystem.releasedir(handle)
    return found


async def newest_checkpoint(session: Session) -> int | None:
    """What a program that resumes from the newest name would load; raises if that is not whole."""
    steps = [int(name.split("-")[1]) for name in await names(session) if name.startswith("checkpoint-")]
    if not steps:
        return None
    newest = max(steps)
    for file in FILES:
        path = f"checkpoint-{newest}/{file}".encode()
        assert await read_at(session, path) == content(newest, file), f"{path!r} is not whole"
    return newest
