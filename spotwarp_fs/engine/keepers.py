"""What others have asked the collector to keep: pins of readers, and salvage (H6, H14, L14).

Invariant: fail closed. A pin or salvage that cannot be understood ends the collection; only one that is proven absent,
or too old by the store's clock, counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import Corrupt, NotFound
from spotwarp_fs.core.ports import Lane, ObjectStore
from spotwarp_fs.core.types import ManifestNumber, ObjectKey
from spotwarp_fs.engine.reader import PIN_FRESH_S

PIN_FORGOTTEN_S = 86_400.0
"""A reader that was killed leaves its pin behind; after so long it is swept away."""
SALVAGE_STATE = "state"
"""Object of a salvage that says which manifest its blocks are completed from."""


async def pinned_by_readers(store: ObjectStore) -> set[ManifestNumber]:
    """Give the states that readers have open."""
    found: set[ManifestNumber] = set()
    forgotten: list[ObjectKey] = []
    async for info in store.list_objects(layout.PINS_PREFIX, lane=Lane.CONTROL):
        age_s = info.server_time_s - info.modified_s
        if age_s > PIN_FORGOTTEN_S:
            forgotten.append(info.key)
        if age_s <= PIN_FRESH_S:
            number = await _number(store, info.key)
            if number is not None:
                found.add(number)
    if forgotten:
        await store.delete(forgotten, lane=Lane.CONTROL)
    return found


async def needed_by_salvage(store: ObjectStore) -> set[ManifestNumber]:
    """Give the states that salvage in the store is completed from, however old it is: it stays until dropped."""
    places: set[str] = set()
    async for info in store.list_objects(layout.SALVAGE_PREFIX, lane=Lane.CONTROL):
        places.add(info.key.removeprefix(layout.SALVAGE_PREFIX).split("/", 1)[0])
    found: set[ManifestNumber] = set()
    for place in sorted(places):
        key = ObjectKey(f"{layout.SALVAGE_PREFIX}{place}/{SALVAGE_STATE}")
        number = await _number(store, key)
        if number is None:
            raise Corrupt(f"salvage {place} does not say which state it needs ({key} is missing): nothing is collected")
        found.add(number)
    return found


async def _number(store: ObjectStore, key: ObjectKey) -> ManifestNumber | None:
    try:
        body = (await store.get(key, lane=Lane.CONTROL)).body
    except NotFound:
        return None
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise Corrupt(f"{key} is not JSON, so nothing is collected: {body[:60]!r}") from error
    number = fields.get("number") if isinstance(fields, Mapping) else None
    if not isinstance(number, int) or number < 1:
        raise Corrupt(f"{key} names no manifest, so nothing is collected: {body[:60]!r}")
    return ManifestNumber(number)
