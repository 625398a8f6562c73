"""Objects on their way into the store: the newest body of each key, tried until it is there.

Invariant: `arrived` returns only when the body that was posted before it, or a newer one of that key, is in the store.
A body that was replaced before it was sent is never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.ports import Shelf
from provisioner.engine.ports import EngineSettings

DENIED_PAUSE_S: Final = 30.0
"""Keys that are refused are renewed by somebody else, if at all."""
WORKERS: Final = 4


@dataclass(slots=True)
class _Post:
    body: bytes
    version: int = 0
    taken: bool = False
    """By a worker, which sends newer versions as well: two puts of one key would overtake each other."""
    done: trio.Event = field(default_factory=trio.Event)


class Outbox:
    """Puts objects in the background."""

    def __init__(self, shelf: Shelf, settings: EngineSettings, say: Callable[[str], None]) -> None:
        self._shelf = shelf
        self._settings = settings
        self._say = say
        self._posts: dict[str, _Post] = {}
        self._more = trio.Event()

    def post(self, key: str, body: bytes) -> None:
        """Let *key* become *body*, soon."""
        post = self._posts.get(key)
        if post is None:
            self._posts[key] = _Post(body)
            self._more.set()
        else:
            post.body = body
            post.version += 1

    async def arrived(self, key: str) -> None:
        """Wait until nothing of *key* is on its way."""
        post = self._posts.get(key)
        if post is not None:
            await post.done.wait()

    async def emptied(self) -> None:
        """Wait until everything is in the store."""
        while self._posts:
            await next(iter(self._posts.values())).done.wait()

    async def run(self) -> None:
        """Send, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            key = next((key for key, post in self._posts.items() if not post.taken), None)
            if key is not None:
                await self._send(key, self._posts[key])
                continue
            if self._more.is_set():
                self._more = trio.Event()
            await self._more.wait()

    async def _send(self, key: str, post: _Post) -> None:
        post.taken = True
        pause_s = self._settings.retry_first_s
        told = False
        while True:
            version = post.version
            failure = await self._put(key, post.body)
            if failure is None and post.version == version:
                del self._posts[key]
                post.done.set()
                return
            if failure is None:
                continue
            if not told:
                self._say(f"{key} is not in the store yet: {failure}")
                told = True
            await trio.sleep(DENIED_PAUSE_S if isinstance(failure, StoreDenied) else pause_s)
            pause_s = min(self._settings.retry_max_s, 2 * pause_s)

    async def _put(self, key: str, body: bytes) -> StoreUnavailable | StoreDenied | None:
        with trio.move_on_after(self._settings.store_s):
            try:
                await self._shelf.put(key, body)
            except (StoreUnavailable, StoreDenied) as error:
                return error
            return None
        return StoreUnavailable(f"no answer within {self._settings.store_s:.0f} s")
