"""A store that misbehaves as real ones do, for tests of everything above the port.

Invariant: every fault is fair. Nothing is reordered, no acknowledged write is lost, no listing is stale: S3 does
none of that. A lost answer means that the request was applied and the caller is told Unavailable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar

import trio

from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.limits import Throttled

T = TypeVar("T")


class Method(Enum):
    """The port's methods, to say which of them suffer."""

    GET = "get"
    HEAD = "head"
    PUT = "put"
    PUT_IF_ABSENT = "put_if_absent"
    PUT_IF_MATCH = "put_if_match"
    LIST = "list_objects"
    DELETE = "delete"


class Rng(Protocol):
    """What is needed of a seeded `random.Random`."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return an integer in [0, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Chances per request, and which methods they concern."""

    fail_before: float = 0.0
    """Unavailable, and nothing happened."""
    lose_answer: float = 0.0
    """It happened, and the caller is told Unavailable."""
    throttle: float = 0.0
    short_body: float = 0.0
    """A GET gives less than there is, as from an adapter that trusts a proxy: digests must notice."""
    flip_bit: float = 0.0
    """A GET gives one wrong bit: digests must notice."""
    slow: float = 0.0
    slow_s: float = 1.0
    methods: frozenset[Method] = field(default_factory=lambda: frozenset(Method))


class FaultStore:
    """*inner* as seen over a bad network.

    Set `partitioned` to refuse everything until it is cleared, and `dead` to answer nothing any more, as to a node that
    lost its network for ever. `counts` tells how often each fault struck.
    """

    def __init__(self, inner: ObjectStore, rng: Rng, schedule: FaultSchedule | None = None) -> None:
        self._inner = inner
        self._rng = rng
        self.schedule = schedule or FaultSchedule()
        self.partitioned = False
        self.dead = False
        self.counts: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Where *inner* is."""
        return self._inner.url

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range, perhaps wrongly."""
        found = await self._suffer(Method.GET, lambda: self._inner.get(key, start=start, length=length, lane=lane))
        return replace(found, body=self._damaged(found.body))

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return await self._suffer(Method.HEAD, lambda: self._inner.head(key, lane=lane))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return await self._suffer(Method.PUT, lambda: self._inner.put(key, body, lane=lane))

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object; the answer may be lost."""
        return await self._suffer(Method.PUT_IF_ABSENT, lambda: self._inner.put_if_absent(key, body, lane=lane))

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*; the answer may be lost."""
        return await self._suffer(Method.PUT_IF_MATCH, lambda: self._inner.put_if_match(key, body, etag, lane=lane))

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give objects until a fault breaks the listing off."""
        async for info in self._inner.list_objects(prefix, after=after, lane=lane):
            await self._suffer(Method.LIST, trio.lowlevel.checkpoint)
            yield info

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete; the answer may be lost."""
        await self._suffer(Method.DELETE, lambda: self._inner.delete(keys, lane=lane))

    async def aclose(self) -> None:
        """Leave *inner* open: the world outlives this node's view of it."""

    async def _suffer(self, method: Method, call: Callable[[], Awaitable[T]]) -> T:
        now = self.schedule if method in self.schedule.methods else FaultSchedule()
        await self._unreachable()
        if self._strikes("slow", now.slow):
            await trio.sleep(now.slow_s * self._rng.random())
        await self._unreachable()
        if self._strikes("throttle", now.throttle):
            raise Throttled(f"{method.value}: 503 SlowDown (fault)")
        if self._strikes("fail_before", now.fail_before):
            raise Unavailable(f"{method.value}: not sent (fault)")
        answer = await call()
        await self._unreachable()
        if self._strikes("lose_answer", now.lose_answer):
            raise Unavailable(f"{method.value}: answer lost (fault)")
        return answer

    async def _unreachable(self) -> None:
        if self.dead:
            await trio.sleep_forever()
        if self.partitioned:
            await trio.lowlevel.checkpoint()
            raise Unavailable("partitioned (fault)")

    def _damaged(self, body: bytes) -> bytes:
        if Method.GET not in self.schedule.methods or not body:
            return body
        if self._strikes("short_body", self.schedule.short_body):
            return body[: self._rng.randrange(len(body))]
        if self._strikes("flip_bit", self.schedule.flip_bit):
            place = self._rng.randrange(len(body))
            flipped = body[place] ^ 1 << self._rng.randrange(8)
            return body[:place] + bytes([flipped]) + body[place + 1 :]
        return body

    def _strikes(self, fault: str, chance: float) -> bool:
        if chance <= 0 or self._rng.random() >= chance:
            return False
        self.counts[fault] = self.counts.get(fault, 0) + 1
        return True
