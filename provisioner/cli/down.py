"""`spotwarp down`: end a job, and verify that nothing of it is billed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from provisioner.cli.edge import Stopped, at_the_edge
from provisioner.cli.one_job import job_argument, with_job

if TYPE_CHECKING:
    from provisioner.cli.facts import JobFacts
    from provisioner.core.ports import Shelf
    from spotwarp_fs.api import LoadedSettings

PATIENCE_S: Final = 1200.0


@click.command("down")
@job_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@at_the_edge
def command(job: str | None, store: str | None, as_json: bool) -> None:
    """End a job: its node publishes what it has, the command is stopped, everything is destroyed and verified gone.

    The workspace stays, with all its states. The controller does it, wherever it runs; where none lives, this command
    is the controller, and needs the account's keys.
    """
    from provisioner.cli.tearing import tear_down
    from spotwarp_fs.api import emit

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> JobFacts:
        return await tear_down(loaded, shelf, facts, PATIENCE_S)

    after = with_job(store, job, work)
    left = [f"{one.intent.provider} {', '.join(one.instances) or one.intent.label}" for one in after.unsettled]
    if left:
        raise Stopped(f"job {after.job}: not verified gone, and may be billed: {'; '.join(left)}; try again")
    workspace = after.spec.workspace if after.spec else after.job
    text = f"{after.job} is down: {len(after.records)} nodes verified gone; the workspace {workspace} stays"
    emit({"job": after.job, "nodes": len(after.records), "workspace": workspace}, text, as_json=as_json)
