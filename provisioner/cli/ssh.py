"""`spotwarp ssh`: a shell on the node that holds the workspace. SpotWarp itself needs none."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Final

import click

from provisioner.cli.edge import Stopped, at_the_edge
from provisioner.cli.one_job import job_argument, with_job

if TYPE_CHECKING:
    from provisioner.cli.facts import JobFacts
    from provisioner.core.ports import Instance, Shelf
    from spotwarp_fs.api import LoadedSettings

NOT_FOUND: Final = 14


@click.command("ssh", context_settings={"allow_interspersed_args": False})
@job_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Print the command and do not run it.")
@at_the_edge
def command(job: str | None, store: str | None, arguments: tuple[str, ...], only_print: bool) -> None:
    """Open a shell on a job's node, with the key that the provider has of you; ARGUMENTS go to ssh.

    Whether there is a way in depends on the provider and the image: SpotWarp starts containers without sshd.
    """

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> list[str]:
        return await _way_in(loaded, facts)

    words = [*with_job(store, job, work), *arguments]
    if only_print:
        click.echo(shlex.join(words))
        return
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        raise Stopped(f"{words[0]} is not installed; the command is: {shlex.join(words)}") from None


async def _way_in(loaded: LoadedSettings, facts: JobFacts) -> list[str]:
    from provisioner.cli.accounts import make_providers
    from provisioner.cli.making_plan import here, opened

    holder = facts.holder
    if holder is None:
        raise Stopped(f"no node holds the workspace of job {facts.job} now: see `spotwarp ps`", NOT_FOUND)
    name = holder.intent.provider
    async with opened(make_providers([name], here(loaded))) as providers:
        for instance_id in holder.instances:
            instance = await providers[name].show(instance_id)
            if instance is not None:
                return words_for(instance, facts.job)
    raise Stopped(f"{name} knows no instance {', '.join(holder.instances)} any more: see `spotwarp ps`", NOT_FOUND)


def words_for(instance: Instance, job: str) -> list[str]:
    """Return the command that leads to *instance*, or raise Stopped."""
    if instance.ssh is None:
        why = "a local node is a process group of this machine" if instance.provider.startswith("local") else (
            f"{instance.provider} names no address for it (status {instance.status.value})"
        )  # fmt: skip
        raise Stopped(f"there is no way into node {instance.instance_id} of job {job} by ssh: {why}", NOT_FOUND)
    host, port = instance.ssh.host, instance.ssh.port
    if host.startswith("-") or not host:
        raise Stopped(f"{instance.provider} names {host!r} as the address, which is none", NOT_FOUND)
    return ["ssh", "-p", str(port), "-l", instance.ssh.user, host]
