"""`spotwarp report`: time, money, loss and comebacks of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from provisioner.cli.edge import Stopped, at_the_edge
from provisioner.cli.one_job import job_argument, with_job

if TYPE_CHECKING:
    from provisioner.cli.facts import JobFacts
    from provisioner.core.ports import Shelf
    from spotwarp_fs.api import LoadedSettings


@click.command("report")
@job_argument
@click.option("--html", "html_file", metavar="FILE", help="Write one self-contained page with timeline and costs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@at_the_edge
def command(job: str | None, store: str | None, html_file: str | None, as_json: bool) -> None:
    """Show each failover by phase, what was lost, what it cost, and what was saved against on demand.

    Everything is read from the store, during the job and after it.

    \b
    spotwarp report run7
    spotwarp report run7 --html run7.html
    """
    from provisioner.cli.history import document, history
    from provisioner.system import SystemClock
    from spotwarp_fs.api import console, print_json

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> JobFacts:
        return facts

    found = history(with_job(store, job, work), SystemClock().now_s())
    if html_file is not None:
        from provisioner.cli.report_html import page

        try:
            Path(html_file).write_text(page(found))
        except OSError as error:
            raise Stopped(f"--html {html_file}: cannot be written ({error.strerror})") from error
    if as_json:
        print_json({"ok": True, **document(found), **({"html": html_file} if html_file else {})})
    elif html_file is not None:
        console().print(f"the report of {found.job} is in {html_file}", markup=False)
    else:
        from provisioner.cli.printing import show
        from provisioner.cli.report_text import view

        show(view(found))
