"""`spotwarp cat`: print a file of a workspace, without a mount."""

from __future__ import annotations

import sys

import click

from spotwarp_fs.cli.options import AT_HELP, location, settings_for, store_option
from spotwarp_fs.core.errors import UserError


@click.command("cat")
@click.argument("where", metavar="NAME:PATH")
@click.option("--at", metavar="STATE", help=AT_HELP)
@store_option
def command(where: str, at: str | None, store: str | None) -> None:
    """Print a file of a workspace, each block checked against its digest first.

    Works from any machine that reaches the store: no mount, no takeover, no FUSE.

    \b
    spotwarp cat run7:train.log | tail
    """
    from spotwarp_fs.cli import wiring

    place = location(where)
    if not place.path:
        raise UserError(f"{where!r} names a workspace; write the file's path after the colon")
    wiring.read_file(settings_for(store=store), place, at=at, sink=sys.stdout.buffer)
    sys.stdout.buffer.flush()
