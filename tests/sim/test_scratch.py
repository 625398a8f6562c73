"""Does scratch stay on its node, and nothing else, through cuts, takeovers, and names that cross the border?"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from spotwarp_fs.core import paths, treecheck
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.scratch import published
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, Inode
from spotwarp_fs.engine.scratch import not_restored
from spotwarp_fs.engine.session import Session
from spotwarp_fs.local.memory import MemoryKV
from tests.support.world import ACTOR, FAST, Node, new_store, start

CACHE = b".cache/uv"


class Shell:
    """Paths instead of inode numbers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.fs = session.filesystem

    async def place(self, path: bytes) -> tuple[Inode, bytes]:
        *above, name = path.split(b"/")
        ino = ROOT_INODE
        for part in above:
            ino = (await self.fs.lookup(ino, part)).ino
        return ino, name

    async def ino(self, path: bytes) -> Inode:
        return (await self.fs.lookup(*await self.place(path))).ino

    async def mkdirs(self, path: bytes) -> None:
        parts = path.split(b"/")
        for count in range(1, len(parts) + 1):
            if b"/".join(parts[:count]) not in self.tree():
                await self.fs.mkdir(*await self.place(b"/".join(parts[:count])), 0o755, ACTOR)

    async def write(self, path: bytes, data: bytes, offset: int = 0) -> None:
        if path in self.tree():
            handle = await self.fs.open(await self.ino(path), os.O_WRONLY, ACTOR)
        else:
            handle, _ = await self.fs.create(*await self.place(path), 0o644, os.O_WRONLY, ACTOR)
        for at in range(0, len(data), 1 << 17):
            await self.fs.write(handle, offset + at, data[at : at + (1 << 17)])
        await self.fs.flush(handle)
        await self.fs.release(handle)

    async def read(self, path: bytes) -> bytes:
        node = await self.fs.lookup(*await self.place(path))
        handle = await self.fs.open(node.ino, os.O_RDONLY, ACTOR)
        parts = [await self.fs.read(handle, at, 1 << 17) for at in range(0, node.record.size, 1 << 17)]
        await self.fs.release(handle)
        return b"".join(parts)

    async def link(self, source: bytes, path: bytes) -> None:
        await self.fs.link(await self.ino(source), *await self.place(path))

    async def rename(self, source: bytes, path: bytes) -> None:
        await self.fs.rename(*await self.place(source), *await self.place(path), 0)

    async def unlink(self, path: bytes) -> None:
        await self.fs.unlink(*await self.place(path))

    async def fsync(self, path: bytes) -> None:
        handle = await self.fs.open(await self.ino(path), os.O_WRONLY, ACTOR)
        await self.fs.fsync(handle, datasync=False)
        await self.fs.release(handle)

    def tree(self) -> dict[bytes, Inode]:
        with self.session.workspace.kv.read() as view:
            return paths_of(view)


def paths_of(view: KVRead) -> dict[bytes, Inode]:
    return {path: node.ino for path, node in paths.subtree(view, ROOT_INODE) if path}


