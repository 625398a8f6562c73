"""`spotwarp snapshot`: published states kept by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import json_option, mountpoint_argument, settings_for, store_option, workspace_option
from spotwarp_fs.core.units import format_duration


@click.group("snapshot")
def command() -> None:
    """Keep published states by name: they stay readable until they are deleted.

    Each command works on the mounted workspace, or with --workspace on any of the store; a writer that runs elsewhere
    is asked, not disturbed.
    """


@command.command("create")
@click.argument("name")
@mountpoint_argument
@workspace_option
@store_option
@json_option
def create(name: str, mountpoint: str | None, workspace: str | None, store: str | None, as_json: bool) -> None:
    """Publish what is written so far and keep that state as NAME."""
    result = _perform("create", {"name": name}, mountpoint, workspace, store)
    output.emit(result, f"{name}: manifest {result.get('manifest')}", as_json=as_json)


@command.command("list")
@mountpoint_argument
@workspace_option
@store_option
@json_option
def list_all(mountpoint: str | None, workspace: str | None, store: str | None, as_json: bool) -> None:
    """List the named states, oldest first."""
    result = _perform("list", {}, mountpoint, workspace, store)
    lines = [
        f"{item['name']}  manifest {item['manifest']}, {format_duration(item['age_s'])} old"
        for item in result.get("snapshots", [])
    ]
    output.emit(result, "\n".join(lines) or "no snapshot", as_json=as_json)


@command.command("delete")
@click.argument("name")
@mountpoint_argument
@workspace_option
@store_option
@json_option
def delete(name: str, mountpoint: str | None, workspace: str | None, store: str | None, as_json: bool) -> None:
    """Forget NAME; its space is free after the next collection if nothing else needs it."""
    result = _perform("delete", {"name": name}, mountpoint, workspace, store)
    output.emit(result, f"{name} is deleted", as_json=as_json)


def _perform(
    operation: str, arguments: Mapping[str, Any], mountpoint: str | None, workspace: str | None, store: str | None
) -> dict[str, Any]:
    """Ask the daemon of a mount, or work on the store."""
    if workspace is not None:
        from spotwarp_fs.cli import wiring

        return wiring.snapshot(settings_for(store=store), workspace, operation, arguments)
    from spotwarp_fs.cli import client

    record = client.find_mount(client.state_directory(), mountpoint)
    return client.call(record, f"snapshot.{operation}", arguments)
