"""The tables that people read: medians beside each other, promises, the cost of streaming, scale."""

from collections.abc import Sequence
from typing import Any

from bench_systems import Durability
from rich.console import Console
from rich.table import Table

MB = 1e6
WIDTH_IN_FILES = 150
SCALE_ROWS = (
    ("files", "files", 1, ",.0f"),
    ("logical size, TB", "logical_bytes", 1e12, ".2f"),
    ("distinct digests", "distinct_digests", 1, ",.0f"),
    ("metadata in the store, MB", "metadata_bytes", MB, ".1f"),
    ("read by the mount, MB", "mount_bytes", MB, ".1f"),
    ("requests of the mount", "mount_requests", 1, ",.0f"),
    ("mount, s (target 5)", "mount_s", 1, ".2f"),
    ("… CPU of the daemon, s", "mount_cpu_s", 1, ".2f"),
    ("first MiB of the newest checkpoint, s (1)", "first_mib_s", 1, ".2f"),
    ("publish of 100 changed files, upload included, s (1)", "publish_s", 1, ".2f"),
    ("RSS after the mount, MB", "rss_mounted_bytes", MB, ".0f"),
    ("RSS at the end, MB", "rss_bytes", MB, ".0f"),
)


def show(document: dict[str, Any], own: str, promises: dict[str, Durability]) -> None:
    """Print everything that was measured."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH_IN_FILES)
    if document["results"]:
        console.print(_medians(document, own))
        console.print(_promises(promises))
    if document.get("streaming"):
        console.print(_streaming(document["streaming"]))
    if document["scale"]:
        console.print(_scale(document["scale"]))


def _medians(document: dict[str, Any], own: str) -> Table:
    known = {(row["workload"], row["system"]): row for row in document["results"]}
    systems = _in_order(system for _, system in known)
    table = Table(title="Medians, and how many times better SpotWarp is")
    for heading in ("workload", *systems):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for key in _in_order(key for key, _ in known):
        cells = []
        for system in systems:
            row = known.get((key, system))
            ratio = document["ratios"].get(system, {}).get(key) if system != own else None
            beside = "" if ratio is None else f"  ×{ratio:.2f}"
            cells.append("–" if row is None else f"{row['median']:,.3g} {row['unit']}{beside}")
        table.add_row(key, *cells)
    return table


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _promises(promises: dict[str, Durability]) -> Table:
    table = Table(title="What has been made safe when the call returns: it survives …")
    for heading in ("system", "write", "close", "fsync"):
        table.add_column(heading)
    for name, durability in promises.items():
        table.add_row(name, durability.write, durability.close, durability.fsync)
    return table


def _streaming(found: dict[str, Any]) -> Table:
    table = Table(title=f"The cost of streaming, {found['pairs']} pairs")
    for heading in ("", "on", "off", "cost: median", "interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, key, unit in (("save", "save", "s"), ("write, p99", "write_p99", "ms")):
        cost, medians = found[f"{key}_cost"], found[f"{key}_{unit}"]
        interval = f"{cost['lowest']:+.0%} … {cost['highest']:+.0%}"
        table.add_row(
            name, f"{medians['on']:.3g} {unit}", f"{medians['off']:.3g} {unit}", f"{cost['median']:+.0%}", interval
        )
    table.add_row("carried by the link", f"{found['link_share']:.0%} of {found['link_mb_per_s']:.0f} MB/s", "", "", "")
    table.add_row("daemon's CPU per GB published", f"{found['cpu_s_per_gb']:.2f} s", "", "", "")
    return table


def _scale(found: dict[str, Any]) -> Table:
    sizes: Sequence[str] = list(found["sizes"])
    table = Table(title=f"A fresh node, {1000 * found['latency_s']:.0f} ms from the store")
    for heading in ("", *sizes):
        table.add_column(heading, justify="right" if heading else "left")
    for name, key, divisor, form in SCALE_ROWS:
        table.add_row(name, *(format(found["sizes"][size][key] / divisor, form) for size in sizes))
    return table
