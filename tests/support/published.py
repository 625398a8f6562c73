"""Look at a store from outside: every state with all its rows, and whether each frame that it names can be read."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.layout import pack_key, workspace_root
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.records import BLOCK_TABLE, INODE_TABLE, FrameRef, key_ino, table_range
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.older import OlderStates
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Head, find_head
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV
from spotwarp_fs.local.workers import InlineWorkers
from spotwarp_fs.store.scoped import Scoped
from tests.support.world import FAST, WORKSPACE_ID, SeededEntropy, VirtualWall


class Published:
    """The states of the world's workspace."""

    def __init__(self, store: ObjectStore) -> None:
        entropy = SeededEntropy(random.Random(99))
        workspace = Workspace(
            MemoryKV(), MemoryDataFiles(), wall=VirtualWall(), entropy=entropy, workers=InlineWorkers(),
            policies=Policies.build(), settings=FAST,
        )  # fmt: skip
        self.store = Scoped(store, workspace_root("test", WORKSPACE_ID))
        health = StoreHealth(FAST, entropy)
        self.metadata = Metadata(workspace, PackStore(workspace, self.store, health))
        self.states = OlderStates(self.store, self.metadata, health, MemoryKV)

    async def head(self) -> Head:
        found = await find_head(self.store)
        assert found is not None
        return found[0]

    async def manifest(self, number: int) -> Head:
        return (await self.states.manifests([number]))[0]

    async def rows(self, number: int) -> dict[bytes, bytes]:
        """Everything that state *number* says."""
        state = await self.states.load(ManifestNumber(number))
        await state.load_blocks([key_ino(key) for key, _ in state.view.scan(*table_range(INODE_TABLE))])
        problems = check(state.view, node_tables=False)
        assert not problems, f"state {number}: {problems}"
        return dict(state.view.scan(b"", None))

    async def verify(self, number: int) -> int:
        """Read every frame of a state and check it; returns how many there were."""
        refs = {value for key, value in (await self.rows(number)).items() if key[:1] == BLOCK_TABLE}
        for value in refs:
            ref = FrameRef.decode(value)
            found = await self.store.get(pack_key(ref.pack), start=ref.offset, length=ref.stored_bytes)
            open_frame(ref, found.body)
        return len(refs)


@asynccontextmanager
async def published(store: ObjectStore) -> AsyncIterator[Published]:
    """Look at *store* as it is now."""
    looking = Published(store)
    try:
        yield looking
    finally:
        looking.states.close()
