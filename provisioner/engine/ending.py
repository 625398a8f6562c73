"""The end of a job: the node publishes, everything is destroyed and verified gone, and what is left is named.

Invariant: once it has begun it only goes forward; nothing of it needs the store.
"""

from __future__ import annotations

from provisioner.core.detect import Health
from provisioner.core.happenings import JobEnd
from provisioner.core.race.messages import Cancel
from provisioner.core.race.state import SETTLED, Candidate
from provisioner.core.rendezvous import NodePhase
from provisioner.engine.racing import Driver, Kit, NodeOrders
from provisioner.engine.watching import Holder


class Ending:
    """One job's end, under way."""

    def __init__(
        self, kit: Kit, driver: Driver, orders: NodeOrders, exit_code: int, why: str, publishes: str | None
    ) -> None:
        """Begin it; *publishes* is the node that is asked to publish and stop first, if any."""
        self._kit = kit
        self._driver = driver
        self._orders = orders
        self._exit_code = exit_code
        self._why = why
        self._settings = kit.ports.settings
        now_s = kit.now_s()
        self._destroy_at_s = now_s if publishes is None else now_s + self._settings.grace_s
        self._until_s = float("inf")
        self._destroying = False
        kit.say(f"the job ends: {why}")
        if publishes is not None:
            orders.change(publishes, hand_over=True)
            driver.step(Cancel(why))

    def decide(self, holder: Holder, now_s: float) -> JobEnd | None:
        """Take the next step; return the end when there is nothing left to do, or no time."""
        if not self._destroying:
            report = holder.report
            ended = report is not None and report.phase in (NodePhase.ENDED, NodePhase.LOST, NodePhase.UNFIT)
            if report is not None and ended and report.exit_code is not None:
                self._exit_code = report.exit_code
            if ended or now_s >= self._destroy_at_s or holder.verdict(now_s).health is Health.LOST:
                self._destroy(now_s)
            return None
        if self._driver.race.done:
            return self._end(())
        return self._end(self._orphans()) if now_s > self._until_s else None

    def _destroy(self, now_s: float) -> None:
        self._destroying = True
        self._until_s = now_s + self._settings.teardown_s
        for record in self._kit.books.unsettled():
            # Should its provider not answer, the node itself still can.
            self._orders.change(record.intent.ident, end=True)
        self._driver.step(Cancel(self._why, everything=True))

    def _orphans(self) -> tuple[str, ...]:
        left = [c for c in self._driver.race.candidates.values() if c.phase not in SETTLED]
        return tuple(f"{c.provider} {_named(c)} ({c.record.intent.label})" for c in left)

    def _end(self, orphans: tuple[str, ...]) -> JobEnd:
        spend = self._kit.books.spend()
        failovers = tuple(self._kit.books.failovers)
        return JobEnd(self._exit_code, self._why, failovers, spend.nodes_usd, spend.racing_usd, orphans)


def _named(candidate: Candidate) -> str:
    return ", ".join(candidate.record.instances) or "unknown instance"
