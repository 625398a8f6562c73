"""`spotwarp plan`: what a job needs, what it would cost and lose; free of charge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from provisioner.cli.edge import at_the_edge
from provisioner.cli.job_options import job_options

NO_OFFER = 1


@click.command("plan", context_settings={"allow_interspersed_args": False})
@job_options
@at_the_edge
def command(command_line: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Say what a job needs, what it costs and what a preemption loses, from live offers: about 10 s, free of charge.

    What the job writes is read from its workspace's history, from the checkpoints that lie in --from DIR, or from
    --checkpoint-size and --checkpoint-every. Prices are per GPU-hour with disk and bandwidth. Exit code 0 if the job
    could begin, 1 if not.

    \b
    spotwarp plan --gpu 'A100 80GB' --max-price 1.20 --from . --disk 200G
    spotwarp plan --gpu 'RTX 4090' --checkpoint-size 2G --checkpoint-every 10m --json
    """
    import trio

    from provisioner.cli.making_plan import plan_of
    from provisioner.cli.planning import document
    from provisioner.cli.wishing import ordered
    from spotwarp_fs.api import print_json

    plan = trio.run(plan_of, ordered(command_line, given, Path.cwd()))
    if as_json:
        print_json({"ok": True, **document(plan)})
    else:
        from provisioner.cli.plan_view import view
        from provisioner.cli.printing import show

        show(view(plan))
    return 0 if not plan.stops else NO_OFFER
