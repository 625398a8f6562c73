"""A session served as a plain directory, with control socket and signals, until it is told to stop.

Invariant: the record of a workspace is there only while its daemon can be asked; nothing that is in the directory is
ever removed by a stop, a fence or a failure.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any, Final

import trio

from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.mounted import Served
from spotwarp_fs.cli.mounts import MountRecord, keeper_socket, remove_record, socket_path, write_record
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.cli.short_path import short_path
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Fenced, SpotwarpError, UserError
from spotwarp_fs.core.guard import Step, Wish, decide
from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.status import Hydration
from spotwarp_fs.core.units import format_size
from spotwarp_fs.directory import identity
from spotwarp_fs.directory.dropping import Dropper
from spotwarp_fs.directory.identity import Owner
from spotwarp_fs.directory.keeping import open_keeper
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.laying import Report
from spotwarp_fs.directory.restoring import Restorer
from spotwarp_fs.directory.scanner import Scanner
from spotwarp_fs.directory.watching import watch
from spotwarp_fs.engine.control import ControlServer
from spotwarp_fs.engine.publish import Head
from spotwarp_fs.engine.session import Drained, Session
from spotwarp_fs.local.system import SystemWall

log = logging.getLogger(__name__)

ANSWER_S: Final = 2.0
LOOK_SHARE: Final = 0.5
"""Share of a drain's time that the last scan may take."""


