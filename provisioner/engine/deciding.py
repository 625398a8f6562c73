"""The decisions about one job: is the node alive, does a race begin, who may claim, has the job ended.

Invariant: nothing here waits. While the store cannot be read no race begins and nobody may claim; what is being ended
goes on, because that was decided before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from provisioner.core.detect import Health, Verdict
from provisioner.core.happenings import FailoverEnded, JobEnd, Judged, Spent
from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.jobs import JobSpec
from provisioner.core.ports import InstanceStatus, WorkspaceHead
from provisioner.core.race import Outcome, Phase, Race
from provisioner.core.race.messages import (
    Cancel,
    ClaimsAllowed,
    HeadRead,
    Rebid,
)
from provisioner.core.ranking import Ranked
from provisioner.core.rendezvous import NodePhase, Report, Request
from provisioner.engine.ending import Ending
from provisioner.engine.leaving import Leave, Leaving
from provisioner.engine.ports import EXIT_FAILED
from provisioner.engine.racing import Driver, Kit, NodeOrders, race_settings
from provisioner.engine.searching import bid_within, spec_for
from provisioner.engine.timeline import Timeline
from provisioner.engine.watching import NO_HEARTBEAT, Holder


@dataclass(slots=True)
class Move:
    """A planned move under way."""

    until_s: float
    provider: str = ""
    """The only one to move to; empty = any of the job's."""
    leave: Leave | None = None
    """Why the node is left, when nobody asked for it."""
    ordered: bool = False
    """Whether the node was told to hand over."""
    request: Request | None = None
    """What asked for it: it stays in the store until the move is over, so that a controller that dies does not
    take it along."""


