"""Decide which packs to condemn, delete and repack (P-13).

Two steps, never one: a published manifest condemns a pack, and at least the grace later the pack is deleted. So a
zombie's delete is always one that its successors had agreed to (C10), and whoever read an older state has had the grace
to finish. Invariants: only a serving writer collects; time is server time, counted from when the condemning manifest
was certainly published; a pack that anything reaches is neither condemned nor deleted, whatever a row says; a pack of a
higher writer epoch is never touched.

    c <pack 12> -> manifest number 8, server time of the decision (s) 8
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.reachability import PackLive
from spotwarp_fs.core.records import (
    CONDEMNED_TABLE,
    decode_u64,
    encode_u64,
    pack_from_bytes,
    pack_key_bytes,
    table_range,
)
from spotwarp_fs.core.types import ManifestNumber, PackId, WriterEpoch, pack_epoch

SKEW_S_MAX: Final = 300.0
GRACE_S: Final = 1800.0
STORED_PER_LIVE: Final = 1.3
"""P-13: after collection the store holds at most so much per live byte."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """Which manifest condemned a pack, and the server time at which its writer decided so."""

    number: ManifestNumber
    decided_s: int


def condemned_key(pack: PackId) -> bytes:
    """Key of a condemned pack's row."""
    return CONDEMNED_TABLE + pack_key_bytes(pack)


def condemned_row(number: ManifestNumber, now_s: float) -> bytes:
    """Value of the row that manifest *number* will publish."""
    return encode_u64(number) + encode_u64(int(now_s))


def condemned_in(view: KVRead) -> dict[PackId, Condemned]:
    """Read the condemned packs of a state."""
    rows = view.scan(*table_range(CONDEMNED_TABLE))
    return {
        pack_from_bytes(key, 1): Condemned(ManifestNumber(decode_u64(value)), decode_u64(value, 8))
        for key, value in rows
    }


@dataclass(frozen=True, slots=True)
class Writer:
    """Who collects."""

    writer_epoch: WriterEpoch
    serving: bool
    """Its takeover is published and it knows of no fence: a fenced or starting writer deletes nothing."""
    took_over_s: float
    """Server time at which its takeover was published."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything a plan is made from; all of it of one published head."""

    head: ManifestNumber
    """The last manifest that this writer is certain to have published."""
    stored: Mapping[PackId, int]
    """The listing: bytes of each pack."""
    live: Mapping[PackId, PackLive]
    """Reached by the head and the retained states, fresh pins of readers and metadata included."""
    condemned: Mapping[PackId, Condemned]
    """As the *published* head has it, not as the next cut may."""
    held: Set[PackId] = field(default_factory=frozenset)
    """Referred to by this writer's live map, frozen cut or uploaded frames, or needed by salvage (C9)."""
    unnamed: Set[PackId] = field(default_factory=frozenset)
    """Packs of this session that no manifest has named yet, started uploads included."""
    published_s: Mapping[ManifestNumber, float] = field(default_factory=dict)
    """Server time of this writer's own publishes; what is not here was published before the takeover."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing may be collected now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What the collector does, in this order; every set is disjoint from the others."""

    delete: frozenset[PackId]
    """Condemned long enough ago. Afterwards their rows go, with the next cut."""
    forget: frozenset[PackId]
    """Rows of packs that the store no longer has."""
    condemn: frozenset[PackId]
    """New rows for the next cut, if they are still unheld in the transaction that writes them."""
    repack: tuple[PackId, ...]
    """Whose frames of the head are to be copied, least live first; condemned later, when nothing reaches them."""
    disputed: frozenset[PackId]
    """Condemned and yet reached, as by a reader's pin: they stay. If it is the head that reaches one, warn."""
    stored_bytes: int
    live_bytes: int
    """The two sides of P-13 before repacking; packs of the grace period and of the cut in progress are on neither."""


def plan(
    inventory: Inventory, writer: Writer, *, now_s: float, skew_s: float, grace_s: float = GRACE_S
) -> Plan | Refused:
    """Plan one collection; *now_s* is server time, *skew_s* how far the node's clock is from it."""
    if not writer.serving:
        return Refused("this writer is starting, or another writer took the workspace over")
    if abs(skew_s) > SKEW_S_MAX:
        return Refused(
            f"this node's clock and the store's are {skew_s:.0f} s apart, at most {SKEW_S_MAX:.0f} s are allowed"
        )
    reached = {pack for pack, live in inventory.live.items() if live.retained_bytes or live.anchored}
    kept = reached | inventory.held | inventory.unnamed
    kept |= {pack for pack in inventory.stored if pack_epoch(pack) > writer.writer_epoch}
    rows = inventory.condemned
    due = {
        pack
        for pack, row in rows.items()
        if pack not in kept and row.number <= inventory.head and now_s - _known_since(row, inventory, writer) >= grace_s
    }
    stored = set(inventory.stored)
    repack, stored_bytes, live_bytes = _repacking(inventory, kept)
    return Plan(
        delete=frozenset(due & stored),
        forget=frozenset(due - stored),
        condemn=frozenset(stored - kept - rows.keys()),
        repack=repack,
        disputed=frozenset(rows.keys() & kept),
        stored_bytes=stored_bytes,
        live_bytes=live_bytes,
    )


def _known_since(row: Condemned, inventory: Inventory, writer: Writer) -> float:
    """Server time by which the condemnation was certainly published: a publish may wait for hours in an outage."""
    return max(float(row.decided_s), inventory.published_s.get(row.number, writer.took_over_s))


def _repacking(inventory: Inventory, kept: Set[PackId]) -> tuple[tuple[PackId, ...], int, int]:
    """Choose packs, least live first, until what stays is within P-13; returns them and both sides before that.

    A pack that the head does not reach any more leaves by itself when the states that reach it do, so it counts on
    neither side: else each collection would repack more on account of what the last one had emptied.
    """
    counted: dict[PackId, tuple[int, int]] = {}
    for pack, size in inventory.stored.items():
        live = inventory.live.get(pack)
        if live is None or pack not in kept or pack in inventory.unnamed or pack in inventory.condemned:
            continue
        if live.anchored:
            counted[pack] = (size, size)
        elif live.head_bytes:
            counted[pack] = (size, min(size, live.retained_bytes))
    stored_bytes = sum(size for size, _ in counted.values())
    live_bytes = sum(live for _, live in counted.values())
    chosen: list[PackId] = []
    left = stored_bytes
    for pack in sorted(counted, key=lambda pack: (counted[pack][1] / max(1, counted[pack][0]), pack)):
        size, live_here = counted[pack]
        if left <= STORED_PER_LIVE * live_bytes or live_here >= size:
            break
        chosen.append(pack)
        left -= size - live_here
    return tuple(chosen), stored_bytes, live_bytes
