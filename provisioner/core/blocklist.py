"""Machines that failed, and for how long they are left alone; kept across runs.

Where a provider hides the machine (RunPod v2), all it can say is region and GPU: those are blocked, for an hour only,
since good machines share them. Invariant: entries only ever expire; adding one never shortens another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Final

from provisioner.core.errors import LedgerCorrupt
from provisioner.core.offers import Offer

VERSION: Final = 1
MACHINE_BLOCKED_S: Final = 24 * 3600.0
"""A machine with a wrong driver or a dead GPU stays so for a day (assumed; third parties use an hour to a day)."""
PLACE_BLOCKED_S: Final = 3600.0
OFFER_BLOCKED_S: Final = 120.0
"""An offer that was just taken by somebody else may come back soon."""
ENTRIES_MAX: Final = 2000


class Scope(Enum):
    """What an entry speaks of."""

    MACHINE = "machine"
    PLACE = "place"
    """A region and a GPU model of one provider."""
    OFFER = "offer"


@dataclass(frozen=True, slots=True)
class Blocked:
    """One entry."""

    provider: str
    scope: str
    subject: str
    until_s: float
    why: str

    def applies(self, offer: Offer, now_s: float) -> bool:
        """Tell whether *offer* is to be left alone."""
        if now_s >= self.until_s or offer.provider != self.provider:
            return False
        return (self.scope, self.subject) in _subjects(offer)


def _subjects(offer: Offer) -> tuple[tuple[str, str], ...]:
    place = f"{offer.location} {offer.gpu}"
    subjects = [(Scope.PLACE.value, place), (Scope.OFFER.value, f"{offer.offer_id} {offer.market.value}")]
    if offer.machine_id is not None:
        subjects.append((Scope.MACHINE.value, offer.machine_id))
    return tuple(subjects)


def broken(offer: Offer, why: str, now_s: float) -> Blocked:
    """Block the machine behind *offer* after it failed: booted wrongly, never booted, or failed a check."""
    if offer.machine_id is not None:
        return Blocked(offer.provider, Scope.MACHINE.value, offer.machine_id, now_s + MACHINE_BLOCKED_S, why)
    return Blocked(offer.provider, Scope.PLACE.value, f"{offer.location} {offer.gpu}", now_s + PLACE_BLOCKED_S, why)


def taken(offer: Offer, why: str, now_s: float) -> Blocked:
    """Block one offer for a short while after its create was refused: nothing is wrong with the machine."""
    subject = f"{offer.offer_id} {offer.market.value}"
    return Blocked(offer.provider, Scope.OFFER.value, subject, now_s + OFFER_BLOCKED_S, why)


@dataclass(frozen=True, slots=True)
class Blocklist:
    """All entries that still hold."""

    entries: tuple[Blocked, ...] = ()

    def with_entry(self, entry: Blocked, now_s: float) -> Blocklist:
        """Add *entry*, keeping the later end where the subject is blocked already; drop what has expired."""
        kept: dict[tuple[str, str, str], Blocked] = {}
        for one in (*self.entries, entry):
            key = (one.provider, one.scope, one.subject)
            if one.until_s > now_s and (key not in kept or kept[key].until_s < one.until_s):
                kept[key] = one
        latest = sorted(kept.values(), key=lambda one: (-one.until_s, one.provider, one.scope, one.subject))
        return Blocklist(tuple(latest[:ENTRIES_MAX]))

    def blocks(self, offer: Offer, now_s: float) -> Blocked | None:
        """Return the entry that blocks *offer* for longest, or None."""
        found = [entry for entry in self.entries if entry.applies(offer, now_s)]
        return max(found, key=lambda entry: entry.until_s, default=None)

    def allowed(self, offers: Iterable[Offer], now_s: float) -> tuple[Offer, ...]:
        """Return the *offers* that nothing blocks, in their order."""
        return tuple(offer for offer in offers if self.blocks(offer, now_s) is None)


def encode(blocklist: Blocklist) -> bytes:
    """Write the list for the ledger."""
    document = {"version": VERSION, "blocked": [asdict(entry) for entry in blocklist.entries]}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def decode(body: bytes) -> Blocklist:
    """Read what `encode` wrote, or raise LedgerCorrupt."""
    try:
        document = json.loads(body)
        version = document["version"]
        entries = tuple(Blocked(**entry) for entry in document["blocked"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerCorrupt(f"the blocklist cannot be read: {error}") from error
    if version != VERSION:
        raise LedgerCorrupt(f"the blocklist has version {version}, this program reads {VERSION}: use a newer one")
    return Blocklist(entries)
