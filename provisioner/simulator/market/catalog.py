"""The kinds of GPU that simulated machines have: names at both providers, sizes, and what an hour usually costs.

Names: providers.md, appendix A. Prices are round figures of the right order, not quotations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    vast_name: str
    runpod_id: str
    display_name: str
    memory_gb: int
    price: float
    """On-demand, dollars per GPU-hour."""
    compute_cap: int
    arch: str
    pool: str | None


GPUS: tuple[Gpu, ...] = (
    Gpu("RTX 3090", "NVIDIA GeForce RTX 3090", "RTX 3090", 24, 0.22, 860, "Ampere", "AMPERE_24"),
    Gpu("RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.39, 890, "Ada", "ADA_24"),
    Gpu("RTX 5090", "NVIDIA GeForce RTX 5090", "RTX 5090", 32, 0.65, 1200, "Blackwell", "BLACKWELL_32"),
    Gpu("RTX A6000", "NVIDIA RTX A6000", "RTX A6000", 48, 0.45, 860, "Ampere", "AMPERE_48"),
    Gpu("L40S", "NVIDIA L40S", "L40S", 48, 0.72, 890, "Ada", "ADA_48_PRO"),
    Gpu("A100 PCIE", "NVIDIA A100 80GB PCIe", "A100 PCIe", 80, 1.10, 800, "Ampere", "AMPERE_80"),
    Gpu("A100 SXM4", "NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.25, 800, "Ampere", "AMPERE_80"),
    Gpu("H100 SXM", "NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.20, 900, "Hopper", "HOPPER_141"),
    Gpu("H200", "NVIDIA H200", "H200 SXM", 141, 2.90, 900, "Hopper", "HOPPER_141"),
)

VAST_PLACES: tuple[str, ...] = (
    "California, US", "Texas, US", "Quebec, CA", "Sweden, SE", "Poland, PL", "Iceland, IS", "Japan, JP", ", US",
)  # fmt: skip
"""`geolocation` as Vast writes it; the city may be missing (providers.md 1.2)."""

RUNPOD_CENTERS: tuple[tuple[str, str, str], ...] = (
    ("US-TX-3", "US Texas 3", "NORTH_AMERICA"),
    ("US-KS-2", "US Kansas 2", "NORTH_AMERICA"),
    ("CA-MTL-1", "CA Montreal 1", "NORTH_AMERICA"),
    ("EU-RO-1", "EU Romania 1", "EUROPE"),
    ("EU-SE-1", "EU Sweden 1", "EUROPE"),
    ("AP-JP-1", "AP Japan 1", "ASIA"),
)
"""Data centre id, name and region, as RunPod's catalog gives them (providers.md 2.3)."""

CUDA_VERSIONS: tuple[str, ...] = ("12.4", "12.6", "12.8", "12.9", "13.0")
