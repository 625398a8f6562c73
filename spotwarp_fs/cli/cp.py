"""`spotwarp cp`: copy files out of a workspace, without a mount."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import AT_HELP, json_option, location, settings_for, store_option
from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.units import format_size


@click.command("cp")
@click.argument("where", metavar="NAME:PATH")
@click.argument("target", metavar="DEST", default=".", type=click.Path(path_type=Path))
@click.option("--at", metavar="STATE", help=AT_HELP)
@click.option("-r", "--recursive", is_flag=True, help="Copy a directory and everything below.")
@store_option
@json_option
def command(where: str, target: Path, at: str | None, recursive: bool, store: str | None, as_json: bool) -> None:
    """Copy a file or directory of a workspace to DEST, with modes, times, links, xattrs and holes.

    If DEST is a directory, the copy goes into it. Works from any machine that reaches the store: no mount, no takeover,
    no FUSE. To put files into a workspace, mount it, or use `spotwarp push`.

    \b
    spotwarp cp run7:checkpoints/checkpoint-900 . -r
    spotwarp cp run7:model.safetensors /tmp/ --at 1200
    """
    from spotwarp_fs.cli import wiring

    if ":" not in where and ":" in str(target):
        raise UserError("cp copies out of a workspace only; to put files in, mount it, or use `spotwarp push DIR NAME`")
    loaded = settings_for(store=store)
    with output.progress_bar("copying", shown=not as_json) as report:
        done = wiring.copy_out(loaded, location(where), target, at=at, recursive=recursive, on_progress=report)
    text = f"{done.files:,} files, {format_size(done.bytes_copied)}, from manifest {done.manifest}"
    output.emit(asdict(done), text, as_json=as_json)