def play(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def sound(session: Session) -> None:
    with session.workspace.kv.read() as view:
        assert not treecheck.check(view)
        assert not treecheck.check(published(view))


def content(seed: int, length: int = 3 * BLOCK_BYTES // 2) -> bytes:
    return random.Random(seed).randbytes(length)


def test_scratch_is_kept_here_and_missing_there() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await shell.write(CACHE + b"/wheel", content(1))
            await shell.write(b"train.py", content(2))
            await session.streamer.barrier()
            assert session.packs.bytes_uploaded < 2 * len(content(2))
            head = session.streamer.head.manifest
            assert (head.files, head.directories, head.logical_bytes) == (1, 2, len(content(2)))
            assert head.notes["scratch"] == [".cache/uv"]
            assert session.workspace.dirty_blocks == 0
        async with start(store, node) as session:
            assert await Shell(session).read(CACHE + b"/wheel") == content(1)
            with session.workspace.kv.read() as view:
                assert not_restored(view, session.claimed.resumed_from) == ()
        async with start(store, Node()) as session:
            assert Shell(session).tree().keys() == {b".cache", b"train.py"}
            with session.workspace.kv.read() as view:
                lines = not_restored(view, session.claimed.resumed_from)
            assert lines == ("scratch, not restored: .cache/uv",)
            assert session.streamer.head.manifest.notes["scratch"] == [".cache/uv"]
            sound(session)

    play(main)


def test_changes_of_scratch_alone_make_no_manifest_and_leave_nothing_behind() -> None:
    async def main() -> None:
        async with start(new_store(), Node()) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            number = await session.streamer.barrier()
            await shell.write(CACHE + b"/wheel", content(1))
            await trio.sleep(10)
            assert await session.streamer.barrier() == number
            assert session.workspace.oldest_unpublished_s is None
            with session.workspace.kv.read() as view:
                assert not list(view.scan(b"L", b"M"))

    play(main)


def test_a_file_linked_out_of_a_cache_is_published_with_its_blocks() -> None:
    """B11: uv and pip install by hard links out of their caches."""

    async def main() -> None:
        store = new_store()
        async with start(store, Node()) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await shell.mkdirs(b"venv/lib")
            await shell.write(CACHE + b"/module.py", content(1))
            await session.streamer.barrier()
            await shell.link(CACHE + b"/module.py", b"venv/lib/module.py")
            await session.streamer.barrier()
            sound(session)
            assert (await session.filesystem.getattr(await shell.ino(b"venv/lib/module.py"))).record.nlink == 2
        async with start(store, Node()) as session:
            shell = Shell(session)
            assert await shell.read(b"venv/lib/module.py") == content(1)
            assert (await session.filesystem.getattr(await shell.ino(b"venv/lib/module.py"))).record.nlink == 1
            assert CACHE not in shell.tree()
            sound(session)

    play(main)


@pytest.mark.history("C18")
def test_a_directory_goes_into_scratch_and_comes_back() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node) as session:
            shell = Shell(session)
            await shell.mkdirs(b"data/deep")
            await shell.mkdirs(CACHE)
            await shell.write(b"data/deep/a", content(1))
            await shell.write(b"data/b", content(2))
            await session.streamer.barrier()
            await shell.rename(b"data", CACHE + b"/data")
            await session.streamer.barrier()
            sound(session)
            assert session.streamer.head.manifest.files == 0
        async with start(store, node) as session:
            shell = Shell(session)
            assert await shell.read(CACHE + b"/data/deep/a") == content(1)
            await shell.write(CACHE + b"/data/b", b"changed", offset=5)
            await shell.rename(CACHE + b"/data", b"back")
            await session.streamer.barrier()
            sound(session)
        async with start(store, Node()) as session:
            shell = Shell(session)
            assert await shell.read(b"back/deep/a") == content(1)
            assert await shell.read(b"back/b") == content(2)[:5] + b"changed" + content(2)[12:]
            assert session.streamer.head.manifest.files == 2
            sound(session)

    play(main)


def test_what_goes_into_scratch_unread_is_fetched_before_the_store_forgets_it() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, Node()) as session:
            await Shell(session).write(b"corpus", content(1))
            await session.streamer.barrier()
        async with start(store, node) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await shell.rename(b"corpus", CACHE + b"/corpus")
            ino = await shell.ino(CACHE + b"/corpus")
            assert ino in session.workspace.withdrawn
            await session.streamer.barrier()
            await trio.sleep(10)
            assert ino not in session.workspace.withdrawn
            fetched = session.packs.bytes_fetched
            assert await shell.read(CACHE + b"/corpus") == content(1)
            assert session.packs.bytes_fetched == fetched
            await shell.unlink(CACHE + b"/corpus")
            await session.streamer.barrier()
        async with start(store, Node()) as session:
            assert b"corpus" not in Shell(session).tree()

    play(main)


def test_an_unread_file_that_went_into_scratch_survives_a_new_base() -> None:
    async def main() -> None:
        settings = replace(FAST, rebase_manifests_max=3, rebase_bytes_min=0)
        store, node = new_store(), Node()
        async with start(store, Node(), settings=settings) as session:
            shell = Shell(session)
            await shell.write(b"corpus", content(1))
            for count in range(8):
                await shell.write(b"other", bytes([count]))
                await session.streamer.barrier()
                await trio.sleep(2)
            assert session.streamer.head.manifest.base_number > 1
        async with start(store, node, settings=settings) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await shell.rename(b"corpus", CACHE + b"/corpus")
            for count in range(8):
                await shell.write(b"other", bytes([count]))
                await session.streamer.barrier()
                await trio.sleep(2)
            assert await shell.read(CACHE + b"/corpus") == content(1)

    play(main)


def test_eviction_leaves_scratch_alone() -> None:
    async def main() -> None:
        async with start(new_store(), Node()) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await shell.write(b"f", content(1))
            await shell.write(b"g", content(2))
            await session.streamer.barrier()
            await shell.rename(b"f", CACHE + b"/f")
            session.budget.evict(1 << 40)
            fetched = session.packs.bytes_fetched
            assert await shell.read(CACHE + b"/f") == content(1)
            assert session.packs.bytes_fetched == fetched
            assert await shell.read(b"g") == content(2)
            assert session.packs.bytes_fetched > fetched

    play(main)


