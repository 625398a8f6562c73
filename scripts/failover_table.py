"""Measure how long a failover takes on the simulated market with latencies.json, in virtual time, over many seeds.

Each run launches a job, lets its node vanish without a word, and waits until the command runs again elsewhere.
`ready_s` is from the true moment of the loss. `step_s` adds what the command has to read and its own start, which no
run of ours measures: the critical set over the link, and draws of `import_torch` (and `nccl_fsdp_init` for sets that
need several GPUs). Prints two Markdown tables, which docs/FAILOVER.md quotes, and draws docs/failover_table.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trio
from failover_plot import draw

from provisioner.core.intents import Intent, IntentRecord, IntentState, encode
from provisioner.core.jobs import JobSpec, encode_spec
from provisioner.core.offers import Offer, with_bid
from provisioner.core.ports import Launch
from provisioner.core.ranking import Ranked, RankSettings, race_order, rank
from provisioner.core.timing import transfer_s
from provisioner.simulator.draws import Draws
from provisioner.simulator.latencies import SHIPPED, Latencies
from provisioner.simulator.market.instances import Instance
from tests.support.failover_world import SPEC, Work, World, in_virtual_time, launch_of, world

PICTURE: Final = Path(__file__).resolve().parents[1] / "docs" / "failover_table.svg"
PHASES: Final = ("detect_s", "race_s", "boot_s", "checks_s", "claim_s", "first_read_s")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    candidates: int
    cached: bool
    """Whether one of the candidates has the image."""
    known: bool = False
    """Whether our own history says which."""


CASES: Final = (
    Case("3 candidates, one is known to have the image", 3, True, True),
    Case("3 candidates, one has it, and nobody knows", 3, True),
    Case("1 candidate, which has the image", 1, True),
    Case("3 candidates, none has the image", 3, False),
    Case("1 candidate, which has not", 1, False),
)
SHOWN: Final = 0
"""The case of the second table."""


def caching(w: World, case: Case, seed: int) -> Any:
    """Give the image to one candidate of the second race: the one that the seed picks, or the next on Vast."""
    races: list[str] = []
    given: set[str] = set()

    async def make(intent: Intent, offer: Offer, spec: JobSpec) -> Launch:
        race, serial = intent.ident.split("-")
        if race not in races:
            races.append(race)
        wanted = 1 + seed % case.candidates
        if len(races) > 1 and race not in given and int(serial) >= wanted and offer.machine_id:
            given.add(race)
            put_image(w, offer, spec)
        return await launch_of(intent, offer, spec)

    return make


def put_image(w: World, offer: Offer, spec: JobSpec) -> None:
    """Let the host of *offer* have the image."""
    for machine in w.sim.world.machines:
        if machine.provider == offer.provider and str(machine.machine_id) == offer.machine_id:
            machine.images.add(spec.image)


async def remember(w: World, case: Case, seed: int, first: Instance) -> None:
    """Let one of the machines that will race have the image, since another job ran on it yesterday."""
    # As the race's first round: spot alone, and not the machine that the job rents already.
    wish = replace(w.spec.wish, on_demand_max_usd_gpu_h=None)
    found = [with_bid(offer) for provider in w.providers.values() for offer in await provider.search(wish)]
    others = [offer for offer in found if offer.machine_id != str(first.machine.machine_id)]
    boots = {name: (await provider.capabilities()).boot for name, provider in w.providers.items()}
    racing = race_order(rank(others, RankSettings(disk_gb=wish.disk_gb, boots=boots)))[: case.candidates]
    named: list[Ranked] = [entry for entry in racing if entry.offer.machine_id]
    offer = named[seed % len(named)].offer
    put_image(w, offer, w.spec)
    yesterday_s = w.now_s() - 86_400
    intent = Intent(
        "01d0b000-1", "sw-before-01d0b000-1", offer.provider, offer.offer_id, offer.market,
        str(offer.gpu), offer.gpu_count, offer.location, offer.machine_id, 1.0, 1.0, yesterday_s,
    )  # fmt: skip
    record = IntentRecord(intent, IntentState.GONE, yesterday_s, ("1",), won_at_s=yesterday_s)
    w.ledger.kept[intent.ident] = encode(record)
    w.ledger.specs["before"] = encode_spec(replace(w.spec, job="before"))


def failover(case: Case, seed: int) -> dict[str, float | None]:
    """Run one, and return its phases."""
    found: dict[str, float | None] = {}

    async def main() -> None:
        spec = replace(SPEC, candidates_max=case.candidates)
        async with world(seed=seed, work=Work(1e6), spec=spec, image_cached=0.0, vast_machines=60, busy=0.3) as w:
            if case.cached and not case.known:
                w.launch_maker = caching(w, case, seed)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(w.run)
                first = await w.until_running()
                if case.known:
                    await remember(w, case, seed, first)
                await trio.sleep(60 + w.draws.uniform(0, 10))
                lost_s = w.now_s()
                w.sim.world.destroy(first)
                second = await w.until_running(but=first.key)
                running_s = w.report_of(second).times["started"]
                await w.until(lambda: len(w.failovers()) == 2)
                nursery.cancel_scope.cancel()
            done = w.failovers()[-1]
            found["ready_s"] = running_s - lost_s
            for name in PHASES:
                found[name] = getattr(done, name)

    in_virtual_time(main, seed=seed)
    return found


def one(job: tuple[int, int]) -> tuple[tuple[int, int], dict[str, float | None]]:
    index, seed = job
    return job, failover(CASES[index], seed)


def read_kept(path: Path | None) -> dict[tuple[int, int], dict[str, float | None]]:
    """Read the runs of an earlier call, by case and seed."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(index, seed): found for index, seed, found in rows}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def first_table(results: dict[int, list[dict[str, float | None]]], seeds: int) -> str:
    """Write `ready_s` and the medians of its phases."""
    lines = [f"| {seeds} failovers each | ready_s p50 | p95 | " + " | ".join(f"{name} p50" for name in PHASES) + " |"]
    lines.append("|---|" + "---|" * (2 + len(PHASES)))
    for index, case in enumerate(CASES):
        ready = readies(results[index])
        medians = []
        for name in PHASES:
            values = [value for found in results[index] if (value := found[name]) is not None]
            medians.append(f"{statistics.median(values):.1f}" if values else "")
        row = [case.name, f"{percentile(ready, 0.5):.0f}", f"{percentile(ready, 0.95):.0f}", *medians]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def readies(found: list[dict[str, float | None]]) -> list[float]:
    return [value for one in found if (value := one["ready_s"]) is not None]


