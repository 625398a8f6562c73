"""The provisioner's only door: the store that the settings name, what a workspace's newest states say, and helpers.

Invariant: nothing here writes into a workspace; whoever wants to write there runs `spotwarp run`. What the store says
no to, or does not answer, is one of `spotwarp_fs.core.errors`, re-exported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from spotwarp_fs.cli.derived import workspace_of
from spotwarp_fs.cli.node_settings import NodeSettings, node_settings
from spotwarp_fs.cli.options import json_option, settings_for, store_option
from spotwarp_fs.cli.output import (
    console,
    emit,
    first_of_group,
    print_error,
    print_json,
    printable,
    progress_bar,
    warn,
)
from spotwarp_fs.cli.settings import Settings, check_workspace
from spotwarp_fs.cli.sources import LoadedSettings, load_settings
from spotwarp_fs.cli.stores import find_workspace, open_plain_store, open_store_of
from spotwarp_fs.core import layout
from spotwarp_fs.core.errors import (
    Conflict,
    Corrupt,
    Denied,
    ExitCode,
    Fenced,
    NotFound,
    PreconditionFailed,
    SpotwarpError,
    StoreRefused,
    Unavailable,
    UserError,
)
from spotwarp_fs.core.manifests import Manifest
from spotwarp_fs.core.ports import Lane, ObjectInfo
from spotwarp_fs.core.types import ManifestNumber, ObjectKey
from spotwarp_fs.core.units import format_duration, format_size, parse_duration, parse_size
from spotwarp_fs.engine.heartbeat import read_beat
from spotwarp_fs.engine.node_note import node_of
from spotwarp_fs.engine.parallel import each
from spotwarp_fs.engine.publish import find_head, read_manifest
from spotwarp_fs.local.processes import descendants
from spotwarp_fs.local.system import SystemEntropy
from spotwarp_fs.store.scoped import Scoped

__all__ = [
    "Corrupt", "Denied", "ExitCode", "Fenced", "HeadFacts", "LoadedSettings", "NodeSettings", "NotFound",
    "Settings", "SpotwarpError", "StateFacts", "Store", "StoreRefused", "Unavailable", "UserError",
    "check_workspace", "console", "descendants", "emit", "first_of_group", "format_duration", "format_size",
    "json_option", "load_settings", "node_settings", "parse_duration", "parse_size", "print_error", "print_json",
    "printable", "progress_bar", "settings_for", "store_option", "sync", "warn", "workspace_of",
]  # fmt: skip

CREATE_TRIES: Final = 4
"""So often a create whose outcome is unknown is settled by looking, and sent again."""
BIG_S: Final = 1800.0
STATES_MAX: Final = 1000
READ_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """The newest manifest of a workspace."""

    number: int
    writer_epoch: int
    session: str
    created_s: float
    """By the store's clock."""
    quiescent: bool
    files: int
    logical_bytes: int
    node: Mapping[str, str] = field(default_factory=dict)
    """`intent` and `instance` of the node whose session wrote it; empty when that was none."""
    resumed_from: int | None = None
    """Of a takeover manifest: the manifest that was served on."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """A published state, for estimates."""

    number: int
    created_s: float
    writer_epoch: int
    quiescent: bool
    logical_bytes: int
    sent_bytes: int
    """What was uploaded for it and still lies in the store: collected packs are missed."""


class Store:
    """The store of some settings: small objects below its prefix, and the heads of its workspaces."""

    def __init__(self, settings: Settings, *, deadline_s: float = 8.0) -> None:
        self._settings = settings
        self._plain = open_plain_store(settings)
        self._store = open_store_of(settings, deadline_s=deadline_s, inner=self._plain)
        self._workspaces: dict[str, Scoped] = {}
        self._heads: dict[str, Manifest] = {}

    @property
    def url(self) -> str:
        """Where it is; never with credentials."""
        return self._store.url

    async def aclose(self) -> None:
        """Let go of connections."""
        await self._store.aclose()

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None when it is proven absent."""
        try:
            return (await self._store.get(ObjectKey(key))).body
        except NotFound:
            return None

    async def put(self, key: str, body: bytes) -> None:
        """Create or replace."""
        await self._store.put(ObjectKey(key), body)

    async def put_big(self, key: str, body: bytes) -> None:
        """Create or replace an object that takes its time: an archive, over a slow link."""
        patient = open_store_of(self._settings, deadline_s=BIG_S, inner=self._plain)
        await patient.put(ObjectKey(key), body, lane=Lane.BULK)

    async def has(self, key: str) -> bool:
        """Tell whether the object is there."""
        try:
            await self._store.head(ObjectKey(key))
        except NotFound:
            return False
        return True

    async def create(self, key: str, body: bytes) -> bool:
        """Create it once, ever; False when it was there already, with other content.

        Raises Unavailable when it stays unknown whether it exists.
        """
        for _ in range(CREATE_TRIES - 1):
            try:
                return await self._create(key, body)
            except Unavailable:
                # A lost answer makes our own first try look like somebody else's: the bytes decide.
                if (found := await self.get(key)) is not None:
                    return found == body
        return await self._create(key, body)

    async def _create(self, key: str, body: bytes) -> bool:
        try:
            await self._store.put_if_absent(ObjectKey(key), body)
        except PreconditionFailed:
            if (found := await self.get(key)) is None:
                raise Conflict(f"{key} in {self.url} was there a moment ago and is gone") from None
            return found == body
        return True

    async def list(self, prefix: str) -> Sequence[str]:
        """Return every key below *prefix*, sorted."""
        return sorted([info.key async for info in self._store.list_objects(prefix)])

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete; what is absent is fine."""
        await self._store.delete([ObjectKey(key) for key in keys])

    async def link(self, key: str, lives_s: int) -> str:
        """Return a URL that lets its bearer GET the object for *lives_s* seconds; it is a secret as long as it lives.

        It dies earlier when the keys that signed it do; for a `file://` store it never does.
        """
        plain: Any = self._plain
        return str(await plain.link(ObjectKey(key), lives_s))

    async def head(self, workspace: str) -> HeadFacts | None:
        """Return the newest manifest of a workspace; None when it has none, or is not there at all.

        The first look finds it, later ones go on from what was found: one request while nothing new is there.
        """
        manifest = await self._newest(workspace)
        return None if manifest is None else _facts(manifest)

    async def _newest(self, workspace: str) -> Manifest | None:
        scoped = await self._scoped(workspace)
        if scoped is None:
            return None
        known = self._heads.get(workspace)
        if known is None:
            if (found := await find_head(scoped)) is None:
                return None
            known = self._heads[workspace] = found[0].manifest
        while True:
            try:
                head, _ = await read_manifest(scoped, ManifestNumber(known.number + 1))
            except NotFound:
                return known
            known = self._heads[workspace] = head.manifest

    async def _scoped(self, workspace: str) -> Scoped | None:
        if workspace not in self._workspaces:
            # Asked by key, since telling what names there are takes a listing.
            if await self.get(layout.workspace_identity_key(workspace)) is None:
                return None
            _, scoped = await find_workspace(self._store, workspace, create=False, entropy=SystemEntropy())
            self._workspaces[workspace] = scoped
        return self._workspaces[workspace]

    async def heartbeat(self, workspace: str) -> str | None:
        """Return a token that changes with each heartbeat of the head's writer; None without one."""
        head, scoped = await self._newest(workspace), await self._scoped(workspace)
        if head is None or scoped is None:
            return None
        try:
            found = await scoped.head(layout.HEARTBEAT)
        except NotFound:
            return None
        beat = await read_beat(scoped)
        if beat is None or beat.writer_epoch != head.writer_epoch:
            return None
        return f"{beat.session}:{found.etag}:{found.modified_s:.6f}"

    async def states(self, workspace: str, count: int = 100) -> Sequence[StateFacts]:
        """Return up to *count* of the newest states, oldest first: what checkpoints weigh and how often they come."""
        assert 0 < count <= STATES_MAX, count
        head, scoped = await self._newest(workspace), await self._scoped(workspace)
        if head is None or scoped is None:
            return []

        async def one(number: int) -> Manifest:
            return (await read_manifest(scoped, ManifestNumber(number)))[0].manifest

        numbers = range(max(1, head.number - count + 1), head.number + 1)
        manifests = await each(one, numbers, limit=READ_AT_ONCE)
        packs = [info async for info in scoped.list_objects(layout.PACKS_PREFIX)]
        return _with_bytes(manifests, packs)


