"""What a session says about itself: the figures of `status`.

Invariant: a figure that is not known is None; ages are of trio's clock on this node, or of the store's own clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

from spotwarp_fs.core.ports import Work
from spotwarp_fs.core.status import InFlightItem, SafeCheckpoint, Status, Totals
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.dirty import dirty_bytes
from spotwarp_fs.engine.newest import newest_checkpoint
from spotwarp_fs.engine.session import Session

RATE_WINDOW_S = 30.0
SAMPLE_PERIOD_S = 1.0
RPO_SLACK_S = 5.0
"""While the upload keeps up, no unpublished write is older than the interval and this (P-04)."""
HISTORY_S = 1800.0
"""How far back the counters are known."""
BEST_RATE_S = 600.0
"""What the link has taken within this time, it can take again: the base of the drain's estimate."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at a moment."""

    at_s: float
    written: int
    sent: int


class Reporter:
    """Keeps rates, and remembers the newest safe checkpoint per head."""

    def __init__(self, session: Session, *, workspace_name: str, store_url: str, read_only: bool = False) -> None:
        self._session = session
        self._name = workspace_name
        self._store_url = store_url
        self._read_only = read_only
        self._samples: deque[Sample] = deque(maxlen=int(HISTORY_S / SAMPLE_PERIOD_S))
        self._sent_rates: deque[float] = deque(maxlen=int(BEST_RATE_S / SAMPLE_PERIOD_S))
        self._safe: tuple[ManifestNumber, tuple[str, int, ManifestNumber] | None] | None = None

    async def run(self) -> None:
        """Sample the counters."""
        while True:
            self._samples.append(self._sample())
            self._sent_rates.append(self._rates(RATE_WINDOW_S)[1])
            await trio.sleep(SAMPLE_PERIOD_S)

    def _sample(self) -> Sample:
        session = self._session
        return Sample(trio.current_time(), session.workspace.bytes_written, session.packs.bytes_uploaded)

    def _rates(self, window_s: float) -> tuple[float, float]:
        """Bytes per second written by programs and sent to the store, over the window."""
        now = self._sample()
        back = min(len(self._samples), round(window_s / SAMPLE_PERIOD_S))
        oldest = self._samples[-back] if back else now
        seconds = max(now.at_s - oldest.at_s, SAMPLE_PERIOD_S)
        return (now.written - oldest.written) / seconds, (now.sent - oldest.sent) / seconds

    def _falling_behind(self) -> tuple[float, float] | None:
        """The rates since the oldest unpublished write, if the link took less than was written; None if it keeps up.

        In an outage nothing is too fast for the link.
        """
        session, rpo_s = self._session, self.rpo_s()
        keeps_up = rpo_s <= session.workspace.intervals.longest_s + RPO_SLACK_S
        if keeps_up or not session.health.reachable or session.workspace.fenced is not None:
            return None
        produced, sent = self._rates(max(rpo_s, RATE_WINDOW_S))
        return (produced, sent) if produced > sent else None

    def rpo_s(self) -> float:
        """Age of the oldest acknowledged change that no manifest has."""
        session = self._session
        known = [session.streamer.cutting_since_s, session.workspace.oldest_unpublished_s]
        ages = [trio.current_time() - since for since in known if since is not None]
        return max(ages, default=0.0)

    async def status(self) -> Status:
        """Gather everything."""
        session, ws = self._session, self._session.workspace
        head = session.streamer.head.manifest
        behind = self._falling_behind()
        produced, sent = behind or self._rates(RATE_WINDOW_S)
        dirty = dirty_bytes(ws)
        published_s = session.streamer.last_published_s
        now = trio.current_time()
        return Status(
            workspace=self._name,
            store=self._store_url,
            form="fuse",
            mode="reader" if self._read_only else "writer",
            head_number=head.number,
            head_age_s=now - published_s if published_s is not None else now - session.started_s,
            writer_epoch=head.writer_epoch,
            session=head.session,
            rpo_seconds=self.rpo_s(),
            dirty_bytes=dirty,
            unpublished_bytes=dirty + session.sealer.bytes_unnamed,
            drain_eta_seconds=self._drain_eta_s(dirty),
            newest_safe_checkpoint=await self._newest_safe(),
            produced_bytes_per_s=produced,
            sent_bytes_per_s=sent,
            falling_behind=behind is not None,
            cache_used_bytes=session.budget.used_bytes,
            cache_budget_bytes=session.budget.limit_bytes,
            in_flight=tuple(
                InFlightItem(item.path.decode(errors="replace"), item.kind, item.torn) for item in head.in_flight
            ),
            fenced=ws.fenced is not None,
            salvage=session.salvager.progress.describe() if ws.fenced is not None else None,
            read_only=self._read_only or ws.fenced is not None,
            store_reachable=session.health.reachable,
            store_error=session.health.last_error or (ws.reports[-1] if ws.reports else None),
            last_publish_s=now - published_s if published_s is not None else None,
            notices=ws.notices,
            hydration=session.warmer.progress() if session.claimed.taken_over else None,
            readers_waiting=session.hydrator.readers_waiting,
            files=ws.files,
            logical_bytes=ws.logical_bytes,
            totals=Totals(
                ws.bytes_written,
                session.packs.bytes_uploaded,
                session.packs.bytes_fetched,
                session.sealer.frames_deduplicated,
            ),
        )

    def _drain_eta_s(self, dirty: int) -> float | None:
        """How long the link takes for what is dirty; None until it was seen to take anything."""
        best = max(self._sent_rates, default=0.0)
        return 0.0 if not dirty else dirty / best if best > 0 else None

    async def _newest_safe(self) -> SafeCheckpoint | None:
        """The newest complete checkpoint in the head, found again only when the head has moved."""
        session, ws = self._session, self._session.workspace
        head = session.streamer.head.manifest
        if self._safe is None or self._safe[0] != head.number:
            snapshot = ws.kv.snapshot()
            try:
                unsafe = {item.ino for item in head.in_flight}
                found = await ws.workers.run(Work.DISK, newest_checkpoint, snapshot, ws.policies, unsafe)
            finally:
                snapshot.close()
            name = "" if found is None else found.path.decode(errors="replace")
            self._safe = head.number, None if found is None else (name, found.mtime_ns, head.number)
        if self._safe[1] is None:
            return None
        name, mtime_ns, number = self._safe[1]
        return SafeCheckpoint(name, max(0.0, (ws.wall.now_ns() - mtime_ns) / 1e9), number)
