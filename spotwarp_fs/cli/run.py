"""`spotwarp run`: a command with its workspace around it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from spotwarp_fs.cli import output
from spotwarp_fs.cli.options import settings_for, store_option

if TYPE_CHECKING:
    from spotwarp_fs.cli.running.wish import RunWish


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("command_line", metavar="[--] COMMAND...", nargs=-1, type=click.UNPROCESSED)
@click.option("--script", metavar="FILE", help="Run FILE with this Python; its arguments come after `--`.")
@click.option("--workspace", "directory", metavar="DIR", help="The workspace. [default: the current directory]")
@click.option("--name", metavar="NAME", help="Its name in the store. [default: <user>-<last part of DIR>]")
@store_option
@click.option("--checkpoint-dir", metavar="URL", help="The same as --store.")
@click.option(
    "--checkpoint-path", metavar="DIR", default="checkpoints", show_default=True,
    help="Where in the workspace the command keeps its checkpoints: $SPOTWARP_CHECKPOINT_DIR.",
)  # fmt: skip
@click.option("--interval", metavar="TIME", help="Publish at least this often, as in 30s, 5m. [setting interval]")
@click.option("--mode", metavar="auto|fuse|directory", help="Form of the workspace. [setting mode]")
@click.option("--takeover", is_flag=True, help="Don't wait for the last writer's lease: fence it now.")
@click.option("--no-wait", is_flag=True, help="Fail (8) if another node still writes to the workspace.")
@click.option("--restore", is_flag=True, help="The workspace's state replaces files that are in DIR already.")
@click.option("--adopt-local", is_flag=True, help="Files that are in DIR already become the workspace's next state.")
@click.option("--cache-dir", metavar="DIR", type=click.Path(resolve_path=True), help="This node's copy; a fast disk.")
@click.option("--cache-size", metavar="SIZE", help="Budget of the cache, as in 200G. [default: 80 % of the free disk]")
@click.option("--fsync", metavar="local|remote", help="What fsync waits for. [setting fsync]")
@click.option("--state-dir", metavar="DIR", type=click.Path(resolve_path=True), help="Instead of ~/.spotwarp.")
@click.option("--permit", type=click.Path(path_type=Path, resolve_path=True), hidden=True)
@click.option("--node-intent", hidden=True)
@click.option("--node-instance", default="", hidden=True)
@click.option("--unsafe-single-writer", is_flag=True, help="Accept a store that ignores conditions; see docs first.")
def command(command_line: tuple[str, ...], name: str | None, no_wait: bool, **given: Any) -> int:
    """Run COMMAND with a workspace that survives the loss of this node; the same line continues it on the next one.

    The workspace is continued where it was left, or created. The command writes to it as to any directory; everything
    is published at each interval, and at the end. It is told:

    \b
    SPOTWARP_WORKSPACE       the workspace
    SPOTWARP_CHECKPOINT_DIR  the directory for checkpoints in it
    SPOTWARP_RESUMED         1 if the workspace was there before, 0 if it is new
    SPOTWARP_RESTORED_FROM   the number of the state that it was restored from

    A node that still writes to the workspace is waited for. SIGTERM is forwarded: the command has half of
    notice_timeout to save, the rest is for publishing. If another node takes the workspace over, the command is stopped
    (exit code 12). If the workspace's daemon is killed, the command is started again. Otherwise the exit code is the
    command's own; 13 if it succeeded and not everything could be saved; 127 if there is no such command.

    \b
    spotwarp run --store s3://my-bucket/runs -- python train.py --output_dir checkpoints
    spotwarp run --script train.py --checkpoint-dir gs://my-bucket/checkpoints --interval 5m
    spotwarp run --workspace /workspace --name run7 -- torchrun --nproc-per-node 8 train.py
    """
    from spotwarp_fs.cli.running.command import NoCommand
    from spotwarp_fs.cli.running.running import run

    wish = wish_from(command_line, wait=not no_wait, **given)
    keys = ("interval", "mode", "cache_dir", "cache_size", "fsync", "state_dir")
    flags = {key: given[key] for key in keys}
    unsafe = given["unsafe_single_writer"] or None
    store = _store(given["store"], given["checkpoint_dir"])
    loaded = settings_for(store=store, workspace=_checked(name), unsafe_single_writer=unsafe, **flags)
    try:
        return run(loaded, wish)
    except NoCommand as error:
        output.print_error(error, error.code, as_json=False)
        return error.code


def wish_from(command_line: tuple[str, ...], *, wait: bool, **given: Any) -> RunWish:
    """Read the command line, or raise UsageError for what contradicts itself."""
    from spotwarp_fs.cli.running.wish import RunWish

    if given["script"] is None and not command_line:
        raise click.UsageError("say what to run: `spotwarp run -- COMMAND...`, or `spotwarp run --script FILE`")
    if given["takeover"] and not wait:
        raise click.UsageError("--takeover does not wait anyway: leave --no-wait out")
    if given["takeover"] and given["permit"]:
        raise click.UsageError("--takeover and --permit contradict each other: is the claim decided, or waited for?")
    if given["restore"] and given["adopt_local"]:
        raise click.UsageError("--restore and --adopt-local contradict each other: which files are to be the state?")
    typed_in = Path.cwd()
    workspace = Path(os.path.realpath(typed_in / (given["directory"] or ".")))
    if given["permit"]:
        # Nobody has typed it: a rented node's command belongs into the workspace.
        typed_in = workspace
    checkpoint_path = Path(os.path.normpath(workspace / given["checkpoint_path"]))
    if not checkpoint_path.is_relative_to(workspace):
        raise click.UsageError(
            f"--checkpoint-path {checkpoint_path} is not in the workspace {workspace}: nothing there would be saved"
        )
    local_files: Literal["restore", "adopt"] | None = None
    if given["restore"] or given["adopt_local"]:
        local_files = "restore" if given["restore"] else "adopt"
    return RunWish(
        command=command_line,
        script=given["script"],
        typed_in=typed_in,
        workspace=workspace,
        checkpoint_path=checkpoint_path,
        takeover=given["takeover"],
        wait=wait,
        local_files=local_files,
        permit=given["permit"],
        node_intent=given["node_intent"],
        node_instance=given["node_instance"],
    )


def _store(store: str | None, checkpoint_dir: str | None) -> str | None:
    if store is not None and checkpoint_dir is not None and store.rstrip("/") != checkpoint_dir.rstrip("/"):
        raise click.UsageError(
            f"--store {store} and --checkpoint-dir {checkpoint_dir} both name the store, and differ: leave one out"
        )
    return store if store is not None else checkpoint_dir


def _checked(name: str | None) -> str | None:
    from spotwarp_fs.cli.settings import check_workspace
    from spotwarp_fs.core.errors import UserError

    try:
        return None if name is None else check_workspace(name)
    except UserError as error:
        raise click.UsageError(f"--name: {error}") from error
