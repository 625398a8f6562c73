"""Bring blocks and block maps from the store to the node.

Invariant: what a wait brought is used only if the block still has the same frame, no local bytes and the same
generation (C2); bytes are checked against the block record before they are written (P-08); "local" is committed after
the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Corrupt, NotFound, Refused, StoreRefused, Unavailable
from spotwarp_fs.core.ports import KVRead, Lane
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameRef, NodeTable, block_key, ino_range, key_block
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Generation, Inode
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.streams import Streams
from spotwarp_fs.engine.turns import Rank, Turn, Turns
from spotwarp_fs.engine.workspace import Workspace, block_state

EINTR = 4
EIO = 5
LOOK_UP_S = 0.25
"""How soon a wait notices that it must end."""
INSTALLS_PER_STEP = 16

Place = tuple[Inode, BlockIndex]


class Item(NamedTuple):
    """A block to be fetched, as it was when its fetch was asked for."""

    ino: Inode
    block: BlockIndex
    frame: FrameRef
    generation: Generation


@dataclass(slots=True, eq=False)
class Fetch:
    """A block on its way."""

    item: Item
    turn: Turn
    wanted: bool
    """Somebody waits for it."""
    here: bool = False
    """Its bytes have come."""
    done: trio.Event = field(default_factory=trio.Event)


class Hydrator:
    """Fetches blocks: one fetch per block however many wait for it."""

    def __init__(self, workspace: Workspace, packs: PackStore, health: StoreHealth, nursery: trio.Nursery) -> None:
        settings = workspace.settings
        self._ws = workspace
        self._packs = packs
        self._health = health
        self._nursery = nursery
        self._fetching: dict[Place, Fetch] = {}
        self._failed: dict[Place, str] = {}
        self._turns = Turns(settings.hydrate_parallel_max)
        self._streams = Streams(settings.readahead_blocks_max, settings.hydrate_run_blocks)
        self._whole: set[Inode] = set()
        self.bytes_coming = 0
        """Bytes of blocks on their way: they will need room."""
        self.readers_waiting = 0
        self.spare_blocks: Callable[[], int] = lambda: settings.readahead_blocks_max
        """How much may be fetched ahead of demand without outgrowing the cache's budget."""
        self.room_unasked: Callable[[], int] = lambda: 0
        """How many bytes may come in background: what eviction would never have to take back."""

    async def demand(
        self,
        ino: Inode,
        blocks: Iterable[BlockIndex],
        *,
        for_write: bool = False,
        given_up: Callable[[], bool] | None = None,
    ) -> None:
        """Return when every block of *blocks* has local bytes (or no frame any more).

        Raises Refused(EIO) when a frame is damaged for good, when the store stays away longer than the read wait, or
        when the mount ends; a writer gets EROFS once fenced, and EINTR once given up.
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
            fetches = self._start([(ino, block) for block in missing], Rank.DEMAND)
            self.readers_waiting += 1
            try:
                with trio.move_on_at(min(deadline, trio.current_time() + LOOK_UP_S)):
                    for fetch in fetches:
                        await fetch.done.wait()
            finally:
                self.readers_waiting -= 1
            if for_write:
                self._ws.check_writable()
            if given_up is not None and given_up():
                raise Refused(EINTR, "the program is being killed")
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
                turn = self._turns.line_up(Rank.DEMAND)
                try:
                    await turn.admitted.wait()
                    found[block] = await self._packs.fetch_patiently(frame, lane=Lane.DEMAND, wait_s=wait_s)
                finally:
                    self._turns.leave(turn)
            except (Corrupt, Unavailable, StoreRefused) as error:
                raise Refused(EIO, f"inode {ino:#x}, block {block}: {error}") from error
        return found

    def note_read(self, ino: Inode, first: BlockIndex, last: BlockIndex) -> None:
        """Follow how a file is read, and fetch ahead of it: further each time, or all of it."""
        advice = self._streams.note(ino, first, last)
        if advice.ahead and not self.prefetch(ino, [BlockIndex(block) for block in advice.ahead]):
            self._streams.declined(ino, advice.ahead)
        if advice.whole and len(self._whole) < self._ws.settings.whole_files_max and self._is_atomic(ino):
            self._whole.add(ino)
            self._nursery.start_soon(self._fetch_whole, ino)

    def _is_atomic(self, ino: Inode) -> bool:
        with self._ws.kv.read() as view:
            place = next(paths.each_name(view, ino), None)
        return place is not None and ino not in self._whole and self._ws.policies.is_atomic(place[1])

    async def _fetch_whole(self, ino: Inode) -> None:
        try:
            with self._ws.kv.read() as view:
                rows = view.scan(*ino_range(BLOCK_TABLE, ino))
                blocks = [(ino, key_block(key)) for key, value in rows if value and not BlockState.decode(value).local]
            await self.background(blocks, lambda count: count <= self.room_unasked() - self.bytes_coming)
        finally:
            self._whole.discard(ino)

    def prefetch(self, ino: Inode, blocks: list[BlockIndex]) -> bool:
        """Start fetching what is missing; False when there is no room, or no store. Failures are forgotten."""
        if not self._health.reachable or self._ws.stopping:
            return False
        with self._ws.kv.read() as view:
            missing = [(ino, block) for block in blocks if _absent(view, ino, block)]
        room = self.spare_blocks() - self.bytes_coming // BLOCK_BYTES
        if missing[: max(0, room)]:
            self._start(missing[:room], Rank.BACKGROUND)
        return len(missing) <= room or not missing

    def missing(self, places: Iterable[Place]) -> Counter[Inode]:
        """Count by inode the bytes of *places* that are neither here nor on their way."""
        found = Counter[Inode]()
        for item in self._missing(places):
            found[item.ino] += item.frame.raw_bytes
        return found

    async def background(
        self, places: Sequence[Place], may_take: Callable[[int], bool], begun: list[Fetch] | None = None
    ) -> list[Fetch]:
        """Start fetching what is missing of *places*, about in their order, neighbours in a pack together.

        Waits while the store is away and whenever the background has no turn; ends early as soon as *may_take* refuses
        the bytes of a request, and when nothing may be fetched any more. Returns what it began, added to *begun*.
        """
        begun = [] if begun is None else begun
        for run in self._background_runs(places):
            while not self._health.reachable and not self._over:
                await trio.sleep(self._ws.settings.outage_probe_s)
            if self._over or not may_take(sum(item.frame.raw_bytes for item in run)):
                break
            fetches = self._start([(item.ino, item.block) for item in run], Rank.BACKGROUND)
            begun += fetches
            for fetch in fetches:
                await fetch.turn.admitted.wait()
            await trio.lowlevel.checkpoint()
        return begun

    def _background_runs(self, places: Sequence[Place]) -> Iterator[list[Item]]:
        """Group what is missing by where it lies, a limited number of bytes at a time: their order matters too."""
        some: list[Item] = []
        raw_bytes = 0
        for item in self._missing(places):
            if raw_bytes + item.frame.raw_bytes > self._ws.settings.hydrate_sort_bytes:
                yield from self._by_place(some)
                some, raw_bytes = [], 0
            some.append(item)
            raw_bytes += item.frame.raw_bytes
        yield from self._by_place(some)

    def _by_place(self, items: list[Item]) -> list[list[Item]]:
        items.sort(key=lambda item: (item.frame.pack, item.frame.offset))
        return grouped(items, self._run_bytes, self._ws.settings.hydrate_gap_bytes)

    @property
    def _over(self) -> bool:
        return self._ws.stopping or self._ws.fenced is not None

    @property
    def _run_bytes(self) -> int:
        return self._ws.settings.hydrate_run_blocks * BLOCK_BYTES

    def _missing(self, places: Iterable[Place]) -> list[Item]:
        """What of *places* has no local bytes and is not on its way."""
        items = []
        with self._ws.kv.read() as view:
            for ino, block in places:
                state = block_state(view, ino, block)
                if state is None or state.local or state.frame is None or (ino, block) in self._fetching:
                    continue
                items.append(Item(ino, block, state.frame, self._ws.generations.of(ino, block)))
        return items

    def _start(self, places: Sequence[Place], rank: Rank) -> list[Fetch]:
        """Fetch what nobody is fetching yet, neighbours together; returns what to wait for."""
        demanded = rank is Rank.DEMAND
        for run in grouped(self._missing(places), self._run_bytes, self._ws.settings.hydrate_gap_bytes):
            turn = self._turns.line_up(rank)
            fetches = [Fetch(item, turn, demanded) for item in run]
            for fetch in fetches:
                self._fetching[fetch.item[:2]] = fetch
                self.bytes_coming += fetch.item.frame.raw_bytes
            self._nursery.start_soon(self._fetch, fetches, turn)
        found = [fetch for fetch in map(self._fetching.get, places) if fetch is not None]
        if demanded:
            for fetch in found:
                fetch.wanted = True
                self._turns.promote(fetch.turn)
        return found

    async def _fetch(self, fetches: list[Fetch], turn: Turn) -> None:
        """Fetch one run of neighbouring frames and install each block."""
        try:
            await self._bring(fetches, turn)
        finally:
            for fetch in fetches:
                self._done(fetch)

    def _done(self, fetch: Fetch) -> None:
        if self._fetching.get(fetch.item[:2]) is fetch:
            del self._fetching[fetch.item[:2]]
            self.bytes_coming -= fetch.item.frame.raw_bytes
            fetch.done.set()

    async def _bring(self, fetches: list[Fetch], turn: Turn) -> None:
        try:
            try:
                await turn.admitted.wait()
                # The background has a turn, not a lane: on that of uploads it would delay what must reach the store.
                contents = await self._packs.fetch_run([fetch.item.frame for fetch in fetches], lane=Lane.DEMAND)
            finally:
                self._turns.leave(turn)
            for at, (fetch, raw) in enumerate(zip(fetches, contents, strict=True)):
                self._install(*fetch.item, raw)
                fetch.here = True
                self._done(fetch)
                if at % INSTALLS_PER_STEP == INSTALLS_PER_STEP - 1:
                    await trio.lowlevel.checkpoint()
        except NotFound as error:
            self._condemn(fetches, error)
        except (Unavailable, StoreRefused) as error:
            await self._health.failed(error)
        except Corrupt as error:
            if len(fetches) == 1:
                self._condemn(fetches, error)
                return
            half = len(fetches) // 2
            for part in (fetches[:half], fetches[half:]):  # one bad frame must not take its neighbours along
                rank = Rank.DEMAND if any(fetch.wanted for fetch in part) else Rank.BACKGROUND
                again = self._turns.line_up(rank)
                for fetch in part:
                    fetch.turn = again
                await self._bring(part, again)
        except OSError as error:
            self._ws.report(f"the cache cannot take blocks of inode {fetches[0].item.ino:#x}: {error}")
            await trio.sleep(self._ws.settings.retry_first_s)

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

    def _condemn(self, fetches: list[Fetch], error: Exception) -> None:
        """Damage: the frames leave the dedup index at once (H11), and whoever waits gets EIO, never zeros."""
        try:
            with self._ws.kv.write() as txn:
                for fetch in fetches:
                    txn.delete(NodeTable.DEDUP + fetch.item.frame.digest)
        except OSError as full:  # the next who reads it finds it damaged again
            self._ws.report(f"damaged frames stay in the index: {full}")
        for fetch in fetches:
            if fetch.wanted:
                self._failed[fetch.item[:2]] = str(error)
        named = [f"{fetch.item.ino:#x}:{fetch.item.block}" for fetch in fetches[:4]]
        self._ws.report(f"blocks {', '.join(named)}: {error}")


def _absent(view: KVRead, ino: Inode, block: BlockIndex) -> bool:
    state: BlockState | None = block_state(view, ino, block)
    return state is not None and not state.local


def grouped(items: Iterable[Item], bytes_max: int, gap_max: int) -> list[list[Item]]:
    """Group frames that lie near each other in one pack, in order, so that one ranged GET brings several.

    Neither what a request brings nor what it decodes to exceeds *bytes_max*, unless a single frame does. A gap of up to
    *gap_max* is fetched along: a request costs more than that.
    """
    runs: list[list[Item]] = []
    start = stop = raw_bytes = 0
    for item in items:
        frame = item.frame
        end = frame.offset + frame.stored_bytes
        near = (
            bool(runs)
            and runs[-1][-1].frame.pack == frame.pack
            and (0 <= frame.offset - stop <= gap_max or runs[-1][-1].frame == frame)
        )
        if near and end - start <= bytes_max and raw_bytes + frame.raw_bytes <= bytes_max:
            runs[-1].append(item)
        else:
            runs.append([item])
            start, raw_bytes = frame.offset, 0
        stop = end
        raw_bytes += frame.raw_bytes
    return runs
