"""A job: the command that is to be kept running, and everything that was decided about it. No secret is in here.

It lies in the store (`rendezvous.spec_key`), so that a controller started anywhere else carries on with the same words.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from provisioner.core.errors import BadWish
from provisioner.core.gpus import GpuWish
from provisioner.core.offers import Traffic
from provisioner.core.wishes import Wish

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be spent, and how often."""

    budget_usd: float | None = None
    """For the whole job; reached, everything is torn down and the workspace stays."""
    race_budget_usd: float | None = None
    """For one race; None = a share of what was spent (`cost.race_budget_usd`)."""
    crashes_max: int = 3
    """So often in a row a command that fails is started again on the same node."""
    keep_lost_s: float = 0.0
    move_below: float | None = None
    """A share: offers cheaper than this part of the present price start a planned move; 0.25 = a quarter cheaper."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job; equal specs encode to equal bytes."""

    job: str
    """As in labels: a-z, 0-9, '-'."""
    workspace: str
    """Its name in the store."""
    command: tuple[str, ...]
    providers: tuple[str, ...]
    wish: Wish
    image: str = ""
    candidates_max: int = 3
    bid_factor: float = 1.15
    """Times the minimum bid (`--bid auto`)."""
    bid_usd_h: float | None = None
    """A fixed bid for the machine instead."""
    interval: str = "30s"
    form: str = "auto"
    """`auto`, `fuse` or `directory`: what the nodes' `run --mode` gets."""
    checkpoint_path: str = "checkpoints"
    store_floor_mbps: float = 20.0
    """A node that measures less in either direction is unfit."""
    limits: Limits = field(default_factory=Limits)
    on_demand_usd_h: float | None = None
    """What such a machine cost on demand when the job began; savings are measured against it. None = not seen."""


def encode_spec(spec: JobSpec) -> bytes:
    """Write a spec."""
    return json.dumps({"version": VERSION, **asdict(spec)}, sort_keys=True, separators=(",", ":")).encode()


def decode_spec(raw: bytes) -> JobSpec:
    """Read what `encode_spec` wrote, or raise BadWish."""
    try:
        fields: dict[str, Any] = dict(json.loads(raw))
        version = fields.pop("version")
        if version != VERSION:
            raise BadWish(f"the job's spec has version {version}, this program reads {VERSION}: use a newer one")
        wish: dict[str, Any] = fields.pop("wish")
        gpu = wish["gpu"]
        wish["gpu"] = GpuWish(tuple(gpu["words"]), gpu["memory_gb"])
        wish["traffic"] = Traffic(**wish["traffic"])
        wish["regions"] = tuple(wish["regions"])
        wish["cuda_min"] = None if wish["cuda_min"] is None else tuple(wish["cuda_min"])
        limits = Limits(**fields.pop("limits"))
        for name in ("command", "providers"):
            fields[name] = tuple(fields[name])
        return JobSpec(wish=Wish(**wish), limits=limits, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWish(f"the job's spec of {len(raw)} bytes cannot be read: {error!r}") from error
