"""A job's report for a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from provisioner.cli.history import LOST, PHASES, History
from provisioner.core.happenings import Failover
from spotwarp_fs.api import format_duration, printable

COLUMNS: Final = (*PHASES, "ready")


def view(found: History) -> Group:
    """Return the report as something that rich prints."""
    parts: list[RenderableType] = [_title(found), Text()]
    if found.failovers:
        parts += [_failovers(found), Text()]
    parts.append(_money(found))
    return Group(*parts)


def _title(found: History) -> Text:
    state = "running" if found.running else "ended"
    if found.exit_code is not None:
        state += f" with exit code {found.exit_code}"
    return Text.assemble((found.job, "bold"), f": {state}, {format_duration(found.wall_h * 3600)}")


def _failovers(found: History) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("what", "winner"):
        table.add_column(name, no_wrap=True)
    for name in (*(name.removeprefix("first_") for name in COLUMNS), "lost", "reaped", "racing"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.failovers:
        table.add_row(*_cells(one))
    return table


def _cells(one: Failover) -> tuple[str, ...]:
    seconds = (getattr(one, f"{name}_s") for name in COLUMNS)
    return (
        f"{one.kind} {one.number}",
        printable(one.provider if one.winner else "nobody"),
        *("–" if value is None else f"{value:.1f}" for value in seconds),
        "–" if one.kind not in LOST or one.state_age_s is None else format_duration(one.state_age_s),
        f"{one.reaped}/{one.candidates}",
        f"${one.racing_usd:.3f}",
    )


def _money(found: History) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("spent", f"${found.total_usd:.2f}, of it ${found.racing_usd:.2f} for racing")
    useful, again = format_duration(found.useful_h * 3600), format_duration(found.recomputed_h * 3600)
    table.add_row("training", f"{useful} useful, {again} done again; losses: {len(found.losses)}")
    table.add_row("avoided", f"{format_duration(found.avoided_h * 3600)} of recomputation")
    table.add_row("saved", saved(found))
    return table


def saved(found: History) -> str:
    """Say what it cost against on demand."""
    if found.on_demand_usd_h is None:
        return "unknown: no on-demand price of such a machine was seen when the job began"
    if found.saved_percent is None:
        return "nothing yet: there has been no useful training"
    words = "cheaper" if found.saved_percent >= 0 else "dearer"
    return f"{abs(found.saved_percent):.0f} % {words} than on demand at ${found.on_demand_usd_h:.2f} an hour"
