"""Find the published state that somebody asks for: by rule, number, name or time.

Invariant: nothing here depends on a listing. Manifests are dense and permanent, so a number is looked up and a time is
found by halving; snapshot names are rows of the head's map, since a name may have been given long after its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import trio

from spotwarp_fs.core.errors import NotFound
from spotwarp_fs.core.layout import manifest_key
from spotwarp_fs.core.manifests import NO_MANIFEST
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.records import SNAPSHOT_TABLE, decode_u64, table_range
from spotwarp_fs.core.sections import Root, SectionKind
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.core.units import format_duration
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import read_chain, read_change_sets
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX, Metadata
from spotwarp_fs.engine.publish import Head, read_manifest


@dataclass(frozen=True, slots=True)
class Latest:
    """The head."""


@dataclass(frozen=True, slots=True)
class Quiescent:
    """The newest state with nothing in flight."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """One state by its manifest's number."""

    number: ManifestNumber


@dataclass(frozen=True, slots=True)
class Named:
    """A snapshot."""

    name: bytes


@dataclass(frozen=True, slots=True)
class AtTime:
    """The newest state that was published by then, in seconds of the store's clock since the epoch."""

    time_s: float


@dataclass(frozen=True, slots=True)
class Ago:
    """The newest state that is at least so old by the store's clock."""

    age_s: float


StateWish = Latest | Quiescent | Numbered | Named | AtTime | Ago


async def find_state(
    store: ObjectStore, metadata: Metadata, health: StoreHealth, head: Head, now_s: float, wish: StateWish
) -> Head:
    """Return the manifest that *wish* means under *head*; *now_s* is the store's clock. Raises NotFound."""
    match wish:
        case Latest():
            return head
        case Quiescent():
            return await _quiescent(store, head)
        case Numbered(number):
            return await _numbered(store, head, number)
        case Named(name):
            return await _named(store, metadata, health, head, name)
        case AtTime(time_s):
            return await _at_time(store, head, time_s)
        case Ago(age_s):
            return await _at_time(store, head, now_s - age_s)
    assert_never(wish)


async def snapshot_names(
    store: ObjectStore, metadata: Metadata, health: StoreHealth, head: Head
) -> dict[bytes, ManifestNumber]:
    """Read the snapshot names of *head* without loading its tree."""
    start, stop = table_range(SNAPSHOT_TABLE)
    rows: dict[bytes, bytes] = {}
    if head.manifest.base is not None:
        root = await metadata.root(head.manifest.base)
        rows = {key: value for key, value in await _puts(metadata, root, start, stop) if start <= key < stop}
    chain = await read_chain(store, head, health, head.manifest.base_number)
    for change_set in await read_change_sets(metadata, chain):
        for key, value in change_set.changes:
            if start <= key < stop:
                if value is None:
                    rows.pop(key, None)
                else:
                    rows[key] = value
    return {key[1:]: ManifestNumber(decode_u64(value)) for key, value in rows.items()}


async def _puts(metadata: Metadata, root: Root, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
    if not root.sections:
        return [(key, value) for key, value in root.records.changes if value is not None]
    found = []
    for section in root.sections:
        if section.kind is SectionKind.TREE and section.last_key >= start and section.first_key < stop:
            found += await metadata.section_puts(section)
    return found


async def _quiescent(store: ObjectStore, head: Head) -> Head:
    """Go back from the head, some manifests at a time."""
    if head.manifest.quiescent:
        return head
    upto = head.manifest.number - 1
    while upto > NO_MANIFEST:
        numbers = range(upto, max(NO_MANIFEST, upto - FETCH_PARALLEL_MAX), -1)
        found: dict[int, Head] = {}

        async def one(number: int, into: dict[int, Head]) -> None:
            into[number] = (await read_manifest(store, ManifestNumber(number)))[0]

        async with trio.open_nursery() as nursery:
            for number in numbers:
                nursery.start_soon(one, number, found)
        for number in numbers:
            if found[number].manifest.quiescent:
                return found[number]
        upto = numbers[-1] - 1
    raise NotFound("something was in flight in every state")


async def _numbered(store: ObjectStore, head: Head, number: ManifestNumber) -> Head:
    newest = head.manifest.number
    if not NO_MANIFEST < number <= newest:
        raise NotFound(f"there is no manifest {number}: they go from 1 to {newest}")
    return head if number == newest else (await read_manifest(store, number))[0]


async def _named(store: ObjectStore, metadata: Metadata, health: StoreHealth, head: Head, name: bytes) -> Head:
    names = await snapshot_names(store, metadata, health, head)
    number = names.get(name)
    if number is None:
        raise unknown_snapshot(name, names)
    return await _numbered(store, head, number)


def unknown_snapshot(name: bytes, names: dict[bytes, ManifestNumber]) -> NotFound:
    """Say that there is no snapshot of this name, and which there are."""
    known = ", ".join(sorted(other.decode("utf-8", "replace") for other in names)) or "none"
    return NotFound(f"there is no snapshot {name.decode('utf-8', 'replace')!r}; there are: {known}")


async def _at_time(store: ObjectStore, head: Head, time_s: float) -> Head:
    """Halve the numbers: the times of manifests rise with them, but for the skew of a store's own servers."""
    if head.manifest.created_s <= time_s:
        return head
    first = await store.head(manifest_key(ManifestNumber(1)))
    if time_s < first.modified_s:
        later = format_duration(first.modified_s - time_s)
        raise NotFound(f"no state is that old: the first was published {later} later")
    low, high = 1, int(head.manifest.number)
    found: Head | None = None
    while high - low > 1:
        middle = (low + high) // 2
        candidate, _ = await read_manifest(store, ManifestNumber(middle))
        if candidate.manifest.created_s <= time_s:
            low, found = middle, candidate
        else:
            high = middle
    return found if found is not None else (await read_manifest(store, ManifestNumber(1)))[0]
