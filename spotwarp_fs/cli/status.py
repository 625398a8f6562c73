"""`spotwarp status`: what is safe, what is at risk, for how long."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, mountpoint_argument, state_dir_option
from spotwarp_fs.core.units import parse_duration

if TYPE_CHECKING:
    from spotwarp_fs.cli.client import MountRecord
    from spotwarp_fs.core.status import Status


@click.command("status")
@mountpoint_argument
@click.option("--watch", is_flag=True, help="Keep showing it, until Ctrl-C; with --json, one document per line.")
@click.option("--every", metavar="TIME", default="1s", show_default=True, help="Pause between two looks of --watch.")
@state_dir_option
@json_option
def command(mountpoint: str | None, watch: bool, every: str, state_dir: str | None, as_json: bool) -> None:
    """Show what would survive the loss of this node now, and what would not.

    MOUNTPOINT may be left out inside a workspace, or when only one is mounted.

    \b
    at risk      age of the oldest write that is not in the store, and how many bytes
    drain        how long it would take to save everything, if writing stopped
    checkpoint   the newest complete one that another node would find
    fetching     what comes from the store before anybody reads it, after a takeover
    reads        how many requests wait for the store
    """
    from spotwarp_fs.cli import client

    record = client.find_mount(client.state_directory(state_dir), mountpoint)
    if watch:
        _watch(record, parse_duration(every), as_json=as_json)
    elif as_json:
        output.print_json({"ok": True, "mountpoint": record.mountpoint, **_ask(record).to_dict()})
    else:
        from spotwarp_fs.cli.status_view import view

        output.console().print(view(_ask(record), record.mountpoint))


def _ask(record: MountRecord) -> Status:
    from spotwarp_fs.cli import client
    from spotwarp_fs.core.errors import SpotwarpError
    from spotwarp_fs.core.status import Status

    try:
        return Status.from_dict(client.call(record, "status"))
    except KeyError as error:
        raise SpotwarpError(f"the daemon of {record.mountpoint} speaks another version: {error.args[0]}") from error


def _watch(record: MountRecord, pause_s: float, *, as_json: bool) -> None:
    never = threading.Event()
    while as_json:
        output.print_json({"ok": True, "mountpoint": record.mountpoint, **_ask(record).to_dict()})
        never.wait(pause_s)
    from rich.live import Live

    from spotwarp_fs.cli.status_view import view

    while not sys.stdout.isatty():
        output.console().print(view(_ask(record), record.mountpoint))
        never.wait(pause_s)
    with Live(view(_ask(record), record.mountpoint), console=output.console(), auto_refresh=False) as live:
        while True:
            never.wait(pause_s)
            live.update(view(_ask(record), record.mountpoint), refresh=True)
