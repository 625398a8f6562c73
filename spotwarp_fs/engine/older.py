"""Older published states as views, beside the live map: what a takeover may go back to or take from.

A state is the base of its manifest with the changes after it laid on top; states with one base share its map.
Invariant: a view holds published values (a block is its FrameRef), and block maps only of the inodes that
`load_blocks` was asked for; nothing here touches the live map.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from spotwarp_fs.core.changesets import ChangeSet, fold
from spotwarp_fs.core.ports import KVRead, KVSnapshot, KVStore, ObjectStore
from spotwarp_fs.core.records import BLOCK_TABLE, ino_range, key_ino
from spotwarp_fs.core.sections import Root, SectionKind
from spotwarp_fs.core.types import Inode, ManifestNumber
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.load import RECORDS_PER_STEP, read_change_sets, read_patiently
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX, Metadata
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.publish import Head


class NotLoaded(Exception):
    """A view was asked for before its state was read; carries which."""

    def __init__(self, number: ManifestNumber) -> None:
        super().__init__(f"state {number} is not loaded")
        self.number = number


class Layered:
    """A view with changes on top; None in a change hides what lies below."""

    def __init__(self, below: KVRead, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        self._below = below
        self._changes = dict(changes)
        self._keys = sorted(self._changes)

    def lay(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put more changes on top."""
        self._changes.update(changes)
        self._keys = sorted(self._changes)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of *key*, or None."""
        return self._changes[key] if key in self._changes else self._below.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Give keys in `[start, stop)` in order."""
        at = bisect_left(self._keys, start)
        last = len(self._keys) if stop is None else bisect_left(self._keys, stop)
        for key, value in self._below.scan(start, stop):
            while at < last and self._keys[at] < key:
                yield from self._change(self._keys[at])
                at += 1
            if at < last and self._keys[at] == key:
                continue  # its change comes in the next round, or at the end
            yield key, value
        for fresh in self._keys[at:last]:
            yield from self._change(fresh)

    def _change(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        value = self._changes[key]
        if value is not None:
            yield key, value


@dataclass(slots=True)
class _Base:
    root: Root | None
    kv: KVStore
    view: KVSnapshot

    def block_rows(self) -> list[tuple[bytes, bytes]]:
        """Block rows of a base that is so small that it lies in its root."""
        changes = self.root.records.changes if self.root is not None and not self.root.sections else ()
        return [(key, value) for key, value in changes if key[:1] == BLOCK_TABLE and value is not None]


@dataclass(slots=True)
class OlderState:
    """One state."""

    number: ManifestNumber
    view: Layered
    _base: _Base
    _after: ChangeSet
    """The fold of all changes after the base."""
    _metadata: Metadata
    _loaded: set[Inode] = field(default_factory=set)

    async def load_blocks(self, inodes: Iterable[Inode]) -> None:
        """Read the block maps of *inodes* into the view."""
        wanted = set(inodes) - self._loaded
        rows: dict[bytes, bytes | None] = {}
        rows.update(await self._base_rows(wanted))
        for drop in self._after.drops:
            if drop.ino in wanted:
                rows = {key: value for key, value in rows.items() if not drop.start <= key < drop.stop}
        for key, value in self._after.changes:
            if key[:1] == BLOCK_TABLE and key_ino(key) in wanted:
                rows[key] = value
        self.view.lay(rows)
        self._loaded |= wanted

    async def _base_rows(self, wanted: set[Inode]) -> list[tuple[bytes, bytes]]:
        found = [(key, value) for key, value in self._base.block_rows() if key_ino(key) in wanted]
        sections = self._base.root.sections if self._base.root is not None else ()
        ranges = [ino_range(BLOCK_TABLE, ino) for ino in wanted]
        for section in sections:
            if section.kind is not SectionKind.BLOCKS:
                continue
            if any(section.last_key >= start and section.first_key < stop for start, stop in ranges):
                puts = await self._metadata.section_puts(section)
                found += [(key, value) for key, value in puts if key_ino(key) in wanted]
        return found


class OlderStates:
    """Reads states and keeps them while a takeover is being decided."""

    def __init__(
        self, store: ObjectStore, metadata: Metadata, health: StoreHealth, fresh_map: Callable[[], KVStore]
    ) -> None:
        self._store = store
        self._metadata = metadata
        self._health = health
        self._fresh_map = fresh_map
        self._heads: dict[ManifestNumber, Head] = {}
        self._change_sets: dict[ManifestNumber, ChangeSet] = {}
        self._bases: dict[ManifestNumber, _Base] = {}
        self._states: dict[ManifestNumber, OlderState] = {}

    def note(self, head: Head, change_set: ChangeSet | None = None) -> None:
        """Remember what was read elsewhere."""
        self._heads[head.manifest.number] = head
        if change_set is not None:
            self._change_sets[head.manifest.number] = change_set

    def known(self, number: ManifestNumber) -> Head | None:
        """Return a manifest if it was read."""
        return self._heads.get(number)

    async def manifests(self, numbers: Iterable[int]) -> list[Head]:
        """Read manifests, several at once."""

        async def one(number: int) -> Head:
            known = self._heads.get(ManifestNumber(number))
            if known is None:
                known = await read_patiently(self._store, ManifestNumber(number), self._health)
                self._heads[known.manifest.number] = known
            return known

        return await each(one, numbers, limit=FETCH_PARALLEL_MAX)

    async def change_sets(self, after: int, upto: int) -> list[ChangeSet]:
        """Read the change sets of the manifests *after* + 1 … *upto*."""
        heads = await self.manifests(range(after + 1, upto + 1))
        missing = [head for head in heads if head.manifest.number not in self._change_sets]
        for head, found in zip(missing, await read_change_sets(self._metadata, missing), strict=True):
            self._change_sets[head.manifest.number] = found
        return [self._change_sets[head.manifest.number] for head in heads]

    async def load(self, number: ManifestNumber) -> OlderState:
        """Read the names of a state."""
        known = self._states.get(number)
        if known is not None:
            return known
        manifest = (await self.manifests([number]))[0].manifest
        base = await self._base_of(number)
        after = fold(await self.change_sets(manifest.base_number, number))
        tree = ((key, value) for key, value in after.changes if key[:1] != BLOCK_TABLE)
        state = OlderState(number, Layered(base.view, tree), base, after, self._metadata)
        self._states[number] = state
        return state

    def view(self, number: ManifestNumber) -> KVRead:
        """Give a state that was loaded, or raise NotLoaded."""
        state = self._states.get(number)
        if state is None:
            raise NotLoaded(number)
        return state.view

    async def _base_of(self, number: ManifestNumber) -> _Base:
        manifest = (await self.manifests([number]))[0].manifest
        known = self._bases.get(manifest.base_number)
        if known is not None:
            return known
        root = await self._metadata.root(manifest.base) if manifest.base is not None else None
        kv = self._fresh_map()
        for puts in await self._metadata.tree_puts(root) if root is not None else ():
            tree = [(key, value) for key, value in puts if key[:1] != BLOCK_TABLE]
            for at in range(0, len(tree), RECORDS_PER_STEP):
                with kv.write() as txn:
                    for key, value in tree[at : at + RECORDS_PER_STEP]:
                        txn.put(key, value)
        base = self._bases[manifest.base_number] = _Base(root, kv, kv.snapshot())
        return base

    def close(self) -> None:
        """Let go of everything read."""
        for base in self._bases.values():
            base.view.close()
            base.kv.close()
        self._bases.clear()
        self._states.clear()
        self._change_sets.clear()
