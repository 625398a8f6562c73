"""A store in this process's memory: the reference meaning of the port, and what simulations run on.

Invariant: no thread, no wall clock, no randomness: the same calls in the same order give the same answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import trio

from spotwarp_fs.core.errors import NotFound, PreconditionFailed
from spotwarp_fs.core.ports import Lane, ObjectInfo, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.keys import checked, range_stop


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    etag: str
    modified_s: float


class MemoryStore:
    """Several nodes of a simulated world share one of these."""

    def __init__(self, *, now: Callable[[], float] = trio.current_time, name: str = "memory") -> None:
        self._objects: dict[str, _Object] = {}
        self._now = now
        self._writes = 0
        self.url = f"memory://{name}"

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        await trio.lowlevel.checkpoint()
        found = self._find(key)
        return Stored(found.body[start : range_stop(key, len(found.body), start, length)], found.etag, self._now())

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        await trio.lowlevel.checkpoint()
        return self._info(key, self._find(key))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        await trio.lowlevel.checkpoint()
        return self._store(key, body)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object, or raise PreconditionFailed."""
        await trio.lowlevel.checkpoint()
        if key in self._objects:
            raise PreconditionFailed(f"{key} exists in {self.url}")
        return self._store(key, body)

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*."""
        await trio.lowlevel.checkpoint()
        found = self._objects.get(key)
        if found is None or found.etag != etag:
            raise PreconditionFailed(f"{key} is {found.etag if found else 'absent'}, not {etag}, in {self.url}")
        return self._store(key, body)

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give what was below *prefix* when the listing began."""
        await trio.lowlevel.checkpoint()
        page = [(key, self._objects[key]) for key in sorted(self._objects) if key.startswith(prefix) and key > after]
        for key, found in page:
            yield self._info(ObjectKey(key), found)

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete, whether or not the keys are there."""
        await trio.lowlevel.checkpoint()
        for key in keys:
            self._objects.pop(key, None)

    async def aclose(self) -> None:
        """Do nothing: the objects outlive their clients."""

    def _find(self, key: ObjectKey) -> _Object:
        found = self._objects.get(checked(key))
        if found is None:
            raise NotFound(f"{key} is not in {self.url}")
        return found

    def _store(self, key: ObjectKey, body: bytes) -> ObjectInfo:
        self._writes += 1
        self._objects[checked(key)] = _Object(bytes(body), f"{self._writes:016x}", self._now())
        return self._info(key, self._objects[key])

    def _info(self, key: ObjectKey, found: _Object) -> ObjectInfo:
        return ObjectInfo(key, len(found.body), found.modified_s, found.etag, self._now())
