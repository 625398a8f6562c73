"""`--unsafe-single-writer`: conditional writes imitated for a store that has none.

Invariant: none. Two writers that look at the same time both win; the user has promised that there is only one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from spotwarp_fs.core.errors import NotFound, PreconditionFailed
from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ObjectKey


class UnsafeSingleWriter:
    """*inner*, with "look, then write" in the place of conditional writes."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        """Where *inner* is."""
        return self._inner.url

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        return await self._inner.get(key, start=start, length=length, lane=lane)

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return await self._inner.head(key, lane=lane)

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return await self._inner.put(key, body, lane=lane)

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object unless a look finds it."""
        try:
            await self._inner.head(key, lane=lane)
        except NotFound:
            return await self._inner.put(key, body, lane=lane)
        raise PreconditionFailed(f"{key} exists in {self.url}")

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if a look finds *etag*."""
        try:
            found = await self._inner.head(key, lane=lane)
        except NotFound as error:
            raise PreconditionFailed(f"{key} is absent, not {etag}, in {self.url}") from error
        if found.etag != etag:
            raise PreconditionFailed(f"{key} is {found.etag}, not {etag}, in {self.url}")
        return await self._inner.put(key, body, lane=lane)

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give every object below *prefix*."""
        async for info in self._inner.list_objects(prefix, after=after, lane=lane):
            yield info

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete, whether or not the keys are there."""
        await self._inner.delete(keys, lane=lane)

    async def aclose(self) -> None:
        """Close *inner*."""
        await self._inner.aclose()
