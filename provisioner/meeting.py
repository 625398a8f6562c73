"""Where controller and nodes meet: the filesystem's store as the ports of `core.ports`, with this package's errors.

Invariant: nothing but StoreUnavailable and StoreDenied leaves these methods. A state that cannot be read is
StoreUnavailable too: nothing is decided without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.ports import WorkspaceHead
from spotwarp_fs import api


class StoreShelf:
    """A `Shelf` in the store."""

    def __init__(self, store: api.Store) -> None:
        self._store = store

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None when it is proven absent."""
        with _translated():
            return await self._store.get(key)

    async def put(self, key: str, body: bytes) -> None:
        """Create or replace."""
        with _translated():
            await self._store.put(key, body)

    async def put_big(self, key: str, body: bytes) -> None:
        """Create or replace an object that takes its time."""
        with _translated():
            await self._store.put_big(key, body)

    async def has(self, key: str) -> bool:
        """Tell whether the object is there."""
        with _translated():
            return await self._store.has(key)

    async def create(self, key: str, body: bytes) -> bool:
        """Create it once, ever; False when it was there already, with other content."""
        with _translated():
            return await self._store.create(key, body)

    async def list(self, prefix: str) -> Sequence[str]:
        """Return every key below *prefix*, in order."""
        with _translated():
            return await self._store.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete; what is absent is fine."""
        with _translated():
            await self._store.delete(keys)

    async def link(self, key: str, lives_s: int) -> str:
        """Return a URL that reads one object for *lives_s* seconds; secret."""
        with _translated():
            return await self._store.link(key, lives_s)


class StoreWorkspace:
    """A `WorkspaceView` of one workspace."""

    def __init__(self, store: api.Store, name: str) -> None:
        self._store = store
        self._name = name

    async def head(self) -> WorkspaceHead | None:
        """Return the newest manifest, or None for a workspace that has no state yet."""
        with _translated():
            found = await self._store.head(self._name)
        return None if found is None else _head(found)

    async def heartbeat(self) -> str | None:
        """Return a token that changes with each heartbeat of the head's writer; None without one."""
        with _translated():
            return await self._store.heartbeat(self._name)


def _head(found: api.HeadFacts) -> WorkspaceHead:
    return WorkspaceHead(
        number=found.number,
        writer_epoch=found.writer_epoch,
        created_at_s=found.created_s,
        intent=found.node.get("intent"),
        # A node whose provider does not tell it its own id leaves it empty.
        instance_id=found.node.get("instance") or None,
        quiescent=found.quiescent,
        logical_bytes=found.logical_bytes,
        files=found.files,
        resumed_from=found.resumed_from,
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except api.Denied as error:
        raise StoreDenied(str(error)) from error
    except api.SpotwarpError as error:
        raise StoreUnavailable(str(error)) from error
