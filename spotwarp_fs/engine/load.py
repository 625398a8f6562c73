"""Bring a published state onto an empty node: names at once, block maps later.

Invariant: parent digests are checked along the loaded chain; a 404 under an unchanged head is damage, under a moved
one it means "start over" (H6). The map holds exactly the state of the manifest when `load_state` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeVar

import trio

from spotwarp_fs.core.changes import SEQ_KEY
from spotwarp_fs.core.changesets import ChangeSet, fold
from spotwarp_fs.core.errors import Corrupt, Denied, NotFound, Unavailable
from spotwarp_fs.core.manifests import check_successor, encode
from spotwarp_fs.core.ports import KVWrite, ObjectStore
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    BlockState,
    EntryRecord,
    FrameRef,
    FrameState,
    NodeTable,
    encode_u64,
    ino_range,
    key_ino,
    key_name,
    name_key,
)
from spotwarp_fs.core.sections import Root
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.engine.blockmaps import apply_cutoff
from spotwarp_fs.engine.health import StoreHealth
from spotwarp_fs.engine.metadata import FETCH_PARALLEL_MAX, Metadata
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.publish import Head, read_manifest
from spotwarp_fs.engine.workspace import Workspace

T = TypeVar("T")

HEAD_KEY = NodeTable.META + b"head"
"""Body of the manifest that the map stands on."""
BASE_KEY = NodeTable.META + b"base"
"""FrameRef of the root in which unloaded block maps lie."""
RECORDS_PER_STEP = 5_000


@dataclass(frozen=True, slots=True)
class LoadedState:
    """What was loaded, besides the map."""

    head: Head
    base: Root | None
    change_sets: tuple[ChangeSet, ...]
    """Of the manifests after the base, in order."""


async def read_chain(store: ObjectStore, head: Head, health: StoreHealth, after: ManifestNumber) -> list[Head]:
    """Read the manifests *after* + 1 … head and check that each names its parent."""

    async def one(number: int) -> Head:
        return await read_patiently(store, ManifestNumber(number), health)

    chain = [*await each(one, range(after + 1, head.manifest.number), limit=FETCH_PARALLEL_MAX), head]
    for parent, child in pairwise(chain):
        check_successor(parent.manifest, child.manifest, parent_digest=parent.digest)
    return chain


async def read_patiently(store: ObjectStore, number: ManifestNumber, health: StoreHealth) -> Head:
    """Read a manifest that must exist, waiting out an outage."""
    while True:
        try:
            return (await read_manifest(store, number))[0]
        except (Unavailable, Denied) as error:
            await health.failed(error)
        except NotFound as error:
            raise Corrupt(f"manifest {number} is missing from the store, though later ones exist") from error


async def read_change_sets(metadata: Metadata, chain: list[Head]) -> tuple[ChangeSet, ...]:
    """Read what each manifest of *chain* changed, several at once."""

    async def one(link: Head) -> ChangeSet:
        return await metadata.change_set(link.manifest)

    return tuple(await each(one, chain, limit=FETCH_PARALLEL_MAX))


async def load_state(
    workspace: Workspace, store: ObjectStore, metadata: Metadata, health: StoreHealth, head: Head
) -> LoadedState:
    """Fill the empty map with the state of *head*; several requests at once, cost in proportion to names (P-07)."""
    manifest = head.manifest
    await clear_map(workspace)
    chain = await read_chain(store, head, health, manifest.base_number)
    base = await metadata.root(manifest.base) if manifest.base is not None else None
    ordered = await read_change_sets(metadata, chain)
    await apply_chain(workspace, metadata, base, ordered)
    with workspace.kv.write() as txn:
        txn.put(SEQ_KEY, encode_u64(manifest.change_seq))
        remember_head(txn, head)
    return LoadedState(head, base, ordered)


async def apply_chain(
    workspace: Workspace, metadata: Metadata, base: Root | None, change_sets: Sequence[ChangeSet]
) -> None:
    """Put a base's names and the changes after it into the empty map.

    Blocks of a base that lies in its root are folded with the changes: a frame that the state does not have must not be
    found by its digest, for its pack may be gone (C10).
    """
    small: list[ChangeSet] = []
    if base is not None:
        parts = [ChangeSet((), puts) for puts in await metadata.tree_puts(base)]
        if base.sections:
            for part in parts:
                await apply_state(workspace, part)
        else:
            small = parts
    await apply_state(workspace, fold([*small, *change_sets]))


async def clear_map(workspace: Workspace) -> None:
    """Take away what a load (or the making of the workspace) that was cut short has left: it may be another state's."""
    while True:
        with workspace.kv.write() as txn:
            rows = (key for key, _ in txn.scan(b"") if key[:1] != NodeTable.META)
            keys = list(islice(rows, RECORDS_PER_STEP))
            for key in keys:
                txn.delete(key)
        if not keys:
            return
        await trio.lowlevel.checkpoint()


def remember_head(txn: KVWrite, head: Head) -> None:
    """Note the manifest that the map stands on, and its base: no kill may come between the two."""
    txn.put(HEAD_KEY, encode(head.manifest))
    if head.manifest.base is not None:
        txn.put(BASE_KEY, head.manifest.base.encode())
    else:
        txn.delete(BASE_KEY)


async def apply_state(workspace: Workspace, change_set: ChangeSet) -> None:
    """Put published records into the map, in steps that leave the loop room."""
    for batch in _batches(change_set.drops):
        with workspace.kv.write() as txn:
            for drop in batch:
                for key, _ in list(txn.scan(drop.start, ino_range(BLOCK_TABLE, drop.ino)[1])):
                    txn.delete(key)
                apply_cutoff(txn, drop.ino, drop.first_block)
        await trio.lowlevel.checkpoint()
    for changes in _batches(change_set.changes):
        with workspace.kv.write() as txn:
            for key, value in changes:
                apply_published(txn, key, value)
        await trio.lowlevel.checkpoint()


def apply_published(txn: KVWrite, key: bytes, value: bytes | None) -> None:
    """Apply one published record, with what the node derives from it."""
    table = key[:1]
    if table == ENTRY_TABLE:
        before = txn.get(key)
        if before is not None:
            txn.delete(name_key(EntryRecord.decode(before).ino, key_ino(key), key_name(key)))
        if value is not None:
            txn.put(name_key(EntryRecord.decode(value).ino, key_ino(key), key_name(key)), b"")
    if table == BLOCK_TABLE:
        _apply_block(txn, key, value)
    elif value is None:
        txn.delete(key)
    else:
        txn.put(key, value)


def _apply_block(txn: KVWrite, key: bytes, value: bytes | None) -> None:
    if value is None:
        txn.put(key, b"")  # a hole over a base that may say otherwise
        return
    frame = FrameRef.decode(value)
    txn.put(key, BlockState(local=False, state=FrameState.PUBLISHED, frame=frame).encode())
    txn.put(NodeTable.DEDUP + frame.digest, value)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, RECORDS_PER_STEP)):
        yield batch
