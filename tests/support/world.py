"""A workspace on memory: store, map and data files without disk, network or threads, in trio's virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import trio

from spotwarp_fs.core.journal import JournalLog, Record, SessionBegun, still_needed
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import DataFiles, KVStore, ObjectStore, Workers
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.core.types import ChangeSeq
from spotwarp_fs.engine.claim import Claim
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.node_note import RentedNode
from spotwarp_fs.engine.permit import Permit
from spotwarp_fs.engine.session import Session, SessionPorts, serve
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.states import StateWish
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV
from spotwarp_fs.local.workers import InlineWorkers
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.scoped import Scoped

WORKSPACE_ID = "0123456789abcdef"
WALL_S = 1_700_000_000
ACTOR = Actor(uid=1000, gid=1000, pid=1)


class SeededEntropy:
    """Random bytes from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def token_bytes(self, count: int) -> bytes:
        return self._rng.randbytes(count)


class VirtualWall:
    """Wall time that follows trio's clock."""

    def now_ns(self) -> int:
        return WALL_S * 1_000_000_000 + int(trio.current_time() * 1e9)


class MemoryJournal:
    """Keeps what was appended."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @property
    def size_bytes(self) -> int:
        return len(self._records)

    def append(self, records: Sequence[Record]) -> None:
        self._records += records

    def rewrite(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def compact(self, records: Sequence[Record]) -> None:
        self._records = [*(record for record in self._records if isinstance(record, SessionBegun)), *records]

    def prune(self, published: ChangeSeq, sessions: frozenset[str]) -> None:
        self._records = still_needed(self._records, published, sessions)

    def records(self) -> list[Record]:
        return list(self._records)


class RoomyDisk:
    """A disk that is never full."""

    def free_bytes(self) -> int:
        return 1 << 50


class NodeState(Protocol):
    """What a session needs of a node."""

    @property
    def kv(self) -> KVStore: ...
    @property
    def data(self) -> DataFiles: ...
    @property
    def journal(self) -> JournalLog: ...


@dataclass
class Node:
    """What one node keeps: it survives a kill of the daemon, and is thrown away when the node is lost."""

    kv: MemoryKV = field(default_factory=MemoryKV)
    data: MemoryDataFiles = field(default_factory=MemoryDataFiles)
    journal: MemoryJournal = field(default_factory=MemoryJournal)


FAST = EngineSettings(interval_s=1.0, heartbeat_s=3.0, disk_reserve_bytes=0, warm_bytes_max=0)
"""Nothing is fetched unasked: a history says itself what is local."""


@asynccontextmanager
async def start(
    store: ObjectStore,
    node: NodeState,
    *,
    rng: random.Random | None = None,
    settings: EngineSettings = FAST,
    policies: Policies | None = None,
    takeover: bool = True,
    workers: Workers | None = None,
    at: StateWish | None = None,
    claims: list[Claim] | None = None,
    mountpoint: str = "/mnt",
    permit: Permit | None = None,
    node_note: RentedNode | None = None,
) -> AsyncIterator[Session]:
    """Serve the workspace on *node*; leaving the block kills the daemon (nothing is drained)."""
    rng = rng or random.Random(1)
    workspace = Workspace(
        node.kv,
        node.data,
        wall=VirtualWall(),
        entropy=SeededEntropy(rng),
        workers=workers or InlineWorkers(),
        policies=policies or Policies.build(),
        settings=settings,
    )
    scoped = Scoped(store, workspace_root("test", WORKSPACE_ID))
    claim = Claim(
        workspace,
        scoped,
        workspace_id=WORKSPACE_ID,
        actor=ACTOR,
        takeover=takeover,
        journal=node.journal,
        fresh_map=MemoryKV,
        workspace_name="test",
        at=at,
        permit=permit,
        node=node_note,
    )
    if claims is not None:
        claims.append(claim)
    ports = SessionPorts(workspace, scoped, WORKSPACE_ID, node.journal, RoomyDisk(), Writer("test", 1, mountpoint, 0.0))
    async with serve(ports, claim) as session:
        yield session


def new_store() -> MemoryStore:
    """An empty store whose clock is right."""
    return MemoryStore(now=lambda: WALL_S + trio.current_time())
