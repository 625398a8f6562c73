"""Measure how long a failover takes on the simulated market with latencies.json, in virtual time, over many seeds.

Each run launches a job, lets its node vanish without a word, and waits until the command runs again elsewhere.
`ready_s` is from the true moment of the loss. Prints a Markdown table; docs/FAILOVER.md quotes it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trio

from provisioner.core.intents import Intent
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Offer
from provisioner.core.ports import Launch
from tests.support.failover_world import SPEC, Work, World, in_virtual_time, launch_of, world


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    cached: str
    """`one` of the candidates, `none`, or `all`."""
    candidates: int


CASES = (
    Case("one of 3 candidates has the image", "one", 3),
    Case("1 candidate, which has the image", "one", 1),
    Case("3 candidates, none has the image", "none", 3),
    Case("1 candidate, which has not", "none", 1),
)


def caching(w: World, case: Case, seed: int) -> Any:
    """Give the image to one candidate of the second race: the one that the seed picks, or the next on Vast."""
    races: list[str] = []
    given: set[str] = set()

    async def make(intent: Intent, offer: Offer, spec: JobSpec) -> Launch:
        race, serial = intent.ident.split("-")
        if race not in races:
            races.append(race)
        wanted = 1 + seed % case.candidates
        if len(races) > 1 and case.cached == "one" and race not in given and int(serial) >= wanted and offer.machine_id:
            given.add(race)
            for machine in w.sim.world.machines:
                if machine.provider == offer.provider and str(machine.machine_id) == offer.machine_id:
                    machine.images.add(spec.image)
        return await launch_of(intent, offer, spec)

    return make


def failover(case: Case, seed: int) -> dict[str, float | None]:
    """Run one, and return its phases."""
    found: dict[str, float | None] = {}

    async def main() -> None:
        spec = replace(SPEC, candidates_max=case.candidates)
        async with world(seed=seed, work=Work(1e6), spec=spec, image_cached=0.0, vast_machines=60, busy=0.3) as w:
            w.launch_maker = caching(w, case, seed)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.run)
                first = await w.until_running()
                await trio.sleep(60 + w.draws.uniform(0, 10))
                lost_s = w.now_s()
                w.sim.world.destroy(first)
                second = await w.until_running(but=first.key)
                running_s = w.report_of(second).times["started"]
                await w.until(lambda: len(w.failovers()) == 2)
                nursery.cancel_scope.cancel()
            done = w.failovers()[-1]
            found["ready_s"] = running_s - lost_s
            for name in ("detect_s", "race_s", "boot_s", "checks_s", "claim_s", "first_read_s"):
                found[name] = getattr(done, name)

    in_virtual_time(main, seed=seed)
    return found


def one(job: tuple[int, int]) -> tuple[int, dict[str, float | None]]:
    index, seed = job
    return index, failover(CASES[index], seed)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    results: dict[int, list[dict[str, float | None]]] = {index: [] for index in range(len(CASES))}
    jobs = [(index, seed) for seed in range(options.seeds) for index in range(len(CASES))]
    with ProcessPoolExecutor(options.workers) as pool:
        for index, found in pool.map(one, jobs, chunksize=4):
            results[index].append(found)
    names = ("detect_s", "race_s", "boot_s", "checks_s", "claim_s", "first_read_s")
    print(
        f"| {options.seeds} failovers each | ready_s p50 | p95 | " + " | ".join(f"{name} p50" for name in names) + " |"
    )
    print("|---|" + "---|" * (2 + len(names)))
    for index, case in enumerate(CASES):
        ready = [found["ready_s"] for found in results[index] if found["ready_s"] is not None]
        medians = []
        for name in names:
            values = [value for found in results[index] if (value := found[name]) is not None]
            medians.append(f"{statistics.median(values):.1f}" if values else "")
        row = [case.name, f"{percentile(ready, 0.5):.0f}", f"{percentile(ready, 0.95):.0f}", *medians]
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
