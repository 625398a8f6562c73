"""A plain directory served by a real session on a memory store, in real time, with real files."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from spotwarp_fs.core import paths, xattrs
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.layout import pack_key, workspace_root
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import KVRead, ObjectStore
from spotwarp_fs.core.records import BLOCK_TABLE, INODE_TABLE, FrameRef, ino_range, key_block, key_ino, table_range
from spotwarp_fs.core.requests import Node as Record
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, ManifestNumber
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.scanner import Scanner
from spotwarp_fs.directory.watching import watch
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.older import OlderStates
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import find_head
from spotwarp_fs.engine.session import Session, SessionPorts, serve
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.local.workers import InlineWorkers, ThreadWorkers
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.scoped import Scoped
from tests.support.world import ACTOR, FAST, WORKSPACE_ID, Node, RoomyDisk, SeededEntropy

QUICK = replace(FAST, interval_s=30.0, warm_small_files_max=0)


def real_store() -> MemoryStore:
    """An empty store whose clock is this machine's."""
    return MemoryStore(now=lambda: SystemWall().now_ns() / 1e9)


@dataclass
class Served:
    """A directory that is being scanned."""

    session: Session
    scanner: Scanner
    known: KnownTree
    root: Path

    async def sync(self) -> ManifestNumber:
        """The barrier of the directory form."""
        await self.scanner.sync()
        return await self.session.streamer.barrier()


@asynccontextmanager
async def claimed(
    store: ObjectStore, node: Node, *, policies: Policies | None = None, takeover: bool = True
) -> AsyncIterator[Session]:
    """A session in real time; leaving kills it."""
    workspace = Workspace(
        node.kv, node.data, wall=SystemWall(), entropy=SystemEntropy(), workers=ThreadWorkers(),
        policies=policies or Policies.build(), settings=QUICK,
    )  # fmt: skip
    scoped = Scoped(store, workspace_root("test", WORKSPACE_ID))
    claim = Claim(
        workspace, scoped, workspace_id=WORKSPACE_ID, actor=ACTOR, takeover=takeover, journal=node.journal,
        fresh_map=MemoryKV, workspace_name="test", at=None,
    )  # fmt: skip
    ports = SessionPorts(workspace, scoped, WORKSPACE_ID, node.journal, RoomyDisk(), Writer("test", 1, "/mnt", 0.0))
    async with serve(ports, claim) as session:
        yield session


@asynccontextmanager
async def directory(
    store: ObjectStore, node: Node, root: Path, *, interval_s: float = 3600.0, policies: Policies | None = None
) -> AsyncIterator[Served]:
    """Serve *root*; with the default interval it is scanned only when the test asks. Leaving kills the daemon."""
    async with claimed(store, node, policies=policies) as session:
        with session.workspace.kv.read() as view:
            known = KnownTree.load(view)
        skip = session.workspace.policies.scratch.matches
        async with watch(os.fsencode(root), skip=skip) as watcher, trio.open_nursery() as nursery:
            scanner = Scanner(session, os.fsencode(root), known, watcher, interval_s=interval_s)
            nursery.start_soon(scanner.run)
            yield Served(session, scanner, known, root)
            nursery.cancel_scope.cancel()


@dataclass
class State:
    """A published state, read from the store alone."""

    number: int
    nodes: dict[bytes, Record]
    content: dict[bytes, bytes]
    xattrs: dict[bytes, dict[bytes, bytes]]
    in_flight: list[bytes]

    def names(self) -> set[str]:
        return {os.fsdecode(path) for path in self.nodes if path}


async def published_state(store: ObjectStore, number: int | None = None) -> State:
    """Read the newest state, or state *number*, block by block with its digests checked."""
    scoped = Scoped(store, workspace_root("test", WORKSPACE_ID))
    entropy = SeededEntropy(random.Random(99))
    workspace = Workspace(
        MemoryKV(), MemoryDataFiles(), wall=SystemWall(), entropy=entropy, workers=InlineWorkers(),
        policies=Policies.build(), settings=FAST,
    )  # fmt: skip
    health = StoreHealth(FAST, entropy)
    states = OlderStates(scoped, Metadata(workspace, PackStore(workspace, scoped, health)), health, MemoryKV)
    found = await find_head(scoped)
    assert found is not None, "nothing is published"
    number = number or found[0].manifest.number
    head = (await states.manifests([ManifestNumber(number)]))[0].manifest
    state = await states.load(ManifestNumber(number))
    await state.load_blocks([key_ino(key) for key, _ in state.view.scan(*table_range(INODE_TABLE))])
    nodes = {path: node for path, node in paths.subtree(state.view, ROOT_INODE)}
    content = {
        path: await _content(scoped, state.view, node) for path, node in nodes.items() if stat.S_ISREG(node.record.mode)
    }
    attributes = {path: dict(xattrs.attributes_of(state.view, node.ino)) for path, node in nodes.items()}
    states.close()
    return State(number, nodes, content, attributes, [item.path for item in head.in_flight])


async def _content(store: ObjectStore, view: KVRead, node: Record) -> bytes:
    data = bytearray(node.record.size)
    for key, value in view.scan(*ino_range(BLOCK_TABLE, node.ino)):
        ref = FrameRef.decode(value)
        body = (await store.get(pack_key(ref.pack), start=ref.offset, length=ref.stored_bytes)).body
        raw = bytes(open_frame(ref, body))
        start = key_block(key) * BLOCK_BYTES
        data[start : start + len(raw)] = raw[: max(0, len(data) - start)]
    return bytes(data)