async def sync(settings: Settings, place: str, timeout_s: float) -> int:
    """Have the workspace that is served at *place* publish everything written so far; gives the manifest's number.

    Raises SpotwarpError when it is not served, is fenced, or takes longer.
    """
    from spotwarp_fs.cli import client
    from spotwarp_fs.cli.mounts import find_mount

    def call() -> int:
        record = find_mount(settings.state_dir, place)
        return int(client.call(record, "sync", {"timeout_s": timeout_s}, silence_max_s=timeout_s + 5.0)["manifest"])

    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


def _facts(manifest: Manifest) -> HeadFacts:
    taken = manifest.takeover or {}
    return HeadFacts(
        number=manifest.number,
        writer_epoch=manifest.writer_epoch,
        session=manifest.session,
        created_s=manifest.created_s,
        quiescent=manifest.quiescent,
        files=manifest.files,
        logical_bytes=manifest.logical_bytes,
        node=node_of(manifest),
        resumed_from=taken.get("from_number"),
    )


def _with_bytes(manifests: Sequence[Manifest], packs: Sequence[ObjectInfo]) -> list[StateFacts]:
    """Count each pack for the first state that was made after it; what is older than all states counts for none."""
    left = sorted((info.modified_s, info.size_bytes) for info in packs)
    found: list[StateFacts] = []
    at = 0
    for manifest in manifests:
        sent = 0
        while at < len(left) and left[at][0] <= manifest.created_s:
            sent += left[at][1]
            at += 1
        found.append(
            StateFacts(
                manifest.number, manifest.created_s, manifest.writer_epoch, manifest.quiescent,
                manifest.logical_bytes, sent if found else 0,
            )
        )  # fmt: skip
    return found
