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

from bench_systems import BUCKET, SYSTEMS, BenchFailed, Site, System, installed
from bench_workloads import KEYS, SECONDS, WORKLOADS, Scale, Workload, make_repository, may_drop_caches
from rich.console import Console
from rich.table import Table
from seaweed import seaweed

OWN = "spotwarp"
ROUNDS = 5
QUICK_DIVISOR = 10
QUIET_S = 0.5
"""Between two measurements: daemons have freed and forgotten what the last one left."""

Samples = dict[tuple[str, str], list[float]]


def main() -> int:
    wish = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = Path(tempfile.mkdtemp(prefix="spotwarp-bench-", dir=wish.dir))
    try:
        with ExitStack() as held:
            server = held.enter_context(seaweed())
            server.create_bucket(BUCKET)
            site = Site(home, server, wish.streaming)
            systems = [held.enter_context(SYSTEMS[name](site)) for name in wish.systems]
            scale = Scale(QUICK_DIVISOR if wish.quick else 1, home / "repository")
            files = make_repository(scale.source, scale) if {"git_clone", "git_status"} & wish.only else 0
            samples = _measure(systems, scale, wish)
    except BenchFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    document = _document(samples, wish, files)
    _show(document, systems)
    if wish.json:
        print(json.dumps(document))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--only", default=",".join(KEYS))
    parser.add_argument("--systems", default=",".join(name for name in SYSTEMS if installed(name)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", default=None)
    wish = parser.parse_args()
    wish.only, wish.systems = set(wish.only.split(",")), wish.systems.split(",")
    for kind, named, known in (("key", wish.only, KEYS), ("system", wish.systems, SYSTEMS)):
        unknown = sorted(set(named) - set(known))
        if unknown:
            parser.error(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    if OWN not in wish.systems:
        parser.error(f"every ratio is one to {OWN}: name it among the systems")
    return wish


def _measure(systems: list[System], scale: Scale, wish: argparse.Namespace) -> Samples:
    samples: Samples = {}
    chosen = [workload for workload in WORKLOADS if set(workload.units) & wish.only]
    for number in range(wish.rounds):
        for workload in chosen:
            # Each system goes first as often as any other.
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                if workload.needs_directories and not system.directories:
                    continue
                _note(samples, system, workload, scale, wish.only)
        print(f"bench: round {number + 1} of {wish.rounds} done", file=sys.stderr)
    return samples


def _note(samples: Samples, system: System, workload: Workload, scale: Scale, only: set[str]) -> None:
    try:
        figures = workload.run(system.root, scale)
    except OSError as error:
        raise BenchFailed(f"{system.name} failed in {', '.join(workload.units)}: {error}") from error
    for key, value in figures.items():
        if key in only:
            samples.setdefault((key, system.name), []).append(value)
    time.sleep(QUIET_S)


def _document(samples: Samples, wish: argparse.Namespace, files: int) -> dict[str, object]:
    units = {key: unit for workload in WORKLOADS for key, unit in workload.units.items()}
    results = [
        {
            "workload": key, "system": name, "median": median(values), "unit": units[key],
            "lowest": min(values), "highest": max(values), "rounds": len(values),
        }
        for (key, name), values in samples.items()
    ]  # fmt: skip
    ratios: dict[str, dict[str, float]] = {name: {} for name in wish.systems if name != OWN}
    for (key, name), values in samples.items():
        if name != OWN:
            pairs = zip(samples[key, OWN], values, strict=True)
            ratios[name][key] = median(
                theirs / ours if units[key] == SECONDS else ours / theirs for ours, theirs in pairs
            )
    conditions = {
        "quick": wish.quick, "rounds": wish.rounds, "streaming": wish.streaming, "repository_files": files,
        "caches_dropped": may_drop_caches(), "cores": os.cpu_count(),
    }  # fmt: skip
    return {"results": results, "ratios": ratios, "scale": {}, "conditions": conditions}


def _show(document: dict[str, object], systems: list[System]) -> None:
    console = Console()
    known = {(row["workload"], row["system"]): row for row in document["results"]}  # type: ignore[attr-defined]
    table = Table(title="Medians, and how many times better SpotWarp is")
    table.add_column("workload")
    for system in systems:
        table.add_column(system.name, justify="right")
    for key in (key for key in KEYS if (key, OWN) in known):
        cells = []
        for system in systems:
            row = known.get((key, system.name))
            ratio = document["ratios"].get(system.name, {}).get(key)  # type: ignore[attr-defined]
            beside = "" if ratio is None else f"  ×{ratio:.2f}"
            cells.append("–" if row is None else f"{row['median']:,.3g} {row['unit']}{beside}")
        table.add_row(key, *cells)
    console.print(table)
    promises = Table(title="What has been made safe when the call returns: it survives …")
    for heading in ("system", "write", "close", "fsync"):
        promises.add_column(heading)
    for system in systems:
        promises.add_row(system.name, system.durability.write, system.durability.close, system.durability.fsync)
    console.print(promises)


if __name__ == "__main__":
    raise SystemExit(main())
