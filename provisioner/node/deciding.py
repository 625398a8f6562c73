"""PURE: what the agent does next. `turn(node, event, now_s)` gives the next state and the commands to carry out.

Invariant: the phase of the report only ever goes down `NodePhase`'s list; a node that has said ENDED or LOST starts
nothing any more, and one that has said UNFIT only what publishes the rest of a claim that was quicker; and `exit` is
set exactly when there is nothing left to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, assert_never

from provisioner.core.bootstrap import EXIT_FENCED
from provisioner.core.rendezvous import NodePhase, Orders, Report

NOT_SAVED: Final = 13
STORE_UNREACHABLE: Final = 4
NO_COMMAND: Final = (126, 127)
"""`spotwarp run`'s exit codes, as far as they decide something (docs/OPERATIONS.md)."""
EXIT_UNFIT: Final = 1
BACKOFF_S: Final = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Pauses before a command that failed is started again, and before what is left is published again."""
START_TRIES: Final = 4
"""So often `run` is started before its first claim, when it says that the store does not answer."""
PUBLISH_TRIES: Final = 20
LIVED_S: Final = 1800.0
"""A command that ran this long, and had a quiescent state published, has got on also without a new checkpoint."""
HAND_OVER_PATIENCE_S: Final = 1200.0
"""A command that makes no new checkpoint for so long is stopped without one: somebody pays for the node that waits."""
STOP_PATIENCE_S: Final = 1800.0
"""`run` publishes what is left before it ends, and gives up by itself; one that hangs for so long is killed."""
_ORDER: Final = tuple(NodePhase)


@dataclass(frozen=True, slots=True)
class Passed:
    """A check went well."""

    check: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """A check did not."""

    check: str
    why: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Noted:
    """`run` has left a note: prefetched, claimed, first_read or started."""

    name: str
    at_s: float
    writer_epoch: int | None = None
    resumed_from: int | None = None
    form: str = ""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The controller's newest word."""

    orders: Orders


@dataclass(frozen=True, slots=True)
class Looked:
    """The workspace from inside, every few seconds while it is held."""

    number: int
    """Of the newest manifest; 0 when it could not be read."""
    quiescent: bool
    checkpoints: str
    """Changes with the content of the checkpoint directory; empty while there is nothing in it."""


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything written before a `Sync` is in the store."""

    quiescent: bool


@dataclass(frozen=True, slots=True)
class RunEnded:
    """`spotwarp run` has ended."""

    code: int
    saved: bool = False
    """It said that everything is published; what says nothing is taken for not saved."""
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Notified:
    """The provider has begun to take this node away."""

    lasts_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Passed | Failed | Noted | Ordered | Looked | Synced | RunEnded | Notified | Tick


@dataclass(frozen=True, slots=True)
class StartRun:
    """Start `spotwarp run`; *publish_only*: with a command that does nothing, for what is not published yet."""

    publish_only: bool = False


@dataclass(frozen=True, slots=True)
class GivePermit:
    """Write the permit."""

    writer_epoch: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Publish everything written so far, and answer with `Synced`."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """SIGTERM, or SIGKILL to all of it."""

    kill: bool = False


Command = StartRun | GivePermit | Sync | StopRun


class Stop(Enum):
    """Why `run` was told to end."""

    HAND_OVER = "handed over"
    END = "ended by the controller"
    NOTICE = "its provider takes this node away"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class HandOver:
    """An order to hand over, on its way."""

    since_s: float
    before: str | None = None
    """The checkpoints when the order came; None until they were looked at."""
    syncing: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """How the command ended for good."""

    code: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What does not change."""

    crashes_max: int
    checks: frozenset[str] = frozenset({"gpu", "store"})


@dataclass(frozen=True, slots=True)
class Node:
    """The agent's whole memory."""

    rules: Rules
    report: Report
    checks_left: frozenset[str]
    prefetched: bool = False
    running: bool = False
    """A `spotwarp run` lives."""
    holds: bool = False
    """It has the workspace; stays so while the command is between two starts."""
    orders: tuple[int, int] = (0, 0)
    permit: int | None = None
    hand_over: HandOver | None = None
    stop: Stop | None = None
    stop_at_s: float = 0.0
    starts: int = 0
    crashes: int = 0
    started_at_s: float = 0.0
    number_at_start: int = 0
    checkpoints_at_start: str | None = None
    progressed: bool = False
    """Since the last start a quiescent state with another checkpoint was seen."""
    start_at_s: float | None = None
    """When `run` is started next."""
    left: Left | None = None
    """The command's end, while what it left is not published."""
    publish_tries: int = 0
    exit: int | None = None


def begin(rules: Rules, report: Report) -> tuple[Node, tuple[Command, ...]]:
    """Return the first state: `run` is started at once, so that it prefetches while the machine is checked."""
    return Node(rules, report, rules.checks, running=True, starts=1), (StartRun(),)


