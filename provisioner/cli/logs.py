"""`spotwarp logs`: the end of a job's output, as its node leaves it in the store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from provisioner.cli.edge import Stopped, at_the_edge
from provisioner.cli.one_job import job_argument, with_job

if TYPE_CHECKING:
    from provisioner.cli.facts import JobFacts
    from provisioner.core.ports import Shelf
    from spotwarp_fs.api import LoadedSettings

LOOK_S: Final = 2.0
OVERLAP_BYTES: Final = 256
CUT: Final = b"\n[... output that was cut ...]\n"
NOT_FOUND: Final = 14


@click.command("logs")
@job_argument
@click.option("--node", metavar="NODE", help="Of this node rather than the one that holds the workspace.")
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows, also on the next node, until the job ends.")
@at_the_edge
def command(job: str | None, store: str | None, node: str | None, follow: bool) -> None:
    """Show the end of a job's output. It lies in the store, so it is there after the node is gone.

    A controller in the background writes its own log to jobs/JOB/controller.log in the state directory.
    """

    async def work(loaded: LoadedSettings, shelf: Shelf, facts: JobFacts) -> None:
        await _show(shelf, facts, node, follow=follow)

    with_job(store, job, work)


def new_part(before: bytes, now: bytes) -> bytes:
    """Return what *now* has beyond *before*, where each is the end of one growing text.

    >>> new_part(b"ab", b"abcd"), new_part(b"", b"ab"), new_part(b"ab", b"ab")
    (b'cd', b'ab', b'')
    """
    if now.startswith(before):
        return now[len(before) :]
    tail = before[-OVERLAP_BYTES:]
    at = now.rfind(tail)
    return now[at + len(tail) :] if at >= 0 else CUT + now


def node_of(facts: JobFacts, node: str | None) -> str:
    """Return the intent whose output is meant, or raise Stopped."""
    known = [record.intent.ident for record in facts.records]
    if node is not None:
        if node not in known:
            raise Stopped(f"job {facts.job} has no node {node}; it has {', '.join(known) or 'none'}", NOT_FOUND)
        return node
    holder = facts.holder
    if holder is not None:
        return holder.intent.ident
    held = [record for record in facts.records if record.won_at_s is not None]
    if not held:
        raise Stopped(f"no node of job {facts.job} has run its command yet: see `spotwarp ps`", NOT_FOUND)
    return max(held, key=lambda record: record.won_at_s or 0.0).intent.ident


async def _show(shelf: Shelf, facts: JobFacts, node: str | None, *, follow: bool) -> None:
    import trio

    from provisioner.cli.facts import read_job
    from provisioner.core.errors import StoreUnavailable
    from provisioner.core.rendezvous import log_key

    shown_of, before = "", b""
    while True:
        try:
            if follow and shown_of:
                facts = await read_job(shelf, facts.job)
            # Read before the output: what the node wrote last is there by then.
            last = not follow or facts.ended is not None
            ident = node_of(facts, node)
            body = await shelf.get(log_key(facts.job, ident)) or b""
        except StoreUnavailable:
            if not (follow and shown_of):
                raise
            await trio.sleep(LOOK_S)
            continue
        if ident != shown_of:
            if shown_of:
                click.echo(f"[now on {ident}]", err=True)
            shown_of, before = ident, b""
        sys.stdout.buffer.write(new_part(before, body))
        sys.stdout.buffer.flush()
        before = body
        if last:
            return
        await trio.sleep(LOOK_S)
