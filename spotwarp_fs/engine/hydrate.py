"""Bring blocks and block maps from the store to the node.

Invariant: what a wait brought is used only if the block still has the same frame, no local bytes and the same
generation (C2); bytes are checked against the block record before they are written (P-08); "local" is committed after
the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import trio

from spotwarp_fs.core.errors import Corrupt, Denied, NotFound, Refused, Unavailable
from spotwarp_fs.core.ports import KVRead, Lane
from spotwarp_fs.core.records import BlockState, FrameRef, NodeTable, block_key
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Generation, Inode
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.workspace import Workspace, block_state

EIO = 5
RECENT_READS_MAX = 1024
LOOK_UP_S = 0.25
"""How soon a wait notices that it must end."""


class Hydrator:
    """Fetches blocks: one fetch per block however many wait for it."""

    def __init__(self, workspace: Workspace, packs: PackStore, health: StoreHealth, nursery: trio.Nursery) -> None:
        self._ws = workspace
        self._packs = packs
        self._health = health
        self._nursery = nursery
        self._fetching: dict[tuple[Inode, BlockIndex], trio.Event] = {}
        self._failed: dict[tuple[Inode, BlockIndex], str] = {}
        self._slots = trio.Semaphore(workspace.settings.hydrate_parallel_max)
        self._streams: OrderedDict[Inode, tuple[BlockIndex, int]] = OrderedDict()
        self.spare_blocks: Callable[[], int] = lambda: workspace.settings.readahead_blocks_max
        """How much may be fetched ahead of demand without outgrowing the cache's budget."""

    async def demand(self, ino: Inode, blocks: Iterable[BlockIndex], *, for_write: bool = False) -> None:
        """Return when every block of *blocks* has local bytes (or no frame any more).

        Raises Refused(EIO) when a frame is damaged for good, when the store stays away longer than the read wait, or
        when the mount ends; a writer gets EROFS once fenced.
        """
        deadline = trio.current_time() + self._ws.settings.read_wait_max_s
        wanted = list(blocks)
        while True:
            with self._ws.kv.read() as view:
                missing = [block for block in wanted if _absent(view, ino, block)]
            if not missing:
                return
            for block in missing:
                reason = self._failed.pop((ino, block), None)
                if reason is not None:
                    raise Refused(EIO, reason)
            events = self._start(ino, missing, Lane.DEMAND)
            with trio.move_on_at(min(deadline, trio.current_time() + LOOK_UP_S)):
                for event in events:
                    await event.wait()
            if for_write:
                self._ws.check_writable()
            if self._ws.stopping or trio.current_time() >= deadline:
                raise Refused(EIO, f"inode {ino:#x}: blocks {missing[:4]} did not arrive: {self._health.last_error}")

    async def fetch_through(self, ino: Inode, blocks: list[BlockIndex]) -> dict[BlockIndex, bytes]:
        """Fetch blocks for one reader and keep nothing; the caller checks that they are still the right ones.

        Raises Refused(EIO) when a frame is damaged, or the store stays away.
        """
        with self._ws.kv.read() as view:
            states = {block: block_state(view, ino, block) for block in blocks}
        frames = {
            block: state.frame for block, state in states.items() if state is not None and state.frame is not None
        }
        found: dict[BlockIndex, bytes] = {}
        for block, frame in frames.items():
            try:
                wait_s = self._ws.settings.read_wait_max_s
                async with self._slots:
                    found[block] = await self._packs.fetch_patiently(frame, lane=Lane.DEMAND, wait_s=wait_s)
            except (Corrupt, Unavailable, Denied) as error:
                raise Refused(EIO, f"inode {ino:#x}, block {block}: {error}") from error
        return found

    def note_read(self, ino: Inode, block: BlockIndex, last: BlockIndex) -> None:
        """Follow a stream: a file that is read in order is fetched ahead, further each time (per inode, not handle)."""
        expected, window = self._streams.pop(ino, (BlockIndex(-1), 0))
        if block == expected or block + 1 == expected:
            window = min(max(4, window * 2), self._ws.settings.readahead_blocks_max)
        elif block == 0:
            window = 4
        else:
            window = 0
        self._streams[ino] = (BlockIndex(last + 1), window)
        if len(self._streams) > RECENT_READS_MAX:
            self._streams.popitem(last=False)
        if window:
            self.prefetch(ino, [BlockIndex(b) for b in range(last + 1, last + 1 + window)])

    def prefetch(self, ino: Inode, blocks: list[BlockIndex]) -> None:
        """Start fetching what is missing, if nothing more urgent has all the room; failures are forgotten."""
        if len(self._fetching) > self._ws.settings.readahead_blocks_max * 2 or not self._health.reachable:
            return
        with self._ws.kv.read() as view:
            missing = [block for block in blocks if _absent(view, ino, block)]
        missing = missing[: max(0, self.spare_blocks() - len(self._fetching))]
        if missing:
            self._start(ino, missing, Lane.BULK)

    def _start(self, ino: Inode, missing: list[BlockIndex], lane: Lane) -> list[trio.Event]:
        """Fetch what nobody is fetching yet, neighbours together; returns what to wait for."""
        fresh: list[tuple[BlockIndex, FrameRef, Generation]] = []
        events = []
        with self._ws.kv.read() as view:
            for block in missing:
                event = self._fetching.get((ino, block))
                if event is None:
                    state = block_state(view, ino, block)
                    if state is None or state.local or state.frame is None:
                        continue
                    event = self._fetching[(ino, block)] = trio.Event()
                    fresh.append((block, state.frame, self._ws.generations.of(ino, block)))
                events.append(event)
        for run in _runs(fresh, self._ws.settings.hydrate_run_blocks):
            self._nursery.start_soon(self._fetch, ino, run, lane)
        return events

    async def _fetch(self, ino: Inode, run: list[tuple[BlockIndex, FrameRef, Generation]], lane: Lane) -> None:
        """Fetch one run of neighbouring frames and install each block."""
        try:
            async with self._slots:
                contents = await self._packs.fetch_run([frame for _, frame, _ in run], lane=lane)
            for (block, frame, generation), raw in zip(run, contents, strict=True):
                self._install(ino, block, frame, generation, raw)
        except (Unavailable, Denied) as error:
            await self._health.failed(error)
        except (Corrupt, NotFound) as error:
            if len(run) == 1:
                self._condemn(ino, run, error)
            else:  # one bad frame must not take its neighbours along
                for item in run:
                    await self._fetch(ino, [item], lane)
        except OSError as error:
            self._ws.report(f"the cache cannot take blocks of inode {ino:#x}: {error}")
            await trio.sleep(self._ws.settings.retry_first_s)
        finally:
            for block, _, _ in run:
                event = self._fetching.pop((ino, block), None)
                if event is not None:
                    event.set()

    def _install(self, ino: Inode, block: BlockIndex, frame: FrameRef, generation: Generation, raw: bytes) -> None:
        """Write a fetched block, unless anything about it changed while it was on its way. One step."""
        ws = self._ws
        with ws.kv.read() as view:
            state = block_state(view, ino, block)
        if state is None or state.local or state.frame != frame or ws.generations.of(ino, block) != generation:
            return
        if len(raw) < BLOCK_BYTES:
            # A full overwrite that a kill cut short may have left bytes behind the frame's valid length (H3, H5).
            ws.data.clear(ino, block * BLOCK_BYTES + len(raw), BLOCK_BYTES - len(raw))
        ws.data.pwrite(ino, block * BLOCK_BYTES, raw)
        with ws.kv.write() as txn:
            txn.put(block_key(ino, block), state.with_local_bytes().encode())
        ws.use.note(ino)

    def _condemn(self, ino: Inode, run: list[tuple[BlockIndex, FrameRef, Generation]], error: Exception) -> None:
        """Damage: the frames leave the dedup index at once (H11), and whoever waits gets EIO, never zeros."""
        with self._ws.kv.write() as txn:
            for _, frame, _ in run:
                txn.delete(NodeTable.DEDUP + frame.digest)
        for block, _, _ in run:
            self._failed[(ino, block)] = str(error)
        self._ws.report(f"inode {ino:#x}, blocks {[block for block, _, _ in run][:4]}: {error}")


def _absent(view: KVRead, ino: Inode, block: BlockIndex) -> bool:
    state: BlockState | None = block_state(view, ino, block)
    return state is not None and not state.local


def _runs(
    fresh: list[tuple[BlockIndex, FrameRef, Generation]], blocks_max: int
) -> list[list[tuple[BlockIndex, FrameRef, Generation]]]:
    """Group frames that lie one after the other in one pack, so that one ranged GET brings several."""
    runs: list[list[tuple[BlockIndex, FrameRef, Generation]]] = []
    for item in fresh:
        frame = item[1]
        if runs and len(runs[-1]) < blocks_max:
            before = runs[-1][-1][1]
            if before.pack == frame.pack and before.offset + before.stored_bytes == frame.offset:
                runs[-1].append(item)
                continue
        runs.append([item])
    return runs
