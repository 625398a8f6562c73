"""Measure the systems beside each other: in every round each workload visits each of them, so that noise hits all.

Invariant: nothing stays mounted, whatever happens. A ratio is taken per round and its median reported; above 1 means
that SpotWarp is better.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench_chart import write_chart
from bench_fresh import FRESH_KEYS, measure_fresh
from bench_node_peers import NODES
from bench_scale import measure_scale
from bench_stall import measure_stall
from bench_streaming import measure_streaming
from bench_systems import BUCKET, PROMISES, SYSTEMS, BenchFailed, Site, System, installed
from bench_tables import show
from bench_workloads import (
    KEYS,
    LESS_IS_BETTER,
    SECONDS,
    WORKLOADS,
    Scale,
    Workload,
    make_repository,
    may_drop_caches,
)
from seaweed import seaweed

OWN = "spotwarp"
ROUNDS = 5
QUICK_DIVISOR = 10
QUIET_S = 0.5
"""Between two measurements: daemons have freed and forgotten what the last one left."""
ALONE_KEYS = ("save_stall_s", "streaming", "scale")
"""Measured by themselves, after the workloads that visit all systems."""
ALL_KEYS = (*KEYS, *FRESH_KEYS, *ALONE_KEYS)
UNITS = {key: unit for workload in WORKLOADS for key, unit in workload.units.items()} | FRESH_KEYS
UNITS |= {"save_stall_s": SECONDS}

COMPARED = ("juicefs", "rclone", "passthrough", "ext4")
"""These have an entry among the ratios, be it empty."""

Samples = dict[tuple[str, str], list[float]]


def main() -> int:
    wish = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = Path(tempfile.mkdtemp(prefix="spotwarp-bench-", dir=wish.dir))
    before = os.getloadavg()
    try:
        document = _measure_all(home, wish)
    except BenchFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    document["conditions"]["load_average"] = {"before": before[0], "after": os.getloadavg()[0]}
    show(document, OWN, {name: PROMISES[name] for name in wish.systems})
    if wish.chart:
        write_chart(Path(wish.chart), document)
        print(f"bench: the chart is {wish.chart}", file=sys.stderr)
    if wish.json:
        print(json.dumps(document))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--chart", default=None)
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--only", default=",".join(ALL_KEYS))
    parser.add_argument("--systems", default=",".join(name for name in SYSTEMS if installed(name)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", default=None)
    wish = parser.parse_args()
    wish.only, wish.systems = set(wish.only.split(",")), wish.systems.split(",")
    for kind, named, known in (("key", wish.only, ALL_KEYS), ("system", wish.systems, SYSTEMS)):
        unknown = sorted(set(named) - set(known))
        if unknown:
            parser.error(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    if OWN not in wish.systems:
        parser.error(f"every ratio is one to {OWN}: name it among the systems")
    return wish


def _measure_all(home: Path, wish: argparse.Namespace) -> dict[str, Any]:
    samples: Samples = {}
    files, streaming, scaled = 0, {}, {}
    scale = Scale(QUICK_DIVISOR if wish.quick else 1, home / "repository")

    def note(key: str, system: str, value: float) -> None:
        if key in wish.only:
            samples.setdefault((key, system), []).append(value)

    with seaweed() as server:
        server.create_bucket(BUCKET)
        site = Site(home, server, wish.streaming)
        if set(KEYS) & wish.only:
            with ExitStack() as held:
                systems = [held.enter_context(SYSTEMS[name](site)) for name in wish.systems]
                files = make_repository(scale.source, scale) if {"git_clone", "git_status"} & wish.only else 0
                _measure(systems, scale, wish, note)
        if set(FRESH_KEYS) & wish.only:
            measure_fresh(site, [name for name in wish.systems if name in NODES], scale, wish.rounds, wish.only, note)
        if "save_stall_s" in wish.only:
            measure_stall(site, scale, wish.rounds, note)
        if "streaming" in wish.only:
            streaming = measure_streaming(site, scale)
        if "scale" in wish.only:
            scaled = measure_scale(site, scale.divisor, wish.rounds)
    conditions = {
        "quick": wish.quick, "rounds": wish.rounds, "streaming": wish.streaming, "repository_files": files,
        "caches_dropped": may_drop_caches(), "cores": os.cpu_count(),
    }  # fmt: skip
    return {**_compared(samples), "scale": scaled, "streaming": streaming, "conditions": conditions}


def _measure(systems: list[System], scale: Scale, wish: argparse.Namespace, note: Any) -> None:
    chosen = [workload for workload in WORKLOADS if set(workload.units) & wish.only]
    for number in range(wish.rounds):
        for workload in chosen:
            # Each system goes first as often as any other.
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                if workload.needs_directories and not system.directories:
                    continue
                for key, value in _run(system, workload, scale).items():
                    note(key, system.name, value)
                time.sleep(QUIET_S)
        print(f"bench: round {number + 1} of {wish.rounds} done", file=sys.stderr)


def _run(system: System, workload: Workload, scale: Scale) -> dict[str, float]:
    try:
        return workload.run(system.root, scale)
    except OSError as error:
        raise BenchFailed(f"{system.name} failed in {', '.join(workload.units)}: {error}") from error


def _compared(samples: Samples) -> dict[str, Any]:
    results = [
        {
            "workload": key, "system": name, "median": median(values), "unit": UNITS[key],
            "lowest": min(values), "highest": max(values), "rounds": len(values),
        }
        for (key, name), values in samples.items()
    ]  # fmt: skip
    ratios: dict[str, dict[str, float]] = {name: {} for name in COMPARED}
    for (key, name), values in samples.items():
        if name in SYSTEMS and name != OWN:
            pairs = zip(samples[key, OWN], values, strict=True)
            ratios.setdefault(name, {})[key] = median(
                theirs / ours if UNITS[key] in LESS_IS_BETTER else ours / theirs for ours, theirs in pairs
            )
    return {"results": results, "ratios": ratios}


if __name__ == "__main__":
    raise SystemExit(main())
