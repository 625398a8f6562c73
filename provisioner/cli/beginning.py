"""From what was typed after `failover` to a running controller: plan, question, first state, controller, report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import trio

from provisioner.cli import background
from provisioner.cli.accounts import make_providers
from provisioner.cli.asking import Alive, alive, opened_store
from provisioner.cli.controlling import Left, Run, control
from provisioner.cli.edge import Stopped
from provisioner.cli.facts import JobFacts, read_job
from provisioner.cli.history import document, history
from provisioner.cli.jobs_here import JobsHere
from provisioner.cli.launching import launch_maker
from provisioner.cli.live import shown
from provisioner.cli.making_plan import gather, here, opened
from provisioner.cli.one_job import with_job
from provisioner.cli.planning import Plan
from provisioner.cli.printing import show
from provisioner.cli.wishing import Ordered, check_command, ordered
from provisioner.core.errors import BadWish
from provisioner.core.happenings import JobEnd
from provisioner.core.jobs import JobSpec, encode_spec
from provisioner.core.ports import Shelf
from provisioner.core.rendezvous import Request, RequestKind, spec_key
from provisioner.system import SystemClock
from spotwarp_fs.api import LoadedSettings, print_json

QUIT: Final = 130
FAILED: Final = 1


def begin(command_line: tuple[str, ...], given: Mapping[str, Any], cwd: Path, *, interactive: bool) -> int:
    """Begin a job, or carry one on; returns the exit code."""
    return trio.run(_begin, command_line, given, cwd, interactive)


async def _begin(command_line: tuple[str, ...], given: Mapping[str, Any], cwd: Path, interactive: bool) -> int:
    order = ordered(command_line, _with_gpu(given, command_line), cwd)
    settings = order.loaded.settings
    async with opened_store(order.loaded) as (_, shelf):
        facts = await read_job(shelf, order.spec.job)
        order = replace(order, spec=_spec(order, facts, command_line))
        if facts.ended is not None and not given["again"]:
            code = facts.ended.exit_code or 0
            click.echo(f"{facts.job} has ended with exit code {code}; --again begins it anew", err=True)
            return code
        if facts.unsettled or given["controller"]:
            spec = order.spec
        else:
            spec = await _planned(order, given, interactive=interactive)
            await _first_state(order)
        if given["detach"] or not given["controller"]:
            await _refuse_living(shelf, facts, JobsHere(settings.state_dir), adopt=given["adopt"])
        if given["detach"]:
            await shelf.put(spec_key(spec.job), encode_spec(spec))
    files = {"--env-file": given["env_file"], "--image-login": given["image_login"]}
    if given["detach"]:
        return _detached(
            spec.job, settings.store_url(), JobsHere(settings.state_dir), files, given, adopt=given["adopt"]
        )
    display = shown(spec.job, SystemClock(), events=given["events"], as_json=given["as_json"])
    run = Run(order, spec, adopt=given["adopt"], again=given["again"], interactive=interactive)
    end = await control(run, make_providers(spec.providers, here(order.loaded)), display, launch_maker)
    if end is Left.DETACH:
        return _detached(spec.job, settings.store_url(), JobsHere(settings.state_dir), files, given, adopt=True)
    if isinstance(end, Left):
        click.echo(
            f"left as it is: nodes of {spec.job} go on. Carry on with `spotwarp failover --job {spec.job}`, "
            f"end it with `spotwarp down {spec.job}`", err=True,
        )  # fmt: skip
        return QUIT
    return await _ended(order.loaded, spec, end, as_json=given["as_json"])


def _with_gpu(given: Mapping[str, Any], command_line: tuple[str, ...]) -> Mapping[str, Any]:
    """Without a command the job's own words count, so the options' defaults need not make sense."""
    return given if command_line else {**given, "providers": "local"}


def _spec(order: Ordered, facts: JobFacts, command_line: tuple[str, ...]) -> JobSpec:
    """Return what is to be kept running: as typed, or as the job was begun with."""
    if not command_line:
        if facts.spec is None:
            raise BadWish(f"the store has no job {facts.job!r} to carry on: give its command")
        return facts.spec
    check_command(order.spec)
    if facts.spec is None:
        return order.spec
    # What was found out when the job was begun still holds for one that is under way.
    wish = replace(order.spec.wish, traffic=facts.spec.wish.traffic)
    return replace(order.spec, wish=wish, on_demand_usd_h=facts.spec.on_demand_usd_h)


async def _planned(order: Ordered, given: Mapping[str, Any], *, interactive: bool) -> JobSpec:
    """Show the plan and ask; returns the spec with what the plan found out."""
    async with opened(make_providers(order.spec.providers, here(order.loaded))) as providers:
        plan = await gather(order, providers)
    if not given["as_json"] and not given["events"]:
        from provisioner.cli.plan_view import view

        show(view(plan), stderr=True)
    if plan.stops:
        raise Stopped(f"job {order.spec.job} does not begin: " + "; ".join(plan.stops), FAILED)
    if not given["yes"]:
        await trio.to_thread.run_sync(_confirm, plan, interactive)
    on_demand = order.spec.on_demand_usd_h if plan.on_demand_usd_h is None else plan.on_demand_usd_h
    return replace(plan.spec, on_demand_usd_h=on_demand)


def _confirm(plan: Plan, interactive: bool) -> None:
    if not interactive:
        raise Stopped("nobody can be asked here, which is no terminal: add --yes to rent without asking", 2)
    sys.stderr.write(f"Rent nodes for {plan.spec.job}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Stopped("nothing was rented", FAILED)


async def _first_state(order: Ordered) -> None:
    """Make --from DIR the first state of a new workspace; one that has a state already is left alone."""
    if order.directory is None:
        return
    async with opened_store(order.loaded) as (store, _):
        if await store.head(order.spec.workspace) is not None:
            click.echo(f"the workspace {order.spec.workspace} has a state already: --from is not looked at", err=True)
            return
    command = [
        sys.executable, "-m", "spotwarp_fs", "push", str(order.directory), order.spec.workspace,
        "--store", order.loaded.settings.store_url(),
    ]  # fmt: skip
    done = await trio.run_process(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    if done.returncode != 0:
        raise Stopped(f"--from {order.directory}: could not be published (exit code {done.returncode})")


async def _refuse_living(shelf: Shelf, facts: JobFacts, jobs: JobsHere, *, adopt: bool) -> None:
    """Refuse early, before anything of the job is changed; the engine looks again."""
    if facts.controller is None or adopt:
        return
    if await alive(shelf, facts, jobs) is Alive.YES:
        who = f"process {facts.controller.pid} on {facts.controller.host}"
        raise Stopped(
            f"job {facts.job} has a controller that lives, {who}: --adopt takes it over, `spotwarp ps` shows it"
        )


def _detached(
    job: str, store: str, jobs: JobsHere, files: dict[str, str | None], given: Mapping[str, Any], *, adopt: bool
) -> int:
    pid = background.start(job, store, jobs, files, adopt=adopt)
    log = jobs.log(job)
    if given["as_json"]:
        print_json({"ok": True, "job": job, "pid": pid, "log": str(log)})
    else:
        click.echo(f"{job} runs in the background (process {pid}); its log is {log}; see `spotwarp ps`")
    return 0


async def _ended(loaded: LoadedSettings, spec: JobSpec, end: JobEnd, *, as_json: bool) -> int:
    """Print the report of a job that has ended."""
    async with opened_store(loaded) as (_, shelf):
        found = history(await read_job(shelf, spec.job), SystemClock().now_s())
    if as_json:
        print_json({**document(found), "ok": end.exit_code == 0, "exit_code": end.exit_code, "why": end.why,
                    "orphans": list(end.orphans)})  # fmt: skip
    else:
        from provisioner.cli.report_text import view

        show(view(found))
        click.echo(f"{spec.job} ended with exit code {end.exit_code}: {end.why}", err=True)
    for orphan in end.orphans:
        click.echo(f"NOT VERIFIED GONE, it may be billed: {orphan}; `spotwarp gc --nodes` tries again", err=True)
    return end.exit_code


def drill(job: str | None, store: str | None, *, as_json: bool) -> int:
    """Ask the job's controller to treat its node as lost, and wait for the next one."""
    from provisioner.cli.move import ask_controller

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> None:
        holder = facts.holder
        if holder is None:
            raise Stopped(f"no node holds the workspace of job {facts.job}: there is nothing to lose")
        wish = Request(RequestKind.DRILL, of=holder.intent.ident, why="spotwarp failover --now")
        await ask_controller(loaded, shelf, facts, wish, wait=True, as_json=as_json)

    with_job(store, job, work)
    return 0
