"""Read a published state without a mount and without writing to it: names at once, bytes as they are asked for.

Invariant: what is handed out has passed the digest of its block record (P-08), and the state is pinned while it is read
(H6). A 404 while loading means "look for the head again and start over"; only under an unchanged head it is damage.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from spotwarp_fs.core import paths, xattrs
from spotwarp_fs.core.errors import Corrupt, Denied, NotFound, SpotwarpError, StoreRefused, Unavailable
from spotwarp_fs.core.layout import pin_key
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import Entropy, KVRead, Lane, ObjectStore
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, ino_range, key_block
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode, ManifestNumber
from spotwarp_fs.engine.blockmaps import BlockMaps
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import load_state
from spotwarp_fs.engine.metadata import Metadata
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.publish import Head, find_head, read_manifest
from spotwarp_fs.engine.states import Numbered, StateWish, find_state, snapshot_names
from spotwarp_fs.engine.workspace import Workspace

STARTS_MAX = 5
PIN_REFRESH_S = 60.0
PIN_FRESH_S = 600.0
"""A pin younger than this, by the store's clock, keeps its state from the collector."""
PIN_END_S = 2.0
PIN_SETTLE_S = 0.5
"""A quick command waits so long for its pin to be there, so that it can take it away again."""


@dataclass(frozen=True, slots=True)
class ReadPorts:
    """What reading needs of the outside."""

    store: ObjectStore
    """Scoped to the workspace's own prefix."""
    new_workspace: Callable[[], Workspace]
    """Gives an empty map, again at each start over."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file; what lies between two pieces is a hole."""

    offset: int
    data: bytes


@dataclass(slots=True, eq=False)
class _Fetch:
    """A run of neighbouring frames on its way."""

    blocks: list[tuple[BlockIndex, FrameRef]]
    done: trio.Event = field(default_factory=trio.Event)
    found: list[bytes] | SpotwarpError = field(default_factory=list)


class Pin:
    """Says to the collector that a reader has a state open (P-13)."""

    def __init__(self, store: ObjectStore, entropy: Entropy, number: ManifestNumber) -> None:
        self._store = store
        self._key = pin_key(entropy.token_bytes(8).hex())
        self._body = json.dumps({"number": number}).encode()
        self._written = False
        self._tried = trio.Event()
        self._ended = trio.CancelScope()
        self.refused = ""
        """Why the store did not take it; reading goes on without."""

    async def keep(self) -> None:
        """Write the pin, again and again, until removed or refused."""
        with self._ended:
            while not self.refused:
                try:
                    await self._store.put(self._key, self._body, lane=Lane.CONTROL)
                    self._written = True
                except StoreRefused as error:
                    self.refused = str(error)
                except Unavailable:
                    pass  # the reads will say so, and the next round tries again
                self._tried.set()
                await trio.sleep(PIN_REFRESH_S)

    async def remove(self) -> None:
        """Take the pin away; one that stays ends by itself."""
        with trio.move_on_after(PIN_SETTLE_S, shield=True):
            await self._tried.wait()
        self._ended.cancel()
        if not self._written:
            return
        with trio.move_on_after(PIN_END_S, shield=True):
            try:
                await self._store.delete([self._key], lane=Lane.CONTROL)
            except (Unavailable, StoreRefused):
                return


