"""What the engine needs of the outside, as Protocols; adapters live in `store/` and `local/`.

Invariant: nothing here names a vendor library, and every method says which errors it raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from spotwarp_fs.core.types import BlockIndex, Inode, ObjectKey

T = TypeVar("T")


class Lane(Enum):
    """Which worker threads and connections a store request may use, so that one kind never starves another."""

    CONTROL = "control"
    """Manifests, hints, heartbeats, metadata: small and never behind bulk data."""
    DEMAND = "demand"
    """A reader is waiting for these bytes."""
    BULK = "bulk"
    """Pack uploads and background fetches."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, or a range of it, as it came from the store."""

    body: bytes
    etag: str
    server_time_s: float
    """The store's own clock (Date header) at the answer, seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says about an object without sending it."""

    key: ObjectKey
    size_bytes: int
    modified_s: float
    etag: str
    server_time_s: float


class ObjectStore(Protocol):
    """One prefix of one object store.

    Every method may raise Unavailable (try again), Denied (credentials) or Unsupported. No method retries by itself:
    `store/retry.py` wraps this same port, and `put_if_absent` is never retried below the publisher.
    """

    @property
    def url(self) -> str:
        """Where this store is, as the user would type it; never with credentials."""
        ...

    async def get(
        self, key: ObjectKey, *, start: int = 0, length: int | None = None, lane: Lane = Lane.CONTROL
    ) -> Stored:
        """Read *length* bytes from *start* (all when None).

        Raises NotFound when proven absent, Unavailable when the body is not as long as the store itself announced.
        A range that starts inside and ends beyond the object gives what there is.
        """
        ...

    async def head(self, key: ObjectKey, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Describe the object, or raise NotFound."""
        ...

    async def put(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create or replace the object (hints only: nothing that matters is ever replaced)."""
        ...

    async def put_if_absent(self, key: ObjectKey, body: bytes, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Create the object once, ever.

        Raises PreconditionFailed when it exists, Conflict (409) when the same request must be sent again, Unavailable
        when the outcome is unknown.
        """
        ...

    async def put_if_match(self, key: ObjectKey, body: bytes, etag: str, *, lane: Lane = Lane.CONTROL) -> ObjectInfo:
        """Replace the object if it still is *etag*; raises PreconditionFailed otherwise."""
        ...

    def list_objects(self, prefix: str, *, after: str = "", lane: Lane = Lane.CONTROL) -> AsyncIterator[ObjectInfo]:
        """Give every object below *prefix* that comes after the key *after*, in the store's own key order.

        That is byte order, except that SeaweedFS walks directories. Raises Unavailable when a page cannot be continued.
        """
        ...

    async def delete(self, keys: list[ObjectKey], *, lane: Lane = Lane.CONTROL) -> None:
        """Delete; a key that is absent already is fine."""
        ...

    async def aclose(self) -> None:
        """Let go of connections and threads."""
        ...


class KVRead(Protocol):
    """A consistent view of an ordered map from bytes to bytes."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of *key*, or None."""
        ...

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order (to the end when None).

        In a write transaction, collect what you need before you change anything.
        """
        ...


class KVWrite(KVRead, Protocol):
    """A write transaction: sees its own changes; commits when its `with` block ends, aborts on an exception."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set *key*."""
        ...

    def delete(self, key: bytes) -> bool:
        """Remove *key*; True if it was there."""
        ...


class KVSnapshot(KVRead, Protocol):
    """A read transaction that outlives the step that opened it; `close` it soon, it pins pages."""

    def close(self) -> None:
        """End the view."""
        ...


class KVStore(Protocol):
    """An ordered map with one writer at a time; keys are at most 511 bytes."""

    def read(self) -> AbstractContextManager[KVRead]:
        """Open a read view for one step (no await inside)."""
        ...

    def write(self) -> AbstractContextManager[KVWrite]:
        """Open the write transaction for one step (no await inside)."""
        ...

    def snapshot(self) -> KVSnapshot:
        """Open a read view that may be kept across awaits and used in a worker thread."""
        ...

    def close(self) -> None:
        """Close the map."""
        ...


class DataFiles(Protocol):
    """The node's copy of file contents: one sparse file per inode, same offsets as the file itself.

    All methods are plain calls that may block on the disk; the engine decides which of them go to a worker thread. They
    raise OSError. A file that does not exist reads as empty and is created by the first write.
    """

    def pread(self, ino: Inode, offset: int, length: int) -> bytes:
        """Read; holes and bytes beyond the data file's end read as zeros, so the result always has *length* bytes."""
        ...

    def pread_cached(self, ino: Inode, offset: int, length: int) -> bytes | None:
        """Read without waiting for the disk (RWF_NOWAIT), or None when that is not possible."""
        ...

    def pwrite(self, ino: Inode, offset: int, data: bytes | memoryview) -> None:
        """Write all of *data*."""
        ...

    def truncate(self, ino: Inode, size: int) -> None:
        """Cut the data file at *size* if it is longer (it is never made longer)."""
        ...

    def punch(self, ino: Inode, offset: int, length: int) -> None:
        """Make a hole, giving the space back."""
        ...

    def clear(self, ino: Inode, offset: int, length: int) -> None:
        """Punch the range that is written next, if the data file reaches into it (cheap when it does not)."""
        ...

    def keep_only(self, ino: Inode, blocks: frozenset[BlockIndex]) -> None:
        """Punch every block but these (after a power loss)."""
        ...

    def sync(self, ino: Inode) -> None:
        """Put contents and name of the file on disk; raises OSError, from the first failure on until `clear_failed`."""
        ...

    def clear_failed(self, ino: Inode) -> None:
        """Forget a failed sync: every block that was unsynced then has been written again, or dropped."""
        ...

    def set_aside(self, ino: Inode, token: str) -> None:
        """Move the data file into the spool under *token*, leaving none (a no-op without a data file)."""
        ...

    def pread_aside(self, ino: Inode, token: str, offset: int, length: int) -> bytes:
        """Read from a data file that `set_aside` moved."""
        ...

    def spool_bytes(self) -> int:
        """Return what everything set aside occupies."""
        ...

    def drop_aside(self, token: str) -> None:
        """Delete everything set aside under *token*."""
        ...

    def append_aside_block(self, token: str, ino: Inode, block: int, data: bytes) -> None:
        """Keep one old block in the spool under *token* (copy-on-write under a cut)."""
        ...

    def read_aside_block(self, token: str, ino: Inode, block: int) -> bytes:
        """Read a block that `append_aside_block` kept; KeyError when there is none."""
        ...

    def remove(self, ino: Inode) -> None:
        """Delete the data file, if any."""
        ...

    def inodes(self) -> Iterator[Inode]:
        """Give every inode that has a data file."""
        ...

    def allocated_bytes(self, ino: Inode) -> int:
        """Return what the data file occupies on disk."""
        ...


class Work(Enum):
    """Which worker threads may run a blocking call."""

    DISK = "disk"
    """Cold reads of data files."""
    SYNC = "sync"
    """fdatasync of data files and journal."""
    CPU = "cpu"
    """Digests and compression."""


class Workers(Protocol):
    """Blocking calls off the event loop; simulations run them in place."""

    async def run(self, work: Work, call: Callable[..., T], *arguments: object) -> T:
        """Run `call(*arguments)` in a thread of its kind and return what it returns or raises."""
        ...


class Wall(Protocol):
    """Wall time; the monotonic clock is trio's."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, for file times and reports only: nothing is decided by it."""
        ...


class Entropy(Protocol):
    """Random bytes, seeded in tests."""

    def token_bytes(self, count: int) -> bytes:
        """Return *count* random bytes."""
        ...
