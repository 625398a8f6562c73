"""A served filesystem with its mount, control socket and signals, until it is unmounted or told to stop.

Invariant: the record of a mount is there only while its daemon can be asked; the last answer is sent before the mount
goes.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trio

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.mounts import MountRecord, remove_record, socket_path, underlay_path, write_record
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.cli.short_path import short_path
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.engine.control import ControlServer, Operation
from spotwarp_fs.engine.filesystem import Filesystem
from spotwarp_fs.engine.session import Drained
from spotwarp_fs.engine.workspace import Workspace
from spotwarp_fs.fuse import mounting
from spotwarp_fs.fuse.holders import flush_pages, holders
from spotwarp_fs.fuse.mounting import MountOptions
from spotwarp_fs.local.system import SystemWall

log = logging.getLogger(__name__)

ANSWER_S = 2.0
FLUSH_S = 3.0
REST_S = 1.0
REST_SHARE = 0.2
"""Share of a drain's time kept for what is written between its cut and the unmount."""


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
    complete: Callable[[], None]
    """Told when the program has ended well, and nothing that it closed is half done."""


class Mounted:
    """One mount of one served filesystem."""

    def __init__(self, wish: DaemonWish, settings: Settings, served: Served, ready: Callable[[Ready], None]) -> None:
        self._wish = wish
        self._settings = settings
        self._served = served
        self._ready = ready
        self._options = mount_options(wish, settings, served.name, served.cache_path)
        self._socket = socket_path(settings.state_dir, wish.mountpoint)
        self._deadline_s: float | None = None
        """Until when what is left is published; set by whoever asks for the end."""
        self._ended = trio.Event()
        self._result: Drained | None = None
        self._answered: trio.Event | None = None

    async def run(self) -> Drained:
        """Mount and serve until unmounted, publish what is left, and say how that went."""
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        operations = {**self._served.operations, "drain": self._drain}
        try:
            async with AsyncExitStack() as held:
                path = held.enter_context(short_path(self._socket))
                control = ControlServer(path, operations, self._served.progress)
                control.on_answered = self._note_answer
                nursery = await held.enter_async_context(trio.open_nursery())
                await nursery.start(control.run)
                nursery.start_soon(self._served.background)
                nursery.start_soon(self._obey_signals)
                # Late: the directory form has to work where pyfuse3 is not installed.
                from spotwarp_fs.fuse import serving

                await serving.serve(self._served.filesystem, self._options, ready=lambda _: self._announce())
                result = self._result = await self._publish_rest()
                self._ended.set()
                if self._answered is not None:
                    with trio.move_on_after(ANSWER_S):
                        await self._answered.wait()
                nursery.cancel_scope.cancel()
        finally:
            remove_record(self._settings.state_dir, self._wish.mountpoint)
        log.info("drained saved=%s manifest=%d", result.saved, result.number)
        return result

    async def _publish_rest(self) -> Drained:
        """Nothing can be written any more: what is left now is all there is."""
        if self._deadline_s is None:
            log.info("unmounted; publishing what is left")
            self._deadline_s = trio.current_time() + self._settings.drain_timeout
        return await self._served.drain(max(REST_S, self._deadline_s - trio.current_time()))

    def _note_answer(self, name: str) -> None:
        if name == "drain" and self._answered is not None:
            self._answered.set()

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
        """Publish, unmount, publish what came in between; the daemon ends after the answer."""
        timeout_s = float(request.get("timeout_s", self._settings.drain_timeout))
        if request.get("complete"):
            self._served.complete()
        self._answered = trio.Event()
        try:
            await self._end(timeout_s, force=bool(request.get("force")))
        except UserError:
            self._answered = None
            raise
        await self._ended.wait()
        assert self._result is not None
        return asdict(self._result)

    async def _obey_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %d: draining", number)
                await self._end(self._settings.notice_timeout, force=True)

    async def _end(self, timeout_s: float, *, force: bool) -> None:
        """Publish while programs may still write, then take the mount away.

        Raises UserError if it is busy; with *force* the programs that hold it meet a dead mount instead.
        """
        deadline_s = trio.current_time() + timeout_s
        await self._served.drain(timeout_s * (1 - REST_SHARE))
        # Noted before the mount goes: serving may have ended by the time this task goes on.
        self._deadline_s = deadline_s
        try:
            await trio.to_thread.run_sync(mounting.unmount, self._wish.mountpoint, abandon_on_cancel=True)
        except OSError as error:
            if not force:
                self._deadline_s = None
                raise self._busy(error) from error
            await self._break_off()

    def _busy(self, error: OSError) -> UserError:
        users = holders(self._wish.mountpoint)
        who = f" by {', '.join(users)}" if users else ""
        return UserError(
            f"{self._wish.mountpoint} is in use{who} ({error.strerror}). What was written so far is published; end "
            "these programs and try again, or use --force, which leaves them with a dead mount",
            ExitCode.MOUNTPOINT,
        )

    async def _break_off(self) -> None:
        """End every wait in a handler, let the kernel hand over its dirty pages, then cut the connection (H2)."""
        mountpoint = self._wish.mountpoint
        with trio.move_on_after(FLUSH_S):
            await trio.to_thread.run_sync(flush_pages, mountpoint, abandon_on_cancel=True)
        self._served.workspace.stopping = True
        await self._served.workspace.wake_waiters()
        await trio.sleep(self._served.workspace.settings.fence_grace_s if self._served.workspace.fenced else 0)
        await trio.to_thread.run_sync(_cut_off, mountpoint, abandon_on_cancel=True)


def _cut_off(mountpoint: str) -> None:
    mounting.abort_connection(mountpoint)
    try:
        mounting.unmount(mountpoint, lazy=True)
    except OSError as error:
        log.warning("the dead mount stays mountpoint=%s reason=%s", mountpoint, error)


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
