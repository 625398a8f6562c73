"""A manifest: the small, numbered, permanent object that names one consistent state.

    {"check":"<BLAKE3 of the rest, 64 hex>",<canonical JSON without its first brace><newline>
             the digest covers "{" + everything after the comma, newline included

Invariant: the bytes of a manifest are a function of its fields (canonical JSON: sorted keys, no spaces, ASCII), because
the digest of the whole body decides whose a publish was (C16) and which parent a child has (C17).
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import blake3

from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.core.layout import FORMAT_VERSION, newer_format
from spotwarp_fs.core.records import FrameRef
from spotwarp_fs.core.types import ChangeSeq, Inode, ManifestNumber, PackId, WriterEpoch

NO_MANIFEST: Final = ManifestNumber(0)
"""State 0: the empty one, before the first manifest."""
ItemKind = Literal["file", "directory"]

_CHECK_START: Final = b'{"check":"'
_CHECK_STOP: Final = b'",'
_CHECK_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class InFlightItem:
    """A file or directory that was being written at the cut (P-05)."""

    ino: Inode
    path: bytes
    kind: ItemKind
    torn: bool = False
    """Nobody is left to finish it: listed and replaced like things in flight, but not blocking quiescence."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """State `number` of a workspace: base(base_number) and the change sets of base_number + 1 … number."""

    number: ManifestNumber
    writer_epoch: WriterEpoch
    session: str
    """Random per start of a writer, hex."""
    workspace_id: str
    parent_digest: str
    """Hex digest of the body of manifest number - 1; empty for number 1."""
    change_seq: ChangeSeq
    created_s: float
    """The store's own time, as known when the manifest was made."""
    base_number: ManifestNumber = NO_MANIFEST
    base: FrameRef | None = None
    changes: FrameRef | None = None
    """What turns state number - 1 into this one; None when nothing changed."""
    base_bytes: int = 0
    """Stored bytes of the base's metadata frames."""
    changes_bytes: int = 0
    """Stored bytes of the metadata frames of all change sets since the base: what a new base would save readers."""
    in_flight: tuple[InFlightItem, ...] = ()
    barrier: bool = False
    """It answered a `sync`, a drain or a remote fsync: a takeover may not fall back behind it (L12)."""
    takeover: dict[str, Any] | None = None
    """Only in a manifest that raises the writer epoch: what it replaced, and from which manifest."""
    files: int = 0
    directories: int = 0
    logical_bytes: int = 0
    group: str | None = None
    """Reserved: several nodes of one job."""
    member: str | None = None
    """Reserved: which of them."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts for people and tools (`forced_by`, host, job): nothing is decided by them."""

    @property
    def quiescent(self) -> bool:
        """Was nothing in flight at the cut? Torn things do not count."""
        return all(item.torn for item in self.in_flight)


def encode(manifest: Manifest) -> bytes:
    """Write the one body that *manifest* has."""
    fields: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "number": manifest.number,
        "writer_epoch": manifest.writer_epoch,
        "session": manifest.session,
        "workspace_id": manifest.workspace_id,
        "parent_digest": manifest.parent_digest,
        "change_seq": manifest.change_seq,
        "created_s": float(manifest.created_s),
        "base_number": manifest.base_number,
        "base": _encode_ref(manifest.base),
        "changes": _encode_ref(manifest.changes),
        "base_bytes": manifest.base_bytes,
        "changes_bytes": manifest.changes_bytes,
        "in_flight": [_encode_item(item) for item in manifest.in_flight],
        "barrier": manifest.barrier,
        "takeover": manifest.takeover,
        "files": manifest.files,
        "directories": manifest.directories,
        "logical_bytes": manifest.logical_bytes,
        "group": manifest.group,
        "member": manifest.member,
        "notes": manifest.notes,
    }
    rest = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    return _CHECK_START + digest_of(rest).encode() + _CHECK_STOP + rest[1:]


def digest_of(body: bytes) -> str:
    """Hex BLAKE3 of a whole body: what a child names its parent by, and what tells mine from foreign."""
    return blake3.blake3(body).hexdigest()


def decode(body: bytes, *, what: str = "manifest") -> Manifest:
    """Read a body, or raise Corrupt (damaged) or UserError with NEWER_FORMAT; *what* names it in the message."""
    fields = _checked(body, what)
    version = fields.get("format")
    if not isinstance(version, int) or version < 1:
        raise Corrupt(f"{what} has no valid format version: {version!r}")
    if version > FORMAT_VERSION:
        raise newer_format(what, version)
    try:
        return _from_fields(fields)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise Corrupt(f"{what} has a missing or wrong field: {type(error).__name__} {error}") from error


