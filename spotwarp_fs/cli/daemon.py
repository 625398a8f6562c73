"""The daemon behind a mount: wires store, cache, engine and FUSE, serves, drains, and ends with a documented exit code.

Invariant: whatever ends it, what was acknowledged is in the cache, and the exit code says whether the store has it too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import trio

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.derived import cache_budget, cache_directory, workspace_of
from spotwarp_fs.cli.mounts import MountRecord, remove_record, socket_path, write_record
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.cli.sources import load_settings
from spotwarp_fs.cli.stores import find_workspace, open_store_of
from spotwarp_fs.core.errors import ExitCode, Fenced, SpotwarpError, UserError
from spotwarp_fs.core.layout import workspace_root
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.engine.claim import Claim, ForeignHead
from spotwarp_fs.engine.control import ControlServer
from spotwarp_fs.engine.groups import only_cause
from spotwarp_fs.engine.heartbeat import Writer
from spotwarp_fs.engine.report import Reporter
from spotwarp_fs.engine.session import Drained, Session, SessionPorts, serve
from spotwarp_fs.engine.settings import EngineSettings
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.local.cachedir import CacheDir
from spotwarp_fs.local.datafiles import SparseDataFiles
from spotwarp_fs.local.disk import disk_free_bytes
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.system import SystemEntropy, SystemWall
from spotwarp_fs.local.workers import ThreadWorkers
from spotwarp_fs.store.scoped import Scoped

log = logging.getLogger(__name__)


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
        drain_s=settings.drain_timeout,
    )


async def run(wish: DaemonWish, ready: Callable[[Ready], None]) -> int:
    """Serve until unmounted or told to stop; returns the exit code, or raises SpotwarpError before it was ready."""
    settings = load_settings(wish.flags).settings
    name = workspace_of(settings, Path(wish.mountpoint))
    store = open_store_of(settings)
    cache = CacheDir.open(cache_directory(settings, name), f"{settings.store_url()} {name}")
    try:
        while True:
            try:
                return await _serve_workspace(wish, settings, name, store, cache, ready)
            except (Exception, BaseExceptionGroup) as error:
                cause = only_cause(error)
                if not isinstance(cause, ForeignHead):
                    raise cause from error
                await trio.to_thread.run_sync(_set_cache_aside, cache, wish, cause)
    finally:
        cache.close()
        await store.aclose()


def _set_cache_aside(cache: CacheDir, wish: DaemonWish, foreign: ForeignHead) -> None:
    """A stale cache: its state becomes salvage; going on from the new head is for the user to say."""
    head = foreign.head.manifest
    released = cache.released
    where = None if released else cache.set_aside_as_salvage(str(foreign))
    if released:
        cache.clear()
    if wish.restarted or not (released or wish.takeover):
        kept = f" What this node had not published is kept in {where} (see `spotwarp salvage`)." if where else ""
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
) -> int:
    entropy = SystemEntropy()
    if cache.workspace_id is None:
        await _check_store(settings, store)
        workspace_id, scoped = await find_workspace(store, name, create=True, entropy=entropy)
        cache.note_workspace_id(workspace_id)
    else:
        workspace_id = cache.workspace_id
        scoped = Scoped(store, workspace_root(name, workspace_id))
    kv = LmdbKV(cache.map_path)
    try:
        free = disk_free_bytes(cache.path)
        budget = cache_budget(settings, free_bytes=free, cached_bytes=cache.used_bytes())
        workspace = Workspace(
            kv,
            SparseDataFiles(cache.path),
            wall=SystemWall(),
            entropy=entropy,
            workers=ThreadWorkers(),
            policies=settings.policies(),
            settings=engine_settings(settings, budget),
        )
        journal = Journal(cache.journal_path)
        claim = Claim(
            workspace,
            scoped,
            workspace_id=workspace_id,
            actor=Actor(os.getuid(), os.getgid(), os.getpid()),
            takeover=wish.takeover and not wish.restarted,
            journal=journal,
        )
        writer = Writer(socket.gethostname(), os.getpid(), wish.mountpoint, SystemWall().now_ns() / 1e9)
        ports = SessionPorts(
            workspace,
            scoped,
            workspace_id,
            journal,
            CacheDisk(cache.path),
            writer,
            relatime=settings.mount.atime == "relatime",
        )
        async with serve(ports, claim) as session:
            cache.note_released(False)
            drained = await Mounted(wish, settings, name, session, cache, ready).run()
        cache.note_released(drained.saved)
        return ExitCode.OK if drained.saved else ExitCode.NOT_SAVED
    finally:
        kv.close()


async def _check_store(settings: Settings, store: ObjectStore) -> None:
    """P-16, before the first use: a store that ignores conditions is not written to."""
    from spotwarp_fs.store.probe import probe

    if settings.unsafe_single_writer:
        log.warning("the store is not probed: two writers would destroy each other's work (unsafe_single_writer)")
        return
    report = await probe(store, SystemEntropy(), wall=SystemWall())
    for line in report.warnings:
        log.warning("store probe: %s", line)


class Mounted:
    """A session with its mount, control socket and signals."""

    def __init__(
        self,
        wish: DaemonWish,
        settings: Settings,
        name: str,
        session: Session,
        cache: CacheDir,
        ready: Callable[[Ready], None],
    ) -> None:
        self._wish = wish
        self._settings = settings
        self._name = name
        self._session = session
        self._cache = cache
        self._ready = ready
        self._reporter = Reporter(session, workspace_name=name, store_url=settings.store_url())
        self._socket = socket_path(settings.state_dir, wish.mountpoint)
        self._drained: Drained | None = None
        self._leave = trio.Event()

    async def run(self) -> Drained:
        """Mount and serve; returns how the drain at the end went."""
        from spotwarp_fs.fuse import serving
        from spotwarp_fs.fuse.mounting import MountOptions

        chosen = self._settings.mount
        options = MountOptions(
            mountpoint=self._wish.mountpoint,
            workspace=self._name,
            cache_dir=self._cache.path,
            allow_other=None if chosen.allow_other else False,
            xattrs=chosen.xattrs,
            writeback_cache=chosen.kernel_writeback,
        )
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        control = ControlServer(str(self._socket), self._operations(), self._progress)
        control.on_answered = lambda name: self._leave.set() if name == "drain" else None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(control.run)
                nursery.start_soon(self._reporter.run)
                nursery.start_soon(self._obey_signals)
                nursery.start_soon(self._unmount_when_told)
                await serving.serve(self._session.filesystem, options, ready=lambda _: self._announce())
                nursery.cancel_scope.cancel()
        finally:
            remove_record(self._settings.state_dir, self._wish.mountpoint)
        if self._drained is None:
            # Unmounted from outside: what is left is still published before the daemon ends.
            log.info("unmounted; publishing what is left")
            deadline = trio.current_time() + self._settings.drain_timeout
            self._drained = await self._session.drain(deadline)
        log.info("drained saved=%s manifest=%d", self._drained.saved, self._drained.number)
        return self._drained

    def _announce(self) -> None:
        session = self._session
        resumed = session.claimed.resumed_from
        now_s = session.publisher.server_now_s()
        record = MountRecord(
            mountpoint=self._wish.mountpoint,
            workspace=self._name,
            store=self._settings.store_url(),
            cache_dir=str(self._cache.path),
            socket=str(self._socket),
            daemon_pid=os.getpid(),
            supervisor_pid=self._wish.supervisor_pid,
            started_ns=SystemWall().now_ns(),
        )
        write_record(self._settings.state_dir, record)
        ws = session.workspace
        self._ready(
            Ready(
                mountpoint=self._wish.mountpoint,
                workspace=self._name,
                store=self._settings.store_url(),
                form="fuse",
                created=session.claimed.created,
                manifest=session.streamer.head.manifest.number,
                age_s=max(0.0, now_s - resumed.created_s) if resumed is not None and now_s > 0 else 0.0,
                logical_bytes=ws.logical_bytes,
                files=ws.files,
                read_only=ws.fenced is not None,
                daemon_pid=os.getpid(),
                left_out=session.claimed.left_out,
            )
        )

    def _operations(self) -> dict[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]]:
        return {"sync": self._sync, "status": self._status, "drain": self._drain}

    def _progress(self) -> dict[str, Any]:
        left = self._session.workspace.dirty_blocks << 20
        done = self._session.packs.bytes_uploaded
        return {"done_bytes": done, "total_bytes": done + left, "phase": "publishing"}

    async def _sync(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._session.workspace.fenced is not None:
            raise Fenced(str(self._session.workspace.fenced))
        deadline_s = float(request.get("timeout_s", 3600.0))
        number: int | None = None
        with trio.move_on_after(deadline_s):
            number = await self._session.streamer.barrier()
        if number is None:
            raise UserError(
                f"not everything could be published within {deadline_s:.0f} s: {self._session.health.last_error}",
                ExitCode.NOT_SAVED,
            )
        return {"manifest": number}

    async def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        status = await self._reporter.status()
        status = replace(
            status, daemon_pid=os.getpid(), supervisor_pid=self._wish.supervisor_pid, rss_bytes=resident_bytes()
        )
        return status.to_dict()

    async def _drain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Publish everything; once this is answered, the mount goes and the daemon ends."""
        timeout_s = float(request.get("timeout_s", self._settings.drain_timeout))
        self._drained = await self._session.drain(trio.current_time() + timeout_s)
        return asdict(self._drained)

    async def _obey_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %d: draining", number)
                deadline = trio.current_time() + self._settings.notice_timeout
                self._drained = await self._session.drain(deadline)
                self._leave.set()

    async def _unmount_when_told(self) -> None:
        """Every wait in a handler ends, then the mount is taken away; open files do not hold it."""
        await self._leave.wait()
        self._session.workspace.stopping = True
        await self._session.workspace.wake_waiters()
        await trio.to_thread.run_sync(_unmount, self._wish.mountpoint, abandon_on_cancel=True)


def _unmount(mountpoint: str) -> None:
    from spotwarp_fs.fuse import mounting

    try:
        mounting.unmount(mountpoint)
    except OSError:
        mounting.unmount(mountpoint, lazy=True)


def resident_bytes() -> int:
    """Return this process's resident memory, in bytes (0 where the system does not say)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main(arguments: list[str]) -> int:
    """`python -m spotwarp_fs.cli.daemon WISH_JSON [--restarted] --ready-fd N`: run under the supervisor."""
    from spotwarp_fs.fuse.readiness import report_failure, report_ready

    wish = DaemonWish(**json.loads(arguments[0]))
    wish = replace(wish, restarted="--restarted" in arguments, supervisor_pid=os.getppid())
    ready_fd = int(arguments[arguments.index("--ready-fd") + 1])
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