def turn(node: Node, event: Event, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    """Return the next state and what to do; the report's `seq` rises exactly when the report changes."""
    if node.exit is not None:
        return node, ()
    after, commands = _on(node, event, now_s)
    if after.report != node.report:
        after = replace(after, report=replace(after.report, seq=node.report.seq + 1))
    return after, commands


def _on(node: Node, event: Event, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    match event:
        case Passed(check, facts):
            return _ready_if(replace(_with_checks(node, facts), checks_left=node.checks_left - {check}), now_s), ()
        case Failed(_, why, facts):
            return _unfit(_with_checks(node, facts), why, now_s)
        case Noted():
            return _noted(node, event, now_s), ()
        case Ordered(orders):
            return _ordered(node, orders, now_s)
        case Looked():
            return _looked(node, event, now_s)
        case Synced(quiescent):
            return _synced(node, quiescent, now_s)
        case RunEnded():
            return _ended(replace(node, running=False), event, now_s)
        case Notified(lasts_s):
            told = replace(node, report=replace(node.report, notice_ends_at_s=now_s + lasts_s))
            return _stop(told, Stop.NOTICE, now_s)
        case Tick():
            return _tick(node, now_s)
        case _:
            assert_never(event)


def _with_checks(node: Node, facts: Mapping[str, str]) -> Node:
    return replace(node, report=replace(node.report, checks={**node.report.checks, **facts}))


def _phase(node: Node, phase: NodePhase, now_s: float) -> Node:
    """Go down the list, never up."""
    report = node.report
    if _ORDER.index(phase) <= _ORDER.index(report.phase):
        return node
    times = {**report.times, phase.value: now_s}
    return replace(node, report=replace(report, phase=phase, times=times))


def _ready_if(node: Node, now_s: float) -> Node:
    ready = node.prefetched and not node.checks_left and node.stop is None
    return _phase(node, NodePhase.READY, now_s) if ready else node


def _unfit(node: Node, why: str, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    if node.stop is not None:
        return node, ()
    unfit = _phase(node, NodePhase.UNFIT, now_s)
    return _stop(replace(unfit, report=replace(unfit.report, why=why)), Stop.UNFIT, now_s)


def _stop(node: Node, why: Stop, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    """Tell `run` to end, once; or end at once when none lives."""
    if node.stop is not None and (why is not Stop.NOTICE or node.stop is Stop.NOTICE):
        return node, ()
    stopping = replace(node, stop=node.stop or why, stop_at_s=now_s, start_at_s=None)
    if node.running:
        return stopping, (StopRun(),)
    left = node.left or Left(None)
    return _over(stopping, left, now_s, saved=node.left is None)


def _noted(node: Node, note: Noted, now_s: float) -> Node:
    times = {**node.report.times, note.name: note.at_s}
    report = replace(node.report, times=times)
    if note.name == "prefetched":
        return _ready_if(replace(node, prefetched=True, report=report), now_s)
    if note.name == "claimed":
        resumed = report.resumed_from if node.holds else note.resumed_from
        report = replace(report, writer_epoch=note.writer_epoch, resumed_from=resumed)
        return replace(node, report=report, holds=True)
    if note.name == "started" and note.form:
        report = replace(report, checks={**report.checks, "form": note.form})
        node = replace(node, report=report)
        return _phase(node, NodePhase.RUNNING, now_s) if node.stop is None else node
    return replace(node, report=report)


def _ordered(node: Node, orders: Orders, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    number = (orders.controller_epoch, orders.seq)
    if number <= node.orders:
        return node, ()
    node = replace(node, orders=number)
    if orders.end:
        return _stop(node, Stop.END, now_s)
    commands: tuple[Command, ...] = ()
    if orders.permit_writer_epoch is not None and orders.permit_writer_epoch != node.permit:
        permitted = {**node.report.times, "permitted": now_s}
        node = replace(node, permit=orders.permit_writer_epoch, report=replace(node.report, times=permitted))
        commands = (GivePermit(orders.permit_writer_epoch),)
    if orders.hand_over and node.hand_over is None and node.stop is None:
        if not node.holds:
            return _stop(node, Stop.HAND_OVER, now_s)
        node = _phase(replace(node, hand_over=HandOver(now_s)), NodePhase.HANDING_OVER, now_s)
    return node, commands


def _looked(node: Node, seen: Looked, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    if node.checkpoints_at_start is None:
        node = replace(node, number_at_start=seen.number, checkpoints_at_start=seen.checkpoints)
    newer = seen.quiescent and seen.number > node.number_at_start
    lived = now_s - node.started_at_s >= LIVED_S
    if newer and (lived or seen.checkpoints != node.checkpoints_at_start):
        node = replace(node, progressed=True)
    if node.hand_over is None or node.stop is not None or not node.running:
        return node, ()
    order = node.hand_over
    if order.before is None:
        # A job without checkpoints is as far as it was in any quiescent state.
        order = replace(order, before=seen.checkpoints)
        wanted = not seen.checkpoints
    else:
        # A checkpoint that is being written makes the state that is published not quiescent, and is waited for so.
        wanted = seen.checkpoints != order.before or not order.before or _late(order, now_s)
    sync = wanted and not order.syncing
    order = replace(order, syncing=order.syncing or sync)
    return replace(node, hand_over=order), (Sync(),) if sync else ()


def _synced(node: Node, quiescent: bool, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    if node.hand_over is None:
        return node, ()
    node = replace(node, hand_over=replace(node.hand_over, syncing=False))
    late = node.hand_over is not None and _late(node.hand_over, now_s)
    return _stop(node, Stop.HAND_OVER, now_s) if quiescent or late else (node, ())


def _late(order: HandOver, now_s: float) -> bool:
    return now_s - order.since_s >= HAND_OVER_PATIENCE_S


def _ended(node: Node, end: RunEnded, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    """`run` has ended: is the job over, is something left to publish, or is it started again?"""
    if end.code == EXIT_FENCED:
        lost = _phase(node, NodePhase.LOST, now_s)
        why = end.last_words or "another node has the workspace"
        return replace(lost, report=replace(lost.report, why=why), exit=EXIT_FENCED), ()
    if not node.holds:
        return _never_began(node, end, now_s)
    if node.left is not None:
        return _finished(node, node.left, end, now_s)
    if node.stop is not None or end.code in (0, NOT_SAVED):
        left = Left(0) if node.stop is None else Left(None, node.stop.value)
        return _finished(node, left, end, now_s)
    crashes = 1 if node.progressed else node.crashes + 1
    node = replace(node, crashes=crashes)
    if crashes > node.rules.crashes_max:
        why = f"the command failed {crashes} times in a row, last with {end.code}: {end.last_words}"
        return _finished(node, Left(end.code, why), end, now_s)
    again_s = now_s + BACKOFF_S[min(crashes, len(BACKOFF_S)) - 1]
    said = f"the command ended with {end.code}; started again ({crashes} of at most {node.rules.crashes_max} in a row)"
    return replace(node, start_at_s=again_s, report=replace(node.report, why=said)), ()


def _never_began(node: Node, end: RunEnded, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    if node.stop is not None:
        return _over(node, Left(None), now_s)
    if end.code == STORE_UNREACHABLE and node.starts < START_TRIES:
        return replace(node, prefetched=False, start_at_s=now_s + BACKOFF_S[node.starts - 1]), ()
    unfit = _phase(node, NodePhase.UNFIT, now_s)
    known = end.code if end.code in NO_COMMAND else None
    why = f"spotwarp run ended with {end.code} before it held the workspace: {end.last_words}"
    return replace(unfit, report=replace(unfit.report, why=why, exit_code=known), exit=EXIT_UNFIT), ()


def _finished(node: Node, left: Left, end: RunEnded, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    """The command is over; what it left is published first, if it is not yet."""
    if end.saved:
        return _over(node, left, now_s)
    tries = node.publish_tries + 1
    node = replace(node, left=left, publish_tries=tries)
    if tries > PUBLISH_TRIES or node.stop is Stop.NOTICE:
        return _over(node, left, now_s, saved=False)
    again_s = now_s + BACKOFF_S[min(tries, len(BACKOFF_S)) - 1]
    said = f"not everything is published yet: {end.last_words}"
    return replace(node, start_at_s=again_s, report=replace(node.report, why=said)), ()


def _over(node: Node, left: Left, now_s: float, *, saved: bool = True) -> tuple[Node, tuple[Command, ...]]:
    """Nothing is left to wait for. A command that was told to stop has no exit code of its own."""
    if node.stop is Stop.UNFIT:
        return replace(node, exit=EXIT_UNFIT), ()
    exit_code, why = left.code, left.why
    if node.stop is not None and node.left is None:
        exit_code, why = None, node.stop.value
    if not saved:
        why = "; ".join(part for part in (why, "not everything is published, the rest is on this node only") if part)
    ended = _phase(node, NodePhase.ENDED, now_s)
    ended = replace(ended, report=replace(ended.report, exit_code=exit_code, why=why))
    # The code of a fenced run makes the script destroy its own rental (`core.bootstrap`).
    code = EXIT_FENCED if node.stop is Stop.END else exit_code or (0 if saved else NOT_SAVED)
    return replace(ended, exit=code), ()


def _tick(node: Node, now_s: float) -> tuple[Node, tuple[Command, ...]]:
    if node.stop is not None and node.running and now_s - node.stop_at_s >= STOP_PATIENCE_S:
        return replace(node, stop_at_s=now_s), (StopRun(kill=True),)
    if node.start_at_s is None or now_s < node.start_at_s or node.running:
        return node, ()
    started = replace(
        node, running=True, start_at_s=None, starts=node.starts + 1, started_at_s=now_s, progressed=False,
        checkpoints_at_start=None,
    )  # fmt: skip
    return started, (StartRun(publish_only=node.left is not None),)