def test_other_globs_at_the_next_start_decide_anew() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node) as session:
            shell = Shell(session)
            for directory in (CACHE, b"wandb/run"):
                await shell.mkdirs(directory)
                await shell.write(directory + b"/f", content(1))
            await session.streamer.barrier()
        async with start(store, node, policies=Policies.build(scratch=["wandb"])) as session:
            await session.streamer.barrier()
            assert await Shell(session).read(b"wandb/run/f") == content(1)
            assert any("no longer has them" in line for line in session.workspace.reports)
            sound(session)
        async with start(store, Node(), policies=Policies.build(scratch=["wandb"])) as session:
            shell = Shell(session)
            assert shell.tree().keys() == {b".cache", CACHE, CACHE + b"/f"}
            assert await shell.read(CACHE + b"/f") == content(1)
            sound(session)

    play(main)


def test_atomic_files_in_scratch_are_never_in_flight() -> None:
    async def main() -> None:
        async with start(new_store(), Node()) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE + b"/checkpoint-1")
            handle, _ = await session.filesystem.create(
                *await shell.place(CACHE + b"/checkpoint-1/m.pt"), 0o644, os.O_WRONLY, ACTOR
            )
            await session.filesystem.write(handle, 0, b"half")
            await session.streamer.barrier()
            assert session.streamer.head.manifest.quiescent
            await shell.rename(CACHE + b"/checkpoint-1", b"checkpoint-1")
            await session.streamer.barrier()
            listed = [item.path for item in session.streamer.head.manifest.in_flight]
            assert listed == [b"checkpoint-1", b"checkpoint-1/m.pt"]

    play(main)


def test_a_power_loss_takes_scratch_and_leaves_what_was_fsynced_beside_it_whole() -> None:
    async def main() -> None:
        store, node = new_store(), Node()
        async with start(store, node, settings=replace(FAST, interval_s=1e6)) as session:
            shell = Shell(session)
            await shell.mkdirs(CACHE)
            await session.streamer.barrier()
            await shell.mkdirs(CACHE + b"/later")
            await shell.write(CACHE + b"/later/f", content(1))
            await shell.write(CACHE + b"/later/g", content(2))
            await shell.link(CACHE + b"/later/f", b"linked")
            await shell.write(b"moved", content(3))
            await shell.fsync(b"moved")
            await shell.rename(b"moved", CACHE + b"/moved")
            for path in (b"linked", CACHE + b"/later/g"):
                await shell.fsync(path)
        lost = Node(kv=MemoryKV(), data=node.data, journal=node.journal)
        async with start(store, lost) as session:
            shell = Shell(session)
            sound(session)
            assert shell.tree().keys() == {b".cache", b"linked"}
            assert await shell.read(b"linked") == content(1)
            await session.streamer.barrier()
        async with start(store, Node()) as session:
            sound(session)
            assert await Shell(session).read(b"linked") == content(1)

    play(main)


@pytest.mark.history("C18")
def test_random_moves_across_the_border_lose_nothing() -> None:
    async def main() -> None:
        for seed in range(8):
            rng = random.Random(seed)
            store, node = new_store(), Node()
            wanted: dict[bytes, bytes] = {}
            for _ in range(3):
                async with start(store, node, rng=rng) as session:
                    shell = Shell(session)
                    await shell.mkdirs(CACHE)
                    await shell.mkdirs(b"out")
                    for _ in range(12):
                        await one_step(shell, rng, wanted)
                    await session.streamer.barrier()
                    await one_step(shell, rng, wanted)
                    sound(session)
                    await session.streamer.barrier()
                    for path, data in wanted.items():
                        assert await shell.read(path) == data, (seed, path)
            async with start(store, Node()) as session:
                shell = Shell(session)
                kept = {path: data for path, data in wanted.items() if not path.startswith(CACHE)}
                assert {path for path in shell.tree() if b"/f" in path} == kept.keys(), seed
                for path, data in kept.items():
                    assert await shell.read(path) == data, (seed, path)
                sound(session)

    play(main)


async def one_step(shell: Shell, rng: random.Random, wanted: dict[bytes, bytes]) -> None:
    directories = (CACHE, b"out")
    path = rng.choice(directories) + b"/f%d" % rng.randrange(4)
    if path not in wanted or rng.random() < 0.3:
        data = rng.randbytes(rng.choice([10, BLOCK_BYTES + 5]))
        same = [other for other in wanted if path in wanted and shell.tree()[other] == shell.tree()[path]]
        before = wanted.get(path, b"")
        await shell.write(path, data)
        for other in [path, *same]:
            wanted[other] = data + before[len(data) :]
        return
    target = rng.choice(directories) + b"/f%d" % rng.randrange(4)
    match rng.choice(["rename", "link", "unlink", "wait"]):
        case "rename":
            same_file = target in wanted and shell.tree()[path] == shell.tree()[target]
            await shell.rename(path, target)
            if not same_file:
                wanted[target] = wanted.pop(path)
        case "link" if target not in wanted:
            await shell.link(path, target)
            wanted[target] = wanted[path]
        case "unlink":
            await shell.unlink(path)
            del wanted[path]
        case _:
            await trio.sleep(rng.random() * 3)
