"""Options that several commands share, and the split of `NAME:PATH`.

Invariant: nothing heavy is imported here; values stay text until `sources.py` reads them, so that a wrong one is
reported alike from the command line, the environment and the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spotwarp_fs.core.errors import UserError

if TYPE_CHECKING:
    from spotwarp_fs.cli.sources import LoadedSettings

Command = TypeVar("Command", bound=Callable[..., Any])
AT_HELP = (
    "State to use: `latest`, `quiescent`, a manifest number, a snapshot's name, a time as in 2026-01-31T12:00Z, or an "
    "age as in 2h."
)


def json_option(command: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def store_option(command: Command) -> Command:
    """Add `--store`."""
    return click.option(
        "--store", metavar="URL", help="Store: s3://BUCKET/PREFIX, gs://…, file:///DIR. [setting store]"
    )(command)


def workspace_option(command: Command) -> Command:
    """Add `--workspace` for commands that can work without a mount."""
    return click.option(
        "--workspace", metavar="NAME", help="Work on this workspace of the store instead of a mounted one."
    )(command)


def mountpoint_argument(command: Command) -> Command:
    """Add an optional MOUNTPOINT."""
    return click.argument("mountpoint", required=False, type=click.Path())(command)


def state_dir_option(command: Command) -> Command:
    """Add `--state-dir` for commands that look for a workspace of this machine."""
    return click.option(
        "--state-dir", metavar="DIR", type=click.Path(resolve_path=True), help="As `start` or `run` got it."
    )(command)


def settings_for(**flags: Any) -> LoadedSettings:
    """Load the settings with what the command line gave; `__` in a name stands for a dot."""
    from spotwarp_fs.cli.sources import load_settings

    return load_settings({name.replace("__", "."): value for name, value in flags.items()})


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a workspace, as `NAME:PATH` names it."""

    workspace: str
    path: str
    """From the workspace's root, without a slash in front; empty for the root."""


def location(text: str) -> Location:
    """Read `NAME:PATH`, or `NAME` alone for its root, or raise UserError.

    >>> location("run7:logs/a:b.txt")
    Location(workspace='run7', path='logs/a:b.txt')
    """
    name, _, path = text.partition(":")
    if "/" in name or not name:
        raise UserError(f"{text!r} is not NAME:PATH, a workspace and a path in it, as in run7:logs/train.log")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise UserError(f"{text!r} has '..' in its path; write the path from the workspace's root")
    return Location(name, "/".join(parts))
