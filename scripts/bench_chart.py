"""One picture of a run, for people: a self-contained SVG in which longer to the right of the line is better.

Invariant: pure but for the file it writes; every text is escaped; colours follow light and dark.
"""

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 1000, 200, 56
NAMES = 160
"""Names of workloads end here; from here to the axis there is room for the figure of a bar that ends at its edge."""
FIGURE = 34
ROW, GROUP_GAP, HEAD = 15, 12, 96
LOWEST, HIGHEST = 1 / 16, 16.0
"""Ratios beyond these end at the edge of the picture, and say so."""
AGAINST = {"juicefs": "JuiceFS", "juicefs-redis": "JuiceFS on Redis", "rclone": "rclone", "passthrough": "pass-through"}
"""In the order of their bars. ext4 is not drawn: it goes into the table as what no daemon can reach."""
TARGETS = {
    "juicefs": {
        "seq_write_1m": 2.0, "write_8x_1m": 1.5, "seq_write_4k": 0.9, "create_1k": 2.5, "stat_first": 2.5, "chmod": 2.5,
        "unlink": 2.5, "seq_read_cold": 1.5, "git_clone": 2.0, "git_status": 2.0, "fresh_read": 1.2,
        "fresh_read_20ms": 1.5, "checkpoint_cycle": 1.5,
    },
    "passthrough": {
        "seq_write_1m": 0.8, "write_8x_1m": 0.8, "seq_write_4k": 0.8, "create_1k": 0.7, "stat_first": 0.7, "chmod": 0.7,
        "unlink": 0.7, "seq_read_cold": 0.8,
    },
}  # fmt: skip
"""What the project wants of each ratio at least."""
STYLE = """
svg { font: 13px system-ui, sans-serif; background: #fff; color: #1c2733; }
text { fill: currentColor; } .title { font-size: 19px; font-weight: 600; } .axis, .value { font-size: 11px; }
.axis { opacity: .65; } .grid { stroke: #d5dce3; } .one { stroke: currentColor; stroke-width: 1.5; }
.target { stroke: #1c2733; stroke-width: 2.5; } .band { fill: #f3f6f9; }
.juicefs { fill: #2f6fde; } .juicefs-redis { fill: #8db1f2; } .rclone { fill: #e08a1e; } .passthrough { fill: #7d8894; }
@media (prefers-color-scheme: dark) {
  svg { background: #14191f; color: #e6ebf0; } .grid { stroke: #333d48; } .band { fill: #1b222a; }
  .target { stroke: #fff; } .passthrough { fill: #9aa5b1; }
}
"""


def write_chart(path: Path, document: dict[str, Any]) -> None:
    """Write the picture of *document*."""
    path.write_text(chart(document), encoding="utf-8")


def chart(document: dict[str, Any]) -> str:
    """Draw how many times better SpotWarp is, workload by workload."""
    ratios = {name: found for name, found in document["ratios"].items() if name in AGAINST and found}
    ratios = {name: ratios[name] for name in AGAINST if name in ratios}
    keys = list(dict.fromkeys(row["workload"] for row in document["results"]))
    keys = [key for key in keys if any(key in found for found in ratios.values())]
    bands, parts, y = list[str](), list[str](), float(HEAD)
    for number, key in enumerate(keys):
        bars = [(name, found[key]) for name, found in ratios.items() if key in found]
        height = ROW * len(bars) + GROUP_GAP
        if number % 2 == 0:
            bands.append(f'<rect class="band" x="0" y="{y:g}" width="{WIDTH}" height="{height}"/>')
        middle = y + height / 2 + 5
        parts.append(f'<text x="{NAMES}" y="{middle:g}" text-anchor="end">{escape(key)}</text>')
        for lane, (name, ratio) in enumerate(bars):
            parts += _bar(name, key, ratio, y + GROUP_GAP / 2 + ROW * lane)
        y += height
    return _page(y + 34, [*_head(document, list(ratios)), *bands, *_grid(y), *parts, *_foot(y)])


def _x(ratio: float) -> float:
    """Place a ratio: the axis is logarithmic, twice as good is as far as half as good."""
    share = math.log(min(HIGHEST, max(LOWEST, ratio)) / LOWEST) / math.log(HIGHEST / LOWEST)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _grid(stop: float) -> Iterator[str]:
    for power in range(-4, 5):
        ratio = 2.0**power
        label = f"{ratio:g}×" if ratio >= 1 else f"1/{1 / ratio:g}"
        kind = "one" if power == 0 else "grid"
        yield f'<line class="{kind}" x1="{_x(ratio)}" x2="{_x(ratio)}" y1="{HEAD - 6}" y2="{stop:g}"/>'
        yield f'<text class="axis" x="{_x(ratio)}" y="{HEAD - 12}" text-anchor="middle">{label}</text>'


def _bar(name: str, key: str, ratio: float, y: float) -> Iterator[str]:
    start, end = sorted((_x(1.0), _x(ratio)))
    told = escape(f"{key}: SpotWarp is {ratio:.2f} times as good as {AGAINST[name]}")
    size = f'width="{max(1.0, end - start):g}" height="{ROW - 4}"'
    yield f'<rect class="{name}" x="{start}" y="{y + 2:g}" {size}><title>{told}</title></rect>'
    target = TARGETS.get(name, {}).get(key)
    marks = [_x(ratio)] if target is None else [_x(ratio), _x(target)]
    if ratio >= 1:
        at, anchor = max(x for x in marks if x < end + FIGURE) + 5, "start"
    else:
        at, anchor = min(x for x in marks if x > start - FIGURE) - 5, "end"
    yield f'<text class="value" x="{at:g}" y="{y + ROW - 4:g}" text-anchor="{anchor}">{ratio:.2f}</text>'
    if target is not None:
        told = escape(f"target against {AGAINST[name]}: {target:g}")
        line = f'x1="{_x(target)}" x2="{_x(target)}" y1="{y:g}" y2="{y + ROW:g}"'
        yield f'<line class="target" {line}><title>{told}</title></line>'


def _head(document: dict[str, Any], names: list[str]) -> Iterator[str]:
    conditions = document["conditions"]
    yield '<text class="title" x="16" y="28">How many times better SpotWarp is</text>'
    load = conditions.get("load_average", {})
    words = f"{conditions['rounds']} rounds, {conditions['cores']} cores"
    words += f", load {load['before']:.1f} to {load['after']:.1f}" if load else ""
    words += ", a tenth of the sizes" if conditions["quick"] else ""
    yield f'<text class="axis" x="{WIDTH - RIGHT}" y="28" text-anchor="end">{escape(words)}</text>'
    x = 16.0
    for name in names:
        label = f"against {AGAINST[name]}"
        yield f'<rect class="{name}" x="{x:g}" y="44" width="14" height="12"/>'
        yield f'<text x="{x + 20:g}" y="55">{escape(label)}</text>'
        x += 50 + 7.2 * len(label)
    yield f'<line class="target" x1="{x + 4:g}" x2="{x + 4:g}" y1="43" y2="58"/>'
    yield f'<text x="{x + 14:g}" y="55">target</text>'


def _foot(y: float) -> Iterator[str]:
    words = "Medians of the rounds' own ratios; the axis is logarithmic. Right of 1×: SpotWarp is better."
    yield f'<text class="axis" x="16" y="{y + 22:g}">{words}</text>'


def _page(height: float, parts: list[str]) -> str:
    inside = "".join(parts)
    label = "How many times better SpotWarp is than others"
    box = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{label}">'
    return f"{start}<style>{STYLE}</style>{inside}</svg>\n"
