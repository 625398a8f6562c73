"""`spotwarp gc`: delete what no retained state needs."""

from __future__ import annotations

import click

from spotwarp_fs.cli import output, plugins
from spotwarp_fs.cli.options import json_option, mountpoint_argument, settings_for, store_option, workspace_option
from spotwarp_fs.core.units import format_size


@click.command("gc")
@mountpoint_argument
@workspace_option
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@click.option("--nodes", is_flag=True, help="Destroy rented nodes that no live job owns, and nothing else.")
@click.option("--providers", metavar="NAMES", help="With --nodes: only these. [default: those with a key here]")
@store_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    mountpoint: str | None,
    workspace: str | None,
    dry_run: bool,
    nodes: bool,
    providers: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Delete packs that no retained state, live writer or pinned reader needs.

    A running daemon collects by itself; this does it now. A pack is first condemned by a published state and deleted
    after the grace period (setting `grace`), so the first call frees little.

    --nodes is about rented nodes instead: those of failover jobs that nobody controls any more.
    """
    if nodes:
        _collect_nodes(
            context, mountpoint, workspace, dry_run=dry_run, providers=providers, store=store, as_json=as_json
        )
        return
    if providers is not None:
        raise click.UsageError("--providers is about rented nodes: say --nodes too")
    with output.progress_bar("collecting", shown=not as_json) as report:
        if workspace is not None:
            from spotwarp_fs.cli import wiring

            result = wiring.collect(settings_for(store=store), workspace, dry_run=dry_run, on_progress=report)
        else:
            from spotwarp_fs.cli import client

            record = client.find_mount(client.state_directory(), mountpoint)
            result = client.call(record, "gc", {"dry_run": dry_run}, on_progress=report)
    would = "would be " if dry_run else ""
    text = (
        f"{result.get('deleted_packs', 0):,} packs ({format_size(result.get('deleted_bytes', 0))}) {would}deleted, "
        f"{result.get('condemned_packs', 0):,} ({format_size(result.get('condemned_bytes', 0))}) {would}condemned; "
        f"{format_size(result.get('stored_bytes', 0))} stored, {format_size(result.get('live_bytes', 0))} live"
    )
    output.emit(result, text, as_json=as_json)


def _collect_nodes(
    context: click.Context, mountpoint: str | None, workspace: str | None, *, dry_run: bool, **given: object
) -> None:
    """Hand over to the package that rents nodes; this one knows nothing of them."""
    if mountpoint is not None or workspace is not None or dry_run:
        raise click.UsageError("--nodes is about all rented nodes: leave the mountpoint, --workspace and --dry-run out")
    found = plugins.load_plugin("gc-nodes")
    if found is None:
        raise click.UsageError("--nodes: no package that rents nodes is installed")
    context.invoke(found, **given)
