"""One line per job, for `spotwarp ps`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio
from rich.table import Table
from rich.text import Text

from provisioner.cli.asking import Alive, alive
from provisioner.cli.facts import JobFacts, job_names, read_job
from provisioner.cli.jobs_here import JobsHere, host_name, lives
from provisioner.core.cost import Spend
from provisioner.core.errors import LedgerCorrupt, ProvisionerError, StoreDenied, StoreUnavailable
from provisioner.core.ports import Shelf
from provisioner.system import SystemClock
from spotwarp_fs.api import format_duration, printable


@dataclass(frozen=True, slots=True)
class JobLine:
    """What `ps` shows of a job."""

    job: str
    store: str
    state: str
    """`running`, `racing`, `no node`, `ended` or `unreadable`."""
    node: str = ""
    provider: str = ""
    gpu: str = ""
    usd_h: float | None = None
    phase: str = ""
    """The node's own last word."""
    why: str = ""
    since_s: float | None = None
    """How long the node has held the workspace."""
    racing: int = 0
    failovers: int = 0
    spent_usd: float = 0.0
    controller: str = ""
    controller_host: str = ""
    here: bool = False
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        """Tell whether it is over."""
        return self.state == "ended"


def line_of(facts: JobFacts, store: str, controller: Alive, now_s: float, *, here: bool) -> JobLine:
    """Make the line of one job."""
    holder, ended = facts.holder, facts.ended
    report = facts.reports.get(holder.intent.ident) if holder else None
    spent: Spend = facts.spent(now_s)
    state = "running" if holder else "racing" if facts.racing else "no node"
    if holder is None and not facts.unsettled and (ended is not None or controller is Alive.LEFT):
        state = "ended"
    return JobLine(
        job=facts.job,
        store=store,
        state=state,
        node=holder.intent.ident if holder else "",
        provider=holder.intent.provider if holder else "",
        gpu=f"{holder.intent.gpu_count} x {holder.intent.gpu}" if holder else "",
        usd_h=holder.intent.usd_h if holder else None,
        phase=report.phase.value if report else "",
        why=report.why if report else "",
        since_s=now_s - holder.won_at_s if holder and holder.won_at_s is not None else None,
        racing=len(facts.racing),
        failovers=len(facts.failovers),
        spent_usd=spent.total_usd,
        controller=controller.value,
        controller_host=facts.controller.host if facts.controller else "",
        here=here,
        exit_code=None if ended is None else ended.exit_code,
    )


async def lines_of(shelf: Shelf, store: str, here: JobsHere) -> list[JobLine]:
    """Read every job of a store, all at once."""
    found: dict[str, JobLine] = {}

    async def read(job: str) -> None:
        try:
            facts = await read_job(shelf, job)
            state = await alive(shelf, facts, here)
            mine = lives(here.read(job)) or (facts.controller is not None and facts.controller.host == host_name())
            found[job] = line_of(facts, store, state, SystemClock().now_s(), here=mine)
        except (StoreUnavailable, StoreDenied):
            raise
        except (LedgerCorrupt, ProvisionerError) as error:
            found[job] = JobLine(job, store, "unreadable", why=str(error))

    names = await job_names(shelf)
    async with trio.open_nursery() as nursery:
        for job in names:
            nursery.start_soon(read, job)
    return [found[job] for job in names]


def document(line: JobLine) -> dict[str, Any]:
    """Return a line as JSON takes it."""
    return asdict(line)


def table(lines: Sequence[JobLine]) -> Table:
    """Return the lines as something that rich prints."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "state", "node", "GPU"):
        shown.add_column(name, no_wrap=True)
    for name in ("$/h", "spent", "since"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("controller", no_wrap=True)
    for line in lines:
        style = {"running": "green", "racing": "yellow", "no node": "red", "unreadable": "red"}.get(line.state, "dim")
        words = f"{line.state}, {line.racing} racing" if line.racing and line.state != "racing" else line.state
        dead = line.controller not in (Alive.YES.value, "") and not line.ended
        where = "here" if line.here else line.controller_host
        whose = "" if line.ended else printable(f"{line.controller} {where}".strip())
        words += "" if line.exit_code is None else f" with {line.exit_code}"
        shown.add_row(
            line.job,
            Text(words, style=style),
            printable(f"{line.provider} {line.node}".strip() or line.why),
            printable(line.gpu),
            "" if line.usd_h is None else f"{line.usd_h:.3f}",
            f"{line.spent_usd:.2f}",
            "" if line.since_s is None else format_duration(line.since_s),
            Text(whose, style="bold red" if dead else ""),
        )
    return shown
