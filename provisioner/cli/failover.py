"""`spotwarp failover`: keep a command running on rented nodes until it has succeeded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from provisioner.cli.edge import at_the_edge
from provisioner.cli.job_options import job_options

OF_ANY_START: Final = frozenset(
    {"command_line", "job", "store", "env_file", "image_login", "as_json", "detach", "now", "yes", "events", "adopt",
     "again", "controller"}
)  # fmt: skip
"""What may be said again when a job goes on with the words it was begun with."""


@click.command("failover", context_settings={"allow_interspersed_args": False})
@job_options
@click.option("--detach", is_flag=True, help="Go on in the background; `spotwarp ps` shows it.")
@click.option("--now", is_flag=True, help="A drill: treat the running job's node as lost.")
@click.option("--yes", is_flag=True, help="Don't ask before renting.")
@click.option("--events", is_flag=True, help="One JSON document a line for each thing that happens.")
@click.option("--adopt", is_flag=True, help="Take the job over from a controller that lives elsewhere.")
@click.option("--again", is_flag=True, help="Begin a job anew that has ended.")
@click.option("--controller", is_flag=True, hidden=True)
@click.pass_context
@at_the_edge
def command(context: click.Context, /, command_line: tuple[str, ...], **given: Any) -> int:
    """Keep COMMAND running on spot GPUs until it succeeds: rent, watch, and on loss race for a replacement and resume.

    Shows the plan first and asks. Stop it at any moment, also with SIGKILL, and start it again, also on another
    machine: `spotwarp failover --job NAME` carries on. Account keys come from VAST_API_KEY and RUNPOD_API_KEY or the
    vendors' own files; secrets of the job from --env-file. Ctrl-C asks whether to leave it running or to tear it down.
    At the end everything is torn down and the report is printed; the exit code is the command's.

    \b
    spotwarp failover --gpu 'A100 80GB' --max-price 1.20 --from . -- python train.py
    spotwarp failover --job me-run7                 # carry on
    spotwarp failover --job me-run7 --now           # a drill
    """
    from provisioner.cli.beginning import begin, drill
    from provisioner.cli.edge import Stopped

    given = dict(given)
    if given["now"]:
        return drill(given["job"], given["store"], as_json=given["as_json"])
    if not command_line and given["job"] is None:
        raise Stopped("say what to keep running: `spotwarp failover … -- python train.py`", 2)
    if not command_line:
        said = [name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if extra := sorted(set(said) - OF_ANY_START):
            options = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
            raise Stopped(f"{options}: a job goes on with what it was begun with; give its command too to change it", 2)
    return begin(command_line, given, Path.cwd(), interactive=sys.stdin.isatty() and sys.stderr.isatty())
