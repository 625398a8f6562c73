"""The daemon behind a mount: wires store, cache, engine and FUSE, serves, drains, and ends with a documented exit code.

Invariant: whatever ends it, what was acknowledged is in the cache, and the exit code says whether the store has it too.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import trio

from spotwarp_fs.cli.at import read_at
from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.derived import cache_budget, cache_directory, workspace_of
from spotwarp_fs.cli.desks import ReaderDesk, WriterDesk
from spotwarp_fs.cli.map_loss import notices, open_map, settle_trust
from spotwarp_fs.cli.mounted import Mounted, Served, mount_options
from spotwarp_fs.cli.permit_file import node_of, note_claim, permit_of
from spotwarp_fs.cli.setting_aside import set_cache_aside
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.cli.sources import load_settings
from spotwarp_fs.cli.stores import find_workspace, open_store_of
from spotwarp_fs.core.errors import ExitCode, Fenced, SpotwarpError
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.engine.claim import Claim, ForeignHead
from spotwarp_fs.engine.groups import only_cause
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.reader import ReadPorts
from spotwarp_fs.engine.readonly import serve_state
from spotwarp_fs.engine.recover import LostMap
from spotwarp_fs.engine.salvage import Outcome
from spotwarp_fs.engine.session import Drained, Session, SessionPorts, serve
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.stale import set_stale_aside
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.fuse import mounting
from spotwarp_fs.fuse.mounting import MountOptions
from spotwarp_fs.local.allocator import keep_memory_together
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.disk import disk_free_bytes
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.memory import MemoryKV
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.local.workers import ThreadWorkers
from spotwarp_fs.store.scoped import Scoped

log = logging.getLogger(__name__)


BYTES_PER_FRAME = 10 << 20
"""Memory that each block in the sealing pipeline is taken to need at worst: raw, encoded, in its pack's body, and what
the allocator keeps; with 1 GiB that is 102 blocks and about a third of the budget."""
BYTES_PER_RUN = 64 << 20
"""The same for each run of blocks being fetched: 8 MiB stored and 8 MiB decoded, for a quarter of the budget."""
MADE_ANEW = (None, "latest", "quiescent")
"""`--at` of these asks for no particular state: a workspace that is not there yet is made."""
WATCHED_HEARTBEAT_S = 5.0
"""On a rented node a controller counts missing heartbeats; elsewhere they are for politeness and come half as often."""
FRAMES_MIN = 16
RUNS_MIN = 4


class CacheDisk:
    """The disk under the cache."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def free_bytes(self) -> int:
        """Free space for us."""
        return disk_free_bytes(self._path)


