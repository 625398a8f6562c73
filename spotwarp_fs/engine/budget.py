"""Keep the cache within its budget: evict what the store has, make writers wait, serve what cannot be kept.

Invariant: only a block whose present content has a frame acknowledged by the store loses its local bytes; "absent" is
committed before the punch, both in one step; busy blocks are left alone (C2). Removing names never waits. In an
outage eviction happens on real need only (H20): nothing goes before somebody waits for its room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import trio

from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, FrameState, block_key, ino_range, key_block
from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.engine.workspace import Workspace

EINTR = 4
ENOSPC = 28
BLOCKS_PER_STEP_MAX = 64
FUTILE_SHARE = 9
"""After a look that found too little, eviction rests this many times as long: with 100 GB of dirty blocks a look takes
half a second, and in an outage everybody who waits for room would take one after the other."""
AHEAD_SHARE = 64
"""Who must evict makes room for more than itself: this share of the budget."""


class Disk(Protocol):
    """The disk that the cache lies on."""

    def free_bytes(self) -> int:
        """Free space for us."""
        ...


class Budget:
    """Room for local bytes."""

    def __init__(self, workspace: Workspace, disk: Disk, urge: Callable[[], None]) -> None:
        self._ws = workspace
        self._disk = disk
        self._urge = urge
        """Asks the early uploader to send everything dirty now."""
        self._disk_free = disk.free_bytes()
        self.may_evict: Callable[[Inode, BlockIndex], bool] = lambda ino, block: True
        self.reachable: Callable[[], bool] = lambda: True
        """Whether the store gives back what is evicted now."""
        self.evicted_blocks = 0
        self._look_again_s = -1e9

    @property
    def used_bytes(self) -> int:
        """What data files and spool occupy."""
        return self._ws.use.total_bytes + self._ws.data.spool_bytes()

    @property
    def limit_bytes(self) -> int:
        """What they may occupy: the budget, or what the disk can still give above its reserve."""
        return self._limit(self.used_bytes)

    def _limit(self, used: int) -> int:
        settings = self._ws.settings
        reserve = min(settings.disk_reserve_bytes, (self._disk_free + used) // 16)
        return min(settings.cache_bytes_max, used + self._disk_free - reserve)

    @property
    def tight(self) -> bool:
        """Near enough to the limit that a write must ask first."""
        used = self.used_bytes
        return used > self._limit(used) * self._ws.settings.evict_low_share - 8 * BLOCK_BYTES

    def spare_blocks(self) -> int:
        """How many blocks may come in unasked: half of what is free, for writes and demand need room too."""
        return max(0, self.limit_bytes - self.used_bytes) // BLOCK_BYTES // 2

    def room_unasked(self) -> int:
        """How many bytes background fetches may still bring: they end well below where eviction begins."""
        settings = self._ws.settings
        low = int(self.limit_bytes * settings.evict_low_share) - 16 * BLOCK_BYTES
        return max(0, min(int(self.limit_bytes * settings.warm_cache_share), low) - self.used_bytes)

    def figures(self) -> tuple[int, int]:
        """Total and free bytes for `statfs`."""
        limit = max(self.limit_bytes, self.used_bytes)
        kept = self._ws.dirty_blocks + self._ws.scratch_blocks
        evictable = max(0, self.used_bytes - kept * BLOCK_BYTES)
        return limit, max(0, min(limit, limit - self.used_bytes + evictable))

    async def run(self) -> None:
        """Watch the disk, and evict ahead of need down to the low mark; in an outage only on need (H20)."""
        while True:
            self._disk_free = self._disk.free_bytes()
            if self.tight and not (self.reachable() and self.evict(self._excess())):
                self._urge()
            await trio.sleep(0.5 if not self.tight else 0.05)

    def _excess(self) -> int:
        low = int(self.limit_bytes * self._ws.settings.evict_low_share) - 16 * BLOCK_BYTES
        return max(0, self.used_bytes - max(low, 0))

    async def room_for_bytes(self, count: int, given_up: Callable[[], bool] | None = None) -> None:
        """Return when *count* more bytes fit; raises Refused(ENOSPC) after `write_wait_max_s`, EINTR once given up."""
        if not await self._room(count, self._ws.settings.write_wait_max_s, writing=True, given_up=given_up):
            raise Refused(
                ENOSPC,
                f"the cache is full ({self.used_bytes} of {self.limit_bytes} bytes) of what is not in the store yet",
            )

    async def room_for_blocks(self, count: int) -> bool:
        """Make room for blocks to be hydrated; False when nothing can be evicted soon (then serve from memory, H18)."""
        if not self.tight:
            return True
        return await self._room(count * BLOCK_BYTES, 0.5, writing=False)

    async def _room(
        self, count: int, wait_s: float, *, writing: bool, given_up: Callable[[], bool] | None = None
    ) -> bool:
        deadline = trio.current_time() + wait_s
        while True:
            self._disk_free = self._disk.free_bytes()
            lacking = self.used_bytes + count - self.limit_bytes
            if lacking <= 0 or self.evict(lacking + max(count, self.limit_bytes // AHEAD_SHARE)) >= lacking:
                return True
            if writing:
                self._ws.check_writable()
            if trio.current_time() >= deadline or self._ws.stopping:
                return False
            if given_up is not None and given_up():
                raise Refused(EINTR, "the program is being killed")
            self._urge()
            with trio.move_on_after(0.2):
                async with self._ws.freed:
                    await self._ws.freed.wait()

    def evict(self, wanted_bytes: int) -> int:
        """Drop local bytes of the least recently used inodes until *wanted_bytes* are free; returns what was freed.

        Never raises: a disk that refuses the note of it is like one where nothing can go.
        """
        use, begun_s = self._ws.use, trio.current_time()
        if begun_s < self._look_again_s:
            return 0
        before = use.total_bytes
        try:
            self._evict_until(before - wanted_bytes)
        except OSError as error:
            self._ws.report(f"nothing can be evicted: {error}")
            self._look_again_s = begun_s + self._ws.settings.retry_first_s
        freed = before - use.total_bytes
        if freed < wanted_bytes:
            took_s = trio.current_time() - begun_s
            self._look_again_s = max(self._look_again_s, begun_s + took_s * (1 + FUTILE_SHARE))
        return freed

    def _evict_until(self, total_bytes: int) -> None:
        ws = self._ws
        for ino in self._in_order():
            if ws.use.total_bytes <= total_bytes:
                return
            for blocks in self._evictable(ino):
                self._drop(ino, blocks)
                if ws.use.total_bytes <= total_bytes:
                    return

    def _in_order(self) -> Iterator[Inode]:
        """Give files, the one used longest ago first; whatever frames scratch has left from before are not for ever.

        Those that are dirty all over come last: looking at each of their blocks finds nothing.
        """
        ws = self._ws
        later = []
        for ino in ws.use.oldest_first():
            if ino in ws.scratch:
                continue
            if len(ws.dirty.get(ino, ())) * BLOCK_BYTES >= ws.use.bytes_of(ino):
                later.append(ino)
            else:
                yield ino
        yield from later

    def _evictable(self, ino: Inode) -> Iterator[list[BlockIndex]]:
        """Blocks of *ino* that may go, a step's worth at a time."""
        with self._ws.kv.read() as view:
            found = [
                key_block(key)
                for key, value in view.scan(*ino_range(BLOCK_TABLE, ino))
                if value and value[0] & 1 and self._store_keeps(BlockState.decode(value))
            ]
        ready = [block for block in found if self._free_to_go(ino, block)]
        for at in range(0, len(ready), BLOCKS_PER_STEP_MAX):
            yield ready[at : at + BLOCKS_PER_STEP_MAX]

    def _store_keeps(self, state: BlockState) -> bool:
        """A frame that no manifest names is as good as one that is, until somebody else collects here."""
        return state.state is FrameState.PUBLISHED or (not state.dirty and self._ws.fenced is None)

    def _free_to_go(self, ino: Inode, block: BlockIndex) -> bool:
        """Nobody is reading the bytes, or will.

        A block that was dirty at the cut may get a frame early, while the cut has yet to read the same bytes.
        """
        cut = self._ws.cut
        frozen = cut is not None and cut.protects(ino, block)
        return not frozen and (ino, block) not in self._ws.busy and self.may_evict(ino, block)

    def _drop(self, ino: Inode, blocks: list[BlockIndex]) -> None:
        """Commit "absent", then punch. One step: no write can come between."""
        with self._ws.kv.write() as txn:
            for block in blocks:
                value = txn.get(block_key(ino, block))
                assert value, "an evictable block has a record"
                txn.put(block_key(ino, block), BlockState.decode(value).without_local_bytes().encode())
        for block in blocks:
            self._ws.data.punch(ino, block * BLOCK_BYTES, BLOCK_BYTES)
        self.evicted_blocks += len(blocks)
        self._ws.use.note(ino)
