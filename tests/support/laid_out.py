"""States with everything that a tree may hold, restores of them, and the comparison of a directory with a state."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import ROOT_INODE, Inode
from spotwarp_fs.core.witness import Seen, merged
from spotwarp_fs.directory.identity import Owner
from spotwarp_fs.directory.laying import Report
from spotwarp_fs.directory.limits import RestoreLimits
from spotwarp_fs.directory.plan import make_plan, place_of
from spotwarp_fs.directory.restoring import Restorer
from spotwarp_fs.directory.witnessing import witness_of
from spotwarp_fs.engine.session import Session
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.local.workers import ThreadWorkers
from tests.support.inprocess_leases import InProcessLeases
from tests.support.world import ACTOR, FAST, WORKSPACE_ID, Node, NodeState, start

KiB, MiB = 1 << 10, 1 << 20
OWNER = Owner(WORKSPACE_ID, "test", "memory://memory")
SETTINGS = replace(FAST, interval_s=1e6, heartbeat_s=1e6, hydrate_run_blocks=2, retry_first_s=0.02, outage_probe_s=0.05)
LIMITS = RestoreLimits(disk_reserve_bytes=0, no_room_pause_s=0.05)
SECOND_NS = 1_000_000_000


def noise(seed: object, size: int) -> bytes:
    return random.Random(str(seed)).randbytes(size)


class Maker:
    """Fills a session's workspace through its requests."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.fs = session.filesystem

    async def directory(self, path: bytes, mode: int = 0o755) -> Inode:
        ino = ROOT_INODE
        for name in filter(None, path.split(b"/")):
            try:
                ino = (await self.fs.lookup(ino, name)).ino
            except Exception:
                ino = (await self.fs.mkdir(ino, name, mode, ACTOR)).ino
        return ino

    async def file(self, path: bytes, data: bytes, mode: int = 0o644, holes_to: int = 0, at: int = 0) -> Inode:
        above, _, name = path.rpartition(b"/")
        parent = await self.directory(above)
        handle, node = await self.fs.create(parent, name, stat.S_IFREG | mode, os.O_WRONLY, ACTOR)
        for offset in range(0, len(data), MiB):
            await self.fs.write(handle, at + offset, data[offset : offset + MiB])
        if holes_to:
            await self.fs.setattr(node.ino, AttributeChange(size=holes_to), None, ACTOR)
        await self.fs.flush(handle)
        await self.fs.release(handle)
        return node.ino

    async def attributes(self, ino: Inode, **changes: int) -> None:
        await self.fs.setattr(ino, AttributeChange(**changes), None, ACTOR)


async def make_everything(session: Session) -> None:
    """A tree in which every kind of thing occurs that P-11 speaks of."""
    made = Maker(session)
    small = await made.file(b"a/small.txt", b"small\n", 0o640)
    await made.file(b"a/empty", b"")
    await made.file(b"a/hollow", b"", holes_to=100 * KiB)
    big = await made.file(b"a/big.dat", noise("big", 5 * MiB + 777), 0o444)
    other = await made.directory(b"b/c")
    await made.fs.link(big, other, b"big too")
    await made.fs.link(small, other, b"small too")
    sparse = await made.file(b"b/sparse", noise("sparse", MiB), holes_to=40 * MiB, at=17 * MiB)
    await made.file(b"b/tool", noise("tool", 300 * KiB), 0o4755)
    await made.file(b"b/\xff\xfe not text\n", b"bytes")
    for at in range(40):
        await made.file(b"lib/module%d.py" % at, noise(at, 100 + 37 * at))
    await made.fs.symlink(ROOT_INODE, b"link", b"a/small.txt", ACTOR)
    await made.fs.symlink(other, b"dangling", b"/no/such/\xff", ACTOR)
    await made.fs.mknod(ROOT_INODE, b"fifo", stat.S_IFIFO | 0o620, 0, ACTOR)
    await made.fs.mknod(other, b"socket", stat.S_IFSOCK | 0o600, 0, ACTOR)
    await made.fs.setxattr(big, b"user.colour", b"blue\0green")
    await made.fs.setxattr(other, b"user.of.directory", b"yes")
    for step in (1, 2, 3):
        await made.file(b"run/checkpoint-%d/model.safetensors" % step, noise(step, 3 * MiB))
        await made.file(b"run/checkpoint-%d/trainer_state.json" % step, b"{}")  # a trainer's mark: it is complete
        ino = await made.directory(b"run/checkpoint-%d" % step)
        await made.attributes(ino, mtime_ns=1_600_000_000 * SECOND_NS + step, atime_ns=step)
    await made.attributes(sparse, mtime_ns=1_234_567_890_123_456_789, atime_ns=7)
    await made.attributes(big, uid=1234, gid=4321)
    await made.attributes(other, mode=0o2750, mtime_ns=987_654_321_000_000_001, atime_ns=9)
    await made.attributes(await made.directory(b"a"), mtime_ns=1_111_111_111_111_111_111, atime_ns=1)
    await made.attributes(ROOT_INODE, mode=0o751, mtime_ns=1_222_222_222_222_222_222, atime_ns=2)


async def publish(store: ObjectStore, *makers: object) -> None:
    async with start(store, Node(), settings=SETTINGS) as session:
        for make in makers:
            await make(session)  # type: ignore[operator]
        await session.streamer.barrier()


