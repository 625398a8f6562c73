"""The store that controller and nodes meet in, and a workspace in it, for failovers in virtual time.

One object store for everybody; each party has its own view, which can be cut off. The workspace is reduced to what
decides: a manifest is won by creating its number once, and carries writer epoch, holder and progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from provisioner.core.errors import StoreUnavailable
from provisioner.core.ports import WorkspaceHead


@dataclass(frozen=True)
class Manifest:
    number: int
    writer_epoch: int
    at_s: float
    intent: str | None
    instance_id: str | None
    progress_s: float
    """How much of the command's work it holds."""
    takeover: bool = False


@dataclass
class Bucket:
    """What is in the store, and when it is out for whom."""

    latency_s: float = 0.05
    objects: dict[str, bytes] = field(default_factory=dict)
    manifests: list[Manifest] = field(default_factory=list)
    beats: dict[int, int] = field(default_factory=dict)
    """Heartbeats by writer epoch."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """In trio's time, for everybody."""
    puts: int = 0

    async def call(self, *, cut: bool = False) -> None:
        await trio.sleep(self.latency_s)
        now_s = trio.current_time()
        if cut or any(start_s <= now_s < end_s for start_s, end_s in self.outages):
            raise StoreUnavailable("the store is out")

    @property
    def head(self) -> Manifest | None:
        return self.manifests[-1] if self.manifests else None

    def create_manifest(self, manifest: Manifest) -> bool:
        """Win a number, or lose it to somebody who was faster."""
        number = 1 if self.head is None else self.head.number + 1
        if manifest.number != number:
            return False
        assert self.head is None or manifest.writer_epoch >= self.head.writer_epoch, (
            "a lower writer epoch after a higher"
        )
        self.manifests.append(manifest)
        return True

    def check(self) -> None:
        """No two holders of one writer epoch, and none that falls."""
        holders: dict[int, tuple[str | None, str | None]] = {}
        last = 0
        for manifest in self.manifests:
            assert manifest.writer_epoch >= last, "a writer epoch fell"
            last = manifest.writer_epoch
            who = (manifest.intent, manifest.instance_id)
            assert holders.setdefault(manifest.writer_epoch, who) == who, f"two hold writer epoch {last}"


@dataclass
class View:
    """`Shelf` and `WorkspaceView` of one party."""

    bucket: Bucket
    cut: bool = False
    denied: bool = False

    async def get(self, key: str) -> bytes | None:
        await self.bucket.call(cut=self.cut)
        return self.bucket.objects.get(key)

    async def put(self, key: str, body: bytes) -> None:
        await self.bucket.call(cut=self.cut)
        self.bucket.puts += 1
        self.bucket.objects[key] = body

    async def create(self, key: str, body: bytes) -> bool:
        await self.bucket.call(cut=self.cut)
        return self.bucket.objects.setdefault(key, body) == body

    async def list(self, prefix: str) -> Sequence[str]:
        await self.bucket.call(cut=self.cut)
        return sorted(key for key in self.bucket.objects if key.startswith(prefix))

    async def delete(self, keys: Sequence[str]) -> None:
        await self.bucket.call(cut=self.cut)
        for key in keys:
            self.bucket.objects.pop(key, None)

    async def head(self) -> WorkspaceHead | None:
        await self.bucket.call(cut=self.cut)
        head = self.bucket.head
        if head is None:
            return None
        return WorkspaceHead(head.number, head.writer_epoch, head.at_s, head.intent, head.instance_id, True, 10**9, 10)

    async def heartbeat(self) -> str | None:
        await self.bucket.call(cut=self.cut)
        head = self.bucket.head
        beat = None if head is None else self.bucket.beats.get(head.writer_epoch)
        return None if head is None or beat is None else f"{head.writer_epoch}/{beat}"