class Reader:
    """A state, loaded."""

    def __init__(self, ports: ReadPorts, head: Head) -> None:
        workspace = ports.new_workspace()
        self._store = ports.store
        self.workspace: Final = workspace
        self.health: Final = StoreHealth(workspace.settings, workspace.entropy)
        self.packs: Final = PackStore(workspace, ports.store, self.health)
        self.metadata: Final = Metadata(workspace, self.packs)
        self.maps: Final = BlockMaps(workspace, self.metadata)
        self._fetches = trio.CapacityLimiter(workspace.settings.hydrate_parallel_max)
        self._head = head
        self._pin: Pin | None = None
        self.manifest = head.manifest
        self.server_time_s = 0.0
        """The store's clock when the head was found."""

    @property
    def unpinned(self) -> str:
        """Why the state is not pinned; empty when it is."""
        return self._pin.refused if self._pin is not None else ""

    async def load(self, now_s: float, wish: StateWish, nursery: trio.Nursery) -> None:
        """Find the state, pin it for as long as *nursery* runs, and load its names."""
        self.server_time_s = now_s
        found = await find_state(self._store, self.metadata, self.health, self._head, now_s, wish)
        self.manifest = found.manifest
        self._pin = Pin(self._store, self.workspace.entropy, found.manifest.number)
        nursery.start_soon(self._pin.keep)
        with _one_error():
            state = await load_state(self.workspace, self._store, self.metadata, self.health, found)
        self.maps.use_base(found.manifest.base, state.base)

    async def close(self) -> None:
        """Take the pin away."""
        if self._pin is not None:
            await self._pin.remove()

    async def snapshots(self) -> dict[bytes, ManifestNumber]:
        """Read the snapshot names of the head."""
        return await snapshot_names(self._store, self.metadata, self.health, self._head)

    async def manifest_at(self, number: ManifestNumber) -> Manifest:
        """Read another state's manifest, which exists."""
        return (await read_manifest(self._store, number))[0].manifest

    @contextmanager
    def view(self) -> Iterator[KVRead]:
        """Look at the map, for one step."""
        with self.workspace.kv.read() as view:
            yield view

    def walk(self, path: bytes, *, follow: bool = False) -> Node:
        """Find *path* from the root, or raise Refused."""
        with self.workspace.kv.read() as view:
            return paths.walk(view, path, follow=follow)

    def children(self, ino: Inode) -> list[tuple[bytes, Node]]:
        """Give what directory *ino* holds, by name."""
        with self.workspace.kv.read() as view:
            return [(name, Node(entry.ino, paths.inode(view, entry.ino))) for name, entry in paths.children(view, ino)]

    def subtree(self, ino: Inode) -> list[tuple[bytes, Node]]:
        """Give *ino* itself as `b""`, then everything below it, parents before children."""
        with self.workspace.kv.read() as view:
            return list(paths.subtree(view, ino))

    def xattrs(self, ino: Inode) -> list[tuple[bytes, bytes]]:
        """Give the extended attributes of *ino*."""
        with self.workspace.kv.read() as view:
            return xattrs.attributes_of(view, ino)

    @asynccontextmanager
    async def content(self, node: Node) -> AsyncIterator[AsyncIterator[Piece]]:
        """Fetch a file, several runs of blocks at once and no more in memory; pieces come in order, holes do not come.

        Raises Corrupt, NotFound (this state is no longer kept) or Unavailable, from here or from the iteration.
        """
        await self.maps.load(node.ino)
        send, receive = trio.open_memory_channel[_Fetch](self.workspace.settings.hydrate_parallel_max)
        begun: list[_Fetch] = []
        with _one_error():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._feed, node.ino, send, begun, nursery)
                pieces = self._pieces(receive, begun, node.record.size)
                try:
                    yield pieces
                finally:
                    await pieces.aclose()
                    nursery.cancel_scope.cancel()
                    for fetch in begun:
                        self._fetches.release_on_behalf_of(fetch)
                    begun.clear()

    async def _feed(
        self, ino: Inode, send: trio.MemorySendChannel[_Fetch], begun: list[_Fetch], nursery: trio.Nursery
    ) -> None:
        async with send:
            for blocks in self._runs(ino):
                fetch = _Fetch(blocks)
                await self._fetches.acquire_on_behalf_of(fetch)
                begun.append(fetch)
                nursery.start_soon(self._fetch, fetch)
                await send.send(fetch)

    def _runs(self, ino: Inode) -> Iterator[list[tuple[BlockIndex, FrameRef]]]:
        """Group blocks whose frames are neighbours in a pack."""
        longest = self.workspace.settings.hydrate_run_blocks
        with self.workspace.kv.read() as view:
            found = [(key_block(key), value) for key, value in view.scan(*ino_range(BLOCK_TABLE, ino)) if value]
        run: list[tuple[BlockIndex, FrameRef]] = []
        for block, value in found:
            state = BlockState.decode(value)
            if state.local:
                continue  # salvage on a node has them; a state from the store has none
            frame = state.frame
            assert frame is not None, "a published block has a frame"
            if run and (len(run) == longest or not _follows(run[-1][1], frame)):
                yield run
                run = []
            run.append((block, frame))
        if run:
            yield run

    async def _fetch(self, fetch: _Fetch) -> None:
        """Fetch a run, waiting out short outages; what went wrong is for whoever iterates."""
        deadline = trio.current_time() + self.workspace.settings.read_wait_max_s
        refs = [ref for _, ref in fetch.blocks]
        while not fetch.done.is_set():
            try:
                fetch.found = await self.packs.fetch_run(refs, lane=Lane.DEMAND)
            except (Unavailable, Denied) as error:
                if trio.current_time() < deadline:
                    await self.health.failed(error)
                    continue
                fetch.found = error
            except NotFound as error:
                fetch.found = await self._missing(error)
            except SpotwarpError as error:
                fetch.found = error
            fetch.done.set()

    async def _missing(self, error: NotFound) -> SpotwarpError:
        """A pack that is gone is damage only under the head; older states are collected one day."""
        try:
            found = await find_head(self._store)
        except SpotwarpError as unknown:
            return unknown
        if found is not None and found[0].manifest.number > self.manifest.number:
            return NotFound(f"manifest {self.manifest.number} is no longer kept whole: {error}")
        return Corrupt(f"manifest {self.manifest.number} needs a pack that is missing: {error}")

    async def _pieces(
        self, receive: trio.MemoryReceiveChannel[_Fetch], begun: list[_Fetch], size: int
    ) -> AsyncGenerator[Piece, None]:
        async for fetch in receive:
            await fetch.done.wait()
            if isinstance(fetch.found, SpotwarpError):
                raise fetch.found
            for (block, _), data in zip(fetch.blocks, fetch.found, strict=True):
                offset = block * BLOCK_BYTES
                yield Piece(offset, data[: max(0, size - offset)])
            begun.remove(fetch)
            self._fetches.release_on_behalf_of(fetch)


