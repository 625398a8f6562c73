"""When a node counts as lost: two signals, and silence when the store cannot be read.

A false takeover is worse than a late one: it throws away what a living node has not published. So:

- The node's own word (its command ended, or it was given notice) counts at once.
- *Confirmed loss*: the provider says that the instance does not run, and the heartbeat has stopped as well. The second
  condition costs 12 s and makes a provider's lagging or wrong word harmless.
  Candidates already boot when one heartbeat is overdue: their boot is what takes long, and only a claim does harm.
- *Stale heartbeat alone*: starts a race at 15 s, and claims only at 75 s, which outlasts a store outage of 60 s and
  the node's way back. A heartbeat that moves again cancels the race.
- If the controller cannot read the store it decides nothing.

Staleness is not the age of the last heartbeat: it counts only time in which the controller itself read the store and
saw no change. An outage that both see therefore counts for nothing, nor do the first 15 s after it, in which the node
finds its way back; and a controller that slept has seen nothing.

Invariant: `judge` depends on what was observed and on *now_s* alone; observations may come twice or out of order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import assert_never

from provisioner.core.ports import InstanceStatus


@dataclass(frozen=True, slots=True)
class DetectSettings:
    """Limits, in seconds."""

    race_after_s: float = 15.0
    claim_after_s: float = 75.0
    confirm_stale_s: float = 12.0
    """A lost instance's heartbeat must have stopped for this long: two heartbeats (5 s apart) and a read."""
    overdue_s: float = 6.0
    """One heartbeat is overdue: with the provider's word, candidates may boot."""
    after_outage_s: float = 15.0
    """So long after an outage of the store staleness does not grow: the node's own retries pause up to 10 s."""
    counted_gap_s: float = 5.0
    """Between two reads of the store at most this much counts as seen; reads come every 2 s."""
    blind_after_s: float = 10.0
    """Without a successful read for this long the controller cannot see the store."""
    absences_needed: int = 2
    """Listings in a row without the instance: one row may be missing."""
    provider_fresh_s: float = 30.0
    """A provider's word older than this says nothing about now."""


@dataclass(frozen=True, slots=True)
class HeartbeatRead:
    """The store answered; *token* changes with each heartbeat (its ETag or its sequence number)."""

    at_s: float
    token: str


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store did not answer."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ProviderSaid:
    """A listing's word on the node; *status* None = the listing did not show it."""

    asked_at_s: float
    status: InstanceStatus | None


@dataclass(frozen=True, slots=True)
class NoticeSeen:
    """The node was told by its provider that it ends at *ends_at_s*, and drains until then."""

    at_s: float
    ends_at_s: float


@dataclass(frozen=True, slots=True)
class EndSeen:
    """The node's own last word in the store: its `run` has ended and left the workspace."""

    at_s: float


Observation = HeartbeatRead | StoreFailed | ProviderSaid | NoticeSeen | EndSeen


@dataclass(frozen=True, slots=True)
class Watch:
    """What has been observed of one node, reduced to what a verdict needs."""

    token: str | None = None
    read_at_s: float = float("-inf")
    """The newest successful read of the store."""
    changed_at_s: float = float("-inf")
    """The read that first showed the present token."""
    stale_s: float = 0.0
    """Seen staleness: the sum of counted gaps since the last change."""
    pause_s: float = 0.0
    """What is left of `after_outage_s`."""
    failed_since_read: bool = False
    provider_asked_at_s: float = float("-inf")
    provider_status: InstanceStatus | None = None
    absences: int = 0
    notice_ends_at_s: float | None = None
    ended: bool = False
    settings: DetectSettings = field(default_factory=DetectSettings)

    def observe(self, seen: Observation) -> Watch:
        """Return the watch with *seen* added; what is older than what is known changes nothing."""
        match seen:
            case HeartbeatRead():
                return self._read(seen)
            case StoreFailed(at_s):
                return replace(self, failed_since_read=True) if at_s > self.read_at_s else self
            case ProviderSaid():
                return self._provider(seen)
            case NoticeSeen(_, ends_at_s):
                return replace(self, notice_ends_at_s=ends_at_s)
            case EndSeen():
                return replace(self, ended=True)
            case _:
                assert_never(seen)

    def _read(self, seen: HeartbeatRead) -> Watch:
        if seen.at_s <= self.read_at_s:
            return self
        if seen.token != self.token:
            return replace(
                self,
                token=seen.token,
                read_at_s=seen.at_s,
                changed_at_s=seen.at_s,
                stale_s=0.0,
                pause_s=0.0,
                failed_since_read=False,
            )
        gap_s = seen.at_s - self.read_at_s
        if self.failed_since_read and gap_s > self.settings.counted_gap_s:
            # The store was out: the heartbeat was refused just as the reads were, so this time proves nothing.
            pause_s = self.settings.after_outage_s
            return replace(self, read_at_s=seen.at_s, pause_s=pause_s, failed_since_read=False)
        counted_s = min(gap_s, self.settings.counted_gap_s)
        paused_s = min(counted_s, self.pause_s)
        return replace(
            self,
            read_at_s=seen.at_s,
            stale_s=self.stale_s + counted_s - paused_s,
            pause_s=self.pause_s - paused_s,
            failed_since_read=False,
        )

    def _provider(self, seen: ProviderSaid) -> Watch:
        if seen.asked_at_s <= self.provider_asked_at_s:
            return self
        gone = seen.status in (None, InstanceStatus.GONE)
        absences = self.absences + 1 if gone else 0
        return replace(self, provider_asked_at_s=seen.asked_at_s, provider_status=seen.status, absences=absences)


