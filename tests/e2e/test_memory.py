"""Does the daemon keep to its memory budget while far more than that streams through it?"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.daemon import Fleet
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse]

MIB = 1 << 20
GIB = 1 << 30
STREAMED_BYTES = int(os.environ.get("SPOTWARP_TEST_STREAM_GIB", "10")) * GIB
FILE_BYTES = 512 * MIB
PIECE_BYTES = 4 * MIB


def peak_bytes(pid: int) -> int:
    """The most that was ever resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.promise("P-10")
def test_ten_gib_stream_through_less_than_one(fleet: Fleet) -> None:
    node = fleet.node("--cache-size", "1G").start()
    rng = random.Random(7)
    for number in range(STREAMED_BYTES // FILE_BYTES):
        with (node.root / "stream").open("wb", buffering=0) as file:
            for _ in range(FILE_BYTES // PIECE_BYTES):
                file.write(rng.randbytes(PIECE_BYTES))
        if number % 4 == 3:
            node.sync()
    node.sync()
    peak = peak_bytes(node.status()["daemon_pid"])
    print(f"peak resident: {peak / MIB:.0f} MiB while {STREAMED_BYTES / GIB:.0f} GiB streamed through")
    assert peak < GIB
