"""Blocking calls off the event loop: one limited set of threads per kind, so that no kind starves another.

Invariant: a call that was begun runs to its end even when its caller is cancelled; the caller then waits for it,
because what it reads or writes must not change under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from spotwarp_fs.core.ports import Work

T = TypeVar("T")

THREADS: Final = {Work.DISK: 8, Work.SYNC: 4, Work.CPU: 2}


class ThreadWorkers:
    """`core.ports.Workers` on trio's threads."""

    def __init__(self) -> None:
        self._limiters = {work: trio.CapacityLimiter(count) for work, count in THREADS.items()}

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        """Run *call* in a thread of its kind."""
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._limiters[work])


class InlineWorkers:
    """`core.ports.Workers` without threads, for simulated worlds: in place, after a chance for others to run."""

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        """Run *call* here, with a scheduling point before and after it, as a thread would have."""
        await trio.lowlevel.checkpoint()
        result = call(*arguments)
        await trio.lowlevel.checkpoint()
        return result
