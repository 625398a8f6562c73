"""The command `spotwarp`: find the subcommand, and turn every error into a message and an exit code.

Invariant: a subcommand's module is imported only when it is the one that runs, so that `--help` is quick and works
without FUSE; and this is the one place where an exception becomes an exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, Final

import click

from spotwarp_fs.cli import output, plugins
from spotwarp_fs.core.errors import ExitCode, SpotwarpError

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

COMMANDS: Final = {
    "run": ("run", "Run a command in a workspace that survives this node."),
    "mount": ("mount", "Mount a workspace; a new one, or where it was left."),
    "umount": ("umount", "Publish what is left, then unmount."),
    "start": ("start", "Watch a plain directory and publish its changes, without FUSE."),
    "stop": ("stop", "Publish what is left of a plain directory, and end its daemon."),
    "sync": ("sync", "Return when everything written so far is in the store."),
    "status": ("status", "Show what is safe, what is at risk, and for how long."),
    "ls": ("ls", "List workspaces, or files of one, straight from the store."),
    "cat": ("cat", "Print a file of a workspace, straight from the store."),
    "cp": ("cp", "Copy files out of a workspace, straight from the store."),
    "push": ("push", "Make a directory the next state of a workspace."),
    "snapshot": ("snapshot", "Keep states by name: create, list, delete."),
    "gc": ("gc", "Delete what no retained state needs."),
    "salvage": ("salvage", "Bring back what a fenced or dead writer had not published."),
    "doctor": ("doctor", "Check this machine, the configuration and the store."),
    "config": ("config", "Show, check or begin a configuration file."),
}
"""Module and short help of each subcommand; the module's `command` is the command itself. See `plugins` for more."""


class ReaderLeft(Exception):
    """Nobody reads standard output any more."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called; other packages may add commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order of the tables, which is the order of use."""
        return [*COMMANDS, *(name for name, (_, short) in plugins.find_plugins().commands.items() if short)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; our own name comes before a plugin's."""
        if cmd_name not in COMMANDS:
            return plugins.load_plugin(cmd_name)
        found = importlib.import_module(f"spotwarp_fs.cli.{COMMANDS[cmd_name][0]}").command
        assert isinstance(found, click.Command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click itself would turn a reader that left into exit code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the tables, without importing any."""
        found = plugins.find_plugins()
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])
        if added := [(name, short) for name, (_, short) in found.commands.items() if short and name not in COMMANDS]:
            with formatter.section("Failover"):
                formatter.write_dl(added)
        if found.broken:
            with formatter.section("Not available"):
                formatter.write_text(plugins.told(found))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spotwarp", prog_name="spotwarp")
def cli() -> None:
    """A workspace for training on spot GPUs: local-speed writes, streamed to an object store, resumable on any node.

    \b
    spotwarp mount /workspace --store s3://my-bucket/runs
    python train.py                  # writes to /workspace, unchanged
    spotwarp status                  # what would survive the loss of this node now

    On the next node the same mount command continues where the last one was lost.

    Settings come from ~/.spotwarp/config.yaml, then SPOTWARP_* variables, then options: `spotwarp config show`. Exit
    codes are listed in docs/OPERATIONS.md.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; every error of every command is reported here."""
    as_json = "--json" in arguments[: arguments.index("--")] if "--" in arguments else "--json" in arguments
    try:
        code = cli.main(arguments, prog_name="spotwarp", standalone_mode=False)
    except click.UsageError as error:
        return _usage(error, as_json=as_json)
    except click.ClickException as error:
        output.print_error(error, error.exit_code, as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.print_error(KeyboardInterrupt("interrupted"), INTERRUPTED, as_json=as_json)
        return INTERRUPTED
    except ReaderLeft:
        # The reader of `spotwarp cat … | head` left; the interpreter's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        return _failed(output.first_of_group(error), as_json=as_json)
    return code if isinstance(code, int) else ExitCode.OK


def _usage(error: click.UsageError, *, as_json: bool) -> int:
    if not as_json and error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try `{error.ctx.command_path} --help`.\n", err=True)
    output.print_error(SpotwarpError(error.format_message()), ExitCode.USAGE, as_json=as_json)
    return ExitCode.USAGE


def _failed(error: BaseException, *, as_json: bool) -> int:
    if isinstance(error, SpotwarpError):
        output.print_error(error, error.exit_code, as_json=as_json)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        output.print_error(KeyboardInterrupt("interrupted"), INTERRUPTED, as_json=as_json)
        return INTERRUPTED
    if not isinstance(error, OSError):
        # Nobody foresaw this one: whoever mends it needs to know where it happened.
        traceback.print_exception(error)
    output.print_error(error, ExitCode.FAILED, as_json=as_json)
    return ExitCode.FAILED
