"""States kept by name.

Invariant: a name is a row of the map, changed only by publishing (H14); it is given to a state that has everything that
was acknowledged before it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.records import SNAPSHOT_TABLE, encode_u64
from spotwarp_fs.core.retention import names_in
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.history import History
from spotwarp_fs.engine.publish import Publisher
from spotwarp_fs.engine.states import unknown_snapshot
from spotwarp_fs.engine.stream import Streamer
from spotwarp_fs.engine.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named state."""

    name: bytes
    number: ManifestNumber
    age_s: float


class Snapshots:
    """Names of the live workspace."""

    def __init__(self, workspace: Workspace, streamer: Streamer, publisher: Publisher, history: History) -> None:
        self._ws = workspace
        self._streamer = streamer
        self._publisher = publisher
        self._history = history

    async def create(self, name: bytes) -> ManifestNumber:
        """Publish what is written so far and keep that state as *name*; raises UserError if the name is taken."""
        self._check_free(name)
        number = await self._streamer.barrier()
        self._check_free(name)
        with self._ws.change() as recorder:
            recorder.put(SNAPSHOT_TABLE + name, encode_u64(number))
        await self._streamer.barrier()
        return number

    def _check_free(self, name: bytes) -> None:
        with self._ws.kv.read() as view:
            taken = names_in(view).get(name)
        if taken is not None:
            raise UserError(
                f"there is a snapshot {name.decode(errors='replace')!r} already, of manifest {taken}: delete it first, "
                "or use another name",
                ExitCode.USAGE,
            )

    async def delete(self, name: bytes) -> None:
        """Forget *name*, or raise NotFound."""
        with self._ws.kv.read() as view:
            names = names_in(view)
        if name not in names:
            raise unknown_snapshot(name, names)
        with self._ws.change() as recorder:
            recorder.delete(SNAPSHOT_TABLE + name)
        await self._streamer.barrier()

    async def list(self) -> list[Snapshot]:
        """Give the names, oldest state first."""
        with self._ws.kv.read() as view:
            names = names_in(view)
        manifests = await self._history.read(names.values())
        now_s = self._publisher.server_now_s()
        ages = {manifest.number: max(0.0, now_s - manifest.created_s) for manifest in manifests}
        found = [Snapshot(name, number, ages[number]) for name, number in names.items()]
        return sorted(found, key=lambda snapshot: (snapshot.number, snapshot.name))
