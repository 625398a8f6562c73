"""`spotwarp gc --nodes`: destroy rented nodes that no live job owns, also with an empty ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from provisioner.cli.edge import Stopped, at_the_edge

if TYPE_CHECKING:
    from provisioner.engine.collecting import Collected
    from spotwarp_fs.api import LoadedSettings


@click.command("gc-nodes")
@click.option("--providers", metavar="NAMES", help="[default: those that this machine has keys for]")
@click.option("--store", metavar="URL", help="Store of the jobs. [setting store]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@at_the_edge
def command(providers: str | None, store: str | None, as_json: bool) -> None:
    """Destroy nodes whose labels are SpotWarp's and that no live job owns, and verify that they are gone.

    Nodes of a job whose controller lives are left alone; so is the node that holds a workspace. To tell that a
    controller is dead takes 30 s of watching. Instances with other labels are never touched.
    """
    import trio

    from spotwarp_fs.api import console, print_json, printable, settings_for

    found = trio.run(_collect, settings_for(store=store), providers)
    if as_json:
        print_json(
            {
                "ok": not found.failed,
                "destroyed": list(found.destroyed),
                "kept": list(found.kept),
                "failed": list(found.failed),
            }
        )
    else:
        shown = console()
        for title, lines in (("destroyed", found.destroyed), ("kept", found.kept), ("FAILED", found.failed)):
            for line in lines:
                shown.print(f"{title}: {printable(line)}", markup=False)
        shown.print(f"{len(found.destroyed)} nodes destroyed and verified gone, {len(found.kept)} left alone")
    if found.failed and not as_json:
        raise Stopped(f"{len(found.failed)} could not be verified gone, and may be billed: try again")


async def _collect(loaded: LoadedSettings, providers: str | None) -> Collected:
    from provisioner.cli import parsing
    from provisioner.cli.accounts import make_providers, with_keys
    from provisioner.cli.asking import opened_store
    from provisioner.cli.making_plan import here, opened
    from provisioner.cli.plugged import plugged_names
    from provisioner.engine.collecting import gc_nodes
    from provisioner.ledger.store import LmdbLedger

    place = here(loaded)
    if providers:
        names = parsing.providers("--providers", providers, plugged=plugged_names())
    else:
        names = with_keys(place)
    if not names:
        raise Stopped("no account's key is here, and no local node: name the providers with --providers", 3)
    ledger = LmdbLedger(loaded.settings.state_dir / "ledger")
    try:
        async with opened(make_providers(names, place)) as made, opened_store(loaded) as (_, shelf):
            return await gc_nodes(made, shelf, ledger, say=lambda text: click.echo(text, err=True))
    finally:
        ledger.close()
