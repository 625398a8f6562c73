"""Decide one create completely: image, start script, environment, bid.

Invariant: what a node is told is the store's address and keys, the job's own secrets and the archive's presigned URL,
all in its environment; no key of an account, and nothing secret in the script (P-15).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from provisioner.bundling.bundle import Bundle, made_before, make_bundle, make_light_bundle, upload_bundle
from provisioner.cli.accounts import is_here
from provisioner.cli.plugged import plugged
from provisioner.cli.wishing import Ordered
from provisioner.core import bootstrap
from provisioner.core.bootstrap import Bootstrap, SelfDestruct
from provisioner.core.errors import BadWish
from provisioner.core.intents import Intent
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Market, Offer
from provisioner.core.ports import Launch, Provider
from provisioner.engine.ports import LaunchMaker
from provisioner.meeting import StoreShelf
from provisioner.node.errand import GIVE, PLUGGED_VARIABLES
from spotwarp_fs.api import NodeSettings, SpotwarpError, node_settings

LINK_S: Final = 3600
"""How long the archive's URL lives: longer than any boot."""
SELF_DESTRUCT: Final[Mapping[str, SelfDestruct]] = {"vast": bootstrap.VAST, "runpod": bootstrap.RUNPOD}


async def launch_maker(
    order: Ordered, spec: JobSpec, shelf: StoreShelf, providers: Mapping[str, Provider]
) -> LaunchMaker:
    """Bring the archives to the store, and return what makes launches; the first time this takes a minute."""
    cache = order.loaded.settings.state_dir / "bundles"
    bundles = {name: await _bundle(name, cache) for name in providers}
    for bundle in {bundle.sha256: bundle for bundle in bundles.values()}.values():
        await upload_bundle(shelf, bundle)
    try:
        told = await node_settings(order.loaded)
    except SpotwarpError as error:
        raise BadWish(str(error)) from error
    script_bytes = {name: (await provider.capabilities()).script_bytes_max for name, provider in providers.items()}

    async def make(intent: Intent, offer: Offer, current: JobSpec) -> Launch:
        bundle = bundles[intent.provider]
        script, extra = _script(intent, current, bundle, script_bytes[intent.provider])
        url = await shelf.link(bundle.key, LINK_S)
        return Launch(
            label=intent.label,
            offer=offer,
            image=current.image,
            disk_gb=current.wish.disk_gb,
            script=script,
            environment=environment(
                told, order.environment, {**extra, **_providers_variables(intent.provider), "SPOTWARP_BUNDLE_URL": url}
            ),
            image_login=order.image_login.told_to(intent.provider) if order.image_login else None,
            bid_usd_h=intent.compute_usd_h if intent.market is Market.SPOT else None,
        )

    return make


async def _bundle(provider: str, cache: Path) -> Bundle:
    if not is_here(provider) and not made_before(cache):
        click.echo("making the archive that nodes run: about a minute, once for each version of SpotWarp", err=True)
    return make_light_bundle(cache) if is_here(provider) else await make_bundle(cache)


def _self_destruct(provider: str) -> SelfDestruct | None:
    if provider in SELF_DESTRUCT:
        return SELF_DESTRUCT[provider]
    plugin = plugged(provider)
    return None if plugin is None else plugin.destroy


def _providers_variables(provider: str) -> Mapping[str, str]:
    """Tell a node which variables its provider speaks by, where the node cannot know them."""
    plugin = plugged(provider)
    if plugin is None:
        return {}
    key = "" if plugin.destroy is None else plugin.destroy.key
    return {PLUGGED_VARIABLES: f"{plugin.instance_variable or ''},{key}"}


def _script(intent: Intent, spec: JobSpec, bundle: Bundle, bytes_max: int) -> tuple[str, Mapping[str, str]]:
    """Return the start script; it names the job, whose spec lies in the store, so its length does not depend on it."""
    boot = Bootstrap(intent.ident, ("run", "--job", spec.job), bundle.sha256, _self_destruct(intent.provider))
    return bootstrap.packed(bootstrap.render(boot), bytes_max)


def environment(told: NodeSettings, given: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return a node's whole environment; what is meant for the command alone does not reach the filesystem."""
    return {**{f"{GIVE}{name}": value for name, value in given.items()}, **told.variables, **told.secrets, **extra}
