"""`spotwarp ps`: the jobs of a store, and those of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from provisioner.cli.edge import at_the_edge

if TYPE_CHECKING:
    from provisioner.cli.job_lines import JobLine
    from spotwarp_fs.api import LoadedSettings


@click.command("ps")
@click.option("--store", metavar="URL", help="Store: s3://BUCKET/PREFIX, gs://…, file:///DIR. [setting store]")
@click.option("--all", "everything", is_flag=True, help="Also jobs that have ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@at_the_edge
def command(store: str | None, everything: bool, as_json: bool) -> None:
    """List jobs: the node that holds the workspace, its provider and price, what it says, spend, and the controller.

    Jobs of the store, wherever their controllers run, and of this machine, in whatever store. A controller of another
    machine is watched for 7 s to tell whether it lives.
    """
    import trio

    from provisioner.cli.job_lines import document
    from spotwarp_fs.api import print_json, settings_for

    lines, problems = trio.run(_lines, settings_for(store=store), store is None)
    shown = [line for line in lines if everything or not line.ended]
    if as_json:
        print_json({"ok": True, "jobs": [document(line) for line in shown], "problems": problems})
        return
    from provisioner.cli.job_lines import table
    from provisioner.cli.printing import show
    from spotwarp_fs.api import warn

    hidden = len(lines) - len(shown)
    if shown:
        show(table(shown))
    else:
        click.echo("no job is running" + (f"; {hidden} ended: --all shows them" if hidden else ""))
    for problem in problems:
        warn(problem)


async def _lines(loaded: LoadedSettings, also_here: bool) -> tuple[list[JobLine], list[str]]:
    from provisioner.cli.asking import opened_store
    from provisioner.cli.job_lines import lines_of
    from provisioner.cli.jobs_here import JobsHere
    from provisioner.core.errors import ProvisionerError
    from spotwarp_fs.api import SpotwarpError, settings_for

    here = JobsHere(loaded.settings.state_dir)
    stores: dict[str, Any] = {loaded.settings.store_url(): loaded}
    if also_here:
        for record in here.all():
            if record.store not in stores:
                stores[record.store] = settings_for(store=record.store)
    lines: list[JobLine] = []
    problems: list[str] = []
    for url, settings in stores.items():
        try:
            async with opened_store(settings) as (_, shelf):
                lines += await lines_of(shelf, url, here)
        except (ProvisionerError, SpotwarpError) as error:
            if len(stores) == 1:
                raise
            problems.append(f"{url}: {error}")
    return lines, problems
