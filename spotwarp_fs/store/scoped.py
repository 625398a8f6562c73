"""A view of a store under a key prefix, such as one workspace's.

Invariant: nothing outside the prefix can be read, listed or deleted through the view.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from spotwarp_fs.core.ports import Lane, ObjectInfo, ObjectStore, Stored
from spotwarp_fs.core.types import ObjectKey
from spotwarp_fs.store.keys import checked, prefix_of, relative


class Scoped:
    """*inner*, seen from below *prefix*. Closing the view leaves *inner* open: others may share it."""

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix_of(prefix)

    @property
    def url(self) -> str:
        """Where the view begins."""
        place, question, options = self._inner.url.partition("?")
        return f"{place.rstrip('/')}/{self._prefix.rstrip('/')}{question}{options}"

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read a range of the object."""
        return await self._inner.get(self._full(key), start=start, length=length, lane=lane)

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object."""
        return self._seen(await self._inner.head(self._full(key), lane=lane))

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object."""
        return self._seen(await self._inner.put(self._full(key), body, lane=lane))

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object, or raise PreconditionFailed."""
        return self._seen(await self._inner.put_if_absent(self._full(key), body, lane=lane))

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*."""
        return self._seen(await self._inner.put_if_match(self._full(key), body, etag, lane=lane))

    async def list_objects(
        self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[ObjectInfo]:
        """Give every object below *prefix* of the view."""
        full_after = self._prefix + after if after else ""
        async for info in self._inner.list_objects(self._prefix + prefix, after=full_after, lane=lane):
            yield self._seen(info)

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete, whether or not the keys are there."""
        await self._inner.delete([self._full(key) for key in keys], lane=lane)

    async def aclose(self) -> None:
        """Do nothing: the store underneath belongs to whoever opened it."""

    def _full(self, key: ObjectKey) -> ObjectKey:
        return ObjectKey(self._prefix + checked(key))

    def _seen(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=relative(info.key, self._prefix))
