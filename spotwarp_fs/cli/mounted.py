"""A served filesystem with its mount, control socket and signals, until it is unmounted or told to stop.

Invariant: the record of a mount is there only while its daemon can be asked; the last answer is sent before the mount
goes.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.mounts import MountRecord, remove_record, socket_path, underlay_path, write_record
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.engine.control import ControlServer, Operation
from spotwarp_fs.engine.filesystem import Filesystem
from spotwarp_fs.engine.session import Drained
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.fuse import mounting, serving
from spotwarp_fs.fuse.mounting import MountOptions
from spotwarp_fs.local.system import SystemWall

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a mount needs of the session or the state behind it."""

    filesystem: Filesystem
    workspace: Workspace
    name: str
    cache_path: Path
    operations: Mapping[str, Operation]
    progress: Callable[[], dict[str, Any]]
    drain: Callable[[float], Awaitable[Drained]]
    """Publishes everything within that many seconds."""
    describe: Callable[[], Ready]
    background: Callable[[], Awaitable[None]]


class Mounted:
    """One mount of one served filesystem."""

    def __init__(self, wish: DaemonWish, settings: Settings, served: Served, ready: Callable[[Ready], None]) -> None:
        self._wish = wish
        self._settings = settings
        self._served = served
        self._ready = ready
        self._options = mount_options(wish, settings, served.name, served.cache_path)
        self._socket = socket_path(settings.state_dir, wish.mountpoint)
        self._drained: Drained | None = None
        self._leave = trio.Event()

    async def run(self) -> Drained:
        """Mount and serve; returns how the drain at the end went."""
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        operations = {**self._served.operations, "drain": self._drain}
        control = ControlServer(str(self._socket), operations, self._served.progress)
        control.on_answered = lambda name: self._leave.set() if name == "drain" else None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(control.run)
                nursery.start_soon(self._served.background)
                nursery.start_soon(self._obey_signals)
                nursery.start_soon(self._unmount_when_told)
                await serving.serve(self._served.filesystem, self._options, ready=lambda _: self._announce())
                nursery.cancel_scope.cancel()
        finally:
            remove_record(self._settings.state_dir, self._wish.mountpoint)
        if self._drained is None:
            # Unmounted from outside: what is left is still published before the daemon ends.
            log.info("unmounted; publishing what is left")
            self._drained = await self._served.drain(self._settings.drain_timeout)
        log.info("drained saved=%s manifest=%d", self._drained.saved, self._drained.number)
        return self._drained

    def _announce(self) -> None:
        record = MountRecord(
            mountpoint=self._wish.mountpoint,
            workspace=self._served.name,
            store=self._settings.store_url(),
            cache_dir=str(self._served.cache_path),
            socket=str(self._socket),
            daemon_pid=os.getpid(),
            supervisor_pid=self._wish.supervisor_pid,
            started_ns=SystemWall().now_ns(),
        )
        write_record(self._settings.state_dir, record)
        self._ready(self._served.describe())

    async def _drain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Publish everything; once this is answered, the mount goes and the daemon ends."""
        self._drained = await self._served.drain(float(request.get("timeout_s", self._settings.drain_timeout)))
        return asdict(self._drained)

    async def _obey_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %d: draining", number)
                self._drained = await self._served.drain(self._settings.notice_timeout)
                self._leave.set()

    async def _unmount_when_told(self) -> None:
        """Every wait in a handler ends, then the mount is taken away; open files do not hold it."""
        await self._leave.wait()
        self._served.workspace.stopping = True
        await self._served.workspace.wake_waiters()
        await trio.to_thread.run_sync(_unmount, self._wish.mountpoint, abandon_on_cancel=True)


def mount_options(wish: DaemonWish, settings: Settings, name: str, cache_dir: Path) -> MountOptions:
    """Take the mount's options from the settings."""
    chosen = settings.mount
    return MountOptions(
        mountpoint=wish.mountpoint,
        workspace=name,
        cache_dir=cache_dir,
        allow_other=None if chosen.allow_other else False,
        xattrs=chosen.xattrs,
        writeback_cache=chosen.kernel_writeback,
        underlay_path=underlay_path(settings.state_dir, wish.mountpoint),
    )


def _unmount(mountpoint: str) -> None:
    try:
        mounting.unmount(mountpoint)
    except OSError:
        mounting.unmount(mountpoint, lazy=True)
