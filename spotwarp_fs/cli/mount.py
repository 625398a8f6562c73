"""`spotwarp mount`: make a workspace usable at a directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import AT_HELP, json_option, settings_for, store_option
from spotwarp_fs.core.units import format_duration, format_size

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import MountReport


@click.command("mount")
@click.argument("mountpoint", type=click.Path(path_type=Path))
@store_option
@click.option("--workspace", metavar="NAME", help="Name in the store. [default: <user>-<last part of MOUNTPOINT>]")
@click.option("--cache-dir", metavar="DIR", type=click.Path(resolve_path=True), help="This node's copy; a fast disk.")
@click.option("--cache-size", metavar="SIZE", help="Budget of the cache, as in 200G. [default: 80 % of the free disk]")
@click.option("--interval", metavar="TIME", help="Publish at least this often, as in 30s, 5m. [setting interval]")
@click.option("--takeover", is_flag=True, help="Take over from a writer that still shows signs of life: it is fenced.")
@click.option("--read-only", is_flag=True, help="Look, but don't write: no takeover, another writer stays undisturbed.")
@click.option("--at", metavar="STATE", help=AT_HELP)
@click.option("--mode", metavar="auto|fuse|directory", help="Form of the workspace. [setting mode]")
@click.option("--fsync", metavar="local|remote", help="What fsync waits for. [setting fsync]")
@click.option("--unsafe-single-writer", is_flag=True, help="Accept a store that ignores conditions; see docs first.")
@click.option("--foreground", is_flag=True, help="Stay until the workspace is unmounted; log to standard error.")
@json_option
def command(
    mountpoint: Path, takeover: bool, read_only: bool, at: str | None, foreground: bool, as_json: bool, **flags: Any
) -> int:
    """Mount a workspace at MOUNTPOINT and return when it is usable.

    A workspace that is in the store already is continued where it was left, on this node or another; its files are
    there at once and their bytes come when they are read. Otherwise an empty one is created. MOUNTPOINT is an empty
    directory, or one that is made.

    Without a store in the settings, states go to a directory under ~/.spotwarp: good for a trial, but lost with the
    machine.

    \b
    spotwarp mount /workspace --store s3://my-bucket/runs
    spotwarp mount /workspace --takeover             # the old node still answers, but this one is to go on
    spotwarp mount /old --read-only --at 1200        # look at an older state
    """
    from spotwarp_fs.cli import reports, wiring

    flags["unsafe_single_writer"] = flags["unsafe_single_writer"] or None
    wish = reports.MountWish(
        mountpoint=mountpoint.absolute(), takeover=takeover, read_only=read_only, at=at, foreground=foreground
    )
    return wiring.mount(settings_for(**flags), wish, lambda report: announce(report, as_json=as_json))


def announce(report: MountReport, *, as_json: bool) -> None:
    """Say what was mounted, and the truth about what is missing in it."""
    if as_json:
        output.print_json({"ok": True, **asdict(report)})
        return
    output.emit({}, summary(report), as_json=False)
    for line in report.left_out:
        output.warn(f"left out: {line}")
    for line in report.notes:
        output.warn(line)


def summary(report: MountReport) -> str:
    """Describe a mount in two lines."""
    if report.created:
        what = "created"
    else:
        age, size = format_duration(report.age_s), format_size(report.logical_bytes)
        what = f"resumed at manifest {report.manifest}, {age} old, {size} in {report.files:,} files"
    access = ", read-only" if report.read_only else ""
    return f"{report.workspace}: {what}\n{report.mountpoint} ({report.form}{access}) → {report.store}"
