"""The lease: heartbeats of the writer, which are politeness and liveness only.

Invariant: nothing that keeps data safe depends on a heartbeat; ages are differences of the store's own times (H14: a
heartbeat counts only with the head's writer epoch).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import ExitCode, Fenced, NotFound, SpotwarpError, UserError
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.core.types import ManifestNumber, WriterEpoch
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.publish import Publisher, read_manifest


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes, for people."""

    host: str
    pid: int
    mountpoint: str
    started_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat as found in the store."""

    writer_epoch: WriterEpoch
    session: str
    writer: Writer
    age_s: float


class Heartbeat:
    """Writes this session's heartbeats."""

    def __init__(self, store: ObjectStore, writer: Writer, publisher: Publisher, health: StoreHealth) -> None:
        self._store = store
        self._writer = writer
        self._publisher = publisher
        self._health = health

    async def beat(self) -> None:
        """Leave a heartbeat and look at the number after the head; raises Fenced when a rival stands there."""
        head = self._publisher.head.manifest
        body = {"writer_epoch": head.writer_epoch, "session": head.session, **asdict(self._writer)}
        info = await self._store.put(layout.HEARTBEAT, json.dumps(body).encode(), lane=Lane.CONTROL)
        self._publisher.note_server_time(info.server_time_s)
        await self._publisher.write_hint()
        try:
            found, _ = await read_manifest(self._store, ManifestNumber(self._publisher.head.manifest.number + 1))
        except NotFound:
            return
        if found.manifest.session != head.session:
            raise Fenced(
                f"session {found.manifest.session} took the workspace over with writer epoch "
                f"{found.manifest.writer_epoch}; this session had {head.writer_epoch}"
            )

    async def release(self) -> None:
        """Say goodbye, so that the next mount need not wait; failing is harmless."""
        try:
            await self._publisher.write_hint()
            await self._store.delete([layout.HEARTBEAT], lane=Lane.CONTROL)
        except SpotwarpError:
            return


async def read_beat(store: ObjectStore) -> Beat | None:
    """Read the heartbeat and its age by the store's own clock; None when there is none or it makes no sense."""
    try:
        info = await store.head(layout.HEARTBEAT, lane=Lane.CONTROL)
        found = await store.get(layout.HEARTBEAT, lane=Lane.CONTROL)
    except NotFound:
        return None
    try:
        body = json.loads(found.body)
        writer = Writer(str(body["host"]), int(body["pid"]), str(body["mountpoint"]), float(body["started_s"]))
        age_s = max(0.0, info.server_time_s - info.modified_s)
        return Beat(WriterEpoch(int(body["writer_epoch"])), str(body["session"]), writer, age_s)
    except (ValueError, KeyError, TypeError):
        return None


def live_writer(beat: Beat, lease_s: float) -> UserError:
    """The refusal while somebody else is writing."""
    writer = beat.writer
    return UserError(
        f"the workspace is being written by {writer.host} (pid {writer.pid}, mounted at {writer.mountpoint}, "
        f"writer epoch {beat.writer_epoch}), whose heartbeat is {beat.age_s:.0f} s old; a writer counts as gone after "
        f"{lease_s:.0f} s. Wait, unmount it there, or take the workspace over with --takeover (the other mount then "
        "turns read-only)",
        ExitCode.LIVE_WRITER,
    )
