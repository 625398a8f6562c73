"""Make providers by name, with the account's key from its variable or the vendor's own file.

Invariant: a key is handed to its adapter and to nothing else. Where to speak to is what the vendors' own clients read
too (`VAST_URL`, `RUNPOD_API_BASE_URL`), so one setting points all of them at a simulator.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from provisioner.cli.plugged import plugged, plugged_names
from provisioner.core.errors import BadWish, ProviderDenied
from provisioner.core.gpus import Gpu, gpu_of
from provisioner.core.ports import Clock, Entropy, Provider
from provisioner.providers import runpod, vast
from provisioner.providers.local import NO_GPU, Local, LocalMachine
from provisioner.providers.plugin import Place
from provisioner.providers.runpod import RunPod
from provisioner.providers.vast import Vast

LOCAL_VARIABLE: Final = "SPOTWARP_INTERNAL_LOCAL"
"""What local providers pretend to be, as JSON by name, for demonstrations and tests: gpu, memory_gb, gpu_count,
slots, spot_usd_h, on_demand_usd_h, location, disk_gb, environment."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where a provider's key comes from."""

    variable: str
    files: tuple[str, ...]
    """From the home directory, as the vendor's own client keeps it."""
    page: str
    """Where to make one."""
    url_variable: str
    url: str


ACCOUNTS: Final = {
    "vast": Account(
        "VAST_API_KEY",
        (".config/vastai/vast_api_key", ".vast_api_key"),
        "https://cloud.vast.ai/manage-keys/",
        "VAST_URL",
        vast.BASE_URL,
    ),
    "runpod": Account(
        "RUNPOD_API_KEY",
        (".runpod/config.toml",),
        "https://console.runpod.io/user/settings",
        "RUNPOD_API_BASE_URL",
        runpod.BASE_URL,
    ),
}


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, as far as providers need it."""

    environ: Mapping[str, str]
    home: Path
    state_dir: Path
    clock: Clock
    entropy: Entropy

    def __repr__(self) -> str:
        # The environment holds account keys (P-15).
        return f"Here({self.state_dir})"


def account_key(name: str, environ: Mapping[str, str], home: Path) -> str:
    """Find an account's key, or raise ProviderDenied saying which variable to set and where to get one."""
    account = ACCOUNTS[name]
    if key := environ.get(account.variable, "").strip():
        return key
    for file in account.files:
        try:
            text = (home / file).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if key := (_toml_key(text) if file.endswith(".toml") else text.strip()):
            return key
    places = f"{account.variable} is not set and ~/{account.files[0]} has none"
    raise ProviderDenied(f"{name}: no account key: {places}; make one at {account.page}, then set {account.variable}")


def _toml_key(text: str) -> str:
    try:
        document: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ""
    found = document.get("default", {}) if isinstance(document, dict) else {}
    key = found.get("api_key", "") if isinstance(found, dict) else ""
    return key.strip() if isinstance(key, str) else ""


def make_providers(names: Iterable[str], here: Here) -> dict[str, Provider]:
    """Make each provider of *names*; raises ProviderDenied for a missing key. The caller closes them."""
    return {name: _make(name, here) for name in names}


def _make(name: str, here: Here) -> Provider:
    if name in ACCOUNTS:
        account = ACCOUNTS[name]
        url = (here.environ.get(account.url_variable) or account.url).rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise BadWish(f"{account.url_variable}={url}: write http://HOST:PORT or https://HOST")
        key = account_key(name, here.environ, here.home)
        return Vast(key, base_url=url) if name == "vast" else RunPod(key, base_url=url)
    if (plugin := plugged(name)) is not None:
        return plugin.make(Place(here.environ, here.state_dir / "providers" / name, here.clock, here.entropy))
    base = here.state_dir / "nodes" / name
    return Local(base, clock=here.clock, entropy=here.entropy, name=name, machine=_machine(name, here.environ))


def _machine(name: str, environ: Mapping[str, str]) -> LocalMachine:
    text = environ.get(LOCAL_VARIABLE, "")
    try:
        fields: dict[str, Any] = dict(dict(json.loads(text or "{}")).get(name, {}))
        gpu: Gpu = gpu_of(fields.pop("gpu"), fields.pop("memory_gb", 0)) if "gpu" in fields else NO_GPU
        return LocalMachine(gpu=gpu, **fields)
    except (ValueError, TypeError) as error:
        raise BadWish(f"{LOCAL_VARIABLE} is not what {name} can be made of: {error}") from error


def is_here(name: str) -> bool:
    """Tell whether the nodes of a provider are processes on this machine, for which nothing is paid."""
    if name in ACCOUNTS:
        return False
    plugin = plugged(name)
    return plugin is None or plugin.rents_this_machine


def all_local(names: Iterable[str]) -> bool:
    """Tell whether nothing of *names* is paid for."""
    return all(is_here(name) for name in names)


def with_keys(here: Here) -> tuple[str, ...]:
    """Name the providers that can be asked from here: accounts with a key, and local ones that have had a node."""
    found: list[str] = []
    for name in ACCOUNTS:
        try:
            account_key(name, here.environ, here.home)
        except ProviderDenied:
            continue
        found.append(name)
    for name in plugged_names():
        plugin = plugged(name)
        if plugin is not None and plugin.key_variable is not None and here.environ.get(plugin.key_variable):
            found.append(name)
    nodes = here.state_dir / "nodes"
    local = sorted(path.name for path in nodes.iterdir() if path.is_dir()) if nodes.is_dir() else []
    return (*found, *local)
