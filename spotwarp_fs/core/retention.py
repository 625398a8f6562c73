"""Decide which published states stay whole, and when a state must be kept because its successor looks like a wipe.

Retained: the head, the newest quiescent state, the last hour, named and pinned states, what readers have pinned, and,
for each thing that the head or the newest quiescent state lists as half done, the newest state in which it was not: so
there is always something to replace it by, also when its mark never ends (L8). Invariant: a state that this module once
let go is never asked for again, since its packs may be gone. (A listed path stays listed in every state from the one
after its source on; so its source has been retained ever since it was the head.)

    r pin  <manifest number 8> -> until, server time (s) 8     P-18: kept although nothing else asks for it
    r keep <manifest number 8> -> ""                           older than the base: where a fresh node finds its sources
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol

from spotwarp_fs.core.manifests import InFlightItem
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import RETENTION_TABLE, SNAPSHOT_TABLE, decode_u64, encode_u64, table_range
from spotwarp_fs.core.types import ManifestNumber

RECENT_S: Final = 3600.0
PIN_S: Final = 7 * 86_400
PINS_MAX: Final = 3
WIPE_FILES_MIN: Final = 8
WIPE_BYTES_MIN: Final = 1 << 20
"""Smaller losses are no wipe. The floor does not save space: it saves the three pins, which a few empty directories and
scratch notes would otherwise push out after a real wipe."""

_PIN: Final = RETENTION_TABLE + b"pin"
_KEEP: Final = RETENTION_TABLE + b"keep"


class State(Protocol):
    """What is decided from a manifest; `core.manifests.Manifest` is one."""

    @property
    def number(self) -> ManifestNumber:
        """Its number."""
        ...

    @property
    def created_s(self) -> float:
        """Server time at which it was made."""
        ...

    @property
    def in_flight(self) -> tuple[InFlightItem, ...]:
        """What was half done at its cut."""
        ...

    @property
    def barrier(self) -> bool:
        """It answered a sync, a drain or a remote fsync."""
        ...

    @property
    def quiescent(self) -> bool:
        """Nothing but torn things is in flight."""
        ...


class Counters(Protocol):
    """The size of a state; `core.manifests.Manifest` is one."""

    @property
    def files(self) -> int:
        """Names of files."""
        ...

    @property
    def logical_bytes(self) -> int:
        """Sum of their sizes."""
        ...


class Reason(Enum):
    """Why a state is retained."""

    HEAD = "head"
    QUIESCENT = "newest quiescent"
    SOURCE = "has the last complete version of something half done"
    RECENT = "last hour"
    NAMED = "named"
    PINNED = "pinned"
    READER = "a reader has it open"


def retained(
    states: Sequence[State],
    now_s: float,
    *,
    named: Iterable[ManifestNumber] = (),
    pins: Mapping[ManifestNumber, float] | None = None,
    readers: Iterable[ManifestNumber] = (),
    recent_s: float | None = None,
) -> dict[ManifestNumber, set[Reason]]:
    """Tell which states stay, and why.

    *states* holds the head, everything younger than *recent_s* (an hour), and everything that was retained before (more
    is fine); *now_s* is server time; *pins* maps to the end of the pin; *readers* are the fresh pins of readers.
    """
    recent_s = RECENT_S if recent_s is None else recent_s
    head = max(states, key=lambda state: state.number)
    quiescent = newest_quiescent(states)
    reasons: list[tuple[Reason, Iterable[ManifestNumber]]] = [
        (Reason.HEAD, (head.number,)),
        (Reason.QUIESCENT, (quiescent.number,) if quiescent is not None else ()),
        (Reason.SOURCE, _sources(head, states)),
        (Reason.SOURCE, _sources(quiescent, states) if quiescent is not None else ()),
        (Reason.RECENT, (state.number for state in states if now_s - state.created_s <= recent_s)),
        (Reason.NAMED, named),
        (Reason.PINNED, (number for number, until_s in (pins or {}).items() if now_s < until_s)),
        (Reason.READER, readers),
    ]
    keep: dict[ManifestNumber, set[Reason]] = {}
    for reason, numbers in reasons:
        for number in numbers:
            keep.setdefault(number, set()).add(reason)
    return keep


def _sources(served: State, states: Sequence[State]) -> Iterator[ManifestNumber]:
    for item in served.in_flight:
        source = source_of(item.path, states, upto=served.number)
        if source is not None:
            yield source


def newest_quiescent(states: Iterable[State]) -> State | None:
    """Return the newest state with nothing in flight."""
    return max((s for s in states if s.quiescent), key=lambda state: state.number, default=None)


def source_of(path: bytes, states: Iterable[State], *, upto: ManifestNumber) -> ManifestNumber | None:
    """Return the newest state, at most *upto*, in which nothing at, above or below *path* was half done.

    The thing at *path* is whole there, or absent.
    """
    whole = (s.number for s in states if s.number <= upto and not touches(s.in_flight, path))
    return max(whole, default=None)


def touches(items: Iterable[InFlightItem], path: bytes) -> bool:
    """Tell whether any of *items* is *path*, lies in it, or has it inside."""
    return any(within(item.path, path) or within(path, item.path) for item in items)


def within(path: bytes, directory: bytes) -> bool:
    """Tell whether *path* is *directory* or lies in it.

    >>> within(b"a/b", b"a"), within(b"ab", b"a"), within(b"a", b"a")
    (True, False, True)
    """
    return path == directory or path.startswith(directory + b"/")


def would_wipe(before: Counters, after: Counters) -> bool:
    """Tell whether *before* must be pinned because *after* has fewer than half its files or bytes (P-18)."""
    if after.files == 0:
        return before.files > 0
    files_lost = before.files - after.files
    bytes_lost = before.logical_bytes - after.logical_bytes
    return (after.files * 2 < before.files and files_lost >= WIPE_FILES_MIN) or (
        after.logical_bytes * 2 < before.logical_bytes and bytes_lost >= WIPE_BYTES_MIN
    )


def names_in(view: KVRead) -> dict[bytes, ManifestNumber]:
    """Read the snapshot names."""
    rows = view.scan(*table_range(SNAPSHOT_TABLE))
    return {key[1:]: ManifestNumber(decode_u64(value)) for key, value in rows}


def pins_in(view: KVRead) -> dict[ManifestNumber, float]:
    """Read the pins and when they end."""
    return {number: float(decode_u64(value)) for number, value in _rows(view, _PIN)}


def keeps_in(view: KVRead) -> set[ManifestNumber]:
    """Read which states older than the base are still needed."""
    return {number for number, _ in _rows(view, _KEEP)}


def _rows(view: KVRead, prefix: bytes) -> list[tuple[ManifestNumber, bytes]]:
    stop = prefix[:-1] + bytes([prefix[-1] + 1])
    return [(ManifestNumber(decode_u64(key, len(prefix))), value) for key, value in view.scan(prefix, stop)]


def pin(view: KVRead, number: ManifestNumber, now_s: float) -> dict[bytes, bytes | None]:
    """Give the row changes that pin *number* for seven days and let the oldest and the ended pins go."""
    before = pins_in(view)
    after = {n: until for n, until in before.items() if now_s < until} | {number: float(int(now_s) + PIN_S)}
    after = {n: after[n] for n in sorted(after, reverse=True)[:PINS_MAX]}
    changes: dict[bytes, bytes | None] = {_PIN + encode_u64(n): None for n in before if n not in after}
    for kept, until_s in after.items():
        if before.get(kept) != until_s:
            changes[_PIN + encode_u64(kept)] = encode_u64(int(until_s))
    return changes


def ended_pins(view: KVRead, now_s: float) -> dict[bytes, bytes | None]:
    """Give the row changes that remove pins whose time is over."""
    return {_PIN + encode_u64(n): None for n, until_s in pins_in(view).items() if now_s >= until_s}


def keep_changes(
    view: KVRead, keep: Mapping[ManifestNumber, set[Reason]], base_number: ManifestNumber
) -> dict[bytes, bytes | None]:
    """Give the row changes that let a fresh node find the states it may have to serve from.

    It reads the manifests from the base on anyway; rows are kept only for older ones, so they change rarely.
    """
    wanted = {
        number
        for number, reasons in keep.items()
        if number < base_number and reasons & {Reason.QUIESCENT, Reason.SOURCE}
    }
    before = keeps_in(view)
    changes: dict[bytes, bytes | None] = {_KEEP + encode_u64(number): None for number in before - wanted}
    changes |= {_KEEP + encode_u64(number): b"" for number in wanted - before}
    return changes
