"""`spotwarp salvage`: bring back what a fenced or dead writer had not published."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for, store_option
from spotwarp_fs.core.units import format_duration, format_size


@click.group("salvage")
def command() -> None:
    """Bring back what a fenced or dead writer had not published.

    When another node takes a workspace over, what the old one had not published is set aside: in its cache directory
    and, if it still could, in the store.
    """


@command.command("list")
@click.argument("workspace", required=False)
@store_option
@json_option
def list_all(workspace: str | None, store: str | None, as_json: bool) -> None:
    """List what was set aside, on this node and in the store."""
    from spotwarp_fs.cli import wiring

    found = list(wiring.salvage_list(settings_for(store=store), workspace))
    lines = [
        f"{item.id}  {item.workspace}, writer epoch {item.writer_epoch}, {format_duration(item.age_s)} old, "
        f"{item.files:,} files, {format_size(item.dirty_bytes)} unpublished ({item.where})"
        for item in found
    ]
    output.emit(
        {"salvage": [asdict(item) for item in found]}, "\n".join(lines) or "nothing was set aside", as_json=as_json
    )


@command.command("cp")
@click.argument("salvage_id", metavar="ID")
@click.argument("target", metavar="DEST", type=click.Path(path_type=Path))
@store_option
@json_option
def copy(salvage_id: str, target: Path, store: str | None, as_json: bool) -> None:
    """Copy the tree as the lost writer last saw it to DEST, an empty or new directory."""
    from spotwarp_fs.cli import wiring

    with output.progress_bar("copying", shown=not as_json) as report:
        done = wiring.salvage_copy(settings_for(store=store), salvage_id, target, on_progress=report)
    output.emit(asdict(done), f"{done.files:,} files, {format_size(done.bytes_copied)} in {target}", as_json=as_json)


@command.command("drop")
@click.argument("salvage_id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_option
@json_option
def drop(salvage_id: str, yes: bool, store: str | None, as_json: bool) -> None:
    """Delete what was set aside as ID, for good."""
    from spotwarp_fs.cli import wiring

    if not yes:
        click.confirm(f"Delete {salvage_id} for good?", abort=True, err=True)
    wiring.salvage_drop(settings_for(store=store), salvage_id)
    output.emit({"id": salvage_id}, f"{salvage_id} is deleted", as_json=as_json)
