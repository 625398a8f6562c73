"""How a fresh node meets a workspace of 300 GB, and of 3 TB, through 20 ms: mount, first bytes, a publish, memory.

The workspace's bytes do not exist (bench_synthetic.py); its metadata are whole. Invariant: each figure is of an empty
cache, and its clock holds nothing of the making.
"""

import os
import sys
import time
from statistics import median
from typing import Any

from bench_link import link_to
from bench_node import Node, spotwarp_node
from bench_synthetic import Maker, Shape, Synthetic
from bench_systems import Site
from bench_workloads import MIB

LATENCY_S = 0.02
CHANGED_FILES = 100
CHANGED_BYTES = 4 << 10
SIZES = {"300GB": 1, "3TB": 10}
"""Times the bytes, with the same number of names."""
QUIET_S = 3.0
"""Before the publish: what is fetched ahead has the link to itself for a while."""


def measure_scale(site: Site, divisor: int, rounds: int) -> dict[str, Any]:
    """Make each workspace once and meet it *rounds* times; medians."""
    found: dict[str, Any] = {}
    for size, factor in SIZES.items():
        prefix = f"scale-{size.lower()}"
        made = Maker(site.server, prefix, "bench", Shape().divided(divisor).larger(factor)).make()
        print(f"bench: scale {size}: {made.files} files, {made.distinct_digests} digests made", file=sys.stderr)
        with link_to(site.server.endpoint, latency_s=LATENCY_S) as link:
            samples = []
            for number in range(rounds):
                before = link.down_bytes, link.requests
                with spotwarp_node(site, f"{prefix}-{number}", prefix, endpoint=link.endpoint) as node:
                    loaded: dict[str, float] = {"mount_cpu_s": node.cpu_s()}
                    loaded |= {"mount_bytes": link.down_bytes - before[0], "mount_requests": link.requests - before[1]}
                    samples.append(loaded | _meet(node, made))
        found[size] = _of(made) | {key: median(sample[key] for sample in samples) for key in samples[0]}
    return found["300GB"] | {"latency_s": LATENCY_S, "rounds": rounds, "sizes": found}


def _of(made: Synthetic) -> dict[str, Any]:
    return {
        "files": made.files, "directories": made.directories, "logical_bytes": made.logical_bytes,
        "distinct_digests": made.distinct_digests, "metadata_bytes": made.metadata_bytes,
    }  # fmt: skip


def _meet(node: Node, made: Synthetic) -> dict[str, float]:
    rss_mounted = node.rss_bytes()
    begun_s = time.perf_counter()
    fd = os.open(node.root / made.newest, os.O_RDONLY)
    data = os.pread(fd, MIB, 0)
    first_mib_s = time.perf_counter() - begun_s
    os.close(fd)
    assert len(data) == MIB, f"{made.newest} gave {len(data)} bytes"
    time.sleep(QUIET_S)
    paths = sorted((node.root / made.small_directory / "part00000").iterdir())[:CHANGED_FILES]
    assert len(paths) == CHANGED_FILES, f"only {len(paths)} small files"
    for path in paths:
        path.write_bytes(os.urandom(CHANGED_BYTES))
    begun_s = time.perf_counter()
    node.sync()
    publish_s = time.perf_counter() - begun_s
    return {
        "mount_s": node.mount_s, "first_mib_s": first_mib_s, "publish_s": publish_s, "rss_mounted_bytes": rss_mounted,
        "rss_bytes": node.rss_bytes(), "rss_most_bytes": node.rss_most_bytes(),
    }  # fmt: skip
