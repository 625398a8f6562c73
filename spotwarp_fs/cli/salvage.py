"""`spotwarp salvage`: bring back what a fenced or dead writer had not published."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for, store_option
from spotwarp_fs.core.errors import ExitCode
from spotwarp_fs.core.units import format_duration, format_size

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import SalvageLine

NAMED_MAX: Final = 20


@click.group("salvage")
def command() -> None:
    """Bring back what a fenced or dead writer had not published.

    When another node takes a workspace over, what the old one had not published is set aside: in the store as soon as
    the old node learns of it, and in its cache directory when it starts again. Both stay until they are dropped.
    """


@command.command("list")
@click.argument("workspace", metavar="[NAME]", required=False)
@store_option
@json_option
def list_all(workspace: str | None, store: str | None, as_json: bool) -> None:
    """List what was set aside, on this node and in the store."""
    from spotwarp_fs.cli import wiring

    found = list(wiring.salvage_list(settings_for(store=store), workspace))
    text = "\n".join(_line(item) for item in found) or "nothing was set aside"
    output.emit({"salvage": [asdict(item) for item in found]}, text, as_json=as_json)


def _line(item: SalvageLine) -> str:
    short = "" if item.complete else ", cut short"
    return (
        f"{item.id}  {format_duration(item.age_s)} old, {item.files:,} files, {format_size(item.dirty_bytes)} "
        f"unpublished, writer epoch {item.writer_epoch} ({item.where}{short})\n    {item.reason}"
    )


@command.command("copy")
@click.argument("salvage_id", metavar="ID")
@click.argument("target", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--all", "whole", is_flag=True, help="Copy the whole tree as the lost writer last saw it.")
@store_option
@json_option
def copy(salvage_id: str, target: Path, whole: bool, store: str | None, as_json: bool) -> int:
    """Copy what the lost writer had changed or made to DEST, an empty or new directory.

    Files are copied whole: parts of them that were published come from the store. ID may be shortened.
    """
    from spotwarp_fs.cli import wiring

    with output.progress_bar("copying", shown=not as_json) as report:
        done = wiring.salvage_copy(settings_for(store=store), salvage_id, target, whole=whole, on_progress=report)
    if as_json:
        output.print_json({"ok": not done.unreadable, **asdict(done)})
    else:
        text = f"{done.files:,} files, {format_size(done.bytes_copied)} in {target}"
        output.emit({}, "\n".join([text, *_removed(done.removed)]), as_json=False)
        for path in done.damaged:
            output.warn(f"{path} has holes: parts of it were not here, or could not be read, when it was set aside")
        for line in done.unreadable:
            output.warn(f"not copied: {line}")
    return ExitCode.CORRUPT if done.unreadable else ExitCode.OK


def _removed(paths: tuple[str, ...]) -> list[str]:
    """The paths that the lost writer had removed."""
    if not paths:
        return []
    more = [f"  and {len(paths) - NAMED_MAX:,} more"] if len(paths) > NAMED_MAX else []
    return ["removed by the lost writer:", *(f"  {path}" for path in paths[:NAMED_MAX]), *more]


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
    dropped = wiring.salvage_drop(settings_for(store=store), salvage_id)
    output.emit({"id": dropped}, f"{dropped} is deleted", as_json=as_json)
