"""The ledger with its mirror: what was rented, what it costs, what happened. The memory of a job, on any machine.

Invariant: what `keep` was given is durable on this machine when it returns, and on its way into the store; `mirrored`
waits until it is there. What this machine and the store know is merged once, at the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import trio

from provisioner.core import cost, happenings, intents
from provisioner.core.blocklist import Blocked, Blocklist
from provisioner.core.cost import Spend
from provisioner.core.errors import LedgerCorrupt, StoreDenied, StoreUnavailable
from provisioner.core.happenings import Failover
from provisioner.core.intents import IntentRecord, IntentState, further
from provisioner.core.jobs import JobSpec, encode_spec
from provisioner.core.ports import Clock, Shelf
from provisioner.core.rendezvous import history_key, intent_key, job_prefix, spec_key
from provisioner.engine.fencing import answered
from provisioner.engine.outbox import Outbox
from provisioner.engine.ports import EnginePorts, EngineSettings, LedgerPort

READERS_MAX: Final = 16
"""Reads of the mirror at once."""
IMAGE_KEPT_S: Final = 3 * 24 * 3600.0
"""How long a host is believed to keep an image that ran on it (assumed; a wrong belief costs an order, no deadline)."""
Value = TypeVar("Value")


class Books:
    """All records of one job."""

    def __init__(self, spec: JobSpec, ports: EnginePorts, outbox: Outbox) -> None:
        self._spec = spec
        self._ledger: LedgerPort = ports.ledger
        self._shelf: Shelf = ports.shelf
        self._clock: Clock = ports.clock
        self._settings: EngineSettings = ports.settings
        self._outbox = outbox
        self.records: dict[str, IntentRecord] = {}
        self.failovers: list[Failover] = []

    async def recover(self) -> None:
        """Read ledger and mirror, keep here what only the mirror knew, and send there what only the ledger knew."""
        job = self._spec.job
        local = {record.intent.ident: record for record in self._ledger.records(job)}
        mirrored = await mirrored_records(self._shelf, job, self._settings)
        for ident in sorted({*local, *mirrored}):
            both = [record for record in (local.get(ident), mirrored.get(ident)) if record is not None]
            newest = both[0] if len(both) == 1 else further(*both)
            self.records[ident] = newest
            if newest != local.get(ident):
                self._ledger.append(job, newest)
            if newest != mirrored.get(ident):
                self._outbox.post(intent_key(job, ident), intents.encode(newest))
        await self._recover_failovers()
        self._ledger.keep_spec(self._spec)
        self._outbox.post(spec_key(job), encode_spec(self._spec))

    async def _recover_failovers(self) -> None:
        job = self._spec.job
        known = {failover.number: failover for failover in await mirrored_failovers(self._shelf, job, self._settings)}
        for failover in self._ledger.failovers(job):
            if known.get(failover.number) != failover:
                known[failover.number] = failover
                self._outbox.post(history_key(job, failover.number), happenings.encode_failover(failover))
        self.failovers = [known[number] for number in sorted(known)]
        for failover in self.failovers:
            self._ledger.add_failover(job, failover)

    def keep(self, record: IntentRecord) -> None:
        """Make *record* durable here; the mirror follows."""
        self._ledger.append(self._spec.job, record)
        self.records[record.intent.ident] = record
        self._outbox.post(intent_key(self._spec.job, record.intent.ident), intents.encode(record))

    async def mirrored(self, ident: str) -> None:
        """Wait until the store has the newest record of *ident*."""
        await self._outbox.arrived(intent_key(self._spec.job, ident))

    def keep_failover(self, failover: Failover) -> None:
        """Make one more failover durable here; the mirror follows."""
        self._ledger.add_failover(self._spec.job, failover)
        self.failovers.append(failover)
        self._outbox.post(history_key(self._spec.job, failover.number), happenings.encode_failover(failover))

    def next_number(self) -> int:
        """Return the number of the next failover."""
        return 1 + max((failover.number for failover in self.failovers), default=0)

    def block(self, entry: Blocked) -> None:
        """Leave a machine alone, in all jobs of this machine."""
        self._ledger.block(entry, self._clock.now_s())

    def blocklist(self) -> Blocklist:
        """Return what is blocked."""
        return self._ledger.blocklist()

    def unsettled(self) -> list[IntentRecord]:
        """Return every record of which something may exist."""
        return [record for record in self.records.values() if record.state is not IntentState.GONE]

    def machines_with_image(self) -> frozenset[tuple[str, str]]:
        """Return (provider, machine) of each that has run this job's image, for it or for another job of this machine.

        Only a node that was ready has run it for sure. What the host has thrown away since then is not known.
        """
        image, since_s = self._spec.image, self._clock.now_s() - IMAGE_KEPT_S
        records = list(self.records.values())
        for job in self._ledger.jobs():
            # Another job's damaged record is for its own controller to say.
            with contextlib.suppress(LedgerCorrupt):
                other = self._ledger.spec(job)
                if job != self._spec.job and other is not None and other.image == image:
                    records += self._ledger.records(job)
        return frozenset(
            (record.intent.provider, record.intent.machine_id)
            for record in records
            if record.intent.machine_id is not None and _was_ready(record) and record.at_s >= since_s
        )

    def spend(self) -> Spend:
        """Return what the job has cost until now."""
        now_s = self._clock.now_s()
        stays = [cost.stay_of(record, now_s) for record in self.records.values()]
        return cost.spend(stay for stay in stays if stay is not None)

    def usd_h(self) -> float:
        """Return what everything that may exist costs per hour."""
        return sum(record.intent.usd_h for record in self.unsettled())


def _was_ready(record: IntentRecord) -> bool:
    return record.won_at_s is not None or record.permitted_writer_epoch is not None


async def mirrored_records(shelf: Shelf, job: str, settings: EngineSettings) -> dict[str, IntentRecord]:
    """Read every intent of *job* from the store, or raise LedgerCorrupt naming the object."""
    records = await _read_all(shelf, f"{job_prefix(job)}intents/", intents.decode, settings)
    return {record.intent.ident: record for record in records}


async def mirrored_failovers(shelf: Shelf, job: str, settings: EngineSettings) -> Sequence[Failover]:
    """Read the history of *job* from the store, or raise LedgerCorrupt naming the object."""
    return await _read_all(shelf, f"{job_prefix(job)}history/", happenings.decode_failover, settings)


async def _read_all(
    shelf: Shelf, prefix: str, decode: Callable[[bytes], Value], settings: EngineSettings
) -> list[Value]:
    """Read all objects below *prefix*, several at once."""
    found: dict[str, bytes | None] = {}
    limiter = trio.CapacityLimiter(READERS_MAX)

    async def read(key: str) -> None:
        async with limiter:
            found[key] = await answered(settings, lambda: shelf.get(key))

    try:
        async with trio.open_nursery() as nursery:
            for key in await answered(settings, lambda: shelf.list(prefix)):
                nursery.start_soon(read, key)
    except BaseExceptionGroup as group:
        silent = group.split((StoreUnavailable, StoreDenied))[0]
        if silent is None:
            raise
        raise StoreUnavailable(f"{prefix} could not be read: {silent.exceptions[0]}") from None
    values = []
    for key, raw in sorted(found.items()):
        try:
            values += [] if raw is None else [decode(raw)]
        except LedgerCorrupt as error:
            raise LedgerCorrupt(f"{key}: {error}; the mirror is never guessed: repair or delete it") from error
    return values
