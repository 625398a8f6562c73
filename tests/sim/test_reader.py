"""Does a reader without a mount see one whole state, whatever the collector and the writer do meanwhile?"""

from __future__ import annotations

import json
import os

import pytest
import trio
import trio.testing

from spotwarp_fs.core.errors import Corrupt, Denied, NotFound
from spotwarp_fs.core.layout import MANIFESTS_PREFIX, PACKS_PREFIX, PINS_PREFIX, manifest_number, workspace_root
from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ManifestNumber, ObjectKey
from spotwarp_fs.engine.reader import Reader, ReadPorts, open_state
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.states import Ago, AtTime, Latest, Named, Numbered, Quiescent
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV
from spotwarp_fs.local.system import SystemEntropy
from spotwarp_fs.local.workers import InlineWorkers
from spotwarp_fs.store.memory import MemoryStore
from spotwarp_fs.store.scoped import Scoped
from tests.support.command_line import build, write
from tests.support.world import WORKSPACE_ID, VirtualWall

CONTENT = os.urandom(3 << 20)


class Interfering(Scoped):
    """The workspace's part of a store, in which something happens in the middle of a load."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner, workspace_root("test", WORKSPACE_ID))
        self.hidden_above: int | None = None
        self.pack_gone = False
        self.pins_denied = False

    def _hides(self, key: str) -> bool:
        number = manifest_number(key) if key.startswith(MANIFESTS_PREFIX) else None
        return number is not None and self.hidden_above is not None and number > self.hidden_above

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if self._hides(key):
            raise NotFound(key)
        return await super().head(key, lane=lane)

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        if self._hides(key):
            raise NotFound(key)
        if self.pack_gone and key.startswith(PACKS_PREFIX):
            if self.hidden_above is not None:
                # The writer publishes, and its collector deletes, while we load.
                self.hidden_above, self.pack_gone = None, False
            raise NotFound(key)
        return await super().get(key, start=start, length=length, lane=lane)

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        if self.pins_denied:
            raise Denied(f"{key}: these credentials may only read")
        return await super().put(key, body, lane=lane)


def ports(store: ObjectStore) -> ReadPorts:
    def new_workspace() -> Workspace:
        return Workspace(
            MemoryKV(),
            MemoryDataFiles(),
            wall=VirtualWall(),
            entropy=SystemEntropy(),
            workers=InlineWorkers(),
            policies=Policies.build(),
            settings=EngineSettings(read_wait_max_s=1.0, hydrate_parallel_max=2, hydrate_run_blocks=2),
        )

    return ReadPorts(store, new_workspace)


@pytest.fixture(scope="module")
def published() -> tuple[MemoryStore, list[int]]:
    store = MemoryStore()

    async def one(session: object) -> None:
        await write(session, "one", CONTENT)  # type: ignore[arg-type]

    async def two(session: object) -> None:
        await write(session, "two.pt", b"2")  # type: ignore[arg-type]

    return store, build(store, one, two)


async def names(reader: Reader) -> list[bytes]:
    return [name for name, _ in reader.children(reader.walk(b"").ino)]


@pytest.mark.history("H6")
async def test_a_state_is_pinned_while_it_is_read_and_not_longer(published: tuple[MemoryStore, list[int]]) -> None:
    store, numbers = published
    scoped = Interfering(store)
    async with open_state(ports(scoped), Numbered(ManifestNumber(numbers[0]))) as reader:
        await trio.testing.wait_all_tasks_blocked()
        (pin,) = [info async for info in scoped.list_objects(PINS_PREFIX)]
        assert json.loads((await scoped.get(pin.key)).body) == {"number": numbers[0]}
        assert await names(reader) == [b"one"]
    assert [info async for info in scoped.list_objects(PINS_PREFIX)] == []


async def test_credentials_that_only_read_are_enough_and_it_is_said(published: tuple[MemoryStore, list[int]]) -> None:
    scoped = Interfering(published[0])
    scoped.pins_denied = True
    async with open_state(ports(scoped), Latest()) as reader:
        await trio.testing.wait_all_tasks_blocked()
        assert await names(reader) == [b"one", b"two.pt"]
        assert "may only read" in reader.unpinned


@pytest.mark.history("H6")
async def test_a_pack_that_goes_while_the_head_moves_starts_the_load_over(
    published: tuple[MemoryStore, list[int]],
) -> None:
    store, numbers = published
    scoped = Interfering(store)
    scoped.hidden_above, scoped.pack_gone = numbers[0], True
    async with open_state(ports(scoped), Latest()) as reader:
        assert reader.manifest.number == numbers[1]
        assert await names(reader) == [b"one", b"two.pt"]


@pytest.mark.history("H6")
async def test_a_pack_that_is_gone_under_an_unchanged_head_is_damage(published: tuple[MemoryStore, list[int]]) -> None:
    store, numbers = published
    scoped = Interfering(store)
    scoped.pack_gone = True
    with pytest.raises(Corrupt):
        async with open_state(ports(scoped), Latest()):
            pass
    with pytest.raises(NotFound, match="no longer kept whole"):
        async with open_state(ports(scoped), Numbered(ManifestNumber(numbers[0]))):
            pass


async def test_data_comes_in_order_in_bounded_pieces_and_a_reader_may_leave(
    published: tuple[MemoryStore, list[int]],
) -> None:
    async with open_state(ports(Interfering(published[0])), Latest()) as reader:
        node = reader.walk(b"one")
        for _ in range(3):
            async with reader.content(node) as pieces:
                async for piece in pieces:
                    assert piece.data == CONTENT[: 1 << 20]
                    break
        async with reader.content(node) as pieces:
            assert b"".join([piece.data async for piece in pieces]) == CONTENT


async def test_states_are_found_by_rule_and_time(published: tuple[MemoryStore, list[int]]) -> None:
    store, (first, last) = published

    async def found(wish: Latest | Quiescent | Named | AtTime | Ago) -> int:
        async with open_state(ports(Interfering(store)), wish) as reader:
            return reader.manifest.number

    async with open_state(ports(Interfering(store)), Numbered(ManifestNumber(first))) as reader:
        made_s = reader.manifest.created_s
    assert await found(Latest()) == last
    assert await found(Quiescent()) == last
    assert await found(AtTime(made_s)) == first
    assert await found(AtTime(made_s + 1e9)) == last
    with pytest.raises(NotFound, match="no state is that old"):
        await found(Ago(1e9))
    with pytest.raises(NotFound, match="no snapshot 'x'; there are: none"):
        await found(Named(b"x"))
