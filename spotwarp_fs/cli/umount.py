"""`spotwarp umount`: publish what is left, then unmount."""

from __future__ import annotations

from dataclasses import asdict

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, settings_for
from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import format_size, parse_duration


@click.command("umount")
@click.argument("mountpoint", type=click.Path())
@click.option("--timeout", metavar="TIME", help="Give up publishing after this long. [setting drain_timeout]")
@click.option("--force", is_flag=True, help="Unmount also while programs use it; they are left with a dead mount.")
@json_option
def command(mountpoint: str, timeout: str | None, force: bool, as_json: bool) -> int:
    """Publish what is left, then unmount MOUNTPOINT.

    Programs may write until the drain ends. If something could not be saved in time, the exit code is 13 and the cache
    is kept: mount again on this node and publishing goes on. A mount whose daemon is dead is cleaned away.
    """
    from spotwarp_fs.cli import client, wiring

    record = client.find_mount(client.state_directory(), mountpoint)
    if timeout is not None:
        timeout_s = parse_duration(timeout)
    else:
        timeout_s = _drain_timeout_s()
    with output.progress_bar("publishing", shown=not as_json) as report:
        done = wiring.umount(record, timeout_s=timeout_s, force=force, on_progress=report)
    if as_json:
        output.print_json({**asdict(done), "ok": done.saved})
    else:
        state = f"saved at manifest {done.manifest}" if done.manifest is not None else "nothing to publish"
        if done.saved:
            output.emit({}, f"{done.workspace}: {state}; {done.mountpoint} is unmounted", as_json=False)
    if done.saved:
        return ExitCode.OK
    if not as_json:
        sample = "".join(f"\n  {path}" for path in done.left)
        output.warn(
            f"{done.workspace}: {format_size(done.dirty_bytes)} could not be saved{sample}\n"
            f"They are still in the cache: mount {done.mountpoint} again on this machine to go on publishing"
        )
    return ExitCode.NOT_SAVED


def _drain_timeout_s() -> float:
    """Read the setting, or its default beside a broken configuration: that must not keep anybody from unmounting."""
    from spotwarp_fs.cli.settings import Settings

    try:
        return settings_for().settings.drain_timeout
    except UserError as error:
        output.warn(f"the configuration is not used: {error}")
        return Settings().drain_timeout