def engine_settings(settings: Settings, cache_bytes_max: int) -> EngineSettings:
    """Take the engine's limits from the settings."""
    return EngineSettings(
        interval_s=settings.interval,
        atomic_max_age_s=settings.atomic_max_age,
        write_wait_max_s=settings.write_wait_max,
        fsync_remote=settings.fsync == "remote",
        cache_bytes_max=cache_bytes_max,
        packs_in_flight_max=settings.upload_threads,
        retain_recent_s=settings.retention.last,
        frames_in_memory_max=max(FRAMES_MIN, settings.memory_max // BYTES_PER_FRAME),
        hydrate_parallel_max=max(RUNS_MIN, min(settings.fetch_threads, settings.memory_max // BYTES_PER_RUN)),
        hydrate_all=settings.hydrate == "all",
        drain_s=settings.drain_timeout,
        grace_s=settings.grace,
    )


async def run(wish: DaemonWish, ready: Callable[[Ready], None]) -> int:
    """Serve until unmounted or told to stop; returns the exit code, or raises SpotwarpError before it was ready."""
    settings = load_settings(wish.flags).settings
    name = workspace_of(settings, Path(wish.mountpoint))
    if wish.form == "fuse":
        options = mount_options(wish, settings, name, cache_directory(settings, name))
        await trio.to_thread.run_sync(_check_mount, options)
    if wish.read_only:
        return await _look(wish, settings, name, ready)
    store = open_store_of(settings)
    cache = CacheDir.open(
        cache_directory(settings, name), f"{settings.store_url()} {name}", mountpoint=Path(wish.mountpoint)
    )
    try:
        lost = await trio.to_thread.run_sync(settle_trust, cache)
        while True:
            try:
                return await _serve_workspace(wish, settings, name, store, cache, ready, lost)
            except (Exception, BaseExceptionGroup) as error:
                cause = only_cause(error)
                if not isinstance(cause, ForeignHead):
                    raise cause from error
                uploaded = await _upload_stale(wish, settings, name, store, cache, cause)
                await trio.to_thread.run_sync(_set_cache_aside, cache, wish, cause, uploaded)
                lost = None
    finally:
        cache.close()
        await store.aclose()


def _check_mount(options: MountOptions) -> None:
    """Refuse what cannot be mounted before anybody is fenced for it."""
    mounting.check_fuse()
    mounting.prepare_mountpoint(options)


async def _upload_stale(
    wish: DaemonWish, settings: Settings, name: str, store: ObjectStore, cache: CacheDir, foreign: ForeignHead
) -> str | None:
    """The disk of a rented node is not there to be looked at later: what its stale cache has goes to the store.

    Gives the salvage's name, empty where nothing was left; None where it stays in the cache.
    """
    if wish.node_intent is None or cache.released or cache.workspace_id is None:
        return None
    scoped = Scoped(store, workspace_root(name, cache.workspace_id))
    kv, data = open_map(cache), SparseDataFiles(cache.state)
    try:
        workspace = _workspace(settings, cache, kv, data, wish, in_use=True)
        done = await set_stale_aside(
            workspace, scoped, _writer(wish), workspace_id=cache.workspace_id, reason=str(foreign)
        )
    finally:
        data.close()
        kv.close()
    return done.place if done is not None and done.outcome in (Outcome.SAVED, Outcome.NOTHING) else None


def _set_cache_aside(cache: CacheDir, wish: DaemonWish, foreign: ForeignHead, uploaded: str | None) -> None:
    """A stale cache: its state becomes salvage; going on from the new head is for the user to say."""
    head = foreign.head.manifest
    released = cache.released
    where = f"the store, as salvage {uploaded}" if uploaded else None
    if released or uploaded is not None:
        cache.clear()
    else:
        place = set_cache_aside(cache, str(foreign))
        where = str(place) if place is not None else None
    if wish.restarted or not (released or wish.takeover):
        kept = f" What this node had not published is kept in {where} (`spotwarp salvage list`)." if where else ""
        raise Fenced(
            f"another node took this workspace over: manifest {head.number} is by session {head.session}, writer epoch "
            f"{head.writer_epoch}.{kept} Mount again to go on from that state."
        )


async def _serve_workspace(
    wish: DaemonWish,
    settings: Settings,
    name: str,
    store: ObjectStore,
    cache: CacheDir,
    ready: Callable[[Ready], None],
    lost: LostMap | None,
) -> int:
    in_use = cache.workspace_id is not None
    workspace_id, scoped = await _open_workspace(settings, name, store, cache, create=wish.at in MADE_ANEW)
    kv, data, journal = open_map(cache), SparseDataFiles(cache.state), Journal(cache.journal_path)
    try:
        workspace = _workspace(settings, cache, kv, data, wish, in_use=in_use)
        claim = Claim(
            workspace,
            scoped,
            workspace_id=workspace_id,
            actor=Actor(os.getuid(), os.getgid(), os.getpid()),
            takeover=wish.takeover and not wish.restarted,
            journal=journal,
            fresh_map=MemoryKV,
            workspace_name=name,
            at=read_at(wish.at) if wish.at is not None and not wish.restarted else None,
            lost=lost,
            permit=permit_of(wish),
            node=node_of(wish),
        )
        ports = SessionPorts(workspace, scoped, workspace_id, journal, CacheDisk(cache.path), _writer(wish))
        ports.relatime = settings.mount.atime == "relatime"
        async with serve(ports, claim) as session, trio.open_nursery() as nursery:
            cache.certify_map()
            cache.end_rest()
            workspace.notices = notices(cache, name)
            cache.note_released(released=False)
            nursery.start_soon(kv.watch_readers)
            ready = note_claim(wish, session, ready)
            served = WriterDesk(wish, settings, name, session).served(cache.path)
            if wish.form == "fuse":
                drained = await Mounted(wish, settings, served, ready).run()
            else:
                drained = await _directed(wish, settings, served, session, ready, workspace_id)
            nursery.cancel_scope.cancel()
        # What is set aside in the store is as safe as what is published: the cache has nothing to itself.
        cache.note_released(released=drained.saved or bool(drained.salvage))
        return _exit_code(drained, fenced=workspace.fenced is not None)
    finally:
        journal.close()
        data.close()
        kv.close()


async def _directed(
    wish: DaemonWish,
    settings: Settings,
    served: Served,
    session: Session,
    ready: Callable[[Ready], None],
    workspace_id: str,
) -> Drained:
    """Serve a plain directory. Imported here: a mount starts a sixth sooner without it."""
    from spotwarp_fs.cli.directed import Directed

    return await Directed(wish, settings, served, session, ready, workspace_id=workspace_id).run()


def _writer(wish: DaemonWish) -> Writer:
    return Writer(socket.gethostname(), os.getpid(), wish.mountpoint, SystemWall().now_ns() / 1e9)


def _exit_code(drained: Drained, *, fenced: bool) -> int:
    if drained.saved:
        return ExitCode.OK
    return ExitCode.FENCED if fenced else ExitCode.NOT_SAVED


def _workspace(
    settings: Settings,
    cache: CacheDir,
    kv: LmdbKV,
    data: SparseDataFiles,
    wish: DaemonWish | None = None,
    *,
    in_use: bool = False,
) -> Workspace:
    """Put the cache's parts together; a reader has no *wish*."""
    free_bytes, cached_bytes = disk_free_bytes(cache.path), cache.used_bytes()
    budget = cache_budget(settings, free_bytes=free_bytes, cached_bytes=cached_bytes, in_use=in_use)
    limits = engine_settings(settings, budget)
    if wish is not None and wish.form == "directory":
        # Its bytes are not in a cache.
        limits = replace(limits, warm_bytes_max=0, warm_small_files_max=0, hydrate_all=False)
    if wish is not None and wish.node_intent is not None:
        limits = replace(limits, heartbeat_s=WATCHED_HEARTBEAT_S)
    return Workspace(
        kv,
        data,
        wall=SystemWall(),
        entropy=SystemEntropy(),
        workers=ThreadWorkers(),
        policies=settings.policies(),
        settings=limits,
    )


async def _open_workspace(
    settings: Settings, name: str, store: ObjectStore, cache: CacheDir, *, create: bool
) -> tuple[str, Scoped]:
    """Find the workspace in the store, or *create* it; a cache that has its state knows its id without asking."""
    if cache.workspace_id is not None:
        return cache.workspace_id, Scoped(store, workspace_root(name, cache.workspace_id))
    await _check_store(settings, store)
    workspace_id, scoped = await find_workspace(store, name, create=create, entropy=SystemEntropy())
    cache.note_workspace_id(workspace_id)
    return workspace_id, scoped


async def _look(wish: DaemonWish, settings: Settings, name: str, ready: Callable[[Ready], None]) -> int:
    """Serve one state read-only, in a cache of its own that goes with the mount."""
    store = open_store_of(settings)
    parent = cache_directory(settings, name).parent
    parent.mkdir(parents=True, exist_ok=True)
    try:
        _, scoped = await find_workspace(store, name, create=False, entropy=SystemEntropy())
        with tempfile.TemporaryDirectory(prefix=f"look-{name}-", dir=parent) as directory:
            cache = CacheDir.open(Path(directory), f"{settings.store_url()} {name} (read-only)")
            maps = MapMaker(settings, cache)
            journal = Journal(cache.journal_path)
            try:
                wanted = read_at(wish.at)
                disk = CacheDisk(cache.path)
                async with serve_state(ReadPorts(scoped, maps.new_workspace), wanted, disk, journal) as looking:
                    served = ReaderDesk(wish, settings, name, looking).served(cache.path)
                    await Mounted(wish, settings, served, ready).run()
            finally:
                journal.close()
                maps.close()
                cache.close()
        return ExitCode.OK
    finally:
        await store.aclose()


class MapMaker:
    """Gives a reader an empty workspace, again at each start over."""

    def __init__(self, settings: Settings, cache: CacheDir) -> None:
        self._settings = settings
        self._cache = cache
        self._open: list[tuple[LmdbKV, SparseDataFiles]] = []

    def new_workspace(self) -> Workspace:
        """Make one."""
        place = self._cache.path / str(len(self._open))
        kv, data = LmdbKV(place / "map"), SparseDataFiles(place)
        self._open.append((kv, data))
        return _workspace(self._settings, self._cache, kv, data)

    def close(self) -> None:
        """Close them all."""
        for kv, data in self._open:
            data.close()
            kv.close()


async def _check_store(settings: Settings, store: ObjectStore) -> None:
    """P-16, before the first use: a store that ignores conditions is not written to."""
    from spotwarp_fs.store.probe import probe

    if settings.unsafe_single_writer:
        log.warning("the store is not probed: two writers would destroy each other's work (unsafe_single_writer)")
        return
    report = await probe(store, SystemEntropy(), wall=SystemWall(), thorough=False)
    for line in report.warnings:
        log.warning("store probe: %s", line)


def main(arguments: list[str]) -> int:
    """`python -m spotwarp_fs.cli.daemon WISH_JSON [--restarted] --ready-fd N`: run under the supervisor."""
    from spotwarp_fs.fuse.readiness import report_failure, report_ready

    wish = DaemonWish(**json.loads(arguments[0]))
    wish = replace(wish, restarted="--restarted" in arguments, supervisor_pid=os.getppid())
    ready_fd = int(arguments[arguments.index("--ready-fd") + 1])
    keep_memory_together()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)

    def ready(report: Ready) -> None:
        report_ready(ready_fd, json.dumps(asdict(report)))

    try:
        return trio.run(run, wish, ready)
    except SpotwarpError as error:
        log.error("%s: %s", type(error).__name__, error)
        report_failure(ready_fd, str(error), error.exit_code)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