def check_successor(parent: Manifest, child: Manifest, *, parent_digest: str) -> None:
    """Raise Corrupt unless *child* may follow *parent*, whose body has *parent_digest*.

    Checked before each publish and along every loaded chain.
    """
    same_epoch = child.writer_epoch == parent.writer_epoch
    for holds, rule, was, now in (
        (child.number == parent.number + 1, "numbers are dense", parent.number, child.number),
        (child.workspace_id == parent.workspace_id, "the workspace stays", parent.workspace_id, child.workspace_id),
        (child.parent_digest == parent_digest, "a child names its parent", parent_digest, child.parent_digest),
        (
            child.writer_epoch >= parent.writer_epoch,
            "writer epochs never fall", parent.writer_epoch, child.writer_epoch,
        ),
        (
            not same_epoch or child.session == parent.session,
            "one session per writer epoch", parent.session, child.session,
        ),
        (child.change_seq >= parent.change_seq, "the change seq never falls", parent.change_seq, child.change_seq),
        (parent.base_number <= child.base_number, "a base never goes back", parent.base_number, child.base_number),
        (child.base_number <= child.number, "a base is not newer", child.number, child.base_number),
        (
            child.base_number != parent.base_number or child.base == parent.base,
            "a base has one root", parent.base, child.base,
        ),
    ):  # fmt: skip
        if not holds:
            raise Corrupt(
                f"manifest {child.number} (writer epoch {child.writer_epoch}) may not follow manifest "
                f"{parent.number} (writer epoch {parent.writer_epoch}): {rule}, but {was!r} became {now!r}"
            )


def _checked(body: bytes, what: str) -> dict[str, Any]:
    at = len(_CHECK_START)
    stop = at + _CHECK_CHARS
    if not body.startswith(_CHECK_START) or body[stop : stop + len(_CHECK_STOP)] != _CHECK_STOP:
        raise Corrupt(f"{what} of {len(body)} bytes does not begin with its check: {body[:40]!r}")
    promised = body[at:stop].decode("ascii", "replace")
    rest = b"{" + body[stop + len(_CHECK_STOP) :]
    found = digest_of(rest)
    if found != promised:
        raise Corrupt(f"{what} is damaged: its check says {promised}, its content has {found}")
    try:
        fields = json.loads(rest)
    except ValueError as error:
        raise Corrupt(f"{what} is not JSON: {error}") from error
    assert isinstance(fields, dict), "what begins with a brace is an object"
    return fields


def _from_fields(fields: dict[str, Any]) -> Manifest:
    takeover = fields["takeover"]
    return Manifest(
        number=ManifestNumber(_natural(fields, "number")),
        writer_epoch=WriterEpoch(_natural(fields, "writer_epoch")),
        session=_text(fields, "session"),
        workspace_id=_text(fields, "workspace_id"),
        parent_digest=_text(fields, "parent_digest"),
        change_seq=ChangeSeq(_natural(fields, "change_seq")),
        created_s=float(fields["created_s"]),
        base_number=ManifestNumber(_natural(fields, "base_number")),
        base=_decode_ref(fields["base"]),
        changes=_decode_ref(fields["changes"]),
        base_bytes=_natural(fields, "base_bytes"),
        changes_bytes=_natural(fields, "changes_bytes"),
        in_flight=tuple(_decode_item(item) for item in fields["in_flight"]),
        barrier=bool(fields["barrier"]),
        takeover=None if takeover is None else dict(takeover),
        files=_natural(fields, "files"),
        directories=_natural(fields, "directories"),
        logical_bytes=_natural(fields, "logical_bytes"),
        group=fields.get("group"),
        member=fields.get("member"),
        notes=dict(fields.get("notes", {})),
    )


def _natural(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a natural number")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not a text")
    return value


def _encode_ref(ref: FrameRef | None) -> dict[str, Any] | None:
    if ref is None:
        return None
    return {
        "pack": ref.pack,
        "offset": ref.offset,
        "stored_bytes": ref.stored_bytes,
        "raw_bytes": ref.raw_bytes,
        "digest": ref.digest.hex(),
    }


def _decode_ref(fields: dict[str, Any] | None) -> FrameRef | None:
    if fields is None:
        return None
    ref = FrameRef(
        PackId(_text(fields, "pack")),
        _natural(fields, "offset"),
        _natural(fields, "stored_bytes"),
        _natural(fields, "raw_bytes"),
        bytes.fromhex(fields["digest"]),
    )
    if FrameRef.decode(ref.encode()) != ref:
        raise ValueError(f"{fields!r} is no frame reference")
    return ref


def _encode_item(item: InFlightItem) -> dict[str, Any]:
    """Paths are bytes: text where they are UTF-8, base64 where they are not."""
    fields: dict[str, Any] = {"ino": item.ino, "kind": item.kind, "torn": item.torn}
    try:
        fields["path"] = item.path.decode("utf-8")
    except UnicodeDecodeError:
        fields["path_base64"] = base64.b64encode(item.path).decode("ascii")
    return fields


def _decode_item(fields: dict[str, Any]) -> InFlightItem:
    kind = fields["kind"]
    if kind not in ("file", "directory"):
        raise ValueError(f"in-flight kind is {kind!r}")
    path = fields["path"].encode() if "path" in fields else base64.b64decode(fields["path_base64"], validate=True)
    return InFlightItem(Inode(_natural(fields, "ino")), path, kind, bool(fields["torn"]))