@asynccontextmanager
async def open_state(ports: ReadPorts, wish: StateWish) -> AsyncIterator[Reader]:
    """Load the state that *wish* means, pinned while the body runs; raises NotFound, Corrupt or what the store says."""
    with _one_error():
        async with trio.open_nursery() as nursery:
            reader = await _load_settled(ports, wish, nursery)
            try:
                yield reader
            finally:
                await reader.close()
                nursery.cancel_scope.cancel()


async def _load_settled(ports: ReadPorts, wish: StateWish, nursery: trio.Nursery) -> Reader:
    """Load, and start over while the head moves under the load."""
    attempt = 0
    while True:
        attempt += 1
        found = await _find_start(ports.store, wish)
        if found is None:
            raise NotFound(f"{ports.store.url} has no published state yet")
        reader = Reader(ports, found[0])
        try:
            await reader.load(found[1], wish, nursery)
            return reader
        except Corrupt as error:
            await reader.close()
            if attempt < STARTS_MAX and await _has_moved(ports.store, found[0]):
                continue
            if reader.manifest.number < found[0].manifest.number and isinstance(error.__cause__, NotFound):
                raise NotFound(f"manifest {reader.manifest.number} is no longer kept whole: {error}") from error
            raise


async def _find_start(store: ObjectStore, wish: StateWish) -> tuple[Head, float] | None:
    """Find the head; a damaged one must not keep anybody from an older state that is asked for by its number."""
    try:
        return await find_head(store)
    except Corrupt:
        if not isinstance(wish, Numbered):
            raise
        return await read_manifest(store, wish.number)


async def _has_moved(store: ObjectStore, head: Head) -> bool:
    found = await find_head(store)
    return found is not None and found[0] != head


@contextmanager
def _one_error() -> Iterator[None]:
    """Take the error that explains the most out of what nurseries wrap it in."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = _first(group)
        if found is None:
            raise
        raise found from found.__cause__


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return our own error if there is one, or the only one there is."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    ours = [leaf for leaf in leaves if isinstance(leaf, SpotwarpError)]
    return ours[0] if ours else leaves[0] if len(leaves) == 1 else None


def _follows(before: FrameRef, after: FrameRef) -> bool:
    return before.pack == after.pack and before.offset + before.stored_bytes == after.offset
