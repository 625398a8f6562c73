"""A store that answers after a while and through a link of limited speed, and remembers what was asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import trio

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.ports import Lane, ObjectInfo, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.memory import MemoryStore


@dataclass(frozen=True, slots=True)
class Get:
    """One request for content."""

    key: str
    start: int
    length: int
    lane: Lane
    begun_s: float


@dataclass
class SlowStore:
    """Wraps a store; what is read from it is slow and counted."""

    inner: MemoryStore
    latency_s: float = 0.02
    bytes_per_s: float = 100e6
    gets: list[Get] = field(default_factory=list)
    in_flight: int = 0
    in_flight_max: int = 0
    away: bool = False
    _free_at_s: float = 0.0

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def data_gets(self) -> list[Get]:
        """Those of blocks: metadata comes on its own lane."""
        return [get for get in self.gets if get.lane is not Lane.CONTROL]

    def forget(self) -> None:
        self.gets.clear()
        self.in_flight_max = self.in_flight

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        if self.away:
            await trio.sleep(self.latency_s)
            raise Unavailable(f"{key}: the store is away")
        found = await self.inner.get(key, start=start, length=length, lane=lane)
        self.gets.append(Get(key, start, len(found.body), lane, trio.current_time()))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            self._free_at_s = max(self._free_at_s, trio.current_time()) + len(found.body) / self.bytes_per_s
            await trio.sleep_until(self._free_at_s + self.latency_s)
        finally:
            self.in_flight -= 1
        return found

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        return await self.inner.head(key, lane=lane)

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        return await self.inner.put(key, body, lane=lane)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        return await self.inner.put_if_absent(key, body, lane=lane)

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        return await self.inner.put_if_match(key, body, etag, lane=lane)

    def list_objects(self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL) -> AsyncIterator[ObjectInfo]:
        return self.inner.list_objects(prefix, after=after, lane=lane)

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        await self.inner.delete(keys, lane=lane)

    async def aclose(self) -> None:
        await self.inner.aclose()
