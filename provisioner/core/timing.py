"""How long a candidate takes from the loss to the first training step, phase by phase.

Figures are seconds as low, median, high; each says where it is from. `ready_s` ends when the command runs on a usable
workspace, `step_s` when its first step is done: what has to be read before it comes over the link, whatever we do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

BITS_PER_BYTE: Final = 8
MBPS_PER_GBPS: Final = 1000
LINK_MBPS_UNKNOWN: Final = 500.0
"""Assumed for a machine whose provider says nothing: the slowest link the figures are given for."""


@dataclass(frozen=True, slots=True)
class Range:
    """A plausible range and the value of a median run, in seconds."""

    low_s: float
    p50_s: float
    high_s: float

    def __post_init__(self) -> None:
        assert 0 <= self.low_s <= self.p50_s <= self.high_s, f"{self} is not in order"


@dataclass(frozen=True, slots=True)
class BootTimes:
    """From the accepted create to a running container; every adapter gives its own."""

    create: Range
    image_cached: Range
    image_cold: Range
    """Includes the pull of a typical training image (about 8 GB)."""


BOOT_VAST: Final = BootTimes(
    create=Range(0.5, 1.0, 3.0),  # assumed
    image_cached=Range(11, 23, 38),  # providers.md 7.2: created to loading 1-8, cached boot 10-30
    image_cold=Range(61, 243, 508),  # providers.md 7.2 and the original tool's a0df23f: 350-500 s for a large image
)
BOOT_RUNPOD: Final = BootTimes(
    create=Range(1, 2, 6),  # assumed
    image_cached=Range(10, 23, 50),  # providers.md 7.2: provisioning 2-20, cached start 8-30
    image_cold=Range(62, 188, 440),  # provisioning as above, cold start assumed from Vast's
)
BOOT_LOCAL: Final = BootTimes(create=Range(0, 0.1, 1), image_cached=Range(0, 0.5, 5), image_cold=Range(0, 0.5, 5))

AGENT_INSTALL: Final = Range(3, 6, 20)  # assumed
CUDA_PROBE: Final = Range(3, 4, 8)  # assumed
STORE_PROBE: Final = Range(2, 2, 3)  # assumed
SEARCH: Final = Range(0.5, 1, 3)  # assumed: one search per provider, all at once
CLAIM: Final = Range(0.5, 1, 5)  # assumed: one conditional create and one manifest, prefetched before
IMPORT_TORCH: Final = Range(5, 10, 20)  # assumed
NCCL_FSDP_INIT: Final = Range(20, 30, 60)  # assumed; only with more than one GPU
DETECT_S: Final = 15.0
"""A confirmed loss is decided within this (`detect`)."""


def transfer_s(gb: float, mbps: float | None) -> float:
    """Return the seconds that *gb* take over a link of *mbps* megabit per second.

    >>> transfer_s(94, 10_000), transfer_s(94, 500)
    (75.2, 1504.0)
    """
    assert gb >= 0
    link = LINK_MBPS_UNKNOWN if mbps is None else max(mbps, 1e-3)
    return gb * BITS_PER_BYTE * MBPS_PER_GBPS / link


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds from the loss, by phase, in order."""

    detect_s: float
    race_s: float
    boot_s: float
    checks_s: float
    claim_s: float
    first_read_s: float
    critical_s: float
    start_s: float

    @property
    def ready_s(self) -> float:
        """From the loss to the command running on a usable workspace."""
        return sum((self.detect_s, self.race_s, self.boot_s, self.checks_s, self.claim_s, self.first_read_s))

    @property
    def step_s(self) -> float:
        """From the loss to the first training step."""
        return self.ready_s + self.critical_s + self.start_s

    def items(self) -> tuple[tuple[str, float], ...]:
        """Give (phase, seconds) for reports."""
        return tuple((field.name.removesuffix("_s"), getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Comeback:
    """What a job needs on a new node before it can go on; GB as stored, that is, as they cross the link."""

    critical_gb: float = 0.0
    """What is read before the first step: the newest checkpoint, the code."""
    eager_gb: float = 0.0
    """What must be on disk before the command may start (small files in the directory form)."""
    image_gb: float | None = None
    """The image's compressed size, where it is known; else the typical pull of `BootTimes.image_cold`."""
    starts_s: float = IMPORT_TORCH.p50_s
    """The program's own start."""


TYPICAL_PULL_SHARE: Final = 0.6
"""Share of a cold boot beyond the cached one that is the pull itself; the rest is extraction (assumed)."""
TYPICAL_IMAGE_GB: Final = 8.0


def boot_s(boot: BootTimes, *, cached: bool, image_gb: float | None, down_mbps: float | None) -> float:
    """Return the median seconds from the accepted create to a running container.

    With a known image the pull is its size over the machine's link, and the extraction grows in the same proportion.
    """
    if cached:
        return boot.image_cached.p50_s
    if image_gb is None:
        return boot.image_cold.p50_s
    extraction_s = (1 - TYPICAL_PULL_SHARE) * (boot.image_cold.p50_s - boot.image_cached.p50_s)
    return boot.image_cached.p50_s + extraction_s * image_gb / TYPICAL_IMAGE_GB + transfer_s(image_gb, down_mbps)
