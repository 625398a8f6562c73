"""`spotwarp push`: a directory becomes a workspace's next state."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for, store_option
from spotwarp_fs.core.units import format_size


@click.command("push")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name")
@click.option("--takeover", is_flag=True, help="Take over from a writer that still shows signs of life: it is fenced.")
@click.option("--replace", is_flag=True, help="Accept that most of the workspace's present files are gone afterwards.")
@store_option
@json_option
def command(directory: Path, name: str, takeover: bool, replace: bool, store: str | None, as_json: bool) -> None:
    """Make DIRECTORY the next state of workspace NAME, which is created if need be.

    Afterwards the workspace holds what DIRECTORY holds, and nothing else; the state before stays readable with --at.
    Only bytes that the store lacks are sent. An empty or unrelated directory is refused without --replace.

    \b
    spotwarp push ./prepared-data run7
    """
    from spotwarp_fs.cli import wiring
    from spotwarp_fs.cli.settings import check_workspace

    loaded = settings_for(store=store)
    check_workspace(name)
    with output.progress_bar("pushing", shown=not as_json) as report:
        done = wiring.push(loaded, directory.resolve(), name, takeover=takeover, replace=replace, on_progress=report)
    text = (
        f"{done.workspace}: manifest {done.manifest}, {done.files:,} files, {format_size(done.bytes_read)} read, "
        f"{format_size(done.bytes_sent)} sent"
    )
    output.emit(asdict(done), text, as_json=as_json)
