"""What commands about one job share: its argument, its store, and running their work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")


def job_argument(command: Command) -> Command:
    """Add `[JOB]` and `--store`."""
    command = click.option("--store", metavar="URL", help="Store of the job. [setting store]")(command)
    return click.argument("job", required=False)(command)


def with_job(store: str | None, job: str | None, work: Callable[..., Awaitable[Value]]) -> Value:
    """Open the store, find the job, run *work*(loaded, shelf, facts); of a job begun here its store is known."""
    import trio

    from provisioner.cli.asking import opened_store, the_job
    from provisioner.cli.jobs_here import JobsHere
    from spotwarp_fs.api import settings_for

    async def main() -> Value:
        loaded = settings_for(store=store)
        if store is None and job is not None and (here := JobsHere(loaded.settings.state_dir).read(job)) is not None:
            loaded = settings_for(store=here.store)
        async with opened_store(loaded) as (opened, shelf):
            facts = await the_job(shelf, job, opened.url)
            return await work(loaded, shelf, facts)

    return trio.run(main)
