"""Draw how many failovers are over after how many seconds, as one self-contained SVG with a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 860
HEIGHT: Final = 420
LEFT: Final = 60
RIGHT: Final = 20
TOP: Final = 40
BOTTOM: Final = 50
MARKS_S: Final = (20, 30, 45, 60, 90, 120, 180, 300, 450, 600)
SHARES: Final = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
COLOURS: Final = ("#1a7f37", "#0969da", "#8250df", "#bc4c00", "#cf222e")
TARGETS: Final = ((45, 0.5), (90, 0.95))
"""What the project asks of a failover with one cached candidate: seconds and share."""
STYLE: Final = """text{font:13px system-ui,sans-serif;fill:#57606a}.grid{stroke:#d0d7de;stroke-width:1}
.title{font-size:15px;fill:#24292f}.curve{fill:none;stroke-width:2}.target{fill:none;stroke:#24292f;stroke-width:1.5}
@media(prefers-color-scheme:dark){svg{background:#0d1117}text{fill:#9198a1}.title{fill:#e6edf3}.grid{stroke:#30363d}
.target{stroke:#e6edf3}}"""


def _x(seconds: float) -> float:
    low, high = math.log(MARKS_S[0]), math.log(MARKS_S[-1])
    share = (math.log(max(seconds, MARKS_S[0])) - low) / (high - low)
    return LEFT + min(1.0, share) * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _grid() -> Iterator[str]:
    for seconds in MARKS_S:
        yield f'<path class="grid" d="M{_x(seconds):.1f} {_y(0):.1f}V{_y(1):.1f}"/>'
        yield f'<text x="{_x(seconds):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds}</text>'
    for share in SHARES:
        yield f'<path class="grid" d="M{LEFT} {_y(share):.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">seconds from the loss to the command</text>'


def _curve(ready_s: Sequence[float], colour: str) -> str:
    """Return the steps of a distribution; *ready_s* is in order."""
    points, count = [f"M{_x(ready_s[0]):.1f} {_y(0):.1f}"], len(ready_s)
    for place, seconds in enumerate(ready_s, 1):
        points.append(f"H{_x(seconds):.1f}V{_y(place / count):.1f}")
    return f'<path class="curve" stroke="{colour}" d="{"".join(points)}"/>'


def draw(curves: Mapping[str, Sequence[float]], seeds: int) -> str:
    """Return the picture; each curve is named in a legend, the targets are circles."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>']
    parts.append(f'<text class="title" x="{LEFT}" y="22">Failovers that are over, {seeds} each</text>')
    parts += _grid()
    for place, ((name, ready_s), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        y = _y(0) - 14 - 18 * (len(curves) - 1 - place)
        if ready_s:
            parts.append(_curve(ready_s, colour))
        parts.append(f'<path class="curve" stroke="{colour}" d="M{WIDTH - 330} {y - 4:.1f}h22"/>')
        parts.append(f'<text x="{WIDTH - 302}" y="{y:.1f}">{escape(name)}</text>')
    for seconds, share in TARGETS:
        parts.append(f'<circle class="target" cx="{_x(seconds):.1f}" cy="{_y(share):.1f}" r="6"/>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
