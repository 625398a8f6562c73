"""Where every object of a workspace lies in the store, and which names a workspace may have.

Invariant: every key but the identity is relative to the workspace's own root, so nothing that is derived here can name,
deduplicate against or delete an object of another workspace (C8).

    workspaces/<name>/id                                 identity, create-only: which id this name stands for
    workspaces/<name>/<workspace id>/                    the root:
        manifests/<number, 12 digits>                    create-only, permanent
        packs/<2 hex of ident>/<epoch 8 hex>-<ident>     create-only, deleted by collection alone
        hints/head  hints/heartbeat                      replaced at will
        hints/pins/<id>  hints/requests/<id>
        salvage/<epoch 8 hex>-<node>/...
"""

from __future__ import annotations

import json
import re
from typing import Final

from spotwarp_fs.core.errors import Corrupt, ExitCode, UserError
from spotwarp_fs.core.types import ManifestNumber, ObjectKey, PackId, WriterEpoch

FORMAT_VERSION: Final = 1
"""The store format that this code writes, and the newest that it reads."""
NAME_CHARS_MAX: Final = 63
MANIFEST_DIGITS: Final = 12

HEAD_HINT: Final = ObjectKey("hints/head")
HEARTBEAT: Final = ObjectKey("hints/heartbeat")
MANIFESTS_PREFIX: Final = "manifests/"
PACKS_PREFIX: Final = "packs/"
PINS_PREFIX: Final = "hints/pins/"
REQUESTS_PREFIX: Final = "hints/requests/"
SALVAGE_PREFIX: Final = "salvage/"

_FIRST: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_LATER: Final = _FIRST | frozenset("._-")
_WORKSPACE_ID: Final = re.compile(r"[0-9a-f]{8,64}")
_MANIFEST_KEY: Final = re.compile(r"(?:^|/)manifests/([0-9]{12})$")
_PACK_KEY: Final = re.compile(r"(?:^|/)packs/([0-9a-f]{2})/([0-9a-f]{8}-([0-9a-f]{16}))$")
_PACK_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}")
_PART: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]*")


def workspace_name(text: str) -> str:
    """Lower-case and check a workspace's name, or raise UserError that names the character which does not fit."""
    name = text.lower()
    if not name:
        raise UserError("workspace name is empty: use 1 to 63 of a-z, 0-9, '.', '_', '-'")
    for position, char in enumerate(name):
        if char not in (_LATER if position else _FIRST):
            rule = "may hold only a-z, 0-9, '.', '_', '-'" if position else "must begin with a-z or 0-9"
            raise UserError(f"workspace name {text!r} {rule}: character {position + 1} is {char!r}")
    if len(name) > NAME_CHARS_MAX:
        raise UserError(f"workspace name {text!r} has {len(name)} characters, at most {NAME_CHARS_MAX} are allowed")
    return name


def workspace_identity_key(name: str) -> ObjectKey:
    """Key, below the store's prefix, of the object that says which workspace id *name* stands for."""
    return ObjectKey(f"workspaces/{name}/id")


def workspace_root(name: str, workspace_id: str) -> str:
    """Prefix, ending in "/", below the store's prefix, that all other keys here are relative to."""
    assert _WORKSPACE_ID.fullmatch(workspace_id), workspace_id
    return f"workspaces/{name}/{workspace_id}/"


def encode_identity(workspace_id: str) -> bytes:
    """Write the identity object's body."""
    assert _WORKSPACE_ID.fullmatch(workspace_id), workspace_id
    return json.dumps({"format": FORMAT_VERSION, "workspace_id": workspace_id}, sort_keys=True).encode() + b"\n"


def decode_identity(name: str, body: bytes) -> str:
    """Read the workspace id out of *name*'s identity object."""
    try:
        fields = json.loads(body)
        found, version = fields["workspace_id"], fields["format"]
        valid = isinstance(version, int) and _WORKSPACE_ID.fullmatch(found) is not None
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{workspace_identity_key(name)} is not an identity object: {body[:80]!r}") from error
    if not valid:
        raise Corrupt(f"{workspace_identity_key(name)} names no workspace id: {body[:80]!r}")
    if version > FORMAT_VERSION:
        raise newer_format(workspace_identity_key(name), version)
    return str(found)


def newer_format(what: str, version: int) -> UserError:
    """Say that *what* was written by a newer spotwarp, and what to do."""
    return UserError(
        f"{what} has store format {version}, this spotwarp reads up to format {FORMAT_VERSION}: upgrade spotwarp",
        ExitCode.NEWER_FORMAT,
    )


def manifest_key(number: ManifestNumber) -> ObjectKey:
    """Key of manifest *number*; numbers are dense and begin at 1."""
    assert 0 < number < 10**MANIFEST_DIGITS, number
    return ObjectKey(f"{MANIFESTS_PREFIX}{number:0{MANIFEST_DIGITS}d}")


def manifest_number(key: str) -> ManifestNumber | None:
    """Read the number out of a manifest's key, or None if it is another kind of object."""
    match = _MANIFEST_KEY.search(key)
    return ManifestNumber(int(match[1])) if match else None


def pack_id(epoch: WriterEpoch, ident: bytes) -> PackId:
    """Name a pack: the writer epoch and eight random bytes."""
    assert len(ident) == 8, ident
    return PackId(f"{epoch:08x}-{ident.hex()}")


def pack_key(pack: PackId) -> ObjectKey:
    """Key of *pack*, spread over 256 folders by its random part."""
    assert _PACK_ID.fullmatch(pack), pack
    return ObjectKey(f"{PACKS_PREFIX}{pack[9:11]}/{pack}")


def pack_of(key: str) -> PackId | None:
    """Read the pack's name out of its key, or None if it is another kind of object."""
    match = _PACK_KEY.search(key)
    return PackId(match[2]) if match and match[3].startswith(match[1]) else None


def pin_key(ident: str) -> ObjectKey:
    """Key of a reader's pin."""
    return ObjectKey(PINS_PREFIX + _part(ident))


def request_key(ident: str) -> ObjectKey:
    """Key of a request to the live writer."""
    return ObjectKey(REQUESTS_PREFIX + _part(ident))


def salvage_prefix(epoch: WriterEpoch, node: str) -> str:
    """Prefix, ending in "/", of what the writer of *epoch* on *node* had not published."""
    return f"{SALVAGE_PREFIX}{epoch:08x}-{_part(node)}/"


def _part(text: str) -> str:
    assert _PART.fullmatch(text), f"{text!r} may not be part of a key"
    return text
