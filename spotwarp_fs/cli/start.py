"""`spotwarp start`: make a plain directory a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spotwarp_fs.cli.mount import announce
from spotwarp_fs.cli.options import AT_HELP, json_option, settings_for, store_option


@click.command("start")
@click.option(
    "--workspace", "directory", metavar="DIR", type=click.Path(path_type=Path), default=".", show_default=True,
    help="The directory.",
)  # fmt: skip
@click.option("--name", "workspace", metavar="NAME", help="Name in the store. [default: <user>-<last part of DIR>]")
@store_option
@click.option("--interval", metavar="TIME", help="Look for changes and publish this often, as in 30s, 5m.")
@click.option("--cache-dir", metavar="DIR", type=click.Path(resolve_path=True), help="Where the node keeps its map.")
@click.option("--state-dir", metavar="DIR", type=click.Path(resolve_path=True), help="Instead of ~/.spotwarp.")
@click.option("--restore", is_flag=True, help="Bring the workspace's state into DIR; what differs there is set aside.")
@click.option("--adopt-local", is_flag=True, help="What is in DIR is the workspace's next state.")
@click.option("--takeover", is_flag=True, help="Take over from a writer that still shows signs of life: it is fenced.")
@click.option("--at", metavar="STATE", help=AT_HELP)
@click.option("--unsafe-single-writer", is_flag=True, help="Accept a store that ignores conditions; see docs first.")
@click.option("--foreground", is_flag=True, help="Stay until the workspace is stopped; log to standard error.")
@json_option
def command(
    directory: Path,
    restore: bool,
    adopt_local: bool,
    takeover: bool,
    at: str | None,
    foreground: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Watch a plain directory and publish its changes, without FUSE; returns when the workspace is usable.

    A new workspace takes what DIR holds. One that is in the store already is brought into an empty DIR with --restore:
    names and small files at once, large files when they are opened or as the link allows.

    \b
    spotwarp start --workspace ./run7 --store s3://my-bucket/runs --interval 30s
    spotwarp start --workspace ./run7 --restore      # on the next node
    spotwarp stop ./run7
    """
    from spotwarp_fs.cli import reports, wiring

    flags["unsafe_single_writer"] = flags["unsafe_single_writer"] or None
    wish = reports.MountWish(
        mountpoint=directory.absolute(), takeover=takeover, at=at, foreground=foreground, form="directory",
        restore=restore, adopt_local=adopt_local,
    )  # fmt: skip
    return wiring.mount(settings_for(**flags), wish, lambda report: announce(report, as_json=as_json))