class Directed:
    """One plain directory that a session serves."""

    def __init__(
        self,
        wish: DaemonWish,
        settings: Settings,
        served: Served,
        session: Session,
        ready: Callable[[Ready], None],
        *,
        workspace_id: str,
    ) -> None:
        self._wish = wish
        self._settings = settings
        self._served = served
        self._session = session
        self._ready = ready
        self._root = os.fsencode(wish.mountpoint)
        self._owner = Owner(workspace_id, served.name, settings.store_url())
        self._socket = socket_path(settings.state_dir, wish.mountpoint)
        self._scanner: Scanner | None = None
        self._restorer: Restorer | None = None
        self._ending = trio.Event()
        self._timeout_s = settings.notice_timeout
        self._result: Drained | None = None
        self._ended = trio.Event()
        self._answered: trio.Event | None = None

    async def run(self) -> Drained:
        """Serve until told to stop, publish what is left, and say how that went.

        Raises UserError (WOULD_WIPE) when directory and workspace do not belong together.
        """
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        step = await self._decide()
        try:
            async with AsyncExitStack() as held:
                path = held.enter_context(short_path(self._socket))
                operations = {
                    **self._served.operations,
                    "sync": self._sync,
                    "status": self._status,
                    "drain": self._drain,
                }
                control = ControlServer(path, operations, self._served.progress)
                control.on_answered = self._note_answer
                nursery = await held.enter_async_context(trio.open_nursery())
                await nursery.start(control.run)
                nursery.start_soon(self._served.background)
                nursery.start_soon(self._obey_signals)
                self._record()
                report = await self._lay_out(held, step)
                await self._scan(held, nursery)
                self._ready(_with_restore(self._served.describe(), report))
                await self._ending.wait()
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

    async def _decide(self) -> Step:
        """The wipe guard (P-18): what this start may do with the directory."""
        workspace, manifest = self._session.workspace, self._session.streamer.head.manifest
        cut_ns = int(manifest.created_s * 1e9)
        found = await workspace.workers.run(
            Work.DISK,
            lambda: identity.situation(workspace, self._root, self._owner, number=manifest.number, cut_ns=cut_ns),
        )
        wished = Wish.RESTORE if self._wish.restore else Wish.ADOPT if self._wish.adopt_local else Wish.PLAIN
        # After a death the directory is this map's own, or its layout is to be finished. If it is neither, because the
        # map was lost, programs may be at work there: whatever was typed at the start was not meant for that.
        return decide(found, Wish.PLAIN if self._wish.restarted else wished)

    async def _lay_out(self, held: AsyncExitStack, step: Step) -> Report | None:
        """Bring the state into the directory if that is wished, and take up what an earlier daemon left absent."""
        if step is Step.ADOPT:
            identity.settle(self._session.workspace, self._root, self._owner, complete=True)
            if self._settings.keep_local is None:
                return None
        place = self._served.cache_path
        keeper = await held.enter_async_context(
            open_keeper(keeper_socket(self._settings.state_dir, self._wish.mountpoint), place / "keeper.log")
        )
        self._restorer = Restorer(
            self._session, self._root, self._owner,
            session_id=self._session.streamer.head.manifest.session, placeholders=keeper,
            why_no_leases=await trio.to_thread.run_sync(identity.why_no_placeholders, self._root),
        )  # fmt: skip
        match step:
            case Step.LAY_OUT:
                return await self._restorer.lay_out()
            case Step.GO_ON:
                return await self._restorer.take_up()
            case Step.ADOPT:
                return None

    async def _scan(self, held: AsyncExitStack, nursery: trio.Nursery) -> None:
        session = self._session
        with session.workspace.kv.read() as view:
            known = KnownTree.load(view)
        skip = session.workspace.policies.scratch.matches
        watcher = await held.enter_async_context(watch(self._root, skip=skip))
        self._scanner = Scanner(
            session, self._root, known, watcher, interval_s=self._settings.interval,
            why_foreign=lambda: identity.why_foreign(session.workspace, self._root),
        )  # fmt: skip
        nursery.start_soon(self._scanner.run)
        if self._restorer is not None:
            filler = self._restorer.filler
            filler.tree, filler.on_seen = self._scanner.tree, self._scanner.saw
            nursery.start_soon(filler.run)
            if self._settings.keep_local is not None:
                nursery.start_soon(self._drop_older, Dropper(self._restorer.site, filler), self._settings.keep_local)

    async def _drop_older(self, dropper: Dropper, count: int) -> None:
        """Give the disk back what only older checkpoints use, after each publish (`keep_local`)."""
        published = trio.Event()

        def note(head: Head, change_set: ChangeSet) -> None:
            published.set()

        self._session.streamer.on_published.append(note)
        while self._session.workspace.fenced is None:
            try:
                dropped = await dropper.keep_newest(count)
            except (SpotwarpError, OSError) as error:
                self._session.workspace.report(f"older checkpoints stay on the disk: {error}")
            else:
                if dropped.files:
                    log.info("dropped files=%d bytes=%d", dropped.files, dropped.bytes)
            await published.wait()
            published = trio.Event()

    async def _publish_rest(self) -> Drained:
        """Take a last look at the directory, then publish; programs may write until then (P-12)."""
        deadline_s = trio.current_time() + self._timeout_s
        looked = self._scanner is None
        with trio.move_on_after(self._timeout_s * LOOK_SHARE):
            if self._scanner is not None and self._session.workspace.fenced is None:
                await self._scanner.sync()
            looked = True
        result = await self._served.drain(max(1.0, deadline_s - trio.current_time()))
        if result.fenced:
            where = self._wish.mountpoint
            reason = f"{result.reason or 'another node has the workspace'}; {where} keeps what was changed in it since"
            return replace(result, saved=False, reason=reason)
        if looked or not result.saved:
            return result
        return replace(result, saved=False, reason="there was no time to read everything that changed last")

    def _record(self) -> None:
        record = MountRecord(
            mountpoint=self._wish.mountpoint,
            workspace=self._served.name,
            store=self._settings.store_url(),
            cache_dir=str(self._served.cache_path),
            socket=str(self._socket),
            daemon_pid=os.getpid(),
            supervisor_pid=self._wish.supervisor_pid,
            started_ns=SystemWall().now_ns(),
            form="directory",
        )
        write_record(self._settings.state_dir, record)

    def _note_answer(self, name: str) -> None:
        if name == "drain" and self._answered is not None:
            self._answered.set()

    async def _sync(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The barrier: what is in the directory now is published when this returns."""
        if self._session.workspace.fenced is not None:
            raise Fenced(str(self._session.workspace.fenced))
        if self._scanner is None:
            raise UserError(f"{self._wish.mountpoint} is still being laid out: there is nothing to publish yet")
        await self._scanner.sync()
        done = await self._served.operations["sync"](request)
        return {**done, "unsettled": self._scanner.figures.unsettled}

    async def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = await self._served.operations["status"](request)
        if self._scanner is not None:
            unseen_s = self._scanner.oldest_unseen_s
            if unseen_s is not None:
                found["rpo_seconds"] = max(found["rpo_seconds"], trio.current_time() - unseen_s)
            found["scanning"] = asdict(self._scanner.figures)
            # Nobody sees the writes: what had to be read is the nearest thing to them.
            found["totals"]["bytes_written"] = self._scanner.figures.bytes_read
        if self._restorer is not None:
            found |= _filling(self._restorer)
        return found

    async def _drain(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Publish, then end after the answer."""
        self._timeout_s = float(request.get("timeout_s", self._settings.drain_timeout))
        if request.get("complete"):
            self._served.complete()
        self._answered = trio.Event()
        self._ending.set()
        await self._ended.wait()
        assert self._result is not None
        return asdict(self._result)

    async def _obey_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %d: draining", number)
                self._ending.set()


def _filling(restorer: Restorer) -> dict[str, Any]:
    """Say how far the layout is, and what comes after it."""
    laying, filling = restorer.laying_out, restorer.filler.progress()
    files_total = filling.files_filled + filling.files_left
    coming = Hydration(
        part=laying.phase or filling.part,
        wanted_bytes=filling.bytes_brought + filling.bytes_left,
        fetched_bytes=filling.bytes_brought,
        wanted_files=laying.files_total if laying.phase else files_total,
        fetched_files=laying.files if laying.phase else filling.files_filled,
    )
    return {"hydration": asdict(coming), "readers_waiting": filling.waiting}


def _with_restore(ready: Ready, report: Report | None) -> Ready:
    """Tell what laying out came to."""
    if report is None:
        return ready
    notes = [*report.said]
    if report.filled or report.placeholders or report.links:
        notes.append(
            f"{report.files:,} files: {report.kept:,} were here, {report.filled:,} fetched "
            f"({format_size(report.filled_bytes)}), {report.placeholders + report.links:,} come when they are needed "
            f"({format_size(report.absent_bytes)})"
        )
    if report.replaced:
        notes.append(f"{len(report.replaced):,} names that differed from the state were moved to {report.replaced_in}")
    notes += [f"{count:,} × not applied here: {what}" for what, count in report.left_out.items()]
    notes += [f"damaged in the store, not restored: {path}: {why}" for path, why in report.damaged.items()]
    return replace(ready, notes=(*ready.notes, *notes))
