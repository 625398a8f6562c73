"""Fetch blocks past the cache, for real files that lie elsewhere on the node: many ranged requests at once.

Invariant: what is handed over has passed the digest of its block record (P-08); what somebody waits for goes before
everything else; all files together hold no more in memory than the limit. One bad frame costs its neighbours a second
request, nothing more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from spotwarp_fs.core.errors import Corrupt, NotFound, SpotwarpError, StoreRefused, Unavailable
from spotwarp_fs.core.ports import KVRead, Lane
from spotwarp_fs.core.records import BLOCK_TABLE, BlockState, ino_range, key_block
from spotwarp_fs.core.types import BLOCK_BYTES, Generation, Inode
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.hydrate import Item, grouped
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.turns import Rank, Turn, Turns
from spotwarp_fs.engine.workspace import Workspace

COPIES: Final = 2
"""A run is in memory as it is stored and as it is decoded."""
RATE_FORGETS_S: Final = 30.0
"""Busy time after which what was measured counts half."""

Deliver = Callable[[list[Item], list[bytes]], Awaitable[None]]
"""Puts a run where it belongs; what it raises ends the whole `bring`."""
Failures = list[tuple[Item, SpotwarpError]]


@dataclass(slots=True, eq=False)
class Urgency:
    """How much somebody wants something; shared by all its requests, so that it may be raised on the way."""

    rank: Rank = Rank.BACKGROUND
    waiting: set[Turn] = field(default_factory=set)


@dataclass(slots=True)
class Meter:
    """How fast bytes come while any are asked for."""

    bytes_brought: int = 0
    _bytes: float = 0.0
    _busy_s: float = 0.0
    _running: int = 0
    _since_s: float = 0.0

    def begin(self) -> None:
        """A request is on its way."""
        if not self._running:
            self._since_s = trio.current_time()
        self._running += 1

    def end(self, count: int) -> None:
        """It brought *count* bytes."""
        self._settle()
        self._running -= 1
        self._bytes += count
        self.bytes_brought += count
        if self._busy_s > RATE_FORGETS_S:
            self._busy_s, self._bytes = self._busy_s / 2, self._bytes / 2

    def _settle(self) -> None:
        now = trio.current_time()
        if self._running:
            self._busy_s += now - self._since_s
        self._since_s = now

    @property
    def bytes_per_s(self) -> float | None:
        """The rate; None until it is known."""
        busy_s = self._busy_s + (trio.current_time() - self._since_s if self._running else 0.0)
        return self._bytes / busy_s if self._bytes and busy_s > 0 else None


class Through:
    """Fetches for files that are not in the cache."""

    def __init__(self, workspace: Workspace, packs: PackStore, health: StoreHealth) -> None:
        settings = workspace.settings
        self._ws = workspace
        self._packs = packs
        self._health = health
        self.run_bytes = settings.hydrate_run_blocks * BLOCK_BYTES
        self._turns = Turns(max(2, settings.through_bytes_max // (COPIES * self.run_bytes)))
        self.meter = Meter()

    def promote(self, urgency: Urgency) -> None:
        """Somebody waits for it now."""
        urgency.rank = Rank.DEMAND
        for turn in urgency.waiting:
            self._turns.promote(turn)

    def runs(self, items: Iterable[Item]) -> list[list[Item]]:
        """Group blocks that one request brings; sort them by place first where several files lie together."""
        return grouped(items, self.run_bytes, self._ws.settings.hydrate_gap_bytes)

    async def bring(
        self, runs: Sequence[list[Item]], deliver: Deliver, urgency: Urgency, *, go_on: bool = False
    ) -> Failures:
        """Fetch *runs*, several at once, and deliver each; returns what is damaged or was given up.

        Stops at the first of these unless *go_on*. Waits out outages for as long as a read does. Raises the OSError or
        SpotwarpError that a delivery does.
        """
        failures: Failures = []
        broken: list[OSError | SpotwarpError] = []
        async with trio.open_nursery() as nursery:
            for run in runs:
                if broken or (failures and not go_on):
                    break
                turn = await self._admitted(urgency)
                nursery.start_soon(self._one, run, turn, deliver, failures, broken)
        if broken:
            raise broken[0]
        return failures

    async def _admitted(self, urgency: Urgency) -> Turn:
        """Wait for a place among all requests."""
        if urgency.rank is Rank.BACKGROUND:
            await self.until_reachable()
        turn = self._turns.line_up(urgency.rank)
        urgency.waiting.add(turn)
        try:
            await turn.admitted.wait()
        except BaseException:
            self._turns.leave(turn)
            raise
        finally:
            urgency.waiting.discard(turn)
        return turn

    async def until_reachable(self) -> None:
        """Wait while the store is away; somebody else's tries tell when it is back, or one of ours after a while."""
        if not self._health.reachable:
            with trio.move_on_after(self._ws.settings.outage_probe_s):
                while not self._health.reachable:
                    await trio.sleep(self._ws.settings.retry_first_s)

    async def _one(
        self, run: list[Item], turn: Turn, deliver: Deliver, failures: Failures, broken: list[OSError | SpotwarpError]
    ) -> None:
        try:
            await self._deliver(run, deliver, failures)
        except (OSError, SpotwarpError) as error:
            broken.append(error)
        finally:
            self._turns.leave(turn)

    async def _deliver(self, run: list[Item], deliver: Deliver, failures: Failures) -> None:
        try:
            contents = await self._fetch(run)
        except (Corrupt, NotFound) as error:
            if len(run) == 1:
                failures.append((run[0], error))
                return
            half = len(run) // 2
            await self._deliver(run[:half], deliver, failures)
            await self._deliver(run[half:], deliver, failures)
        except (Unavailable, StoreRefused) as error:
            failures += [(item, error) for item in run]
        else:
            await deliver(run, contents)

    async def _fetch(self, run: list[Item]) -> list[bytes]:
        """Fetch one run, trying again while the store does not answer."""
        deadline = trio.current_time() + self._ws.settings.read_wait_max_s
        while True:
            count = 0
            self.meter.begin()
            try:
                contents = await self._packs.fetch_run([item.frame for item in run], lane=Lane.DEMAND)
                count = sum(map(len, contents))
                return contents
            except (NotFound, Corrupt):
                raise
            except (Unavailable, StoreRefused) as error:
                failed = error
            finally:
                self.meter.end(count)
            if self._ws.stopping or trio.current_time() >= deadline:
                raise failed
            await self._health.failed(failed)


def items_of(view: KVRead, ino: Inode) -> list[Item]:
    """Give the published blocks of a file whose map is loaded, in file order; what is between them is a hole."""
    found = []
    for key, value in view.scan(*ino_range(BLOCK_TABLE, ino)):
        frame = BlockState.decode(value).frame if value else None
        if frame is not None:
            found.append(Item(ino, key_block(key), frame, Generation(0)))
    return found


def by_place(items: Iterable[Item]) -> list[Item]:
    """Sort blocks of several files as they lie in packs."""
    return sorted(items, key=lambda item: (item.frame.pack, item.frame.offset))
