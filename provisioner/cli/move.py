"""`spotwarp move`: the job goes on elsewhere, and nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from provisioner.cli.edge import Stopped, at_the_edge
from provisioner.cli.one_job import job_argument, with_job

if TYPE_CHECKING:
    from provisioner.cli.facts import JobFacts
    from provisioner.core.intents import IntentRecord
    from provisioner.core.ports import Shelf
    from provisioner.core.rendezvous import Request
    from spotwarp_fs.api import LoadedSettings

PATIENCE_S: Final = 1800.0
LOOK_S: Final = 1.0


@click.command("move")
@job_argument
@click.option("--to", "provider", metavar="PROVIDER", help="Only there. [default: wherever it is best]")
@click.option("--no-wait", is_flag=True, help="Return once the controller has been asked.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@at_the_edge
def command(job: str | None, store: str | None, provider: str | None, no_wait: bool, as_json: bool) -> None:
    """Move a running job: a replacement boots beside the node and takes over at its next quiescent state.

    The controller does it, wherever it runs; the overlap of both nodes is paid for.
    """
    from provisioner.cli.parsing import near
    from provisioner.core.rendezvous import Request, RequestKind

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> None:
        known = facts.spec.providers if facts.spec else ()
        if provider is not None and provider not in known:
            meant = near(provider, known)
            raise Stopped(f"--to {provider}: job {facts.job} may use {', '.join(known) or 'nothing'}{meant}", 2)
        holder = facts.holder
        if holder is None:
            raise Stopped(
                f"no node holds the workspace of job {facts.job}: there is nothing to move; see `spotwarp ps`"
            )
        wish = Request(RequestKind.MOVE, of=holder.intent.ident, why="spotwarp move", provider=provider or "")
        await ask_controller(loaded, shelf, facts, wish, wait=not no_wait, as_json=as_json)

    with_job(store, job, work)


async def ask_controller(
    loaded: LoadedSettings, shelf: Shelf, facts: JobFacts, wish: Request, *, wait: bool, as_json: bool
) -> None:
    """Hand *wish* to the controller, and tell what became of it."""
    from provisioner.cli.asking import Alive, alive, ask
    from provisioner.cli.jobs_here import JobsHere
    from spotwarp_fs.api import emit

    state = await alive(shelf, facts, JobsHere(loaded.settings.state_dir))
    if state is not Alive.YES:
        raise Stopped(
            f"no controller of job {facts.job} lives ({state.value}): start one with "
            f"`spotwarp failover --job {facts.job}`"
        )
    done = await ask(shelf, facts.job, wish, PATIENCE_S if wait else 0.0)
    if not wait:
        emit({"job": facts.job, "asked": wish.kind.value}, f"{facts.job}: the controller was asked to", as_json=as_json)
        return
    if not done.done:
        why = "another request took its place" if done.replaced else f"not taken within {PATIENCE_S / 60:.0f} min"
        raise Stopped(f"{wish.kind.value} of job {facts.job}: {why}; see `spotwarp ps` and the controller's output")
    click.echo(f"{facts.job}: the controller is at it", err=True)
    holder = await _next_holder(shelf, facts.job, wish.of)
    if holder is None:
        raise Stopped(
            f"{wish.kind.value} of job {facts.job}: {wish.of} still holds the workspace, or nobody does; the "
            "controller's output says why"
        )
    ident, where = holder.intent.ident, holder.intent.provider
    emit({"job": facts.job, "node": ident, "provider": where}, f"{facts.job} runs on {where} {ident}", as_json=as_json)


async def _next_holder(shelf: Shelf, job: str, before: str) -> IntentRecord | None:
    """Wait until another node holds the workspace, and is the only one that does; None when that never comes."""
    import trio

    from provisioner.cli.facts import HELD, read_job
    from provisioner.core.errors import StoreUnavailable

    with trio.move_on_after(PATIENCE_S):
        while True:
            try:
                facts = await read_job(shelf, job)
            except StoreUnavailable:
                await trio.sleep(LOOK_S)
                continue
            if facts.ended is not None:
                return None
            held = [record for record in facts.records if record.state in HELD and record.intent.ident != before]
            if held:
                return held[-1]
            await trio.sleep(LOOK_S)
    return None
