"""The options that `plan` and `failover` share, and their translation into a `JobSpec`.

Invariant: values stay text until `wishing` reads them, so that each wrong one is reported alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("command_line", metavar="[--] COMMAND...", nargs=-1, type=click.UNPROCESSED),
    click.option("--providers", metavar="NAMES", default="vast,runpod", show_default=True, help="vast, runpod, local."),
    click.option("--gpu", metavar="NAME", help="As in `A100 80GB`, `RTX 4090`; any memory size if none is given."),
    click.option("--gpus", type=int, default=1, show_default=True, help="GPUs of one machine."),
    click.option("--max-price", metavar="USD", help="Most per GPU-hour on spot, disk and bandwidth included."),
    click.option("--on-demand-max", metavar="USD", help="The same on demand; without it on-demand is never rented."),
    click.option("--from", "directory", metavar="DIR", help="A new workspace begins with these files."),
    click.option("--env-file", metavar="FILE", help="NAME=VALUE lines for the command; only you may read it (0600)."),
    click.option("--disk", metavar="SIZE", default="50G", show_default=True, help="Disk to rent, as in 200G."),
    click.option("--image", metavar="NAME", help="Container image. [default: a PyTorch one]"),
    click.option("--image-login", metavar="FILE", help="registry=, user=, password= lines for a private image (0600)."),
    click.option("--region", metavar="NAMES", help="Only there, as in EU,US: a part of the offer's location."),
    click.option("--min-up", metavar="SPEED", help="Least uplink, as in 500mbps."),
    click.option("--min-down", metavar="SPEED", help="Least downlink, as in 1gbps."),
    click.option("--min-reliability", metavar="SHARE", help="The provider's own figure, as in 0.95."),
    click.option("--budget", metavar="USD", help="For the whole job; reached, everything ends and the data stays."),
    click.option("--race-budget", metavar="USD", help="For one race. [default: 2 % of what was spent, at least $1]"),
    click.option("--candidates", type=int, default=3, show_default=True, help="How many nodes race at once."),
    click.option("--bid", metavar="auto|USD", default="auto", show_default=True, help="auto: the lowest bid and 15 %."),
    click.option("--keep-lost", metavar="TIME", help="Keep an outbid node so long for salvage, as in 30m."),
    click.option("--move-below", metavar="SHARE", help="Move to offers so much cheaper, as in 25%."),
    click.option("--crashes", type=int, default=3, show_default=True, help="Starts of a command that fails, per node."),
    click.option("--interval", metavar="TIME", help="Publish at least this often. [setting interval]"),
    click.option("--mode", type=click.Choice(["auto", "fuse", "directory"]), default="auto", help="Form on the nodes."),
    click.option(
        "--checkpoint-path", metavar="DIR", default="checkpoints", show_default=True, help="In the workspace."
    ),
    click.option("--workspace", metavar="NAME", help="Its name in the store. [default: <user>-<directory>]"),
    click.option("--job", metavar="NAME", help="Name of the job. [default: the workspace's]"),
    click.option("--store", metavar="URL", help="Store: s3://BUCKET/PREFIX, gs://…, file:///DIR. [setting store]"),
    click.option("--checkpoint-size", metavar="SIZE", help="Of one checkpoint as stored, as in 94G, for the plan."),
    click.option("--checkpoint-every", metavar="TIME", help="Time between two checkpoints, as in 30m, for the plan."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
)


def job_options(command: Command) -> Command:
    """Add them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
