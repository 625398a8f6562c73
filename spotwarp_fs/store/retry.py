"""Send again what may be sent again: the same port, with patience.

Invariant: a conditional write is sent once. Whoever sends it must know whether a 412 is its own success, so only the
publisher and the sealer repeat it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import trio

from spotwarp_fs.core.errors import Denied, Unavailable
from spotwarp_fs.core.ports import Entropy, Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.limits import LANE_THREADS, Answered
from spotwarp_fs.store.pacing import AdaptiveLimit, Backoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often; `math.inf` as a deadline waits for as long as the caller does."""

    first_s: float = 0.1
    most_s: float = 10.0
    deadline_s: float = 60.0
    """From the first attempt to the last answer, pauses included."""
    answering_deadline_s: float = 0.0
    """The same while the store answers, be it with nothing but 5xx: it is there, and half of the requests may succeed.
    Where it is less than `deadline_s`, that counts."""
    denied_deadline_s: float = 15.0
    """Refused credentials are tried again for this long only: the adapter looks them up anew each time."""
    denied_first_s: float = 1.0


class Retrying:
    """*inner*, with idempotent requests repeated and bulk requests paced."""

    def __init__(
        self,
        inner: ObjectStore,
        entropy: Entropy,
        policy: RetryPolicy | None = None,
        *,
        pace: AdaptiveLimit | None = None,
    ) -> None:
        self._inner = inner
        self._entropy = entropy
        self._policy = policy or RetryPolicy()
        self._pace = pace or AdaptiveLimit(LANE_THREADS[Lane.BULK])

    def within(self, deadline_s: float) -> Retrying:
        """Return the same store with another deadline for each of its calls; pace and connections are shared."""
        denied_s = min(deadline_s, self._policy.denied_deadline_s)
        policy = replace(self._policy, deadline_s=deadline_s, answering_deadline_s=0.0, denied_deadline_s=denied_s)
        return Retrying(self._inner, self._entropy, policy, pace=self._pace)

    @property
    def url(self) -> str:
        """Where *inner* is."""
        return self._inner.url

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        return await self._repeated(
            lane, f"GET {key}", lambda: self._inner.get(key, start=start, length=length, lane=lane)
        )

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return await self._repeated(lane, f"HEAD {key}", lambda: self._inner.head(key, lane=lane))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return await self._repeated(lane, f"PUT {key}", lambda: self._inner.put(key, body, lane=lane))

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object; sent once."""
        return await self._paced(lane, lambda: self._inner.put_if_absent(key, body, lane=lane))

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*; sent once."""
        return await self._paced(lane, lambda: self._inner.put_if_match(key, body, etag, lane=lane))

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give every object below *prefix*; a listing that breaks off goes on after the last key it gave."""
        patience, reached = _Patience(self._policy, self._entropy), after
        while True:
            try:
                async for info in self._inner.list_objects(prefix, after=after, lane=lane):
                    after = info.key
                    yield info
                return
            except (Unavailable, Denied) as error:
                if after != reached:
                    patience, reached = _Patience(self._policy, self._entropy), after
                await patience.wait(error)

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete, whether or not the keys are there."""
        await self._repeated(lane, f"DELETE {len(keys)} objects", lambda: self._inner.delete(keys, lane=lane))

    async def aclose(self) -> None:
        """Close *inner*."""
        await self._inner.aclose()

    async def _repeated(self, lane: Lane, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        patience = _Patience(self._policy, self._entropy)
        while True:
            try:
                with trio.move_on_at(patience.ends_at_s):
                    return await self._paced(lane, call)
                raise Unavailable(f"{doing} in {self.url}: no answer within {self._policy.deadline_s:g} s")
            except (Unavailable, Denied) as error:
                await patience.wait(error)

    async def _paced(self, lane: Lane, call: Callable[[], Awaitable[T]]) -> T:
        async with AsyncExitStack() as held:
            if lane is Lane.BULK:
                await held.enter_async_context(self._pace.slot())
            return await call()


class _Patience:
    """One call's pauses and deadline."""

    def __init__(self, policy: RetryPolicy, entropy: Entropy) -> None:
        self._began_s = trio.current_time()
        self._policy = policy
        self._backoff = Backoff(entropy, first_s=policy.first_s, most_s=policy.most_s)
        self.ends_at_s = self._began_s + policy.deadline_s
        """No attempt lasts longer."""

    async def wait(self, error: Unavailable | Denied) -> None:
        """Sleep before the next attempt, or raise *error* when no attempt would fit before the deadline."""
        denied = isinstance(error, Denied)
        pause_s = self._backoff.pause_s(at_least_s=self._policy.denied_first_s if denied else 0.0)
        answering_s = self._policy.answering_deadline_s if isinstance(error, Answered) else 0.0
        self.ends_at_s = self._began_s + max(self._policy.deadline_s, answering_s)
        ends_at_s = self._began_s + self._policy.denied_deadline_s if denied else self.ends_at_s
        if trio.current_time() + pause_s >= ends_at_s:
            raise error
        await trio.sleep(pause_s)
