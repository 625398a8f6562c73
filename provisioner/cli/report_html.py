"""One self-contained page of a job's report: nothing is fetched, nothing runs, light and dark follow the reader.

Invariant: every text that comes from outside is escaped; no address of any other page is in it.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from typing import Final

from provisioner.cli import report_svg
from provisioner.cli.history import LOST, History
from provisioner.core.happenings import Failover
from spotwarp_fs.api import format_duration

STYLE: Final = """\
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#667085;--line:#e4e7ec;--run:#2f9e6e;
--detect:#d9534f;--race:#e8833a;--boot:#e9b44c;--checks:#7aa5d8;--ready:#5b7fc7;--claim:#8a6fc9;--read:#4fb3bf;
--loss:#d9534f;--plan:#5b7fc7;--od:#98a2b3}
@media (prefers-color-scheme:dark){:root{--bg:#12161d;--card:#1a202a;--ink:#e7ebf1;--soft:#94a0b3;--line:#2b3442;
--run:#3fbf86;--od:#7d8899}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:26px;margin:0 0 2px;letter-spacing:-.01em}
h2{font-size:15px;margin:0 0 12px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
.soft{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(156px,1fr));gap:12px;margin:22px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px}
.tile b{display:block;white-space:nowrap;font-size:21px;line-height:1.25;letter-spacing:-.02em}
.tile span{color:var(--soft);font-size:13px}
.tile.good b{color:var(--run)}
.card{margin:14px 0;overflow-x:auto}
svg{display:block;width:100%;min-width:640px;height:auto;font:11px system-ui,-apple-system,"Segoe UI",sans-serif}
svg .grid{stroke:var(--line)}svg .axis,svg .lane{fill:var(--soft)}svg .value{fill:var(--ink);font-weight:600}
svg .mark{stroke-dasharray:3 3}svg .mark.lost{stroke:var(--loss)}svg .mark.planned{stroke:var(--plan)}
svg .flag{fill:var(--loss)}
svg .part.running{fill:var(--run)}svg .part.boot{fill:var(--boot)}svg .part.checks{fill:var(--checks)}
svg .part.ready{fill:var(--ready)}svg .part.detect{fill:var(--detect)}svg .part.race{fill:var(--race)}
svg .part.claim{fill:var(--claim)}svg .part.first_read{fill:var(--read)}svg .part.loser{opacity:.5}
svg .area.nodes{fill:var(--run);opacity:.75}svg .area.racing{fill:var(--race);opacity:.85}
svg .on-demand{fill:none;stroke:var(--od);stroke-width:2;stroke-dasharray:6 4}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:10px;color:var(--soft);font-size:13px}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500;text-align:right;padding:4px 10px;white-space:nowrap}
td{padding:6px 10px;border-top:1px solid var(--line);text-align:right;white-space:nowrap}
th.l,td.l{text-align:left}td.w{white-space:normal;min-width:180px}
"""
TIMELINE_KEY: Final = (
    ("boot", "booting"), ("checks", "checks"), ("ready", "ready, waiting"), ("run", "running the job"),
    ("loss", "loss"),
)  # fmt: skip
PHASE_KEY: Final = (
    ("detect", "detect"), ("race", "race"), ("boot", "boot"), ("checks", "checks"), ("claim", "claim"),
    ("read", "first read"),
)  # fmt: skip
COST_KEY: Final = (("run", "nodes"), ("race", "racing"), ("od", "on demand, for the same training"))
COLUMNS: Final = ("detect", "race", "boot", "checks", "claim", "first_read", "ready")


def page(found: History) -> str:
    """Return the whole page."""
    return "".join(
        (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(found.job)} · SpotWarp</title><style>{STYLE}</style></head><body><main>",
            *_header(found),
            *_charts(found),
            *_failovers(found),
            *_nodes(found),
            f'<p class="soft">Made by SpotWarp at {_when(found.made_at_s)}. Prices as providers named them; a node '
            "counts from its order to its verified end.</p></main></body></html>",
        )
    )


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _header(found: History) -> Iterator[str]:
    if found.running:
        state = "running"
    else:
        state = "ended" if found.exit_code is None else f"ended with exit code {found.exit_code}"
    yield f"<h1>{escape(found.job)}</h1>"
    yield f'<div class="soft">{escape(state)} · {_when(found.began_s)} to {_when(found.ended_s)}</div>'
    if found.command:
        yield f"<div><code>{escape(shlex.join(found.command))}</code></div>"
    yield '<div class="tiles">'
    for figure, label, good in tiles(found):
        yield f'<div class="tile{" good" if good else ""}"><b>{escape(figure)}</b><span>{escape(label)}</span></div>'
    yield "</div>"


def tiles(found: History) -> Iterator[tuple[str, str, bool]]:
    """Give (figure, label, whether it is good news)."""
    if found.saved_percent is not None:
        better = found.saved_percent >= 0
        yield (
            f"{abs(found.saved_percent):.0f} %",
            "saved against on demand" if better else "dearer than on demand",
            better,
        )
    yield f"${found.total_usd:.2f}", f"spent, of it ${found.racing_usd:.2f} for racing", False
    yield format_duration(found.useful_h * 3600), "of useful training", False
    yield str(len(found.losses)), "losses" if len(found.losses) != 1 else "loss", False
    ready = [one.ready_s for one in found.losses if one.ready_s is not None]
    if ready:
        yield format_duration(statistics.median(ready)), "median from loss to running", False
    yield format_duration(found.avoided_h * 3600), "of recomputation avoided", found.avoided_h > 0


def _card(title: str, body: str, key: tuple[tuple[str, str], ...] = ()) -> str:
    marks = "".join(f'<span><i style="background:var(--{name})"></i>{escape(text)}</span>' for name, text in key)
    legend = f'<div class="key">{marks}</div>' if key else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{legend}</section>'


def _charts(found: History) -> Iterator[str]:
    if found.bars:
        yield _card("Nodes over time", report_svg.timeline(found), TIMELINE_KEY)
    if found.failovers:
        yield _card("From loss to running, by phase", report_svg.comebacks(found.failovers), PHASE_KEY)
    if len(found.cost) > 1:
        key = COST_KEY if found.on_demand_usd_h is not None else COST_KEY[:2]
        yield _card("Cost", report_svg.money(found.cost), key)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _failovers(found: History) -> Iterator[str]:
    if not found.failovers:
        return
    names = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in COLUMNS)
    rows = "".join(_failover(one) for one in found.failovers)
    head = f'<th class="l">what</th><th class="l">winner</th>{names}<th>done again</th><th>reaped</th><th>racing</th>'
    head += '<th class="l">why</th>'
    yield _card("Failovers, in seconds", f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")


def _failover(one: Failover) -> str:
    cells = "".join(f"<td>{_seconds(getattr(one, f'{name}_s'))}</td>" for name in COLUMNS)
    winner = f"{one.provider} {one.winner}" if one.winner else "none"
    again_s = one.state_age_s if one.kind in LOST else None
    return (
        f'<tr><td class="l">{escape(one.kind)} {one.number}</td><td class="l">{escape(winner)}</td>{cells}'
        f"<td>{_seconds(again_s)}</td><td>{one.reaped} of {one.candidates}</td><td>${one.racing_usd:.3f}</td>"
        f'<td class="l w">{escape(one.why)}</td></tr>'
    )


def _nodes(found: History) -> Iterator[str]:
    if not found.bars:
        return
    rows = "".join(
        f'<tr><td class="l">{escape(bar.provider)} {escape(bar.ident)}</td><td class="l">{escape(bar.gpu)}</td>'
        f'<td class="l">{escape(bar.market)}</td><td>{"yes" if bar.won else ""}</td><td>${bar.usd_h:.3f}</td>'
        f"<td>{escape(format_duration(bar.parts[-1].until_s - bar.parts[0].from_s))}</td><td>${bar.usd:.3f}</td>"
        f'<td class="l w">{escape(bar.why)}</td></tr>'
        for bar in found.bars
    )
    head = '<th class="l">node</th><th class="l">GPU</th><th class="l">market</th><th>won</th><th>per hour</th>'
    head += '<th>held</th><th>cost</th><th class="l">end</th>'
    yield _card("Nodes", f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
