"""Draw a report's charts as SVG: the timeline of candidates, comebacks by phase, dollars over time.

Invariant: pure; every text is escaped; colours are the page's CSS variables, so that charts follow light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from provisioner.cli.history import LOST, PHASES, Bar, CostPoint, History
from provisioner.core.happenings import Failover
from spotwarp_fs.api import format_duration

WIDTH: Final = 1000
LEFT: Final = 150
RIGHT: Final = 20
LANE: Final = 22
TOP: Final = 26
LANES_MAX: Final = 60
TICKS: Final = 6
ROOM_FOR_WORDS: Final = 1.12
STEPS_S: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800,
)  # fmt: skip


def ticks(span: float, steps: Sequence[float], count: int = TICKS) -> list[float]:
    """Choose round marks from 0 to *span*.

    >>> ticks(7000, STEPS_S)
    [0, 1800, 3600, 5400]
    """
    step = next((step for step in steps if span / step <= count), math.ceil(span / count))
    return [step * at for at in range(int(span / step) + 1)]


def money_ticks(most: float) -> list[float]:
    """Choose round marks of dollars.

    >>> money_ticks(7.3)
    [0.0, 2.0, 4.0, 6.0]
    """
    power = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step = next(step for step in (0.2, 0.5, 1.0, 2.0, 5.0) if most / (step * power) <= 5)
    return [round(step * power * at, 10) for at in range(int(most / (step * power)) + 1)]


class _Axis:
    """Seconds since the job's start, from left to right."""

    def __init__(self, began_s: float, ended_s: float) -> None:
        self.began_s = began_s
        self.span_s = max(1.0, ended_s - began_s)

    def x(self, at_s: float) -> float:
        """Return a moment's place."""
        share = min(1.0, max(0.0, (at_s - self.began_s) / self.span_s))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)

    def marks(self, height: float) -> Iterator[str]:
        """Draw the grid."""
        for after_s in ticks(self.span_s, STEPS_S):
            x = self.x(self.began_s + after_s)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 4}"/>'
            label = "start" if after_s == 0 else f"+{format_duration(after_s)}"
            yield f'<text class="axis" x="{x}" y="14" text-anchor="middle">{escape(label)}</text>'


def timeline(found: History) -> str:
    """Draw each candidate as a bar by phase, and mark the failovers."""
    bars = found.bars[-LANES_MAX:]
    axis = _Axis(found.began_s, found.ended_s)
    height = TOP + LANE * max(1, len(bars)) + 10
    parts = list(axis.marks(height))
    for one in found.failovers:
        x = axis.x(one.lost_at_s)
        kind = "lost" if one.kind in LOST else "planned"
        told = escape(f"{one.kind} {one.number}: {one.why}")
        line = f'<line class="mark {kind}" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 4}">'
        parts.append(f"{line}<title>{told}</title></line>")
    for lane, bar in enumerate(bars):
        parts += _lane(axis, bar, TOP + lane * LANE)
    for one in found.failovers:
        if one.kind in LOST:
            x, y = axis.x(one.lost_at_s), height - 10
            parts.append(f'<polygon class="flag" points="{x},{y} {x - 5},{y + 9} {x + 5},{y + 9}"/>')
    return _svg(height, parts, f"Timeline of {len(bars)} nodes and {len(found.failovers)} failovers")


def _lane(axis: _Axis, bar: Bar, y: float) -> Iterator[str]:
    name = escape(f"{bar.provider} {bar.ident}")
    yield f'<text class="lane" x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>'
    for part in bar.parts:
        x, end = axis.x(part.from_s), axis.x(part.until_s)
        lasted = format_duration(part.until_s - part.from_s)
        told = f"{bar.provider} {bar.ident} · {part.what} {lasted} · {bar.gpu} {bar.market} ${bar.usd_h:.3f}/h"
        told += "" if bar.won or not bar.why else f" · {bar.why}"
        kind = part.what if bar.won or part.what != "running" else "ready"
        yield (
            f'<rect class="part {escape(kind)}{"" if bar.won else " loser"}" x="{x}" y="{y + 3}" '
            f'width="{max(1.5, round(end - x, 2))}" height="{LANE - 8}" rx="3"><title>{escape(told)}</title></rect>'
        )


def comebacks(failovers: Sequence[Failover]) -> str:
    """Draw the time from the loss to the running command, by phase, one bar per failover."""
    most_s = max([sum(_phases(one).values()) for one in failovers] + [one.ready_s or 0.0 for one in failovers])
    axis = _Axis(0.0, max(1.0, ROOM_FOR_WORDS * most_s))
    height = TOP + LANE * max(1, len(failovers)) + 6
    parts = [mark.replace(">start<", ">0<") for mark in axis.marks(height)]
    for lane, one in enumerate(failovers):
        y, cursor_s = TOP + lane * LANE, 0.0
        name = f"{one.kind} {one.number}"
        parts.append(f'<text class="lane" x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for phase, seconds in _phases(one).items():
            x, end = axis.x(cursor_s), axis.x(cursor_s + seconds)
            cursor_s += seconds
            told = f"{phase.replace('_', ' ')} {format_duration(seconds)}"
            parts.append(
                f'<rect class="part {phase}" x="{x}" y="{y + 3}" width="{max(0.5, round(end - x, 2))}" '
                f'height="{LANE - 8}"><title>{escape(told)}</title></rect>'
            )
        ready = "not reached" if one.ready_s is None else format_duration(one.ready_s)
        x = axis.x(cursor_s) + 6
        parts.append(f'<text class="value" x="{x}" y="{y + 14}">{escape(ready)}</text>')
    return _svg(height, parts, "Comebacks by phase")


def _phases(one: Failover) -> dict[str, float]:
    found = {name: getattr(one, f"{name}_s") for name in PHASES}
    return {name: seconds for name, seconds in found.items() if seconds}


def money(points: Sequence[CostPoint]) -> str:
    """Draw dollars over time: nodes, racing on top, and what on demand would have cost for the same training."""
    height, floor = 240.0, 214.0
    axis = _Axis(points[0].at_s, points[-1].at_s)
    most = max([p.nodes_usd + p.racing_usd for p in points] + [p.on_demand_usd or 0.0 for p in points] + [0.01])

    def y(usd: float) -> float:
        return round(floor - usd / most * (floor - TOP), 2)

    parts = list(axis.marks(floor + 8))
    for usd in money_ticks(most):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(usd)}" y2="{y(usd)}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y(usd) + 4}" text-anchor="end">${usd:g}</text>')
    nodes = [(axis.x(p.at_s), y(p.nodes_usd)) for p in points]
    total = [(axis.x(p.at_s), y(p.nodes_usd + p.racing_usd)) for p in points]
    parts.append(_area("racing", total, nodes))
    parts.append(_area("nodes", nodes, [(x, floor) for x, _ in nodes]))
    if all(p.on_demand_usd is not None for p in points):
        line = " ".join(f"{axis.x(p.at_s)},{y(p.on_demand_usd or 0.0)}" for p in points)
        parts.append(f'<polyline class="on-demand" points="{line}"/>')
    return _svg(height, parts, "Dollars over time")


def _area(kind: str, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{x},{y}" for x, y in (*upper, *reversed(lower)))
    return f'<polygon class="area {kind}" points="{points}"/>'


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'
