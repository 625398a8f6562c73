"""`spotwarp gc`: delete what no retained state needs."""

from __future__ import annotations

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, mountpoint_argument, settings_for, store_option, workspace_option
from spotwarp_fs.core.units import format_size


@click.command("gc")
@mountpoint_argument
@workspace_option
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@store_option
@json_option
def command(mountpoint: str | None, workspace: str | None, dry_run: bool, store: str | None, as_json: bool) -> None:
    """Delete packs that no retained state, live writer or pinned reader needs.

    A running daemon collects by itself; this does it now. A pack is first condemned by a published state and deleted
    after the grace period (setting `grace`), so the first call frees little.
    """
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
