"""List, copy and drop what fenced or dead writers had not published, on this node and in the store: `salvage`.

An id is `<workspace>/<name>`, where the name is that of a directory below the `salvage/` of a cache, or of a place
below `salvage/` in the store. Invariant: copying changes neither a salvage nor the workspace, and nothing is deleted
but by `drop`.
"""

from __future__ import annotations

import calendar
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from spotwarp_fs.cli import output
from spotwarp_fs.cli.copying import Copier, Progress, Tree
from spotwarp_fs.cli.mounts import current_records
from spotwarp_fs.cli.reading import MAP_BYTES, reading_workspace, run
from spotwarp_fs.cli.stores import find_workspace, open_store_of, workspace_names
from spotwarp_fs.cli.wiring_lost_map import copy_lost, kept_bytes, lost_map_of
from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import Denied, NotFound, SpotwarpError, Unavailable, UserError
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.salvage import selected
from spotwarp_fs.core.types import Inode
from spotwarp_fs.engine.reader import Reader, ReadPorts
from spotwarp_fs.engine.salvaged import (
    Salvaged,
    StoredSalvage,
    drop_stored,
    has_state,
    open_kept,
    open_stored,
    rebuild_kept,
    stored_salvages,
    summary_of,
)
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.rest import is_rest
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.store.scoped import Scoped

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import SalvageLine, SalvageReport
    from spotwarp_fs.cli.settings import Settings
    from spotwarp_fs.cli.sources import LoadedSettings


@dataclass(frozen=True, slots=True)
class Kept:
    """A cache that was set aside on this node."""

    place: Path
    workspace: str
    store: str

    @property
    def id(self) -> str:
        """What `copy` and `drop` take."""
        return f"{self.workspace}/{self.place.name}"

    @property
    def reason(self) -> str:
        """Why it was set aside."""
        try:
            return (self.place / "reason").read_text().strip()
        except OSError:
            return ""

    @property
    def workspace_id(self) -> str | None:
        """The id of its workspace, if it was noted."""
        try:
            return (self.place / "workspace_id").read_text().strip() or None
        except OSError:
            return None


@dataclass(frozen=True, slots=True)
class Found:
    """A salvage by its id."""

    id: str
    workspace: str
    kept: Kept | None
    """None for one in the store."""


def kept_here(settings: Settings) -> list[Kept]:
    """Find what was set aside in the caches of this node."""
    caches = sorted((settings.state_dir / "cache").glob("*"))
    named = [settings.cache_dir] if settings.cache_dir is not None else []
    mounted = [Path(record.cache_dir) for record in current_records(settings.state_dir)]
    caches += [cache for cache in dict.fromkeys(named + mounted) if cache not in caches]
    found: list[Kept] = []
    for cache in caches:
        try:
            store, _, workspace = json.loads((cache / "identity").read_text())["workspace"].rpartition(" ")
            places = sorted((cache / "salvage").iterdir())
        except (OSError, ValueError, KeyError):
            continue
        found += [Kept(place, workspace, store) for place in places if place.is_dir()]
    return found


def salvage_list(loaded: LoadedSettings, workspace: str | None) -> Iterator[SalvageLine]:
    """Give what was set aside, here and in the store; a store that does not answer is a warning."""
    settings = loaded.settings
    lines = [_kept_line(kept) for kept in kept_here(settings) if workspace in (None, kept.workspace)]

    async def stored() -> list[SalvageLine]:
        store = open_store_of(settings)
        try:
            return [line for name in await _names(store, workspace) for line in await _stored_lines(store, name)]
        finally:
            await store.aclose()

    try:
        return iter(lines + run(stored))
    except (Unavailable, Denied) as error:
        output.warn(f"what is in the store is not listed: {error}")
        return iter(lines)
    except NotFound:
        if workspace is None or lines:
            return iter(lines)
        raise


async def _names(store: ObjectStore, workspace: str | None) -> list[str]:
    return [workspace] if workspace is not None else await workspace_names(store)


