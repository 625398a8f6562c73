"""What a rented node has to be told of these settings, as environment variables.

Invariant: what describes this machine (directories, caches, the form) stays here; what describes the workspace goes
along, so that a node treats it as this machine would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import trio

from spotwarp_fs.cli.config_view import as_written, values
from spotwarp_fs.cli.settings import SECRET_KEYS, Settings, variable
from spotwarp_fs.cli.sources import LoadedSettings
from spotwarp_fs.cli.stores import store_settings
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.store.settings import Scheme
from spotwarp_fs.store.urls import parse_store_url

OF_THIS_MACHINE: Final = frozenset(
    {
        "store", "workspace", "state_dir", "cache_dir", "cache_size", "free_reserve", "memory_max", "mode", "interval",
        "s3.profile", *SECRET_KEYS,
    }
)  # fmt: skip
"""`store`, `workspace`, the mode and the interval are told apart from these; secrets are looked up."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a node needs to work on the store that these settings name."""

    variables: dict[str, str]
    """Not secret: SPOTWARP_STORE and what was set for the workspace."""
    secrets: dict[str, str] = field(repr=False)
    """The store's credentials under their variables; empty for a directory."""
    temporary: bool = False
    """The credentials end by themselves: a session token is among them."""


async def node_settings(loaded: LoadedSettings) -> NodeSettings:
    """Gather them, or raise UserError when the store's keys cannot be found here."""
    settings = loaded.settings
    told = {"SPOTWARP_STORE": settings.store_url()}
    written = values(settings)
    for key in loaded.given:
        if key not in OF_THIS_MACHINE and written[key] is not None:
            told[variable(key)] = as_written(written[key])
    scheme = parse_store_url(settings.store_url()).scheme
    if scheme is Scheme.DIRECTORY:
        return NodeSettings(told, {})
    section = "gs" if scheme is Scheme.GCS else "s3"
    keys = await trio.to_thread.run_sync(_credentials, settings)
    if section == "s3" and keys["region"] and "SPOTWARP_S3_REGION" not in told:
        told["SPOTWARP_S3_REGION"] = keys["region"]
    names = ("access_key_id", "secret_access_key", *(["session_token"] if section == "s3" else []))
    secrets = {variable(f"{section}.{name}"): keys[name] for name in names if keys[name]}
    return NodeSettings(told, secrets, temporary=bool(keys["session_token"]))


def _credentials(settings: Settings) -> dict[str, Any]:
    from spotwarp_fs.store.s3_clients import find_credentials

    found = find_credentials(store_settings(settings))
    if found is None:
        raise UserError(
            f"no keys for the store {settings.store_url()} are found here, and a rented node needs some: set "
            "SPOTWARP_S3_ACCESS_KEY_ID and SPOTWARP_S3_SECRET_ACCESS_KEY (or s3.profile)",
            ExitCode.STORE_DENIED,
        )
    return found
