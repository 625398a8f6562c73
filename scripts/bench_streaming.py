"""What streaming costs: CPU of the daemon per GB, and what it does to the program that writes meanwhile.

Two mounts, one that streams through a link of limited speed and one that does not stream; a save on each, in pairs,
each first in turn. Invariant: the saves of a pair are of one size, written in the same way, and only the streaming
mount has anything to send.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any

from bench_fresh import Weights
from bench_link import Link, link_to
from bench_node import Node, spotwarp_node
from bench_systems import Site
from bench_workloads import MIB, Scale

PAIRS = 11
LINK_BYTES_PER_S = 50e6
LEAD_MIB = 384
"""Written before the save, so that the link has work from its first moment to its last."""
SAVE_MIB = 512
LEAD_S = 2.5
"""Until the lead is cold and on its way."""
CPU_MB = 1000
CPU_ROUNDS = 3
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Save:
    """One save, as its writer saw it."""

    took_s: float
    p99_s: float
    link_share: float
    """What the link carried meanwhile, as a share of what it can."""


def measure_streaming(site: Site, scale: Scale) -> dict[str, Any]:
    """Give CPU per GB, and the slowdown of a save by streaming: medians and intervals."""
    rate = LINK_BYTES_PER_S / scale.divisor
    with (
        link_to(site.server.endpoint, upload_bytes_per_s=rate) as link,
        spotwarp_node(site, "streaming-on", "streaming-on", endpoint=link.endpoint) as on,
        spotwarp_node(site, "streaming-off", "streaming-off", interval="1h", quiet=True) as off,
    ):
        cpu = _cpu(off, scale)
        saves: dict[str, list[Save]] = {"on": [], "off": []}
        for number in range(PAIRS):
            turns = [("on", on), ("off", off)]
            for kind, node in turns if number % 2 else reversed(turns):
                saves[kind].append(_save(node, scale, link, rate, number))
            print(f"bench: streaming, pair {number + 1} of {PAIRS} done", file=sys.stderr)
    pairs = list(zip(saves["on"], saves["off"], strict=True))
    return cpu | {
        "pairs": PAIRS, "link_mb_per_s": rate / 1e6, "link_share": median(save.link_share for save in saves["on"]),
        "save_s": {kind: median(save.took_s for save in found) for kind, found in saves.items()},
        "write_p99_ms": {kind: 1e3 * median(save.p99_s for save in found) for kind, found in saves.items()},
        "save_cost": _cost([one.took_s / other.took_s for one, other in pairs]),
        "write_p99_cost": _cost([one.p99_s / other.p99_s for one, other in pairs]),
    }  # fmt: skip


def _cpu(node: Node, scale: Scale) -> dict[str, float]:
    """CPU seconds of the daemon per GB of trained weights, from the first seal to the manifest."""
    found = []
    total = scale.of(CPU_MB) * 1_000_000
    weights = Weights(total, 1, 99)
    for _ in range(CPU_ROUNDS):
        (data,) = weights.step()
        path = node.root / "weights.bin"
        with path.open("wb", buffering=0) as file:
            for at in range(0, len(data), MIB):
                file.write(data[at : at + MIB])
        before_s = node.cpu_s()
        node.sync()
        found.append((node.cpu_s() - before_s) / (total / 1e9))
        path.unlink()
        node.sync()
    return {"cpu_s_per_gb": median(found)}


def _save(node: Node, scale: Scale, link: Link, rate: float, number: int) -> Save:
    lead = _write(node.root / f"lead-{number}", scale.of(LEAD_MIB))
    time.sleep(LEAD_S)
    before, begun_s = link.up_bytes, time.perf_counter()
    calls = _write(node.root / f"save-{number}", scale.of(SAVE_MIB))
    took_s = time.perf_counter() - begun_s
    sent = link.up_bytes - before
    for name in (f"lead-{number}", f"save-{number}"):
        (node.root / name).unlink()
    node.sync()  # what nobody needs any more is not sent: the other's turn begins on a quiet machine
    assert lead
    return Save(took_s, sorted(calls)[-1 - len(calls) // 100], sent / (rate * took_s))


def _write(path: os.PathLike[str], mib: int) -> list[float]:
    """Write fresh bytes in calls of 1 MiB; how long each call took."""
    calls = []
    random = os.urandom(2 * MIB)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for number in range(mib):
            # No two blocks alike, and none alike in two saves: dedup would send nothing.
            at = number * 2039 % MIB
            data = memoryview(random)[at : at + MIB]
            begun_s = time.perf_counter()
            os.write(fd, data)
            calls.append(time.perf_counter() - begun_s)
    finally:
        os.close(fd)
    return calls


def _cost(ratios: Sequence[float]) -> dict[str, float]:
    """How much longer it takes, as a share: median, and the interval that holds the true median."""
    costs = sorted(ratio - 1.0 for ratio in ratios)
    outside = _outside(len(costs))
    return {"median": median(costs), "lowest": costs[outside], "highest": costs[-1 - outside]}


def _outside(count: int) -> int:
    """How many values at each end the interval of the median leaves out (sign test).

    >>> _outside(11), _outside(3)
    (1, 0)
    """
    left_out, tail = 0, 2 / 2**count
    while left_out < count // 2 and tail + 2 * comb(count, left_out + 1) / 2**count <= 1 - CONFIDENCE:
        left_out += 1
        tail += 2 * comb(count, left_out) / 2**count
    return left_out
