"""From settings to a workspace's store: adapter, patience, identity, prefix.

Invariant: a workspace has a random id, created once under its name; everything of it lies below that id (C8, H7).
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import trio

from spotwarp_fs.core.errors import NotFound, PreconditionFailed, Unavailable
from spotwarp_fs.core.layout import decode_identity, encode_identity, workspace_identity_key, workspace_root
from spotwarp_fs.core.ports import Entropy, ObjectStore
from spotwarp_fs.local.system import SystemEntropy
from spotwarp_fs.store.scoped import Scoped
from spotwarp_fs.store.settings import Scheme, StoreSettings
from spotwarp_fs.store.urls import open_store, parse_store_url

if TYPE_CHECKING:
    from pydantic import SecretStr

    from spotwarp_fs.cli.settings import Settings

WORKSPACE_ID_BYTES = 8
CREATE_ATTEMPTS = 8
CREATE_PAUSE_S = 0.25
CALL_DEADLINE_S = 8.0
"""How long one call to the store is repeated before the engine hears of it, waits and goes on."""
ANSWERING_DEADLINE_S = 20.0
"""The same while it answers with 5xx: if 7 of 10 answers are bad, 8 s fail a call in ten, and a mount needs a dozen."""
PAUSE_MAX_S = 1.0
"""Between two attempts of a call: bulk requests are paced on their own."""


def store_settings(settings: Settings) -> StoreSettings:
    """Take what the settings say about getting into the store."""
    location = parse_store_url(settings.store_url())
    if location.scheme is Scheme.GCS:
        gs = settings.gs
        return StoreSettings(
            endpoint_url=gs.endpoint,
            access_key_id=_plain(gs.access_key_id),
            secret_access_key=_plain(gs.secret_access_key),
        )
    s3 = settings.s3
    return StoreSettings(
        endpoint_url=s3.endpoint,
        region=s3.region,
        profile=s3.profile,
        access_key_id=_plain(s3.access_key_id),
        secret_access_key=_plain(s3.secret_access_key),
        session_token=_plain(s3.session_token),
    )


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def open_plain_store(settings: Settings, *, list_page_keys: int | None = None) -> ObjectStore:
    """Open the store as it is, without patience and without imitating what it lacks: for the probe."""
    found = store_settings(settings)
    if list_page_keys is not None:
        found = replace(found, list_page_keys=list_page_keys)
    return open_store(parse_store_url(settings.store_url()), found)


def open_store_of(
    settings: Settings, *, deadline_s: float = CALL_DEADLINE_S, inner: ObjectStore | None = None
) -> ObjectStore:
    """Open the store that the settings name, or take *inner* for it; nothing is sent yet."""
    from spotwarp_fs.store.retry import Retrying, RetryPolicy
    from spotwarp_fs.store.single_writer import UnsafeSingleWriter

    inner = inner or open_plain_store(settings)
    if settings.unsafe_single_writer:
        inner = UnsafeSingleWriter(inner)
    policy = RetryPolicy(
        most_s=PAUSE_MAX_S,
        deadline_s=deadline_s,
        answering_deadline_s=ANSWERING_DEADLINE_S,
        denied_deadline_s=deadline_s / 2,
    )
    return Retrying(inner, SystemEntropy(), policy)


async def find_workspace(store: ObjectStore, name: str, *, create: bool, entropy: Entropy) -> tuple[str, Scoped]:
    """Return the workspace's id and its part of the store; creates the id if asked to.

    Raises NotFound, which lists names like it.
    """
    key = workspace_identity_key(name)
    fresh = entropy.token_bytes(WORKSPACE_ID_BYTES).hex()
    failures = 0
    while True:
        try:
            found = decode_identity(name, (await store.get(key)).body)
            return found, Scoped(store, workspace_root(name, found))
        except NotFound:
            if not create:
                raise NotFound(await _unknown(store, name)) from None
        try:
            await store.put_if_absent(key, encode_identity(fresh))
        except PreconditionFailed:
            continue  # somebody else's, or our own from a lost answer: what is there counts
        except Unavailable:
            failures += 1
            if failures == CREATE_ATTEMPTS:
                raise
            await trio.sleep(CREATE_PAUSE_S * failures)


async def workspace_names(store: ObjectStore) -> list[str]:
    """Name every workspace of the store (from listings: for people, nothing depends on it)."""
    names = []
    async for info in store.list_objects("workspaces/"):
        parts = info.key.split("/")
        if len(parts) == 3 and parts[2] == "id":
            names.append(parts[1])
    return names


async def _unknown(store: ObjectStore, name: str) -> str:
    names = await workspace_names(store)
    near = get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(names)[:10]) or 'none'}"
    return f"{store.url} has no workspace {name!r}; {hint}"
