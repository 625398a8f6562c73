"""What is known of a job before it runs: from its workspace's history, from its directory, or as the user says.

Invariant: pure; each figure is from the best source there is, and the source is told with it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from provisioner.core.plan import Workload

BURST_SHARE: Final = 0.3
"""States that carry at least this share of the largest one's bytes belong to a checkpoint."""
CHECKPOINT_GB_ASSUMED: Final = 2.2
"""A LoRA's or a small model's, with its optimizer; only where nothing is known."""
EVERY_S_ASSUMED: Final = 600.0
CADENCE_MIN_S: Final = 1.0


class State(Protocol):
    """One published state (`spotwarp_fs.api.StateFacts`)."""

    @property
    def created_s(self) -> float:
        """By the store's clock."""
        ...

    @property
    def logical_bytes(self) -> int:
        """Of the whole workspace."""
        ...

    @property
    def sent_bytes(self) -> int:
        """What was uploaded for it."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that lies in a directory: a file, or a directory as a whole."""

    path: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Protection:
    """What the filesystem will keep safe of a directory, and what not."""

    files: int = 0
    size_bytes: int = 0
    small_bytes: int = 0
    """Of files that a comeback reads at once: code and settings."""
    unsaved: tuple[str, ...] = ()
    """What is not published, each with its reason."""


@dataclass(frozen=True, slots=True)
class Known:
    """A workload and where its figures are from."""

    work: Workload
    sources: tuple[str, ...]
    logical_bytes: int = 0
    protection: Protection | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said of the workload."""

    checkpoint_gb: float | None = None
    every_s: float | None = None
    interval_s: float = 30.0
    directory: str = ""
    """Shown only."""
    protection: Protection | None = None
    saved: tuple[Saved, ...] = field(default=())


def from_history(states: Sequence[State]) -> tuple[float, float] | None:
    """Return (GB, seconds) of a checkpoint as the store has seen them, or None when too little was published.

    >>> from collections import namedtuple
    >>> S = namedtuple("S", "created_s logical_bytes sent_bytes")
    >>> from_history([S(t, 0, 10**9 if t % 600 == 0 else 1000) for t in range(600, 4000, 30)])
    (1.0, 600.0)
    """
    largest = max((state.sent_bytes for state in states), default=0)
    bursts: list[tuple[float, float]] = []
    open_burst = False
    for state in states:
        heavy = largest > 0 and state.sent_bytes >= BURST_SHARE * largest
        if heavy and open_burst:
            began_s, size = bursts[-1]
            bursts[-1] = (began_s, size + state.sent_bytes)
        elif heavy:
            bursts.append((state.created_s, state.sent_bytes))
        open_burst = heavy
    if len(bursts) < 2:
        return None
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(bursts)]
    size_gb = statistics.median(size for _, size in bursts) / 1e9
    return size_gb, max(CADENCE_MIN_S, statistics.median(gaps))


def from_directory(saved: Iterable[Saved]) -> tuple[float, float | None] | None:
    """Return (GB, seconds) of a checkpoint as they lie there; without a second one there is no cadence.

    >>> from_directory([Saved("a", 10**9, 0.0), Saved("b", 2 * 10**9, 900.0), Saved("c", 2 * 10**9, 1800.0)])
    (2.0, 900.0)
    """
    ordered = sorted(saved, key=lambda one: one.modified_s)
    if not ordered:
        return None
    size_gb = statistics.median(one.size_bytes for one in ordered) / 1e9
    gaps = [after.modified_s - before.modified_s for before, after in itertools.pairwise(ordered)]
    gaps = [gap for gap in gaps if gap >= CADENCE_MIN_S]
    return size_gb, statistics.median(gaps) if gaps else None


def workload(asked: Asked, states: Sequence[State]) -> Known:
    """Put together what is known; what the user says wins, then what was published, then what lies there."""
    measured = from_history(states)
    lying = from_directory(asked.saved)
    sources = []
    checkpoint_gb, every_s = CHECKPOINT_GB_ASSUMED, EVERY_S_ASSUMED
    size_from = every_from = "assumed; say it with --checkpoint-size and --checkpoint-every"
    if lying is not None:
        checkpoint_gb, size_from = lying[0], f"{len(asked.saved)} checkpoints in {asked.directory}"
        if lying[1] is not None:
            every_s, every_from = lying[1], size_from
    if measured is not None:
        checkpoint_gb, every_s = measured
        size_from = every_from = f"the last {len(states)} states of the workspace"
    if asked.checkpoint_gb is not None:
        checkpoint_gb, size_from = asked.checkpoint_gb, "--checkpoint-size"
    if asked.every_s is not None:
        every_s, every_from = asked.every_s, "--checkpoint-every"
    sources.append(f"checkpoint size: {size_from}")
    sources.append(f"checkpoint cadence: {every_from}")
    published = states[-1].logical_bytes if states else 0
    here = asked.protection.size_bytes if asked.protection else 0
    logical_bytes = max(published, here)
    stored_gb = max(logical_bytes / 1e9, checkpoint_gb)
    small_gb = asked.protection.small_bytes / 1e9 if asked.protection else 0.0
    work = Workload(
        stored_gb=stored_gb,
        checkpoint_gb=checkpoint_gb,
        checkpoint_every_s=max(CADENCE_MIN_S, every_s),
        interval_s=asked.interval_s,
        published_gb=published / 1e9,
        critical_gb=checkpoint_gb + small_gb,
    )
    return Known(work, tuple(sources), logical_bytes, asked.protection)