async def _stored_lines(store: ObjectStore, name: str) -> list[SalvageLine]:
    from spotwarp_fs.cli.reports import SalvageLine

    _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
    lines = []
    for found in await stored_salvages(scoped):
        state = found.state
        reason = f"{state.host}:{state.mountpoint} was {state.reason}" if state is not None else "cut short at once"
        lines.append(
            SalvageLine(
                id=f"{name}/{found.place}",
                workspace=name,
                writer_epoch=int(found.place.partition("-")[0], 16),
                where="store",
                age_s=found.age_s,
                files=state.files if state is not None else 0,
                dirty_bytes=state.unpublished_bytes if state is not None else found.stored_bytes,
                reason=reason,
                complete=found.content is not None,
            )
        )
    return lines


def _kept_line(kept: Kept) -> SalvageLine:
    from spotwarp_fs.cli.reports import SalvageLine

    epoch = files = unpublished = 0
    reason = kept.reason
    if is_rest(kept.place):
        files, unpublished = kept_bytes(kept.place)
        return SalvageLine(kept.id, kept.workspace, epoch, "node", _age_s(kept.place), files, unpublished, reason)
    try:
        kv = LmdbKV(kept.place / "map")
        try:
            with kv.read() as view:
                summary = summary_of(view)
        finally:
            kv.close()
        if summary is not None:
            epoch, files, unpublished = summary.writer_epoch, summary.files, summary.unpublished_bytes
        else:
            reason = f"{reason}; its map is gone, `copy` builds it anew from the fsync journal"
    except (SpotwarpError, OSError) as error:
        reason = f"{reason}; its map cannot be read: {error}"
    return SalvageLine(kept.id, kept.workspace, epoch, "node", _age_s(kept.place), files, unpublished, reason)


def _age_s(place: Path) -> float:
    """Read when it was set aside out of its name."""
    try:
        then_s = float(calendar.timegm(time.strptime(place.name.partition("-")[2], "%Y%m%dT%H%M%SZ")))
    except ValueError:
        then_s = place.stat().st_ctime
    return max(0.0, SystemWall().now_ns() / 1e9 - then_s)


def salvage_copy(
    loaded: LoadedSettings, salvage_id: str, target: Path, *, whole: bool, on_progress: Progress
) -> SalvageReport:
    """Copy a salvage's tree, or what its writer had changed or made; a file that cannot be read is reported."""
    from spotwarp_fs.cli.reports import SalvageReport

    _check_target(target)

    async def copied() -> SalvageReport:
        found = await _find(loaded.settings, salvage_id)
        if found.kept is not None and is_rest(found.kept.place):
            return await trio.to_thread.run_sync(copy_lost, found.kept.place, target, on_progress)
        async with _opened(loaded.settings, salvage_id) as salvaged:
            tree = salvaged.reader if whole else _Chosen(salvaged)
            copier = _Copier(tree, salvage_id, on_progress)
            await copier.copy_tree(salvaged.reader.walk(b""), os.fsencode(target), b"")
            for what, times in copier.left_out.items():
                output.warn(f"not kept {times:,} times: {what}")
            return SalvageReport(
                files=copier.files,
                bytes_copied=copier.bytes_copied,
                manifest=salvaged.reader.manifest.number,
                removed=tuple(path.decode("utf-8", "surrogateescape") for path in salvaged.concerned.removed),
                damaged=salvaged.damaged,
                unreadable=tuple(copier.unreadable),
            )

    return run(copied)


def salvage_drop(loaded: LoadedSettings, salvage_id: str) -> str:
    """Delete a salvage; gives its whole id."""

    async def dropped() -> str:
        found = await _find(loaded.settings, salvage_id)
        if found.kept is not None:
            shutil.rmtree(found.kept.place)
            return found.id
        store = open_store_of(loaded.settings)
        try:
            _, scoped = await find_workspace(store, found.workspace, create=False, entropy=SystemEntropy())
            await drop_stored(scoped, found.id.partition("/")[2])
        finally:
            await store.aclose()
        return found.id

    return run(dropped)


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not an empty directory; name a new one")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} does not exist; make it first")


