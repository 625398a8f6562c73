"""What a fenced writer sets aside in the store: the two small objects that describe it, and which paths it concerns.

    salvage/<writer epoch, 8 hex>-<session>/
        state                   created first: which manifest it completes, whose it is; keeps that manifest's packs
        packs/<2 hex>/<pack>    frames and metadata, in the pack format
        content                 created last: where the change set lies; without it the salvage was cut short

Both objects are JSON and never replaced, so that a request that arrives late changes nothing. Invariant: nothing below
`salvage/` is ever named by a manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotwarp_fs.core import paths
from spotwarp_fs.core.changesets import ChangeSet
from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.layout import FORMAT_VERSION, SALVAGE_PREFIX, newer_format, pack_key
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    XATTR_TABLE,
    FrameRef,
    InodeRecord,
    NodeTable,
    inode_key,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.scratch import is_scratch, is_scratch_name, published
from spotwarp_fs.core.types import ROOT_INODE, Inode, ManifestNumber, ObjectKey, PackId, WriterEpoch

STATE_NAME: Final = "state"
CONTENT_NAME: Final = "content"
DAMAGED_NAMED_MAX: Final = 1000
_PLACE: Final = re.compile(r"[0-9a-f]{8}-[a-z0-9._-]+")
_DIRECTORY: Final = 0o040000
_FORMAT_BITS: Final = 0o170000


@dataclass(frozen=True, slots=True)
class SalvageState:
    """Whose unpublished work it is, and which state it continues."""

    number: ManifestNumber
    """The last manifest that its writer published."""
    digest: str
    """Of that manifest's body."""
    writer_epoch: WriterEpoch
    session: str
    workspace_id: str
    host: str
    mountpoint: str
    reason: str
    created_s: float
    """Server time."""
    files: int
    unpublished_bytes: int

    def encode(self) -> bytes:
        """Write the object's body."""
        return _encode({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class SalvageContent:
    """Where everything lies."""

    root: FrameRef
    packs: tuple[PackId, ...]
    """The packs below the salvage's own prefix; all others are the workspace's."""
    created_s: float
    damaged: tuple[str, ...] = ()
    """Paths of files of which some blocks could neither be read on the node nor fetched: there they have holes."""

    def encode(self) -> bytes:
        """Write the object's body."""
        return _encode(
            {
                "root": self.root.encode().hex(),
                "packs": list(self.packs),
                "created_s": self.created_s,
                "damaged": list(self.damaged[:DAMAGED_NAMED_MAX]),
            }
        )


def decode_state(body: bytes, what: str) -> SalvageState:
    """Read a state object, or raise Corrupt."""
    fields = _decode(body, what)
    try:
        return SalvageState(
            number=ManifestNumber(int(fields["number"])),
            digest=str(fields["digest"]),
            writer_epoch=WriterEpoch(int(fields["writer_epoch"])),
            session=str(fields["session"]),
            workspace_id=str(fields["workspace_id"]),
            host=str(fields["host"]),
            mountpoint=str(fields["mountpoint"]),
            reason=str(fields["reason"]),
            created_s=float(fields["created_s"]),
            files=int(fields["files"]),
            unpublished_bytes=int(fields["unpublished_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{what} has a missing or wrong field: {error}") from error


def decode_content(body: bytes, what: str) -> SalvageContent:
    """Read a content object, or raise Corrupt."""
    fields = _decode(body, what)
    try:
        root = FrameRef.decode(bytes.fromhex(fields["root"]))
        packs = tuple(PackId(str(pack)) for pack in fields["packs"])
        return SalvageContent(root, packs, float(fields["created_s"]), tuple(map(str, fields["damaged"])))
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{what} has a missing or wrong field: {error}") from error


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT_VERSION, **fields}, sort_keys=True).encode() + b"\n"


def _decode(body: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise Corrupt(f"{what} is not JSON: {body[:60]!r}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise Corrupt(f"{what} has no format version: {body[:60]!r}")
    if fields["format"] > FORMAT_VERSION:
        raise newer_format(what, fields["format"])
    return fields


def place_of(key: str) -> str | None:
    """Read which salvage an object below `salvage/` belongs to, or None if it is none of ours."""
    place = key.removeprefix(SALVAGE_PREFIX).split("/", 1)[0]
    return place if key.startswith(SALVAGE_PREFIX) and _PLACE.fullmatch(place) else None


def object_key(place: str, name: str) -> ObjectKey:
    """Key of a salvage's state or content."""
    return ObjectKey(f"{SALVAGE_PREFIX}{place}/{name}")


def salvage_pack_key(place: str, pack: PackId) -> ObjectKey:
    """Key of a salvage's own pack."""
    return ObjectKey(f"{SALVAGE_PREFIX}{place}/{pack_key(pack)}")


def tree_part(change_set: ChangeSet) -> ChangeSet:
    """Leave the bookkeeping out: names, pins and condemned packs are the workspace's, whoever writes it now."""
    changes = tuple(change for change in change_set.changes if change[0][:1] in TREE_TABLES)
    return ChangeSet(change_set.drops, changes)


def has_unpublished(view: KVRead) -> bool:
    """Tell whether a node's map holds changes of the tree that no manifest has, scratch aside."""
    return next(unpublished_keys(view), None) is not None


def unpublished_keys(view: KVRead) -> Iterator[bytes]:
    """Give the tree keys in a node's map that changed since its last manifest, but not what is scratch."""
    for _, key in view.scan(*table_range(NodeTable.CHANGELOG)):
        if key[:1] in TREE_TABLES and not _is_scratch(view, key):
            yield key
    for row, _ in view.scan(*table_range(NodeTable.RANGES)):
        if not is_scratch(view, key_ino(row)):
            yield inode_key(key_ino(row))


def _is_scratch(view: KVRead, key: bytes) -> bool:
    if key[:1] == ENTRY_TABLE:
        return is_scratch_name(view, key_ino(key), key_name(key))
    return is_scratch(view, key_ino(key))


def keys_of(change_set: ChangeSet) -> Iterator[bytes]:
    """Give the keys that a change set touches."""
    yield from (key for key, _ in change_set.changes)
    yield from (inode_key(drop.ino) for drop in change_set.drops)


@dataclass(frozen=True, slots=True)
class Concerned:
    """What a set of changed keys means for somebody who wants the work back."""

    whole: frozenset[bytes]
    """Paths to copy with everything below them."""
    removed: tuple[bytes, ...]
    """Paths that are no longer there."""


def concerned(view: KVRead, keys: Iterator[bytes]) -> Concerned:
    """Work out paths from changed keys; *view* is the tree after the changes.

    A directory counts only under a name that it was given: each file made in it changes its times as well.
    """
    whole: set[bytes] = set()
    removed: set[bytes] = set()
    for key in keys:
        if key[:1] == ENTRY_TABLE:
            above = paths.path_of(view, key_ino(key))
            if above is not None:
                path = _join(above, key_name(key))
                (removed if view.get(key) is None else whole).add(path)
        elif key[:1] in (INODE_TABLE, BLOCK_TABLE, XATTR_TABLE):
            whole.update(_file_paths(view, key_ino(key)))
    return Concerned(frozenset(whole), tuple(sorted(removed)))


def _file_paths(view: KVRead, ino: Inode) -> Iterator[bytes]:
    value = view.get(inode_key(ino))
    if value is None or InodeRecord.decode(value).mode & _FORMAT_BITS == _DIRECTORY:
        return
    for parent, name in paths.names(view, ino):
        above = paths.path_of(view, parent)
        if above is not None:
            yield _join(above, name)


def selected(view: KVRead, whole: frozenset[bytes]) -> Iterator[tuple[bytes, Inode]]:
    """Give the paths in *whole*, everything below them, and the directories on the way; parents before children."""
    view = published(view)
    above = {b"/".join(parts[:at]) for path in whole for parts in [path.split(b"/")] for at in range(len(parts))}
    pending: list[tuple[bytes, Inode, bool]] = [(b"", ROOT_INODE, b"" in whole)]
    while pending:
        path, ino, inside = pending.pop()
        yield path, ino
        prefix = path + b"/" if path else b""
        for name, entry in reversed(paths.children(view, ino)):
            below = prefix + name
            if inside or below in whole or below in above:
                pending.append((below, entry.ino, inside or below in whole))


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
