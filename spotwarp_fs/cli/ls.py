"""`spotwarp ls`: list workspaces, or files of one, without a mount."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import AT_HELP, json_option, location, settings_for, store_option
from spotwarp_fs.core.units import format_duration, format_size

if TYPE_CHECKING:
    from spotwarp_fs.cli.reports import ListedFile, WorkspaceLine


@click.command("ls")
@click.argument("where", required=False, metavar="[NAME[:PATH]]")
@click.option("--at", metavar="STATE", help=AT_HELP)
@click.option("-l", "--long", "is_long", is_flag=True, help="Show mode, owner, size and time, as `ls -l`.")
@click.option("-R", "--recursive", is_flag=True, help="List everything below.")
@store_option
@json_option
def command(
    where: str | None, at: str | None, is_long: bool, recursive: bool, store: str | None, as_json: bool
) -> None:
    """List the workspaces of the store or, with NAME:PATH, files of one.

    Works from any machine that reaches the store: no mount, no takeover, no FUSE; a running job is not disturbed.

    \b
    spotwarp ls
    spotwarp ls -l run7:checkpoints
    spotwarp ls -R run7: --at quiescent
    """
    from spotwarp_fs.cli import wiring

    loaded = settings_for(store=store)
    if where is None:
        _show_workspaces(wiring.list_workspaces(loaded), as_json=as_json)
        return
    files = wiring.list_files(loaded, location(where), at=at, recursive=recursive)
    if as_json:
        output.print_json({"ok": True, "files": [as_plain(item) for item in files]})
        return
    for item in files:
        click.echo(output.printable(long_line(item) if is_long else _text(item.path)))


def _show_workspaces(lines: Iterable[WorkspaceLine], *, as_json: bool) -> None:
    if as_json:
        output.print_json({"ok": True, "workspaces": [asdict(line) for line in lines]})
        return
    from rich.table import Table

    table = Table("workspace", "manifest", "age", "size", "files", "writer", box=None)
    for line in lines:
        table.add_row(
            line.name,
            str(line.head_number),
            format_duration(line.age_s),
            format_size(line.logical_bytes),
            f"{line.files:,}",
            "live" if line.live else "",
        )
    output.console().print(table if table.row_count else "the store has no workspace yet")


def as_plain(item: ListedFile) -> dict[str, Any]:
    """Return a listed file as JSON takes it; bytes that are not UTF-8 become escaped surrogates."""
    plain = asdict(item)
    plain["path"] = _text(item.path)
    plain["target"] = None if item.target is None else _text(item.target)
    return plain


def long_line(item: ListedFile) -> str:
    """Describe a file as `ls -l` does.

    Times are formatted here only: a workspace may hold years that `datetime` cannot.
    """
    try:
        when = datetime.fromtimestamp(item.mtime_ns // 1_000_000_000).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        when = f"@{item.mtime_ns // 1_000_000_000}"
    mode = item.kind + stat.filemode(stat.S_IMODE(item.mode))[1:]
    arrow = f" -> {_text(item.target)}" if item.target is not None else ""
    owner = f"{item.uid:>5} {item.gid:>5}"
    return f"{mode} {item.links:>3} {owner} {item.size:>15,} {when:>19} {_text(item.path)}{arrow}"


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
