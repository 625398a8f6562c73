"""What can be asked of a running mount: the operations behind `sync`, `status`, `snapshot` and `gc`.

Invariant: every operation answers in plain values; nothing here mounts, claims or publishes by itself.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import trio

from spotwarp_fs.cli.at import check_snapshot_name
from spotwarp_fs.cli.daemon_wish import DaemonWish, Ready
from spotwarp_fs.cli.mounted import Served
from spotwarp_fs.cli.settings import Settings
from spotwarp_fs.core.errors import ExitCode, Fenced, UserError
from spotwarp_fs.core.provenance import NOTE, check_note
from spotwarp_fs.core.status import Status
from spotwarp_fs.engine.place import moved
from spotwarp_fs.engine.readonly import Looking
from spotwarp_fs.engine.report import Reporter
from spotwarp_fs.engine.scratch import not_restored
from spotwarp_fs.engine.session import Drained, Session

T = TypeVar("T")

SYNC_TIMEOUT_S = 3600.0


class WriterDesk:
    """Operations of a writer's session."""

    def __init__(self, wish: DaemonWish, settings: Settings, name: str, session: Session) -> None:
        self._wish = wish
        self._settings = settings
        self._name = name
        self._session = session
        self._reporter = Reporter(session, workspace_name=name, store_url=settings.store_url())

    def served(self, cache_path: Path) -> Served:
        """Offer the session to a mount."""
        return Served(
            filesystem=self._session.filesystem,
            workspace=self._session.workspace,
            name=self._name,
            cache_path=cache_path,
            operations={
                "sync": self._sync,
                "status": self._status,
                "gc": self._collect,
                "snapshot.create": self._create_snapshot,
                "snapshot.list": self._list_snapshots,
                "snapshot.delete": self._delete_snapshot,
                "note": self._note,
                "wait-fenced": self._wait_fenced,
            },
            progress=self._progress,
            drain=self._drain,
            describe=self._describe,
            background=self._reporter.run,
            complete=self._complete,
        )

    def _complete(self) -> None:
        self._session.streamer.all_complete = True

    async def _drain(self, timeout_s: float) -> Drained:
        return await self._session.drain(trio.current_time() + timeout_s)

    def _describe(self) -> Ready:
        session = self._session
        resumed = session.claimed.resumed_from
        now_s = session.publisher.server_now_s()
        with session.workspace.kv.read() as view:
            notes = moved(resumed, self._wish.mountpoint) + not_restored(view, resumed)
        notes += session.workspace.notices
        return Ready(
            mountpoint=self._wish.mountpoint,
            workspace=self._name,
            store=self._settings.store_url(),
            form=self._wish.form,
            created=session.claimed.created,
            manifest=session.streamer.head.manifest.number,
            age_s=max(0.0, now_s - resumed.created_s) if resumed is not None and now_s > 0 else 0.0,
            logical_bytes=session.workspace.logical_bytes,
            files=session.workspace.files,
            read_only=session.workspace.fenced is not None,
            daemon_pid=os.getpid(),
            left_out=session.claimed.left_out,
            notes=notes,
            resumed_from=_served_number(session),
        )

    def _progress(self) -> dict[str, Any]:
        if self._session.workspace.fenced is not None:
            saving = self._session.salvager.progress
            phase = "setting aside what was not published"
            return {"done_bytes": saving.done_bytes, "total_bytes": saving.total_bytes, "phase": phase}
        left = self._session.workspace.dirty_blocks << 20
        done = self._session.packs.bytes_uploaded
        return {"done_bytes": done, "total_bytes": done + left, "phase": "publishing"}

    async def _sync(self, request: Mapping[str, Any]) -> dict[str, Any]:
        session = self._session
        if session.workspace.fenced is not None:
            raise Fenced(str(session.workspace.fenced))
        timeout_s = float(request.get("timeout_s", SYNC_TIMEOUT_S))
        number: int | None = None
        with trio.move_on_after(timeout_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_raise_when_fenced, session)
                number = await session.streamer.barrier()
                nursery.cancel_scope.cancel()
        if number is None:
            reason = session.health.last_error or "the store is slower than what was written"
            raise UserError(f"not everything was published within {timeout_s:.0f} s: {reason}", ExitCode.NOT_SAVED)
        listed = session.streamer.head.manifest.in_flight
        return {"manifest": number, "in_flight": [item.path.decode(errors="replace") for item in listed]}

    async def _collect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return await self._session.collector.collect(dry_run=bool(request.get("dry_run")))

    async def _create_snapshot(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = check_snapshot_name(str(request["name"]))
        number = await self._unless_fenced(self._session.snapshots.create, name)
        return {"name": request["name"], "manifest": int(number)}

    async def _delete_snapshot(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = str(request["name"]).encode("utf-8", "surrogateescape")
        await self._unless_fenced(self._session.snapshots.delete, name)
        return {"name": request["name"]}

    async def _list_snapshots(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = await self._session.snapshots.list()
        return {
            "snapshots": [
                {
                    "name": item.name.decode("utf-8", "surrogateescape"),
                    "manifest": int(item.number),
                    "age_s": item.age_s,
                }
                for item in found
            ]
        }

    async def _unless_fenced(self, call: Callable[[bytes], Awaitable[T]], name: bytes) -> T:
        """Run what waits for a publish; being fenced ends the wait."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raise_when_fenced, self._session)
            result = await call(name)
            nursery.cancel_scope.cancel()
        return result

    async def _note(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have every manifest from now on say what runs here (`core.provenance`)."""
        try:
            note = check_note(request["note"])
        except (KeyError, ValueError, AttributeError) as error:
            raise UserError(f"no note for manifests: {error}") from error
        self._session.streamer.about |= {NOTE: note}
        return {}

    async def _wait_fenced(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer when another writer has the workspace.

        Whoever asks learns of our death by the broken connection, and says whom it means: a successor answers at once.
        """
        if request.get("daemon_pid") == os.getpid():
            await self._session.fenced.wait()
        reason = self._session.workspace.fenced
        return {"daemon_pid": os.getpid(), "fenced": reason is not None, "reason": str(reason or "")}

    async def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return replace(_with_process(await self._reporter.status(), self._wish), form=self._wish.form).to_dict()


def _served_number(session: Session) -> int | None:
    """The state that was taken up: the head that was found, or the older one that is served instead (P-05)."""
    resumed, head = session.claimed.resumed_from, session.streamer.head.manifest
    if resumed is None:
        return None
    return int((head.takeover or {}).get("served", resumed.number))


async def _raise_when_fenced(session: Session) -> None:
    await session.fenced.wait()
    raise Fenced(str(session.workspace.fenced))


class ReaderDesk:
    """Operations of a mount that only looks."""

    def __init__(self, wish: DaemonWish, settings: Settings, name: str, looking: Looking) -> None:
        self._wish = wish
        self._settings = settings
        self._name = name
        self._looking = looking
        self._started_s = trio.current_time()

    def served(self, cache_path: Path) -> Served:
        """Offer the state to a mount."""
        return Served(
            filesystem=self._looking.filesystem,
            workspace=self._looking.reader.workspace,
            name=self._name,
            cache_path=cache_path,
            operations={"status": self._status, "sync": self._refuse_sync},
            progress=dict,
            drain=self._drain,
            describe=self._describe,
            background=trio.sleep_forever,
            complete=lambda: None,
        )

    async def _drain(self, timeout_s: float) -> Drained:
        await trio.lowlevel.checkpoint()
        return Drained(True, self._looking.reader.manifest.number)

    def _age_s(self) -> float:
        reader = self._looking.reader
        return max(0.0, reader.server_time_s - reader.manifest.created_s)

    def _describe(self) -> Ready:
        reader = self._looking.reader
        return Ready(
            mountpoint=self._wish.mountpoint,
            workspace=self._name,
            store=self._settings.store_url(),
            form="fuse",
            created=False,
            manifest=reader.manifest.number,
            age_s=self._age_s(),
            logical_bytes=reader.workspace.logical_bytes,
            files=reader.workspace.files,
            read_only=True,
            daemon_pid=os.getpid(),
            notes=(f"the state is not pinned: {reader.unpinned}",) if reader.unpinned else (),
        )

    async def _refuse_sync(self, request: Mapping[str, Any]) -> dict[str, Any]:
        raise UserError("this mount is read-only: there is nothing to publish")

    async def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        reader, budget = self._looking.reader, self._looking.budget
        status = Status(
            workspace=self._name,
            store=self._settings.store_url(),
            form="fuse",
            mode="reader",
            head_number=reader.manifest.number,
            head_age_s=self._age_s() + trio.current_time() - self._started_s,
            writer_epoch=reader.manifest.writer_epoch,
            session=reader.manifest.session,
            rpo_seconds=0.0,
            dirty_bytes=0,
            unpublished_bytes=0,
            cache_used_bytes=budget.used_bytes,
            cache_budget_bytes=budget.limit_bytes,
            read_only=True,
            store_reachable=reader.health.reachable,
            store_error=reader.health.last_error or None,
            files=reader.workspace.files,
            logical_bytes=reader.workspace.logical_bytes,
        )
        return _with_process(status, self._wish).to_dict()


def _with_process(status: Status, wish: DaemonWish) -> Status:
    return replace(status, daemon_pid=os.getpid(), supervisor_pid=wish.supervisor_pid, rss_bytes=resident_bytes())


def resident_bytes() -> int:
    """Return this process's resident memory, in bytes (0 where the system does not say)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
