"""Hear of one thing after the other, and decide after each.

Invariant: what is heard is taken in completely before anything is decided; nothing here waits.
"""

from __future__ import annotations

from typing import Final, assert_never

from provisioner.core.happenings import NodeSaid
from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.ports import WorkspaceHead
from provisioner.core.race.messages import (
    Cancel,
    Listed,
    NodeReported,
    OffersFound,
    Tick,
)
from provisioner.core.race.messages import Report as RaceReport
from provisioner.core.rendezvous import NodePhase, Report, Request, RequestKind
from provisioner.engine.deciding import Decider, Move
from provisioner.engine.eyes import (
    Around,
    Funds,
    HeadSeen,
    HeartbeatSeen,
    Message,
    RaceSaid,
    ReportSeen,
    RequestSeen,
    Showed,
    Shut,
    StoreSilent,
    TaskMessage,
    Told,
)
from provisioner.engine.ports import EXIT_FAILED, EXIT_FENCED, EXIT_STOPPED
from provisioner.engine.racing import PHASES_THAT_SPEAK, Kit, race_settings
from provisioner.engine.timeline import Timeline

_SAYS: Final = {
    NodePhase.BOOTED: RaceReport.BOOTED,
    NodePhase.READY: RaceReport.READY,
    # Whoever runs has claimed: the head will say so, and until then it is no less than ready.
    NodePhase.RUNNING: RaceReport.READY,
    NodePhase.HANDING_OVER: RaceReport.READY,
    NodePhase.ENDED: RaceReport.READY,
    NodePhase.UNFIT: RaceReport.UNFIT,
    NodePhase.LOST: RaceReport.LOST,
}


