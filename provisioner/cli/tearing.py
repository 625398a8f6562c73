"""End a job from here: ask the controller that lives, or be one that ends it."""

from __future__ import annotations

import sys
from typing import Final

import trio

from provisioner.cli.accounts import make_providers
from provisioner.cli.asking import Alive, alive, ask
from provisioner.cli.controlling import Run, ask_down, control
from provisioner.cli.edge import Stopped
from provisioner.cli.facts import JobFacts, read_job
from provisioner.cli.jobs_here import JobsHere
from provisioner.cli.launching import launch_maker
from provisioner.cli.live import Lines
from provisioner.cli.making_plan import here
from provisioner.cli.wishing import Ordered
from provisioner.core.ports import Shelf
from provisioner.core.rendezvous import Request, RequestKind
from spotwarp_fs.api import LoadedSettings

LOOK_S: Final = 1.0


async def tear_down(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts, patience_s: float) -> JobFacts:
    """Return the job's facts once everything is settled, or when the patience has ended."""
    if not facts.unsettled and facts.ended is not None:
        return facts
    state = await alive(shelf, facts, JobsHere(loaded.settings.state_dir))
    if state is Alive.YES:
        await ask(shelf, facts.job, Request(RequestKind.DOWN, why="spotwarp down"), patience_s)
    else:
        if facts.spec is None:
            raise Stopped(
                f"job {facts.job} has no spec in the store, so nobody knows its providers: `spotwarp gc --nodes`"
            )
        await ask_down(shelf, facts.job, "spotwarp down")
        order = Ordered(facts.spec, loaded)
        run = Run(order, facts.spec, adopt=state is Alive.LEFT, again=False)
        await control(run, make_providers(facts.spec.providers, here(loaded)), Lines(sys.stderr), launch_maker)
    with trio.move_on_after(patience_s):
        while (facts := await read_job(shelf, facts.job)).unsettled:
            await trio.sleep(LOOK_S)
    return facts