async def _find(settings: Settings, salvage_id: str) -> Found:
    """Find a salvage by its id, or by a beginning that only one has; raises NotFound or UserError."""
    name, _, _ = salvage_id.partition("/")
    if "/" not in salvage_id:
        raise UserError(f"{salvage_id!r} is no id of a salvage, which is WORKSPACE/NAME; see `spotwarp salvage list`")
    found = [Found(kept.id, name, kept) for kept in kept_here(settings) if kept.workspace == name]
    if not any(item.id == salvage_id for item in found):
        found += [Found(f"{name}/{stored.place}", name, None) for stored in await _stored(settings, name)]
    exact = [item for item in found if item.id == salvage_id]
    near = exact or [item for item in found if item.id.startswith(salvage_id)]
    if not near:
        raise NotFound(f"there is no salvage {salvage_id}; `spotwarp salvage list` shows what there is")
    if len(near) > 1:
        which = ", ".join(str(item.kept.place) if item.kept is not None else item.id for item in near)
        raise UserError(f"{salvage_id} means more than one: {which}")
    return near[0]


async def _stored(settings: Settings, name: str) -> list[StoredSalvage]:
    store = open_store_of(settings)
    try:
        _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
        return await stored_salvages(scoped)
    except NotFound:
        return []
    finally:
        await store.aclose()


@asynccontextmanager
async def _opened(settings: Settings, salvage_id: str) -> AsyncIterator[Salvaged]:
    found = await _find(settings, salvage_id)
    opened = _opened_stored(settings, found) if found.kept is None else _opened_kept(settings, found.kept)
    async with opened as salvaged:
        yield salvaged


@asynccontextmanager
async def _opened_stored(settings: Settings, found: Found) -> AsyncIterator[Salvaged]:
    store = open_store_of(settings)
    maps: list[LmdbKV] = []
    try:
        _, scoped = await find_workspace(store, found.workspace, create=False, entropy=SystemEntropy())
        stored = next(item for item in await stored_salvages(scoped) if found.id.endswith(f"/{item.place}"))
        with tempfile.TemporaryDirectory(prefix="spotwarp-salvage-") as directory:
            numbers = count()

            def new_workspace() -> Workspace:
                maps.append(LmdbKV(Path(directory) / str(next(numbers)), map_bytes=MAP_BYTES))
                return reading_workspace(settings, maps[-1])

            try:
                yield await open_stored(ReadPorts(scoped, new_workspace), stored)
            finally:
                for kv in maps:
                    kv.close()
    finally:
        await store.aclose()


@asynccontextmanager
async def _opened_kept(settings: Settings, kept: Kept) -> AsyncIterator[Salvaged]:
    # The cache knows its store, whatever the settings of now say; they only say how to get in.
    settings = settings.model_copy(update={"store": kept.store})
    store = open_store_of(settings)
    kv, data = LmdbKV(kept.place / "map"), SparseDataFiles(kept.place)
    journal = Journal(kept.place / "journal")
    try:
        workspace_id = kept.workspace_id
        if workspace_id is None:
            workspace_id, _ = await find_workspace(store, kept.workspace, create=False, entropy=SystemEntropy())
        scoped = Scoped(store, workspace_root(kept.workspace, workspace_id))
        ports = ReadPorts(scoped, lambda: reading_workspace(settings, kv, data))
        if not has_state(kv):
            await rebuild_kept(ports, journal, lost_map_of(kept.place))
        yield open_kept(ports)
    finally:
        journal.close()
        data.close()
        kv.close()
        await store.aclose()


class _Chosen:
    """Of a salvage's tree, only what its writer had changed or made, and the directories on the way."""

    def __init__(self, salvaged: Salvaged) -> None:
        self._reader: Reader = salvaged.reader
        self._whole = salvaged.concerned.whole
        self.xattrs = self._reader.xattrs
        self.content = self._reader.content

    def subtree(self, ino: Inode) -> list[tuple[bytes, Node]]:
        """Give what was chosen, parents before children."""
        with self._reader.view() as view:
            return [(path, Node(found, paths.inode(view, found))) for path, found in selected(view, self._whole)]


class _Copier(Copier):
    """Goes on after a file that cannot be read: all that can be had is wanted."""

    def __init__(self, tree: Tree, name: str, on_progress: Progress) -> None:
        super().__init__(tree, name, on_progress)
        self.unreadable: list[str] = []

    async def _copy(self, node: Node, target: bytes, path: bytes) -> None:
        try:
            await super()._copy(node, target, path)
        except SpotwarpError as error:
            self.unreadable.append(str(error))
