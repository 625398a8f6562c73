"""`spotwarp stop`: publish what is left of a plain directory, and end its daemon."""

from __future__ import annotations

import click

from spotwarp_fs.cli import umount
from spotwarp_fs.cli.options import json_option, mountpoint_argument, state_dir_option


@click.command("stop")
@mountpoint_argument
@click.option("--timeout", metavar="TIME", help="Give up publishing after this long. [setting drain_timeout]")
@state_dir_option
@json_option
def command(mountpoint: str | None, timeout: str | None, state_dir: str | None, as_json: bool) -> int:
    """Publish what is left, then end the daemon; the directory stays as it is.

    If something could not be saved in time, the exit code is 13: start again on this node and publishing goes on. If
    another writer took the workspace over, it is 12.
    """
    return umount.end(mountpoint, timeout=timeout, force=False, state_dir=state_dir, as_json=as_json)
