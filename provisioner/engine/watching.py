"""The node that holds the workspace: what was seen of it, and what that amounts to.

Invariant: a verdict of health needs a heartbeat that moved while this controller watched; a controller that has just
started knows nothing yet, and calls nobody healthy or lost for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from provisioner.core import detect
from provisioner.core.detect import (
    DetectSettings,
    EndSeen,
    HeartbeatRead,
    NoticeSeen,
    ProviderSaid,
    StoreFailed,
    Verdict,
    Watch,
)
from provisioner.core.intents import IntentRecord
from provisioner.core.ports import Instance
from provisioner.core.rendezvous import NodePhase, Report
from provisioner.engine.ports import Listing

NO_HEARTBEAT = "(none)"
"""The token of a writer that has left none: it stands still like any other."""

DUE_SHARE: Final = 2 / 3
BEAT_SHARE: Final = 0.8
"""A little before a heartbeat is due, because reads come every other second."""


@dataclass(slots=True)
class Holder:
    """The node of one intent, from when it is known to hold the workspace."""

    ident: str | None
    """None = somebody who was not rented for this job."""
    settings: DetectSettings
    watch: Watch = field(init=False)
    moved: bool = False
    """Whether its heartbeat moved while it was watched."""
    beat_s: float = 0.0
    """Between its last two heartbeats, as they were seen."""
    ran: bool = False
    """Whether it was heard to run the command: what it says of an earlier phase after that is a new life."""
    report: Report | None = None
    instance: Instance | None = None
    """As its provider showed it last."""

    def __post_init__(self) -> None:
        self.watch = Watch(settings=self.settings)

    def heartbeat(self, asked_at_s: float, token: str | None) -> None:
        """The store answered."""
        seen = NO_HEARTBEAT if token is None else token
        if self.watch.token not in (None, seen) and asked_at_s > self.watch.read_at_s:
            if self.moved:
                self.beat_s = asked_at_s - self.watch.changed_at_s
            self.moved = True
        self.watch = self.watch.observe(HeartbeatRead(asked_at_s, seen))

    def silence(self, asked_at_s: float) -> None:
        """The store did not answer."""
        self.watch = self.watch.observe(StoreFailed(asked_at_s))

    def listing(self, record: IntentRecord, listing: Listing) -> None:
        """Its provider showed, or did not show it."""
        rows = [one for one in listing.instances if one.instance_id in record.instances]
        rows = rows or [one for one in listing.instances if one.label.strip() == record.intent.label]
        status = rows[0].status if rows else None
        if listing.asked_at_s > self.watch.provider_asked_at_s:
            self.instance = rows[0] if rows else None
        self.watch = self.watch.observe(ProviderSaid(listing.asked_at_s, status))

    def reported(self, report: Report, now_s: float) -> None:
        """It spoke."""
        self.report = report
        self.ran = self.ran or report.phase is NodePhase.RUNNING
        if report.notice_ends_at_s is not None:
            self.watch = self.watch.observe(NoticeSeen(now_s, report.notice_ends_at_s))
        if report.phase is NodePhase.ENDED:
            self.watch = self.watch.observe(EndSeen(now_s))

    @property
    def overdue(self) -> bool:
        """Whether the next heartbeat is due: from now on the provider's word is urgent."""
        due_s = max(self.settings.overdue_s * DUE_SHARE, self.beat_s * BEAT_SHARE)
        return self.watch.stale_s >= due_s

    def verdict(self, now_s: float) -> Verdict:
        """Say what is known of it now."""
        return detect.judge(self.watch, now_s)

    @property
    def last_alive_s(self) -> float:
        """The newest moment at which it was seen to live; minus infinity when it never was."""
        return self.watch.changed_at_s
