"""Read what the store knows of a job; nothing else is needed to show it, from any machine.

Invariant: read only. What cannot be read of one job is an error of that job's, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from provisioner.core import intents, rendezvous
from provisioner.core.cost import Spend, spend, stay_of
from provisioner.core.happenings import Failover, decode_failover
from provisioner.core.intents import IntentRecord, IntentState
from provisioner.core.jobs import JobSpec, decode_spec
from provisioner.core.rendezvous import BadMessage, Controller, Report

JOBS_MAX: Final = 1000
READ_AT_ONCE: Final = 16
HELD: Final = (IntentState.WINNER,)
UNDER_WAY: Final = (IntentState.WRITTEN, IntentState.UNKNOWN, IntentState.RENTED, IntentState.CLAIMING)


class Reads(Protocol):
    """What reading needs of a `Shelf`."""

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None."""
        ...

    async def list(self, prefix: str) -> Sequence[str]:
        """Return every key below *prefix*."""
        ...


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job as the store shows it."""

    job: str
    spec: JobSpec | None = None
    controller: Controller | None = None
    records: tuple[IntentRecord, ...] = ()
    reports: dict[str, Report] = field(default_factory=dict)
    """By intent."""
    failovers: tuple[Failover, ...] = ()

    @property
    def holder(self) -> IntentRecord | None:
        """The node that holds the workspace, as the ledger's mirror knows it."""
        held = [record for record in self.records if record.state in HELD]
        return max(held, key=lambda record: record.at_s, default=None)

    @property
    def racing(self) -> tuple[IntentRecord, ...]:
        """Candidates that are under way."""
        return tuple(record for record in self.records if record.state in UNDER_WAY)

    @property
    def unsettled(self) -> tuple[IntentRecord, ...]:
        """Everything that may be billed: all but what is verified gone."""
        return tuple(record for record in self.records if record.state is not IntentState.GONE)

    @property
    def ended(self) -> Report | None:
        """The last word of a node whose command ended for good, when nothing is under way any more."""
        if self.unsettled:
            return None
        ends = [report for report in self.reports.values() if report.exit_code is not None]
        return max(ends, key=lambda report: max(report.times.values(), default=0.0), default=None)

    def spent(self, now_s: float) -> Spend:
        """What it has cost, as far as the records know."""
        stays = [stay for record in self.records if (stay := stay_of(record, now_s)) is not None]
        return spend(stays)


async def job_names(shelf: Reads) -> tuple[str, ...]:
    """Name the jobs of a store."""
    keys = await shelf.list(rendezvous.JOBS_PREFIX)
    found = {key.removeprefix(rendezvous.JOBS_PREFIX).split("/")[0] for key in keys}
    return tuple(sorted(found))[:JOBS_MAX]


async def read_job(shelf: Reads, job: str) -> JobFacts:
    """Read one job, or raise StoreUnavailable, StoreDenied, BadMessage, LedgerCorrupt or BadWish."""
    prefix = rendezvous.job_prefix(job)
    keys = await shelf.list(prefix)
    wanted = [key for key in keys if _wanted(key.removeprefix(prefix))]
    bodies: dict[str, bytes] = {}
    limit = trio.CapacityLimiter(READ_AT_ONCE)

    async def read(key: str) -> None:
        async with limit:
            if (body := await shelf.get(key)) is not None:
                bodies[key] = body

    async with trio.open_nursery() as nursery:
        for key in wanted:
            nursery.start_soon(read, key)
    return facts_of(job, bodies)


def _wanted(rest: str) -> bool:
    if rest in ("spec", "controllers/alive"):
        return True
    return rest.startswith(("intents/", "history/")) or rest.endswith("/report")


def facts_of(job: str, bodies: dict[str, bytes]) -> JobFacts:
    """Decode the bodies of one job, by key."""
    prefix = rendezvous.job_prefix(job)
    spec = bodies.get(rendezvous.spec_key(job))
    alive = bodies.get(rendezvous.alive_key(job))
    records = [intents.decode(body) for key, body in sorted(bodies.items()) if key.startswith(f"{prefix}intents/")]
    history = [decode_failover(body) for key, body in sorted(bodies.items()) if key.startswith(f"{prefix}history/")]
    reports: dict[str, Report] = {}
    for key, body in bodies.items():
        if key.endswith("/report"):
            try:
                report = rendezvous.decode(Report, body)
            except BadMessage:
                continue  # a node of another version: shown without its words
            reports[report.ident] = report
    return JobFacts(
        job=job,
        spec=None if spec is None else decode_spec(spec),
        controller=None if alive is None else rendezvous.decode(Controller, alive),
        records=tuple(sorted(records, key=lambda record: (record.intent.written_at_s, record.intent.ident))),
        reports=reports,
        failovers=tuple(sorted(history, key=lambda one: one.number)),
    )
