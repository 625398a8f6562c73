"""Measure the plain directory beside the programs that people run in a loop: publish, restore, and cost when idle.

Invariant: nothing is left running, whatever happens. A ratio is taken per round and its median reported; above 1 means
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
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench_directory_systems import BUCKET, MIRRORS, BenchFailed, Mirror, Site, installed, mirror
from bench_directory_tree import MB, Scale, add_checkpoint, first_byte, make_tree, opened, read_whole
from rich.console import Console
from rich.table import Table
from seaweed import seaweed

OWN = "spotwarp"
QUICK_DIVISOR = 10
CPU = "CPU s"
UNITS = {
    "first_publish": "s",
    "first_publish_cpu": CPU,
    "idle_cpu": "CPU s/min",
    "publish": "s",
    "publish_cpu": CPU,
    "training_start": "s",
    "training_start_cpu": CPU,
    "restore_opened": "s",
    "restore_fetched": "MB",
}
"""In all of them less is better. CPU is that of the programs, not of the server: it says more on a busy machine.

first_publish: the whole tree, once · idle_cpu: a minute in which nothing changes, looked at every 30 s · publish: a new
checkpoint in the tree, from its last byte on · training_start: from nothing until the job has read all its code ·
restore_opened: and until the first byte of the last file that it opens · restore_fetched: what had come by then
"""
IDLE_S = 60.0

Samples = dict[tuple[str, str], list[float]]


def main() -> int:
    wish = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    home = Path(tempfile.mkdtemp(prefix="spotwarp-bench-directory-", dir=wish.dir))
    scale = Scale.divided(wish.divisor)
    samples: Samples = {}
    try:
        tree = home / "tree"
        make_tree(tree, scale)
        for number in range(wish.rounds):
            turn = number % len(wish.systems)
            for name in wish.systems[turn:] + wish.systems[:turn]:
                for key, value in _measure(name, home / f"{name}{number}", tree, scale, wish.idle).items():
                    samples.setdefault((key, name), []).append(value)
            print(f"bench: round {number + 1} of {wish.rounds} done", file=sys.stderr)
    except BenchFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    document = _document(samples, wish, scale)
    _show(document, wish.systems)
    if wish.json:
        print(json.dumps(document))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("--form", choices=["directory"], default="directory")
    parser.add_argument("--quick", action="store_true", help="2 GB instead of 20 GB, and so on")
    parser.add_argument("--divisor", type=int, help="that many times less than 20 GB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--systems", default=",".join(name for name in MIRRORS if installed(name)))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds in which nothing changes")
    parser.add_argument("--dir", default=None)
    wish = parser.parse_args()
    wish.systems = wish.systems.split(",")
    unknown = sorted(set(wish.systems) - set(MIRRORS))
    if unknown:
        parser.error(f"no such system: {', '.join(unknown)}; there are {', '.join(MIRRORS)}")
    if OWN not in wish.systems:
        parser.error(f"every ratio is one to {OWN}: name it among the systems")
    wish.divisor = wish.divisor or (QUICK_DIVISOR if wish.quick else 1)
    return wish


def _measure(name: str, home: Path, tree: Path, scale: Scale, idle_s: float) -> dict[str, float]:
    """One round of one system, on a server and a disk where it is alone."""
    home.mkdir()
    new: Path | None = None
    try:
        with seaweed(_made(home / "server")) as server:
            server.create_bucket(BUCKET)
            with mirror(name, Site(home, tree, server)) as system:
                figures = _spent(system, "first_publish", system.publish)
                before_s = system.cpu_s()
                minutes = system.idle(idle_s)
                figures["idle_cpu"] = (system.cpu_s() - before_s) / minutes
                system.expect_publishing()
                new = add_checkpoint(tree, 2, scale)
                os.sync()
                figures |= _spent(system, "publish", system.publish)
                system.lose()
                figures |= _restore(system, tree)
    finally:
        if new is not None:
            shutil.rmtree(new)
        shutil.rmtree(home, ignore_errors=True)
    return figures


def _restore(system: Mirror, tree: Path) -> dict[str, float]:
    """Bring the tree to an empty directory, and do what the job does."""
    names = [path.relative_to(tree) for path in opened(tree)]
    files = [system.site.target / name for name in names]
    code = [path for path in files if path.suffix == ".py"]
    rest = files[len(code) :]

    def start() -> None:
        system.restore()
        for path in code:
            read_whole(path)

    began = time.perf_counter()
    figures = _spent(system, "training_start", start)
    for path in rest[:-1]:
        read_whole(path)
    first = first_byte(rest[-1])
    figures["restore_opened"] = time.perf_counter() - began
    figures["restore_fetched"] = system.fetched_bytes() / MB
    if first != first_byte(tree / names[-1]) or files[0].read_bytes() != (tree / names[0]).read_bytes():
        raise BenchFailed(f"{type(system).__name__} restored other bytes than were published")
    return figures


def _spent(system: Mirror, key: str, call: Callable[[], None]) -> dict[str, float]:
    """What a call takes, in time and in CPU time."""
    cpu_s, began = system.cpu_s(), time.perf_counter()
    call()
    return {key: time.perf_counter() - began, f"{key}_cpu": system.cpu_s() - cpu_s}


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _document(samples: Samples, wish: argparse.Namespace, scale: Scale) -> dict[str, object]:
    results = [
        {
            "workload": key, "system": name, "median": median(values), "unit": UNITS[key],
            "lowest": min(values), "highest": max(values), "rounds": len(values),
        }
        for (key, name), values in samples.items()
    ]  # fmt: skip
    ratios: dict[str, dict[str, float]] = {name: {} for name in wish.systems if name != OWN}
    for (key, name), values in samples.items():
        if name != OWN:
            pairs = zip(samples[key, OWN], values, strict=True)
            # A clock of CPU time has ticks: less than one counts as one.
            ratios[name][key] = median(theirs / max(ours, 0.01) for ours, theirs in pairs)
    conditions = {
        "form": "directory", "rounds": wish.rounds, "cores": os.cpu_count(), "idle_s": wish.idle,
        "tree_bytes": scale.tree_bytes, "checkpoint_bytes": scale.checkpoint_bytes, "opened_bytes": scale.opened_bytes,
    }  # fmt: skip
    return {"results": results, "ratios": ratios, "scale": {}, "conditions": conditions}


def _show(document: dict[str, object], systems: list[str]) -> None:
    known = {(row["workload"], row["system"]): row for row in document["results"]}  # type: ignore[attr-defined]
    table = Table(title="Medians, and how many times better SpotWarp is")
    table.add_column("workload")
    for name in systems:
        table.add_column(name, justify="right")
    for key, unit in UNITS.items():
        cells = []
        for name in systems:
            ratio = document["ratios"].get(name, {}).get(key)  # type: ignore[attr-defined]
            beside = "" if ratio is None else f"  ×{ratio:.2f}"
            cells.append(f"{known[key, name]['median']:,.3g} {unit}{beside}")
        table.add_row(key, *cells)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
