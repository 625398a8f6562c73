"""Do the same thing to several items at once, and meet the first error bare.

Invariant: an error of ours leaves as itself, never in a group: callers catch it by its kind. When `each` returns or
raises, nothing that it began is still running.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

from spotwarp_fs.core.errors import SpotwarpError

T = TypeVar("T")
R = TypeVar("R")


async def each(call: Callable[[T], Awaitable[R]], items: Iterable[T], *, limit: int) -> list[R]:
    """Return what *call* gives for each item, in their order, with at most *limit* calls at a time."""
    wanted = list(items)
    found: dict[int, R] = {}
    errors: list[SpotwarpError] = []
    slots = trio.Semaphore(limit)

    async def one(at: int, item: T) -> None:
        async with slots:
            try:
                found[at] = await call(item)
            except SpotwarpError as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for at, item in enumerate(wanted):
            nursery.start_soon(one, at, item)
    if errors:
        raise errors[0]
    return [found[at] for at in range(len(wanted))]
