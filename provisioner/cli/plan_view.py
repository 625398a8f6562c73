"""Render a plan for people: the verdict, what is safe and what is not, offers, and their comebacks by phase.

Invariant: nothing is shown that is not in the plan, and each assumption is called one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from provisioner.cli.planning import Plan, spot_share
from provisioner.core.plan import Forecast
from spotwarp_fs.api import format_duration, format_size, printable

OFFERS_SHOWN_MAX: Final = 10
WHERE_CHARS: Final = 14
PHASES: Final = ("detect", "race", "boot", "checks", "claim", "first_read")


def view(plan: Plan) -> Group:
    """Return the plan as something that rich prints."""
    parts: list[RenderableType] = [_title(plan), _facts(plan)]
    shown = plan.forecasts[:OFFERS_SHOWN_MAX]
    if shown:
        parts += [Text(), _offers(shown), Text("\nSeconds from a loss to the command (ready) and its next step:")]
        parts.append(_comebacks(shown))
        left = len(plan.forecasts) - len(shown)
        if left:
            parts.append(Text(f"and {left} more offers; --json lists them all", style="dim"))
    parts += [Text(), *_words(plan)]
    return Group(*parts)


def _title(plan: Plan) -> Text:
    wish = plan.spec.wish
    return Text.assemble(
        (plan.spec.job, "bold"),
        printable(f": workspace {plan.spec.workspace} in {plan.store}, {wish.gpu_count} x {wish.gpu}"),
    )


def _facts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts(plan):
        table.add_row(label, Text(printable(text)))
    return table


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Give the lines of the first part."""
    work, protection = plan.known.work, plan.known.protection
    if protection is not None:
        yield "protected", f"{protection.files:,} files, {format_size(protection.size_bytes)}, and all that comes"
    elif plan.known.logical_bytes:
        yield "protected", f"{format_size(plan.known.logical_bytes)} in the workspace, and all that comes"
    else:
        yield "protected", "everything that the command writes into its workspace"
    unsaved = protection.unsaved if protection else ()
    for count, line in enumerate(unsaved):
        yield ("not protected" if count == 0 else ""), line
    yield ("" if unsaved else "not protected"), "what the command writes outside of its workspace"
    every = format_duration(work.checkpoint_every_s)
    yield "checkpoint", f"{work.checkpoint_gb:.3g} GB every {every}: {work.up_gb_h:.3g} GB per hour to the store"
    for line in plan.known.sources:
        yield "", line
    yield "disk", f"{plan.disk_gb:.0f} GB"
    if plan.forecasts:
        best = plan.forecasts[0]
        yield "first safe", f"{format_duration(best.first_safe_s)} after the start, on the best offer"
        mean, most = format_duration(best.loss_mean_s), format_duration(best.loss_max_s)
        yield "loss", f"{mean} of training per preemption in the mean, at most {most}"
        yield "store", f"${best.store_usd_month:.2f} a month, egress ${best.egress_usd_month:.2f} (list prices)"
    if plan.on_demand_usd_h is not None:
        yield "on demand", f"the cheapest such machine costs ${plan.on_demand_usd_h:.2f} an hour"


def _offers(shown: Sequence[Forecast]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("#", "provider", "GPU", "where"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in ("$/GPU-h", "all in $/h", "up", "loss max", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(shown, 1):
        offer = one.ranked.offer
        count = f"{offer.gpu_count} x " if offer.gpu_count > 1 else ""
        table.add_row(
            str(number),
            printable(f"{offer.provider} {offer.market.value}"),
            printable(f"{count}{offer.gpu}"),
            printable(offer.location.strip(", "))[:WHERE_CHARS],
            f"{one.ranked.usd_h / offer.gpu_count:.3f}",
            f"{one.hourly.total_usd_h:.3f}",
            "?" if offer.up_mbps is None else f"{offer.up_mbps / 1000:.2g}G",
            f"{one.loss_max_s / 60:.0f} min",
            Text("ok", style="green") if one.feasible else Text("slow", style="red"),
        )
    return table


def _comebacks(shown: Sequence[Forecast]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", no_wrap=True)
    for name in (*(name.removeprefix("first_") for name in PHASES), "= ready", "critical", "start", "= step"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(shown, 1):
        seconds = dict(one.phases.items())
        table.add_row(
            str(number),
            *(f"{seconds[name]:.0f}" for name in PHASES),
            Text(f"{one.phases.ready_s:.0f} s", style="bold"),
            f"{seconds['critical']:.0f}",
            f"{seconds['start']:.0f}",
            Text(f"{one.phases.step_s:.0f} s", style="bold"),
        )
    return table


def _words(plan: Plan) -> Iterator[Text]:
    for line in plan.problems:
        yield Text.assemble(("not available: ", "bold yellow"), printable(line))
    for line in plan.warnings:
        yield Text.assemble(("warning: ", "bold yellow"), printable(line))
    for line in plan.stops:
        if line not in plan.problems:
            yield Text.assemble(("would not start: ", "bold red"), printable(line))
    count = f"{len(plan.forecasts)} of {plan.offers_seen} offers fit ({spot_share(plan.forecasts)})"
    yield Text.assemble(("verdict: ", "bold"), (plan.verdict, "green" if plan.feasible else "red"), f"; {count}")
