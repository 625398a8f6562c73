"""Render the screen of a running job."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from provisioner.cli.screen import Line, Screen, clock, summary
from provisioner.core.detect import Health
from provisioner.core.race.state import LIVE, Phase
from spotwarp_fs.api import format_duration, printable

STYLES: Final = {
    Phase.WINNER: "bold green",
    Phase.INCUMBENT: "green",
    Phase.READY: "cyan",
    Phase.CLAIMING: "bold cyan",
    Phase.REAPING: "yellow",
    Phase.GONE: "dim",
    Phase.KEPT: "yellow",
}
HEALTH: Final = {Health.HEALTHY: "green", Health.SUSPECT: "yellow", Health.BLIND: "yellow", Health.LOST: "bold red"}
FAILOVERS_SHOWN: Final = 4


def view(screen: Screen) -> Group:
    """Return the screen as something that rich prints."""
    parts: list[RenderableType] = [_head(screen)]
    if screen.candidates or screen.gone:
        parts.append(_candidates(screen))
    if screen.offers or screen.why:
        parts.append(_offers(screen))
    parts += [Text(summary(one), style="dim") for one in screen.failovers[-FAILOVERS_SHOWN:]]
    parts += [Text(f"{clock(at_s)} {printable(text)}", style="dim", overflow="ellipsis") for at_s, text in screen.said]
    parts.append(Text("Ctrl-C asks whether to leave it running, or to tear everything down", style="dim italic"))
    return Group(*parts)


def _head(screen: Screen) -> Text:
    running = format_duration(max(0.0, screen.now_s - screen.started_s))
    total = screen.nodes_usd + screen.racing_usd
    text = Text.assemble((screen.job, "bold"), f" · {running} · ", (f"${total:.2f} spent", "bold"))
    text.append(f" (${screen.racing_usd:.2f} racing) · ${screen.usd_h:.3f}/h now")
    if screen.health is not None:
        text.append(f" · {screen.health.value}", style=HEALTH.get(screen.health, "yellow"))
        if screen.health is not Health.HEALTHY and screen.health_why:
            text.append(f": {printable(screen.health_why)}", style="yellow")
    return text


def _candidates(screen: Screen) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("provider", "node", "phase", "$/h", "in phase", "age", ""):
        table.add_column(name, no_wrap=True, justify="right" if name in ("$/h", "in phase", "age") else "left")
    for line in sorted(screen.candidates.values(), key=lambda line: (line.phase not in LIVE, line.began_s, line.ident)):
        table.add_row(*_row(line, screen.now_s))
    for line in screen.gone:
        table.add_row(*_row(line, screen.now_s))
    return table


def _row(line: Line, now_s: float) -> tuple[RenderableType, ...]:
    style = STYLES.get(line.phase, "")
    return (
        printable(line.provider),
        line.ident,
        Text(line.phase.value, style=style),
        f"{line.usd_h:.3f}",
        format_duration(max(0.0, now_s - line.since_s)),
        format_duration(max(0.0, now_s - line.began_s)),
        Text(printable(line.text or line.node), style="dim", overflow="ellipsis"),
    )


def _offers(screen: Screen) -> Text:
    fitting = ", ".join(f"{name} {count}" for name, count in sorted(screen.offers.items())) or "none"
    text = Text(f"offers that fit: {fitting} · {screen.reaped} reaped", style="dim")
    for line in screen.why:
        text.append(f"\n  {printable(line)}", style="yellow")
    return text