@dataclass
class Restored:
    """A serving session with its directory."""

    session: Session
    restorer: Restorer
    root: Path
    leases: InProcessLeases
    report: Report = field(default_factory=Report)

    def inode(self, path: bytes) -> Inode:
        from spotwarp_fs.core.paths import walk

        with self.session.workspace.kv.read() as view:
            return walk(view, path).ino

    def seen(self, path: bytes) -> Seen:
        with self.session.workspace.kv.read() as view:
            witness = witness_of(view, self.inode(path))
        assert witness is not None, path
        return witness.seen


@asynccontextmanager
async def opened(
    store: ObjectStore,
    root: Path,
    *,
    node: NodeState | None = None,
    leases: InProcessLeases | None = None,
    limits: RestoreLimits = LIMITS,
    settings: EngineSettings = SETTINGS,
    why_no_leases: str = "",
) -> AsyncIterator[Restored]:
    """Serve the workspace on a node and give a restorer that has done nothing yet."""
    root.mkdir(exist_ok=True)
    leases = leases or InProcessLeases()
    async with start(store, node or Node(), settings=settings, workers=ThreadWorkers()) as session:
        restorer = Restorer(
            session, os.fsencode(root), OWNER,
            session_id="a session", placeholders=leases, why_no_leases=why_no_leases, limits=limits,
        )  # fmt: skip
        yield Restored(session, restorer, root, leases)


@asynccontextmanager
async def filling(restored: Restored) -> AsyncIterator[None]:
    """Serve whoever waits, and fill, while the body runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restored.restorer.filler.run)
        yield
        nursery.cancel_scope.cancel()


async def all_filled(restored: Restored, *, but: int = 0, seconds: float = 60.0) -> None:
    with trio.fail_after(seconds):
        while len(restored.restorer.filler.absent) > but:
            await trio.sleep(0.01)


async def in_another_process(code: str, *arguments: str | bytes, seconds: float = 60.0) -> bytes:
    """Run Python in a process of its own; returns what it prints."""
    command = [sys.executable, "-I", "-c", code, *map(os.fsdecode, arguments)]
    with trio.fail_after(seconds):
        done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout.decode()
    return bytes(done.stdout)


READ = "import sys, pathlib; sys.stdout.buffer.write(pathlib.Path(sys.argv[1]).read_bytes())"


def compare(restored: Restored, expected: dict[bytes, bytes], *, owners: bool = True) -> None:
    """The whole tree is as in the state; *expected* holds the bytes of files by path.

    Where this node has witnesses, a scan of an unchanged file gives the very record that the state has.
    """
    with restored.session.workspace.kv.read() as view:
        plan = make_plan(view)
        witnesses = {thing.ino: witness_of(view, thing.ino) for thing in [*plan.directories, *plan.things.values()]}
    root = os.fsencode(restored.root)
    found = {
        os.path.relpath(os.path.join(above, name), root)
        for above, directories, names in os.walk(root)
        for name in directories + names
        if not os.path.relpath(os.path.join(above, name), root).startswith(b".spotwarp")
    }
    things = [*plan.directories[1:], *plan.things.values()]
    assert found == {path for thing in things for path in thing.paths}
    for thing in [*plan.directories, *plan.things.values()]:
        inodes = set()
        for path in thing.paths:
            place = place_of(root, path)
            status, record = os.lstat(place), thing.record
            inodes.add(status.st_ino)
            witness = witnesses[thing.ino]
            now = record if witness is None else merged(record, witness, status)
            if stat.S_ISDIR(record.mode):  # names that were put into it since have changed its ctime
                now = replace(now, ctime_ns=record.ctime_ns)
            assert now == record, (path, witness, now)
            assert witness is None or stat.S_ISDIR(record.mode) or witness.unchanged(status), path
            assert (status.st_mode | (0 if owners else 0o6000)) == (record.mode | (0 if owners else 0o6000)), path
            assert not owners or (status.st_uid, status.st_gid) == (record.uid, record.gid), path
            assert status.st_mtime_ns == record.mtime_ns, path
            if not stat.S_ISDIR(record.mode):
                assert status.st_nlink == record.nlink, path
            names = os.listxattr(place, follow_symlinks=False)
            given = {os.fsencode(name): os.getxattr(place, name, follow_symlinks=False) for name in names}
            assert {k: v for k, v in given.items() if k.startswith(b"user.")} == dict(thing.xattrs), path
            if stat.S_ISLNK(record.mode):
                assert os.readlink(place) == record.target
            if thing.is_file:
                assert status.st_size == record.size, path
                assert Path(os.fsdecode(place)).read_bytes() == expected[path], path
                assert status.st_blocks * 512 <= record.allocated + 64 * KiB, f"{path!r} has lost its holes"
        assert len(inodes) == 1, thing.paths


async def contents(session: Session) -> dict[bytes, bytes]:
    """The bytes of every file, as another mount reads them."""
    with session.workspace.kv.read() as view:
        plan = make_plan(view)
    found = {}
    for thing in plan.files():
        handle = await session.filesystem.open(thing.ino, os.O_RDONLY, ACTOR)
        parts = [await session.filesystem.read(handle, at, MiB) for at in range(0, thing.record.size, MiB)]
        await session.filesystem.release(handle)
        found |= dict.fromkeys(thing.paths, b"".join(parts))
    return found