class Keeper(Decider):
    """One job."""

    def __init__(self, kit: Kit, head: WorkspaceHead | None) -> None:
        super().__init__(kit, head)
        kit.eyes.idents = self._idents

    def _idents(self) -> list[str]:
        """Whose reports matter."""
        speak = [c.ident for c in self._driver.race.candidates.values() if c.phase in PHASES_THAT_SPEAK]
        return speak if self._record is None else sorted({*speak, self._record.intent.ident})

    def listing_gap_s(self, provider: str) -> float:
        """Say how often listings of *provider* are needed."""
        if provider in self._driver.race.watches:
            return self._settings.listing_racing_s
        if self._record is None or self._record.intent.provider != provider:
            return self._settings.listing_idle_s
        # A heartbeat that is overdue makes the provider's word urgent: it takes two listings to miss a node.
        return 0.0 if self._holder.overdue else self._settings.listing_s

    def wake_in_s(self) -> float:
        """Say when to call `wake` if no message comes."""
        now_s = self._kit.now_s()
        wake_at_s = self._driver.race.wake_at_s(now_s)
        return min(self._settings.look_s, self._settings.look_s if wake_at_s is None else wake_at_s - now_s)

    def recover(self, report: Report | None) -> None:
        """Take up what an earlier controller left; *report* is the holder's last word."""
        record = self._record
        ended = report is not None and report.exit_code is not None and report.phase is NodePhase.ENDED
        if report is not None and ended and self._settings.again and record is not None and record.settled:
            self._ended_before, report = report.ident, None
        now_s = self._kit.now_s()
        # Whatever begins with this controller is timed from here; what came before, nobody saw.
        why = "the controller was started again" if self._kit.books.records else "the job begins"
        self._timeline = Timeline(self._kind(), why, self._holder.ident, now_s, now_s)
        settings = race_settings(self._kit, self._kit.spec.providers)
        self._driver.begin(settings, self._head_read(), self._needed(), held=True)
        if report is not None:
            self._reported(report)
        if self._driver.running and self._lives_perhaps() and not self._driver.race.live():
            self._driver.step(Cancel("the node is watched first"))
        if record is not None and record.state is IntentState.WINNER and not self._recorded(record):
            # The controller before saw it win, and died before the command ran.
            kind = "loss" if self._has_run(but=record.intent.ident) else "launch"
            self._timeline = Timeline(kind, why, None, now_s, now_s)
            winner = self._driver.race.candidates[record.intent.ident]
            self._timeline.won(self._driver.race, winner, record.won_at_s or now_s)

    def _recorded(self, record: IntentRecord) -> bool:
        return any(failover.winner == record.intent.ident for failover in self._kit.books.failovers)

    def hear(self, message: Message) -> None:
        """Take one message, then decide."""
        match message:
            case HeartbeatSeen(asked_at_s, token):
                self._holder.heartbeat(asked_at_s, token)
            case StoreSilent(asked_at_s, _):
                self._holder.silence(asked_at_s)
            case HeadSeen():
                self._head_seen(message)
            case ReportSeen(report):
                self._reported(report)
            case RequestSeen(request):
                self._requested(request)
            case Showed():
                self._showed(message)
            case _:
                self._heard_of_task(message)
        self._decide()
        self._kit.eyes.urgent = self._holder.overdue

    def _heard_of_task(self, message: TaskMessage) -> None:
        match message:
            case RaceSaid(race, event):
                # Offers are for the race that searched; what became of a create or a destroy is true in any race.
                if not isinstance(event, OffersFound) or (race == self._driver.race.ident and not self._blind()):
                    self._driver.step(event)
            case Told(text):
                self._kit.say(text)
            case Shut(why):
                # A node that runs goes on, and a lost one waits until somebody pays: only a first launch is given up.
                if self._ending is None and not self._has_run():
                    self._end(EXIT_FAILED, why)
            case Around(best):
                self._consider(best)
            case Funds(provider, usd):
                self._leaving.told(provider, usd)
            case _:
                assert_never(message)

    def wake(self) -> None:
        """Time passed."""
        if not self._blind():
            self._driver.step(Tick())
        self._decide()

    def _head_seen(self, seen: HeadSeen) -> None:
        if seen.asked_at_s < self._head_at_s:
            return
        self._head, self._head_at_s = seen.head, seen.asked_at_s
        self._driver.step(self._head_read())
        head = seen.head
        if head is None or head.writer_epoch <= self._writer_epoch:
            return
        self._writer_epoch = head.writer_epoch
        if head.intent != self._holder.ident:
            self._new_holder(head.intent)
        if self._record is None and self._ending is None:
            whose = "no node of this job" if head.intent is None else f"{head.intent}, which nobody knows"
            self._end(EXIT_FENCED, f"writer epoch {head.writer_epoch} of the workspace belongs to {whose}")

    def _reported(self, report: Report) -> None:
        ident, now_s = report.ident, self._kit.now_s()
        if report == self._stale.get(ident) or (ident == self._ended_before and report.exit_code is not None):
            return
        old = self._reports.get(ident)
        if old is None or old.phase is not report.phase:
            self._kit.observe(NodeSaid(now_s, ident, report.phase.value, report.why))
            # The node's word came before the head's, or instead of it.
            self._kit.eyes.read_head_soon()
        self._reports[ident] = report
        if ident == self._holder.ident and self._holder.report != report:
            self._holder.reported(report, now_s)
        candidate = self._driver.race.candidates.get(ident)
        if candidate is None:
            return
        if self._timeline is not None:
            self._timeline.reported(report, now_s)
        if self._driver.running and candidate.phase in PHASES_THAT_SPEAK and not self._blind():
            self._driver.step(NodeReported(ident, _SAYS[report.phase], report.why))

    def _showed(self, showed: Showed) -> None:
        record = self._record
        if record is not None and record.intent.provider == showed.provider:
            self._holder.listing(record, showed.listing)
        if not self._blind():
            self._driver.step(Listed(showed.provider, showed.listing.asked_at_s, showed.listing.instances))

    def _requested(self, request: Request) -> None:
        """Do what a user wants, once; what is done or makes no sense any more is deleted."""
        if self._ending is not None:
            return
        if request.kind is RequestKind.DOWN:
            self._end(EXIT_STOPPED, request.why or "stopped by the user", graceful=True)
            return
        record = self._record
        meant = record is not None and request.of in ("", record.intent.ident)
        busy = self._move is not None or self._drill or self._driver.running
        if busy:
            return
        if meant and record is not None and record.state is IntentState.WINNER:
            if request.kind is RequestKind.DRILL:
                self._drill = request.why or "a drill"
                self._driver.lose(record)
            else:
                self._move = Move(self._kit.now_s() + self._settings.move_s, request.provider, request=request)
                self._begin("move", request.why or "asked for by the user", self._kit.now_s())
                return
        else:
            node = request.of or "the node"
            self._kit.say(f"the {request.kind.value} of {node} is left out: it does not hold the workspace")
        self._kit.nursery.start_soon(self._kit.forget_request, request)
