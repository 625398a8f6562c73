"""`spotwarp umount`: publish what is left, then unmount."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for, state_dir_option
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import format_size, parse_duration

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import UmountReport


@click.command("umount")
@click.argument("mountpoint", type=click.Path())
@click.option("--timeout", metavar="TIME", help="Give up publishing after this long. [setting drain_timeout]")
@click.option("--force", is_flag=True, help="Unmount also while programs use it; they are left with a dead mount.")
@state_dir_option
@json_option
def command(mountpoint: str, timeout: str | None, force: bool, state_dir: str | None, as_json: bool) -> int:
    """Publish what is left, then unmount MOUNTPOINT.

    Programs may write until the drain ends. If something could not be saved in time, the exit code is 13 and the cache
    is kept: mount again on this node and publishing goes on. If another writer took the workspace over, it is 12, and
    what was not published is salvage (`spotwarp salvage`). A mount whose daemon is dead is cleaned away.
    """
    return end(mountpoint, timeout=timeout, force=force, state_dir=state_dir, as_json=as_json)


def end(mountpoint: str | None, *, timeout: str | None, force: bool, state_dir: str | None, as_json: bool) -> int:
    """Drain a workspace of either form and say how that went; returns the exit code."""
    from spotwarp_fs.cli import client, wiring

    place = client.state_directory(state_dir)
    record = client.find_mount(place, mountpoint)
    if timeout is not None:
        timeout_s = parse_duration(timeout)
    else:
        timeout_s = _drain_timeout_s()
    with output.progress_bar("publishing", shown=not as_json) as report:
        done = wiring.umount(record, place, timeout_s=timeout_s, force=force, on_progress=report)
    if as_json:
        output.print_json({**asdict(done), "ok": done.saved})
    else:
        state = f"saved at manifest {done.manifest}" if done.manifest is not None else "nothing to publish"
        if done.saved:
            ended = "unmounted" if record.form == "fuse" else "no longer watched"
            output.emit({}, f"{done.workspace}: {state}; {done.mountpoint} is {ended}", as_json=False)
    if done.saved:
        return ExitCode.OK
    if not as_json:
        output.warn(_left_behind(done))
    return ExitCode.FENCED if done.fenced else ExitCode.NOT_SAVED


def _left_behind(done: UmountReport) -> str:
    """Say what was not published, where it is, and how to get it."""
    sample = "".join(f"\n  {path}" for path in done.left)
    lost = f"{done.workspace}: {format_size(done.dirty_bytes)} could not be saved{sample}\n"
    if done.fenced:
        return (
            f"{lost}Another writer has the workspace, so it is not published any more: `spotwarp salvage list` shows "
            "it, `spotwarp salvage copy` brings it back"
        )
    return f"{lost}They are still in the cache: mount {done.mountpoint} again on this machine to go on publishing"


def _drain_timeout_s() -> float:
    """Read the setting, or its default beside a broken configuration: that must not keep anybody from unmounting."""
    from spotwarp_fs.cli.settings import Settings

    try:
        return settings_for().settings.drain_timeout
    except UserError as error:
        output.warn(f"the configuration is not used: {error}")
        return Settings().drain_timeout
