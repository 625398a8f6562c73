"""The settings of a simulated world: how big, how busy, how mean."""

from __future__ import annotations

from dataclasses import dataclass

from provisioner.simulator.clock import START_UNIX_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One world. The defaults give a calm market with some offers of every kind of GPU."""

    seed: int = 0
    start_unix_s: float = START_UNIX_S
    vast_machines: int = 36
    runpod_machines: int = 27
    rivals_per_hour: float = 0.25
    """How often, per machine, another customer comes. 0 leaves the market to the test."""
    rival_hours: float = 1.5
    """How long such a customer stays, on average."""
    rival_on_demand: float = 0.35
    """The share of them that rents on-demand."""
    busy: float = 0.3
    """The share of machines that begin with another customer on some of their GPUs."""
    drift: float = 0.02
    """By how much of itself a price may move at each tick. 0 keeps prices."""
    tick_s: float = 60.0
    image_cached: float = 0.3
    """The chance that a host already has an image."""
    lag: bool = True
    """Whether the API learns of a preemption late (latencies.json, state_visible_after_preemption)."""
    outbid_shows_exited: float = 0.2
    """The share of outbid instances of which only actual_status changes, to `exited` (providers.md 7.2)."""
    outbid_freezes: bool = False
    """Whether an outbid container is paused and goes on later, instead of being killed."""
    limits: bool = True
    """Whether the providers' rate limits are enforced (providers.md 1.6, 2.3)."""
    call_latency: bool = True
    """Whether a create call takes its time (latencies.json, create_call)."""
    search_rows_max: int = 64
    """Vast's cap on rows of one search (providers.md 1.2: seen as 64, as 200, as about 2,500)."""
    search_ignores: tuple[str, ...] = ()
    """Filters that Vast's search takes and does not apply (providers.md 1.2: seen for some numeric ones)."""
    runpod_spot: bool = False
    """Whether RunPod's spot mutations still exist (providers.md 0, fact 1)."""
    runpod_v1: bool = True
    """Whether REST v1 still answers (providers.md 0, fact 2)."""
    runpod_pod_key: bool = True
    """Whether a pod's own key may stop and terminate its pod: inferred, not documented (providers.md 2.4)."""
    credit: float = 100.0
    """Dollars on each account."""