class Health(Enum):
    """What a watch amounts to."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """A race may boot candidates; claiming is not allowed yet."""
    LOST = "lost"
    """Claiming is allowed."""
    BLIND = "blind"
    """The controller does not see the store: it decides nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about it, and why."""

    health: Health
    why: str

    @property
    def race(self) -> bool:
        """Tell whether candidates should boot."""
        return self.health in (Health.SUSPECT, Health.LOST)

    @property
    def claim(self) -> bool:
        """Tell whether they may claim."""
        return self.health is Health.LOST


def judge(watch: Watch, now_s: float) -> Verdict:
    """Say what is known about the node at *now_s*."""
    settings = watch.settings
    silent_s = now_s - watch.read_at_s
    if silent_s > settings.blind_after_s or watch.token is None:
        known = "never" if watch.token is None else f"{silent_s:.0f} s ago"
        return Verdict(Health.BLIND, f"the heartbeat was last read {known}: nothing is decided without the store")
    if watch.ended:
        return Verdict(Health.LOST, "the node said that it has ended")
    if watch.notice_ends_at_s is not None:
        return _noticed(watch, watch.notice_ends_at_s, now_s)
    said = _provider_says_lost(watch, now_s)
    if said and watch.stale_s >= settings.confirm_stale_s:
        return Verdict(Health.LOST, f"{said}, and its heartbeat stands still for {watch.stale_s:.0f} s")
    if watch.stale_s >= settings.claim_after_s:
        return Verdict(Health.LOST, f"its heartbeat stands still for {watch.stale_s:.0f} s")
    if said and watch.stale_s >= settings.overdue_s:
        return Verdict(Health.SUSPECT, f"{said}, and its heartbeat stands still for {watch.stale_s:.0f} s")
    if watch.stale_s >= settings.race_after_s:
        left_s = settings.claim_after_s - watch.stale_s
        return Verdict(Health.SUSPECT, f"its heartbeat stands still for {watch.stale_s:.0f} s; lost in {left_s:.0f} s")
    seen = f"its heartbeat was not seen to stand still for more than {watch.stale_s:.0f} s"
    return Verdict(Health.HEALTHY, f"{said}, but {seen}" if said else seen)


def _noticed(watch: Watch, ends_at_s: float, now_s: float) -> Verdict:
    """A notice: candidates boot at once, and claim when the node's time to drain is over and it is silent."""
    if now_s < ends_at_s:
        return Verdict(Health.SUSPECT, f"the node was given notice and drains for {ends_at_s - now_s:.0f} s more")
    if watch.stale_s >= watch.settings.confirm_stale_s:
        return Verdict(Health.LOST, "the node's notice has run out, and its heartbeat stands still")
    # Providers take notices back: candidates are not ready before a node that did die has been silent long enough.
    return Verdict(Health.SUSPECT, "the node's notice has run out, but its heartbeat moved lately")


def _provider_says_lost(watch: Watch, now_s: float) -> str:
    """Return what the provider says if it means that no process of the node lives; empty otherwise."""
    if now_s - watch.provider_asked_at_s > watch.settings.provider_fresh_s:
        return ""
    if watch.absences >= watch.settings.absences_needed:
        return f"the provider does not show it ({watch.absences} listings)"
    if watch.provider_status in (InstanceStatus.STOPPED, InstanceStatus.FAILED):
        return f"the provider says {watch.provider_status.value}"
    return ""
