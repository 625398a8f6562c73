"""What a fresh node does first, and what a trainer does all day: `fresh_read`, `fresh_read_20ms`, `checkpoint_cycle`.

Invariant: a node is fresh: its cache is empty, and its clock begins with its mount's command. A cycle ends when its
system says that everything is in the store; the bytes are those that a proxy saw, headers included.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from bench_link import Link, link_to
from bench_node_peers import NODES
from bench_systems import Site
from bench_workloads import MB, MIB, SECONDS, Scale, drop_caches, may_drop_caches, read_through

LATENCY_S = 0.02
READ_MIB = 256
SAVES, KEPT, SHARDS = 10, 3, 4
SAVE_MB = 500
FRESH_KEYS = {
    "fresh_mount": SECONDS, "fresh_read": SECONDS, "fresh_read_20ms": SECONDS,
    "checkpoint_cycle": SECONDS, "checkpoint_cycle_up": MB,
}  # fmt: skip
"""`fresh_mount` is the mount's part of `fresh_read`; `checkpoint_cycle_up` is what the cycle sent to the store."""

Note = Callable[[str, str, float], None]
"""Takes a key, a system and a figure."""


def measure_fresh(site: Site, systems: list[str], scale: Scale, rounds: int, only: set[str], note: Note) -> None:
    """Visit each system in each round; each goes first as often as any other."""
    with _links(site, only) as links:
        readers = [key for key in ("fresh_read", "fresh_read_20ms") if key in only]
        sizes = {name: _prepare(site, name, scale, links["plain"]) for name in systems} if readers else {}
        for number in range(rounds):
            turn = number % len(systems)
            for name in systems[turn:] + systems[:turn]:
                for key in readers:
                    link = links["slow" if key == "fresh_read_20ms" else "plain"]
                    took_s, mounted_s = _fresh_read(site, name, f"{key}-{number}", link, sizes[name])
                    note(key, name, took_s)
                    if key == "fresh_read":
                        note("fresh_mount", name, mounted_s)
                if {"checkpoint_cycle", "checkpoint_cycle_up"} & only:
                    took_s, sent_mb = _cycle(site, name, number, scale, links["plain"])
                    note("checkpoint_cycle", name, took_s)
                    note("checkpoint_cycle_up", name, sent_mb)
            print(f"bench: fresh nodes, round {number + 1} of {rounds} done", file=sys.stderr)


@contextmanager
def _links(site: Site, only: set[str]) -> Iterator[dict[str, Link]]:
    with link_to(site.server.endpoint) as plain, link_to(site.server.endpoint, latency_s=LATENCY_S) as slow:
        yield {"plain": plain, "slow": slow}


def _prepare(site: Site, name: str, scale: Scale, link: Link) -> int:
    """Leave one large file in the store, and nothing of it on this machine."""
    size = scale.of(READ_MIB) * MIB
    with NODES[name](site, "writer", "read", link.endpoint) as place:
        with (place.root / "large").open("wb") as file:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))
        place.settle()
    return size


def _fresh_read(site: Site, name: str, label: str, link: Link, size: int) -> tuple[float, float]:
    if may_drop_caches():
        drop_caches(1)
    begun_s = time.perf_counter()
    with NODES[name](site, label, "read", link.endpoint) as place:
        mounted_s = time.perf_counter() - begun_s
        found = read_through(place.root / "large")
        took_s = time.perf_counter() - begun_s
    if found != size:
        raise OSError(f"{name}: a fresh node read {found} bytes of {size}")
    return took_s, mounted_s


class Weights:
    """Checkpoints as training leaves them: float32 that all move a little with every step."""

    def __init__(self, total_bytes: int, pieces: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        drawn = random.standard_normal(total_bytes // pieces // 4, dtype=np.float32) * np.float32(0.02)
        self._pieces = [drawn * np.float32(1.0 + 0.001 * number) for number in range(pieces)]
        self._step = 0

    def step(self) -> list[memoryview]:
        """Train once; the contents of the files of one save."""
        self._step += 1
        factor = np.float32(1.0 + 1e-4 * self._step)
        return [memoryview((piece * factor).view(np.uint8)) for piece in self._pieces]  # type: ignore[arg-type]


def _cycle(site: Site, name: str, number: int, scale: Scale, link: Link) -> tuple[float, float]:
    """Save, rename, delete the oldest of three, ten times, until all of it is in the store; seconds and MB sent."""
    weights = Weights(scale.of(SAVE_MB) * 1_000_000, SHARDS, number)
    with NODES[name](site, f"cycle-{number}", f"cycle{number}", link.endpoint) as place:
        before, begun_s, computed_s = link.up_bytes, time.perf_counter(), 0.0
        for save in range(SAVES):
            compute_s = time.perf_counter()
            shards = weights.step()
            computed_s += time.perf_counter() - compute_s
            draft = place.root / f"tmp-{save}"
            draft.mkdir()
            for shard, data in enumerate(shards):
                with (draft / f"model-{shard}.safetensors").open("wb", buffering=0) as file:
                    for at in range(0, len(data), MIB):
                        file.write(data[at : at + MIB])
            draft.rename(place.root / f"checkpoint-{save}")
            if save >= KEPT:
                shutil.rmtree(place.root / f"checkpoint-{save - KEPT}")
        place.settle()
        return time.perf_counter() - begun_s - computed_s, (link.up_bytes - before) / 1e6