class Decider:
    """What is known of one job, and what follows from it."""

    def __init__(self, kit: Kit, head: WorkspaceHead | None) -> None:
        self._kit = kit
        self._settings = kit.ports.settings
        self._orders = NodeOrders(kit)
        self._driver = Driver(kit, self._orders, self._moved)
        self._head = head
        self._head_at_s = kit.now_s()
        self._writer_epoch = 0 if head is None else head.writer_epoch
        self._reports: dict[str, Report] = {}
        self._stale: dict[str, Report] = {}
        """What a node had said before it was brought back: it says nothing about now."""
        self._holder = Holder(None if head is None else head.intent, self._settings.detect)
        self._verdict = Verdict(Health.BLIND, "nothing was read yet")
        self._timeline: Timeline | None = None
        self._move: Move | None = None
        self._leaving = Leaving(kit)
        self._drill = ""
        self._ending: Ending | None = None
        self._paused_until_s = self._cancel_at_s = float("-inf")
        self._spent_at_s = self._doubted_at_s = float("-inf")
        self._look_at_s = kit.now_s() + self._settings.cheaper_s
        self._ended_before: str | None = None
        """The node whose end a user does not want to count any more."""
        self.end: JobEnd | None = None
        """How the job has ended; None while it goes on."""

    @property
    def _record(self) -> IntentRecord | None:
        """The ledger's record of the node that holds the workspace, when it is one of ours."""
        return None if self._holder.ident is None else self._kit.books.records.get(self._holder.ident)

    def _blind(self) -> bool:
        """Whether nothing may be decided now; what is being ended was decided before."""
        return self._ending is None and self._holder.verdict(self._kit.now_s()).health is Health.BLIND

    def _new_holder(self, ident: str | None) -> None:
        self._holder = Holder(ident, self._settings.detect)
        report = None if ident is None else self._reports.get(ident)
        if report is not None:
            self._holder.reported(report, self._kit.now_s())

    def _head_read(self) -> HeadRead:
        head = self._head
        if head is None:
            return HeadRead(self._head_at_s, 0, None)
        return HeadRead(self._head_at_s, head.writer_epoch, head.intent, head.instance_id or None)

    def _decide(self) -> None:
        now_s = self._kit.now_s()
        self._account(now_s)
        if self._ending is not None:
            self._close_timeline(now_s)
            self.end = self._ending.decide(self._holder, now_s)
            return
        self._judge(now_s)
        if self._verdict.health is Health.BLIND:
            return
        self._close_timeline(now_s)
        report = self._holder.report
        if report is not None and report.phase is NodePhase.ENDED and report.exit_code is not None:
            why = report.why or f"the command ended with exit code {report.exit_code}"
            self._end(report.exit_code, why)
        elif self._driver.running:
            self._decide_race(now_s)
        elif now_s >= self._paused_until_s:
            self._look_around(now_s)
            self._decide_watch(now_s)
            self._leave_in_time(now_s)
        self._kit.eyes.racing = self._driver.running

    def _judge(self, now_s: float) -> None:
        verdict = self._holder.verdict(now_s)
        somebody = self._holder.ident or self._holder.moved or verdict.health is Health.BLIND
        if verdict.health is not self._verdict.health and somebody:
            self._kit.observe(Judged(now_s, self._holder.ident or "", verdict.health, verdict.why))
        self._verdict = verdict
        if verdict.race:
            self._doubted_at_s = now_s

    def _account(self, now_s: float) -> None:
        """Tell what was spent, and end the job when its budget is used up."""
        if now_s - self._spent_at_s < self._settings.spent_s:
            return
        self._spent_at_s = now_s
        spend, budget_usd = self._kit.books.spend(), self._kit.spec.limits.budget_usd
        self._kit.observe(Spent(now_s, spend.nodes_usd, spend.racing_usd, self._kit.books.usd_h()))
        if budget_usd is not None and spend.total_usd >= budget_usd and self._ending is None:
            why = f"the budget of ${budget_usd:.2f} is used up: ${spend.total_usd:.2f} were spent; the workspace stays"
            self._end(EXIT_FAILED, why, graceful=True)

    def _nobody_holds(self) -> str:
        """Say why nobody can be writing the workspace; empty when somebody may."""
        if self._head is None:
            return "the workspace has no state yet"
        record = self._record
        if record is not None:
            gone = record.state in (IntentState.REAPING, IntentState.GONE)
            return "its last node is destroyed" if gone else ""
        return "nobody writes the workspace" if self._holder.watch.token == NO_HEARTBEAT else ""

    def _lives_perhaps(self) -> bool:
        return self._record is not None and not self._nobody_holds()

    def _decide_watch(self, now_s: float) -> None:
        """Nobody races: begin a race when there is no node, or it is in doubt."""
        unheld = self._nobody_holds()
        if not unheld and not self._verdict.race:
            return
        alive_s = self._holder.last_alive_s if self._lives_perhaps() else now_s
        self._begin(self._kind(), unheld or self._verdict.why, alive_s)

    def _look_around(self, now_s: float) -> None:
        """Now and then ask what else there is, when the user wants to go on where it is cheaper."""
        if self._kit.spec.limits.move_below is None or self._verdict.health is not Health.HEALTHY:
            return
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._settings.cheaper_s
            self._driver.look_around()

    def _consider(self, best: Ranked) -> None:
        """Move to *best* when it is cheaper by the share that the user named."""
        record, share = self._record, self._kit.spec.limits.move_below
        if record is None or share is None or self._is_busy() or self._verdict.health is not Health.HEALTHY:
            return
        usd_h = record.intent.usd_h
        if best.usd_h <= (1 - share) * usd_h:
            now_s = self._kit.now_s()
            self._move = Move(now_s + self._settings.move_s)
            self._begin(
                "move", f"{best.offer.provider} has one for ${best.usd_h:.2f}/h, this costs ${usd_h:.2f}/h", now_s
            )

    def _leave_in_time(self, now_s: float) -> None:
        """Move away from a node that is well, and will not be for long."""
        record = self._record
        if record is None or self._is_busy() or self._verdict.health is not Health.HEALTHY:
            return
        leave = self._leaving.reason(record, self._holder.instance)
        if leave is not None:
            self._leaving.tried()
            self._move = Move(now_s + self._settings.move_s, leave=leave)
            self._begin("move", leave.why, now_s)

    def _is_busy(self) -> bool:
        """Whether a node is being exchanged, or the job ends."""
        return bool(self._move is not None or self._drill or self._driver.running or self._ending is not None)

    def _kind(self) -> str:
        if self._drill:
            return "drill"
        return "loss" if self._has_run() else "launch"

    def _has_run(self, but: str = "") -> bool:
        """Whether a node of the job has ever held the workspace, another one than *but*."""
        records = self._kit.books.records.values()
        return any(record.won_at_s is not None and record.intent.ident != but for record in records)

    def _needed(self) -> JobSpec:
        spec = spec_for(self._kit.spec, 0 if self._head is None else self._head.logical_bytes)
        if self._move is None or self._move.leave is None:
            return spec
        lasts_s = max(spec.wish.lasts_s_min, self._move.leave.lasts_s_min)
        return replace(spec, wish=replace(spec.wish, lasts_s_min=lasts_s))

    def _begin(self, kind: str, why: str, lost_at_s: float) -> None:
        kit, now_s = self._kit, self._kit.now_s()
        self._close_timeline(now_s, whatever=True)
        state_at_s = None if self._head is None else self._head.created_at_s
        self._timeline = Timeline(kind, why, self._holder.ident, min(lost_at_s, now_s), now_s, state_at_s)
        kit.say(f"{kind}: {why}")
        self._driver.begin(race_settings(kit, self._allowed()), self._head_read(), self._needed())

    def _allowed(self) -> Sequence[str]:
        """The providers that may take part in a race that begins now."""
        providers, move = self._kit.spec.providers, self._move
        if move is None:
            return providers
        if move.provider:
            return [move.provider]
        return [name for name in providers if move.leave is None or name != move.leave.avoid]

    def _decide_race(self, now_s: float) -> None:
        unheld = self._nobody_holds()
        race = self._driver.race
        if unheld or self._verdict.race:
            self._driver.release()
        if self._move is not None:
            self._decide_move(self._move, now_s)
        elif not unheld and self._is_well(race) and now_s >= self._cancel_at_s:
            self._cancel_at_s = now_s + self._settings.listing_s
            if any(candidate.phase is Phase.CLAIMING for candidate in race.candidates.values()):
                # The heartbeat that moved may be that of a candidate that has just won.
                self._kit.eyes.read_head_soon()
            else:
                self._driver.step(Cancel(f"the node lives: {self._verdict.why}"))
            return
        self._bring_back(race, now_s)
        if (unheld or self._verdict.claim) and not race.claims_allowed and self._driver.running:
            if self._timeline is not None:
                self._timeline.allowed_at_s = now_s
            self._driver.step(ClaimsAllowed())

    def _is_well(self, race: Race) -> bool:
        """Whether the heartbeat has moved since the node was in doubt: a provider's word alone cancels nothing."""
        moved = self._holder.moved and self._holder.last_alive_s > max(race.started_at_s, self._doubted_at_s)
        return moved and self._verdict.health is Health.HEALTHY

    def _decide_move(self, move: Move, now_s: float) -> None:
        """The replacement boots beside the running node, which hands over when a candidate is ready."""
        ready = any(c.phase is Phase.READY for c in self._driver.race.candidates.values())
        if self._verdict.race and not move.ordered:
            # Lost on the way: from here on it is a loss like any other.
            self._end_move()
            if self._timeline is not None:
                self._timeline.kind, self._timeline.lost_at_s = "loss", self._holder.last_alive_s
        elif ready and not move.ordered and self._holder.ident is not None:
            move.ordered = True
            self._kit.say("a replacement is ready: the node publishes and hands over")
            self._orders.change(self._holder.ident, hand_over=True)
        elif not move.ordered and now_s > move.until_s:
            self._end_move()
            self._driver.step(Cancel(f"no candidate was ready within {self._settings.move_s:.0f} s"))

    def _end_move(self) -> None:
        """Nobody is moved any more, for better or worse."""
        move, self._move = self._move, None
        if move is not None and move.request is not None:
            self._kit.nursery.start_soon(self._kit.forget_request, move.request)

    def _bring_back(self, race: Race, now_s: float) -> None:
        """A higher bid for the stopped node joins the race, once; so does a node that came back by itself."""
        record, shown = self._record, self._holder.instance
        if record is None or not self._verdict.race or not self._driver.running:
            return
        candidate = race.candidates.get(record.intent.ident)
        if candidate is None or candidate.phase is not Phase.INCUMBENT or candidate.rebid:
            return
        account, intent = self._kit.accounts.get(record.intent.provider), record.intent
        report = self._holder.report
        if report is not None and self._holder.ran and report.phase in (NodePhase.BOOTED, NodePhase.READY):
            self._driver.step(Rebid(intent.compute_usd_h, intent.usd_h))
            return
        if account is None or not account.capabilities.rebid or shown is None or self._drill:
            return
        if shown.status is InstanceStatus.STOPPED and shown.min_bid_usd_h is not None:
            beside_usd_h = intent.usd_h - intent.compute_usd_h
            bid_usd_h = bid_within(shown.min_bid_usd_h, beside_usd_h, intent.gpu_count, self._kit.spec)
            if bid_usd_h is not None:
                if report is not None:
                    self._stale[intent.ident] = report
                    self._reports.pop(intent.ident, None)
                self._driver.step(Rebid(bid_usd_h, beside_usd_h + bid_usd_h))

    def _moved(self, before: Race | None, after: Race) -> None:
        """The race made a step: candidates moved, and perhaps it was decided."""
        now_s = self._kit.now_s()
        if self._timeline is not None:
            for candidate in after.candidates.values():
                self._timeline.moved(candidate, now_s)
        same = before is not None and before.outcome is after.outcome and before.ident == after.ident
        if after.outcome is Outcome.RUNNING or same:
            return
        self._kit.say(f"the race is {after.outcome.value}: {after.why}")
        winner = after.winner
        if after.outcome is Outcome.WON and winner is not None:
            if self._timeline is not None:
                self._timeline.won(after, winner, now_s)
            self._writer_epoch = max(self._writer_epoch, after.head_writer_epoch)
            self._new_holder(winner.ident)
            self._drill = ""
        elif self._timeline is not None and self._timeline.winner is None:
            self._timeline = None
        self._end_move()
        if after.outcome is Outcome.FAILED and self._ending is None:
            self._failed(after, now_s)

    def _failed(self, race: Race, now_s: float) -> None:
        """Nobody could win: a job that has never run is given up, another one tries again after a pause."""
        if self._has_run():
            self._paused_until_s = now_s + self._settings.failed_pause_s
        else:
            self._end(EXIT_FAILED, race.why)

    def _close_timeline(self, now_s: float, *, whatever: bool = False) -> None:
        """Write a failover down once its command runs, or once it will not."""
        timeline = self._timeline
        if timeline is None or timeline.winner is None:
            return
        report = self._reports.get(timeline.winner.ident)
        spoke = report is not None and report.phase in (NodePhase.RUNNING, NodePhase.HANDING_OVER, NodePhase.ENDED)
        if not spoke and not whatever and self._ending is None:
            return
        race = self._driver.race
        others = [c for c in race.candidates.values() if c.ident != timeline.winner.ident]
        racing_usd = sum(c.spent_usd(now_s) for c in others)
        reaped = sum(c.phase in (Phase.REAPING, Phase.GONE) and bool(c.record.instances) for c in others)
        failover = timeline.ended(self._kit.books.next_number(), report, reaped, racing_usd)
        self._timeline = None
        self._kit.books.keep_failover(failover)
        self._kit.observe(FailoverEnded(now_s, failover))

    def _end(self, exit_code: int, why: str, *, graceful: bool = False) -> None:
        """Begin the end of the job; *graceful* lets a living node publish first."""
        ident = self._holder.ident if graceful and self._lives_perhaps() else None
        self._ending = Ending(self._kit, self._driver, self._orders, exit_code, why, ident)
