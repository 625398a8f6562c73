"""One step of a race under construction: candidates change, commands collect, the ledger follows each phase.

Invariant: every change of what a crash must not forget has its `Record` before the command that depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from provisioner.core import blocklist
from provisioner.core.intents import Intent, IntentRecord, IntentState, advanced
from provisioner.core.offers import Offer
from provisioner.core.race.messages import Announce, Block, Command, Create, Destroy, Permit, Record
from provisioner.core.race.state import Candidate, Outcome, Phase, Race

NOTES_MAX: Final = 20


class Turn:
    """A race that is being stepped; `finish` gives the new state and what is to be done."""

    def __init__(self, race: Race, now_s: float) -> None:
        self.race = race
        self.now_s = now_s
        self.candidates = dict(race.candidates)
        self.commands: list[Command] = []

    def finish(self) -> tuple[Race, tuple[Command, ...]]:
        """Return the state after this step, checked, and its commands in the order they must be carried out."""
        race = replace(self.race, candidates=self.candidates)
        winners = [c.ident for c in race.candidates.values() if c.phase is Phase.WINNER]
        assert len(winners) <= 1, f"two winners: {winners}"
        assert race.outcome is not Outcome.WON or winners, "won by nobody"
        assert not winners or race.outcome is not Outcome.RUNNING, f"{winners[0]} won a race that goes on"
        return race, tuple(self.commands)

    def set(self, **changes: object) -> None:
        """Change fields of the race itself."""
        self.race = replace(self.race, **changes)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        """Remember why there is no winner yet, and tell the user."""
        self.commands.append(Announce(text))
        self.set(notes=(*self.race.notes, text)[-NOTES_MAX:])

    def put(self, candidate: Candidate, state: IntentState | None = None, *, why: str = "") -> Candidate:
        """Keep *candidate*; with a *state*, its ledger record follows."""
        if state is not None:
            record = advanced(candidate.record, state, self.now_s, why=why)
            candidate = replace(candidate, record=record)
            self.commands.append(Record(record))
        self.candidates[candidate.ident] = candidate
        return candidate

    def saw(self, candidate: Candidate, *instances: str) -> Candidate:
        """Remember that these instances exist or existed under the candidate's label."""
        if set(instances) <= set(candidate.record.instances):
            return candidate
        record = candidate.record
        record = advanced(record, record.state, record.at_s, instances=instances)
        return replace(candidate, record=record)

    def launch(self, intent: Intent, offer: Offer, *, boot_by_s: float, ends_by_s: float) -> Candidate:
        """Write the intent of a new candidate, and send its create."""
        record = IntentRecord(intent, IntentState.WRITTEN, self.now_s)
        self.commands.append(Record(record))
        self.commands.append(Create(intent, offer))
        return self.put(
            Candidate(
                record,
                Phase.REQUESTED,
                deadline_s=self.now_s + self.race.settings.deadlines.requested_s,
                boot_by_s=boot_by_s,
                ends_by_s=ends_by_s,
                offer=offer,
                charged_from_s=self.now_s,
            )
        )

    def boots(self, candidate: Candidate) -> Candidate:
        """An instance exists under its label: it boots, or is reaped if it must not go on."""
        if candidate.doomed:
            return self.reap(candidate, candidate.doomed)
        candidate = replace(candidate, phase=Phase.BOOTING, absences=0, deadline_s=candidate.boot_by_s)
        return self.put(candidate, IntentState.RENTED)

    def settles(self, candidate: Candidate, why: str) -> Candidate:
        """Its create's outcome is unknown: listings decide, from when they must show it."""
        seen_by_s = self.now_s + self.race.settings.visible_s(candidate.provider)
        candidate = replace(candidate, phase=Phase.SETTLING, deadline_s=None, absences=0, absent_asked_at_s=seen_by_s)
        return self.put(candidate, IntentState.UNKNOWN, why=why)

    def permit(self, candidate: Candidate) -> Candidate:
        """Let a ready candidate claim: recorded before the node can know it, so no crash forgets who may have won."""
        writer_epoch = self.race.head_writer_epoch + 1
        deadline_s = self.now_s + self.race.settings.deadlines.claiming_s
        record = replace(candidate.record, permitted_writer_epoch=writer_epoch)
        candidate = replace(candidate, record=record, phase=Phase.CLAIMING, deadline_s=deadline_s)
        candidate = self.put(candidate, IntentState.CLAIMING)
        self.commands.append(Permit(candidate.ident, writer_epoch))
        return candidate

    def drop(self, candidate: Candidate, why: str) -> Candidate:
        """End a candidate, whatever it is doing; what may exist without our knowing is settled first."""
        if candidate.phase in (Phase.REQUESTED, Phase.SETTLING):
            if candidate.record.instances:
                return self.reap(candidate, why)
            return self.put(replace(candidate, doomed=candidate.doomed or why))
        if candidate.rebid and self.race.settings.keep_lost_s > 0:
            return self.keep(candidate, why)
        return self.reap(candidate, why)

    def keep(self, candidate: Candidate, why: str) -> Candidate:
        """Keep a lost node for salvage, with a deadline."""
        deadline_s = self.now_s + self.race.settings.keep_lost_s
        kept = replace(candidate, phase=Phase.KEPT, deadline_s=deadline_s, charged_until_s=self.now_s)
        return self.put(kept, IntentState.KEPT, why=why)

    def reap(self, candidate: Candidate, why: str) -> Candidate:
        """Destroy every instance of the candidate, and go on until listings prove that none is left."""
        assert candidate.phase is not Phase.WINNER, f"{candidate.ident} has won and would be destroyed: {why}"
        retry_at_s = self.now_s + self.race.settings.deadlines.reap_retry_s
        launched = candidate.offer is not None
        charged_from_s = candidate.record.intent.written_at_s if launched else candidate.charged_from_s
        candidate = replace(
            candidate,
            phase=Phase.REAPING,
            charged_from_s=charged_from_s,
            deadline_s=None,
            absences=0,
            acked=frozenset(),
            retry_at_s=retry_at_s,
            charged_until_s=None,
        )
        candidate = self.put(candidate, IntentState.REAPING, why=why)
        self.destroy(candidate)
        return candidate

    def destroy(self, candidate: Candidate) -> None:
        """Ask for the end of each instance of which it is not accepted yet."""
        for instance_id in candidate.record.instances:
            if instance_id not in candidate.acked:
                self.commands.append(Destroy(candidate.ident, candidate.provider, instance_id))

    def gone(self, candidate: Candidate, why: str, *, existed: bool) -> Candidate:
        """Settle an intent: nothing of it exists. What never existed was never charged."""
        charged_from_s = candidate.charged_from_s if existed else None
        ended = replace(
            candidate,
            phase=Phase.GONE,
            deadline_s=None,
            charged_from_s=charged_from_s,
            charged_until_s=self.now_s,
        )
        return self.put(ended, IntentState.GONE, why=why)

    def block(self, candidate: Candidate, why: str, *, machine: bool) -> None:
        """Leave the offer, or the machine behind it, alone for a while."""
        if candidate.offer is None:
            return
        blamed = blocklist.broken if machine else blocklist.taken
        entry = blamed(candidate.offer, why, self.now_s)
        self.set(blocklist=self.race.blocklist.with_entry(entry, self.now_s))
        self.commands.append(Block(entry))

    def decide(self, outcome: Outcome, why: str) -> None:
        """End the race; whoever may still win is dropped."""
        self.set(outcome=outcome, why=why, offers=(), search_at_s=None, search_deadline_s=None)
        for candidate in tuple(self.candidates.values()):
            if candidate.phase in (Phase.REQUESTED, Phase.SETTLING, Phase.BOOTING, Phase.READY, Phase.CLAIMING):
                self.drop(candidate, why)
