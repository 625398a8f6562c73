"""What the engine sees of the store: the holder's heartbeat, the head, the nodes' reports, a user's request.

Each look ends in a message; what could not be read is a message as well, because not seeing is a fact that decides.
Invariant: a time in a message is from before its read was sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.ports import Shelf, WorkspaceHead, WorkspaceView
from provisioner.core.race.messages import Event
from provisioner.core.ranking import Ranked
from provisioner.core.rendezvous import BadMessage, Report, Request, decode, report_key, request_key
from provisioner.engine.fencing import answered
from provisioner.engine.ports import EnginePorts, Listing

HEAD_GAP_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """The store answered; *token* None = the head's writer has none."""

    asked_at_s: float
    token: str | None


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """The newest manifest, or None for a workspace without one."""

    asked_at_s: float
    head: WorkspaceHead | None


@dataclass(frozen=True, slots=True)
class StoreSilent:
    """The store did not answer, or refused."""

    asked_at_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ReportSeen:
    """A node's newest word."""

    report: Report


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A user wants something."""

    request: Request


@dataclass(frozen=True, slots=True)
class Showed:
    """A listing of one account."""

    provider: str
    listing: Listing


@dataclass(frozen=True, slots=True)
class RaceSaid:
    """A task that was started for the race *race* has ended."""

    race: str
    event: Event


@dataclass(frozen=True, slots=True)
class Told:
    """A line for people, from a task."""

    text: str


@dataclass(frozen=True, slots=True)
class Shut:
    """Every provider refused the account's key, or its credit is used up."""

    why: str


@dataclass(frozen=True, slots=True)
class Around:
    """What would race first now."""

    best: Ranked


@dataclass(frozen=True, slots=True)
class Funds:
    """What an account had left when it was asked."""

    provider: str
    usd: float


TaskMessage = RaceSaid | Told | Shut | Around | Funds
Message = HeartbeatSeen | HeadSeen | StoreSilent | ReportSeen | RequestSeen | Showed | TaskMessage
Send = Callable[[Message], Awaitable[None]]


class Eyes:
    """Reads the store again and again, and sends what it saw."""

    def __init__(self, job: str, ports: EnginePorts, send: Send) -> None:
        self._job = job
        self._shelf: Shelf = ports.shelf
        self._workspace: WorkspaceView = ports.workspace
        self._clock = ports.clock
        self._settings = ports.settings
        self._send = send
        self._head_now = trio.Event()
        self.racing = False
        """Whether somebody may be ready, or take the workspace over, at any moment."""
        self.urgent = False
        """Whether the holder's heartbeat is overdue."""
        self.idents: Callable[[], Iterable[str]] = tuple
        """Whose reports are read."""

    def read_head_soon(self) -> None:
        """Let the next read of the head be now."""
        self._head_now.set()

    async def watch_heartbeat(self) -> None:
        """Read the holder's heartbeat, until cancelled."""
        while True:
            asked_at_s = self._clock.now_s()
            try:
                token = await answered(self._settings, self._workspace.heartbeat)
                await self._send(HeartbeatSeen(asked_at_s, token))
            except (StoreUnavailable, StoreDenied) as error:
                await self._send(StoreSilent(asked_at_s, str(error)))
            await trio.sleep(self._settings.look_urgent_s if self.urgent else self._settings.look_s)

    async def watch_head(self) -> None:
        """Read the newest manifest, often while candidates race, until cancelled."""
        while True:
            self._head_now = trio.Event()
            asked_at_s = self._clock.now_s()
            try:
                head = await answered(self._settings, self._workspace.head)
                await self._send(HeadSeen(asked_at_s, head))
            except (StoreUnavailable, StoreDenied) as error:
                await self._send(StoreSilent(asked_at_s, str(error)))
            # However often a read is asked for, the store is not asked more often than this.
            await trio.sleep(HEAD_GAP_S)
            gap_s = self._settings.head_racing_s if self.racing else self._settings.head_s
            with trio.move_on_after(gap_s - HEAD_GAP_S):
                await self._head_now.wait()

    async def watch_reports(self) -> None:
        """Read the reports of all nodes of interest, all at once, until cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                for ident in sorted(self.idents()):
                    nursery.start_soon(self._read_report, ident)
            await trio.sleep(self._settings.report_racing_s if self.racing else self._settings.report_s)

    async def _read_report(self, ident: str) -> None:
        report = await self.report(ident)
        if report is not None:
            await self._send(ReportSeen(report))

    async def report(self, ident: str) -> Report | None:
        """Read one node's report; None when there is none, or none that can be read now."""
        try:
            raw = await answered(self._settings, lambda: self._shelf.get(report_key(self._job, ident)))
            report = None if raw is None else decode(Report, raw)
        except (StoreUnavailable, StoreDenied):
            return None
        except BadMessage as error:
            await self._send(Told(f"{report_key(self._job, ident)} is left out: {error}"))
            return None
        return report if report is not None and report.ident == ident else None

    async def watch_requests(self) -> None:
        """Look for what a user asks, until cancelled."""
        while True:
            try:
                raw = await answered(self._settings, lambda: self._shelf.get(request_key(self._job)))
                if raw is not None:
                    await self._send(RequestSeen(decode(Request, raw)))
            except (StoreUnavailable, StoreDenied):
                pass
            except BadMessage as error:
                await self._send(Told(f"a request is left out: {error}"))
            await trio.sleep(self._settings.request_s)
