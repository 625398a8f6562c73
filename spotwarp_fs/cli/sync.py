"""`spotwarp sync`: the barrier."""

from __future__ import annotations

import threading

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, mountpoint_argument, state_dir_option
from spotwarp_fs.core.units import parse_duration

FLUSH_S = 30.0


@click.command("sync")
@mountpoint_argument
@click.option("--timeout", metavar="TIME", default="1h", show_default=True, help="Fail if it takes longer.")
@state_dir_option
@json_option
def command(mountpoint: str | None, timeout: str, state_dir: str | None, as_json: bool) -> None:
    """Return when everything written before this call is in the store, and print the manifest's number.

    A takeover on another node serves that state or a later one. MOUNTPOINT may be left out inside a workspace, or when
    only one is mounted.
    """
    from spotwarp_fs.cli import client

    record = client.find_mount(client.state_directory(state_dir), mountpoint)
    arguments = {"timeout_s": parse_duration(timeout)}
    flush(record.mountpoint)
    with output.progress_bar("publishing", shown=not as_json) as report:
        result = client.call(record, "sync", arguments, on_progress=report)
    output.emit(result, str(result.get("manifest")), as_json=as_json)
    for path in result.get("in_flight", []):
        click.echo(f"{path} is still being written: a takeover serves an older version of it", err=True)
    for path in result.get("unsettled", []):
        click.echo(f"{path} changed each time that it was read, or cannot be read; see `spotwarp status`", err=True)


def flush(mountpoint: str) -> None:
    """Have the kernel hand over pages dirtied through mappings, so that the barrier has them; not for ever."""
    from spotwarp_fs.fuse.holders import flush_pages

    flusher = threading.Thread(target=flush_pages, args=(mountpoint,), daemon=True)
    flusher.start()
    flusher.join(FLUSH_S)
