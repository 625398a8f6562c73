"""Whose directory is this, and what is in it: `.spotwarp/identity`, and the facts for the wipe guard (core/guard.py).

Invariant: the identity is written before the first name of a restore, and says `complete` only when every name is
there: an interrupted restore is never mistaken for a directory from which things were deleted.
"""

from __future__ import annotations

import heapq
import json
import os
import stat
from dataclasses import asdict, dataclass, replace

from spotwarp_fs.core import paths
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.guard import NEWEST_NAMES, Identity, Side, Situation
from spotwarp_fs.core.ownnames import IDENTITY_NAME, OWN_NAME, absent_inode
from spotwarp_fs.core.ports import KVRead
from spotwarp_fs.core.records import INODE_TABLE, InodeRecord, NodeTable, key_ino, table_range
from spotwarp_fs.core.scratch import published
from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory import leases
from spotwarp_fs.engine.workspace import Workspace

TOKEN_KEY = NodeTable.META + b"directory"
"""In the node's map: the token of the directory that this map's witnesses were taken in."""
TOKEN_BYTES = 16


def own_directory(root: bytes) -> bytes:
    """Make `.spotwarp`, for this user only, and return its path."""
    place = os.path.join(root, OWN_NAME)
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            raise UserError(
                f"{os.fsdecode(place)} is not a directory: spotwarp keeps its own files there; move it away",
                ExitCode.WOULD_WIPE,
            ) from None
        os.chmod(place, 0o700)
    return place


def why_no_placeholders(root: bytes) -> str:
    """Try a placeholder below `.spotwarp`, where it changes no directory of the workspace; empty if all of it works."""
    return leases.why_no_leases(own_directory(root))


def read_identity(root: bytes) -> Identity | None:
    """Read the identity of *root*, or None; raises UserError when it is damaged."""
    place = os.path.join(root, OWN_NAME, IDENTITY_NAME)
    try:
        with open(place, "rb") as file:
            body = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return Identity(**json.loads(body))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{os.fsdecode(place)} is damaged ({error}): it begins with {body[:40]!r}. If the directory belongs to no "
            "workspace any more, remove the file",
            ExitCode.WOULD_WIPE,
        ) from error


def write_identity(root: bytes, identity: Identity) -> None:
    """Put the identity into *root*, in one step and on the disk."""
    directory = own_directory(root)
    draft = os.path.join(directory, IDENTITY_NAME + b".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, json.dumps(asdict(identity), indent=1).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft, os.path.join(directory, IDENTITY_NAME))
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)


@dataclass(frozen=True, slots=True)
class Owner:
    """The workspace that a directory is to belong to."""

    workspace_id: str
    name: str
    store: str


def settle(workspace: Workspace, root: bytes, owner: Owner, *, complete: bool) -> Identity:
    """Make *root* the directory of this workspace and of this map; keeps what the identity says already."""
    identity = read_identity(root)
    if identity is None or identity.workspace_id != owner.workspace_id:
        token = workspace.entropy.token_bytes(TOKEN_BYTES).hex()
        identity = Identity(owner.workspace_id, owner.name, owner.store, workspace.wall.now_ns(), token)
    with workspace.kv.read() as view:
        known = view.get(TOKEN_KEY) == identity.token.encode()
    if not known:
        # A copy of the directory has the old token too; this map must know its own only.
        identity = replace(identity, token=workspace.entropy.token_bytes(TOKEN_BYTES).hex())
    write_identity(root, replace(identity, name=owner.name, store=owner.store, complete=complete))
    if not known:
        with workspace.kv.write() as txn:
            txn.put(TOKEN_KEY, identity.token.encode())
    return identity


def survey(root: bytes, now_ns: int) -> Side:
    """Look at everything in *root* (blocking); what is not a directory counts as a file, as in a state."""
    files = total = placeholders = 0
    newest: list[tuple[int, str]] = []
    pending = [b""]
    while pending:
        above = pending.pop()
        with os.scandir(os.path.join(root, above)) as entries:
            for entry in entries:
                if not above and entry.name == OWN_NAME:
                    continue
                path = os.path.join(above, entry.name)
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    pending.append(path)
                    continue
                files += 1
                total += status.st_size
                placeholders += _is_absent(entry.path, status)
                _note_newest(newest, status.st_mtime_ns, os.fsdecode(path))
    names = [name for _, name in sorted(newest, reverse=True)]
    age_s = max(0.0, (now_ns - max(newest)[0]) / 1e9) if newest else None
    return Side(files, total, age_s, tuple(names), placeholders)


def _note_newest(newest: list[tuple[int, str]], mtime_ns: int, path: str) -> None:
    heapq.heappush(newest, (mtime_ns, path))
    if len(newest) > NEWEST_NAMES:
        heapq.heappop(newest)


def _is_absent(place: bytes, status: os.stat_result) -> bool:
    if stat.S_ISLNK(status.st_mode):
        return absent_inode(os.readlink(place)) is not None
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        return leases.absence(place) is not None
    except OSError:
        return False


def state_side(snapshot: KVRead, cut_ns: int | None, now_ns: int) -> Side:
    """Describe the state that the map holds; *cut_ns* is when it was cut."""
    view = published(snapshot)
    files = total = 0
    newest: list[tuple[int, Inode]] = []
    for key, value in view.scan(*table_range(INODE_TABLE)):
        record = InodeRecord.decode(value)
        if stat.S_ISDIR(record.mode) or not record.nlink:
            continue
        files += 1
        total += record.size
        heapq.heappush(newest, (record.mtime_ns, key_ino(key)))
        if len(newest) > NEWEST_NAMES:
            heapq.heappop(newest)
    names = [os.fsdecode(paths.path_of(view, ino) or b"") for _, ino in sorted(newest, reverse=True)]
    return Side(files, total, (now_ns - cut_ns) / 1e9 if cut_ns is not None else None, tuple(names))


def why_foreign(workspace: Workspace, root: bytes) -> str:
    """Say why *root* is not the directory that this map's witnesses were taken in any more; empty if it is."""
    where = os.fsdecode(os.path.join(root, OWN_NAME, IDENTITY_NAME))
    with workspace.kv.read() as view:
        token = view.get(TOKEN_KEY)
    try:
        found = read_identity(root)
    except (OSError, UserError) as error:
        return f"{where} cannot be read: {error}"
    if found is None:
        return f"{where} is gone, and other names with it. If all of it was deleted on purpose, stop and start anew"
    if token is None or found.token != token.decode():
        return f"{where} is of another directory: something was put in the place of the one that was started"
    return ""


def situation(workspace: Workspace, root: bytes, owner: Owner, *, number: int, cut_ns: int | None) -> Situation:
    """Gather what the wipe guard decides from (blocking): the state is the one that the map holds."""
    now_ns = workspace.wall.now_ns()
    with workspace.kv.read() as view:
        token = view.get(TOKEN_KEY)
        state = state_side(view, cut_ns, now_ns)
    return Situation(
        directory=os.fsdecode(root),
        workspace=owner.name,
        workspace_id=owner.workspace_id,
        local=survey(root, now_ns),
        state=state,
        state_number=number,
        identity=read_identity(root),
        cache_token=token.decode() if token else "",
    )
