"""One name per GPU model, whatever a provider calls it.

A name is the model without maker, memory and generation words: `A100 SXM`, `RTX 4090`, `H100 NVL`. Memory stands
apart, since Vast sells A100s of 40 and of 80 GB under one name. Invariant: `gpu_of` is total (a model that the table
does not have keeps its own words), and `gpu_of(gpu.name, gpu.memory_gb) == gpu`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

MEMORY_TOLERANCE: Final = 0.12
"""Drivers report less than the label says (an 80 GB card shows 79 to 81 GiB); 40 and 80 stay far apart."""
NEAREST_MAX: Final = 3
MB_PER_GB: Final = 1000
"""Vast's `gpu_ram` counts MB in thousands where it compares with GB (providers.md 1.2)."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A row of the table: our name and what each provider writes (providers.md, appendix A)."""

    name: str
    memory_gb: int
    vast: str
    runpod: str
    """The id of RunPod's APIs; v2 also lists ids in its catalogue, which wins where they differ."""


MODELS: Final = (
    GpuModel("RTX 3090", 24, "RTX 3090", "NVIDIA GeForce RTX 3090"),
    GpuModel("RTX 4090", 24, "RTX 4090", "NVIDIA GeForce RTX 4090"),
    GpuModel("RTX 5090", 32, "RTX 5090", "NVIDIA GeForce RTX 5090"),
    GpuModel("RTX A4000", 16, "RTX A4000", "NVIDIA RTX A4000"),
    GpuModel("RTX A5000", 24, "RTX A5000", "NVIDIA RTX A5000"),
    GpuModel("RTX A6000", 48, "RTX A6000", "NVIDIA RTX A6000"),
    GpuModel("RTX 6000 ADA", 48, "RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation"),
    GpuModel("L4", 24, "L4", "NVIDIA L4"),
    GpuModel("L40", 48, "L40", "NVIDIA L40"),
    GpuModel("L40S", 48, "L40S", "NVIDIA L40S"),
    GpuModel("A40", 48, "A40", "NVIDIA A40"),
    GpuModel("A100 PCIE", 40, "A100 PCIE", ""),
    GpuModel("A100 PCIE", 80, "A100 PCIE", "NVIDIA A100 80GB PCIe"),
    GpuModel("A100 SXM", 40, "A100 SXM4", ""),
    GpuModel("A100 SXM", 80, "A100 SXM4", "NVIDIA A100-SXM4-80GB"),
    GpuModel("H100 PCIE", 80, "H100 PCIE", "NVIDIA H100 PCIe"),
    GpuModel("H100 SXM", 80, "H100 SXM", "NVIDIA H100 80GB HBM3"),
    GpuModel("H100 NVL", 94, "H100 NVL", "NVIDIA H100 NVL"),
    GpuModel("H200", 141, "H200", "NVIDIA H200"),
    GpuModel("H200 NVL", 141, "H200 NVL", "NVIDIA H200 NVL"),
    GpuModel("B200", 180, "B200", "NVIDIA B200"),
)

_MEMORY: Final = re.compile(r"\b(\d{1,4})\s*GI?B\b")
_NOISE: Final = frozenset({"NVIDIA", "GEFORCE", "GENERATION", "HBM2", "HBM2E", "HBM3", "HBM3E", "TESLA"})
_SXM: Final = re.compile(r"SXM\d*")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model as offers and wishes compare it."""

    name: str
    memory_gb: int

    def __str__(self) -> str:
        return f"{self.name} {self.memory_gb}GB"


def _words(text: str) -> tuple[str, ...]:
    """Split into model words: `NVIDIA A100-SXM4-80GB` gives A100, SXM."""
    upper = _MEMORY.sub(" ", text.upper().replace("_", " ").replace("-", " "))
    upper = re.sub(r"(\d)(ADA)\b", r"\1 \2", upper)
    return tuple("SXM" if _SXM.fullmatch(word) else word for word in upper.split() if word not in _NOISE)


_BY_ALIAS: Final = {alias.upper(): model.name for model in MODELS for alias in (model.vast, model.runpod) if alias}


def _close(reported_gb: float, nominal_gb: float) -> bool:
    return abs(reported_gb - nominal_gb) <= MEMORY_TOLERANCE * nominal_gb


def gpu_of(reported_name: str, memory_gb: float) -> Gpu:
    """Name a provider's GPU in our words, its memory snapped to the nearest model of that name.

    >>> gpu_of("NVIDIA H100 80GB HBM3", 80), gpu_of("A100 SXM4", 40.5)
    (Gpu(name='H100 SXM', memory_gb=80), Gpu(name='A100 SXM', memory_gb=40))
    """
    spelled = " ".join(reported_name.split()).upper()
    name = _BY_ALIAS.get(spelled) or " ".join(_words(reported_name)) or spelled
    for model in MODELS:
        if model.name == name and _close(memory_gb, model.memory_gb):
            return Gpu(name, model.memory_gb)
    return Gpu(name, round(memory_gb))


def models_of(wish: GpuWish) -> tuple[GpuModel, ...]:
    """Give the table's models that *wish* means; adapters search for these names."""
    return tuple(model for model in MODELS if wish.means(Gpu(model.name, model.memory_gb)))


@dataclass(frozen=True, slots=True)
class GpuWish:
    """What the user wrote after `--gpu`: words that the name must have, and the memory if it was given."""

    words: tuple[str, ...]
    memory_gb: int | None

    def means(self, gpu: Gpu) -> bool:
        """Tell whether *gpu* is one the user would accept.

        >>> parse_gpu("A100 80GB").means(Gpu("A100 SXM", 80)), parse_gpu("L40").means(Gpu("L40S", 48))
        (True, False)
        """
        if self.memory_gb is not None and not _close(gpu.memory_gb, self.memory_gb):
            return False
        return set(self.words) <= set(gpu.name.split())

    def __str__(self) -> str:
        return " ".join(self.words) + (f" {self.memory_gb}GB" if self.memory_gb else "")


def parse_gpu(text: str) -> GpuWish:
    """Read `A100 80GB`, `rtx_4090`, `NVIDIA H100 80GB HBM3`; a name alone means every memory size of it.

    A provider's own spelling means exactly that model, also where its words alone would say less.
    """
    memory = _MEMORY.search(text.upper())
    alias = _BY_ALIAS.get(" ".join(text.upper().split()))
    words = tuple(alias.split()) if alias else _words(text)
    return GpuWish(words, int(memory[1]) if memory else None)


def nearest(wish: GpuWish, known: frozenset[str]) -> tuple[str, ...]:
    """Name what the user may have meant, from *known* names (the table's and those seen on the market)."""
    names = sorted(known | {f"{model.name} {model.memory_gb}GB" for model in MODELS})
    by_words = difflib.get_close_matches(" ".join(wish.words), names, n=NEAREST_MAX, cutoff=0.3)
    return tuple(by_words)