def second_table(ready: list[float]) -> str:
    """Write `step_s` for each critical set and link."""
    figures = json.loads(SHIPPED.read_text())
    known, draws = Latencies.load(), Draws(7)
    links = [float(gbps) for gbps in figures["links_gbps"]]
    lines = ["| step_s, p50 / p95 | " + " | ".join(f"{gbps:g} Gbit/s" for gbps in links) + " |"]
    lines.append("|---|" + "---|" * len(links))
    for name, stored_gb in figures["critical_sets_gb_stored"].items():
        if name == "source":
            continue
        several = name != "lora"
        starts = [draws.latency(known.of("node", "import_torch")) for _ in ready]
        if several:
            starts = [start + draws.latency(known.of("node", "nccl_fsdp_init")) for start in starts]
        cells = []
        for gbps in links:
            steps = [r + s + transfer_s(stored_gb, gbps * 1000) for r, s in zip(ready, starts, strict=True)]
            cells.append(f"{spoken(percentile(steps, 0.5))} / {spoken(percentile(steps, 0.95))}")
        lines.append(f"| {name.replace('_', ' ')}, {stored_gb:g} GB | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spoken(seconds: float) -> str:
    """Write a duration in the unit that people would choose.

    >>> spoken(71.4), spoken(1570), spoken(12_800)
    ('71 s', '26 min', '3.6 h')
    """
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--kept", type=Path, help="a file of runs that were made: none of them is made again")
    options = parser.parse_args()
    results: dict[int, list[dict[str, float | None]]] = {index: [] for index in range(len(CASES))}
    wanted = [(index, seed) for seed in range(options.seeds) for index in range(len(CASES))]
    made = read_kept(options.kept)
    jobs = [job for job in wanted if job not in made]
    with ProcessPoolExecutor(options.workers) as pool:
        for job, found in pool.map(one, jobs):
            made[job] = found
            if options.kept is not None:
                with options.kept.open("a") as kept:
                    kept.write(json.dumps([*job, found]) + "\n")
    for index, seed in wanted:
        results[index].append(made[index, seed])
    print(first_table(results, options.seeds))
    print(f"\n{CASES[SHOWN].name}:\n\n{second_table(readies(results[SHOWN]))}")
    curves = {case.name: sorted(readies(results[index])) for index, case in enumerate(CASES)}
    options.picture.write_text(draw(curves, options.seeds))


if __name__ == "__main__":
    main()
