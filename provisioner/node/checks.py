"""Is this machine what was rented? The GPUs, and the way to the store.

Invariant: a check ends by itself in bounded time, and says what it measured also when it says no.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import trio

from provisioner.core.errors import StoreDenied, StoreUnavailable
from provisioner.core.gpus import gpu_of
from provisioner.core.jobs import JobSpec
from provisioner.core.ports import Shelf
from provisioner.core.rendezvous import job_prefix
from provisioner.core.wishes import Wish
from provisioner.node.deciding import Failed, Passed

CPU: Final = ("CPU",)
"""The words of a GPU wish that means none."""
CUDA_S: Final = 90.0
"""A driver that was just loaded takes long for its first context."""
SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
PROBE_BYTES: Final = 1 << 20
PROBES_AT_ONCE: Final = 4
ROUND_S: Final = 1.0
"""While rounds are shorter, another one is measured: a first request pays for connections."""
ROUNDS_MAX: Final = 3
STORE_S: Final = 60.0
"""A store that takes this long for a few MiB is below any floor."""
MEGA: Final = 1e6
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int
    works: str
    """`yes`, or why not; empty when nobody could try."""


def judge_gpus(seen: Sequence[SeenGpu], wish: Wish, problem: str) -> Passed | Failed:
    """Compare what is there with what was asked for; PURE."""
    facts = {
        "gpu": f"{len(seen)} × {seen[0].name}" if seen else "none",
        "cuda": next((gpu.works for gpu in seen if gpu.works != "yes"), "yes") if seen else problem or "no",
    }
    if len(seen) < wish.gpu_count:
        return Failed(
            "gpu", f"{len(seen)} GPUs are visible, {wish.gpu_count} were rented: {problem or 'no error'}", facts
        )
    for gpu in seen:
        found = gpu_of(gpu.name, gpu.memory_bytes / GIGA)
        if not wish.gpu.means(found):
            return Failed("gpu", f"the GPU is {gpu.name} ({found}), wanted was {wish.gpu}", facts)
        if gpu.works not in ("yes", ""):
            return Failed("gpu", f"CUDA does not work on {gpu.name}: {gpu.works}", facts)
    return Passed("gpu", facts)


def judge_store(up_mbps: float, down_mbps: float, floor_mbps: float) -> Passed | Failed:
    """Compare what was measured with the floor; PURE."""
    facts = {"store_up_mbps": f"{up_mbps:.0f}", "store_down_mbps": f"{down_mbps:.0f}"}
    if min(up_mbps, down_mbps) < floor_mbps:
        why = f"the store takes {up_mbps:.1f} and gives {down_mbps:.1f} Mbit/s, wanted are {floor_mbps:g}"
        return Failed("store", why, facts)
    return Passed("store", facts)


async def check_gpus(spec: JobSpec, environ: Mapping[str, str]) -> Passed | Failed:
    """Ask the driver, and where that library is hidden `nvidia-smi`."""
    if spec.wish.gpu.words == CPU:
        return Passed("gpu", {"gpu": "not wanted", "cuda": "not wanted"})
    seen, problem = await _by_driver(environ)
    if not seen:
        seen = await _by_smi(environ)
    return judge_gpus(seen, spec.wish, problem)


async def _by_driver(environ: Mapping[str, str]) -> tuple[list[SeenGpu], str]:
    import provisioner.node.cuda as cuda

    answer = await _output([sys.executable, cuda.__file__], environ)
    if answer is None:
        return [], f"the CUDA driver did not answer within {CUDA_S:.0f} s, or died"
    try:
        found: dict[str, Any] = json.loads(answer)
        return [SeenGpu(**gpu) for gpu in found["gpus"]], str(found["error"])
    except (ValueError, KeyError, TypeError) as error:
        return [], f"the CUDA driver's answer cannot be read: {error!r}"


async def _by_smi(environ: Mapping[str, str]) -> list[SeenGpu]:
    answer = await _output(list(SMI), environ)
    found = []
    for line in (answer or "").splitlines():
        name, _, memory = line.rpartition(",")
        if name and memory.strip().isdigit():
            found.append(SeenGpu(name.strip(), int(memory) << 20, ""))
    return found


async def _output(argv: list[str], environ: Mapping[str, str]) -> str | None:
    with trio.move_on_after(CUDA_S):
        try:
            done = await trio.run_process(
                argv, capture_stdout=True, stderr=subprocess.DEVNULL, check=False, env=dict(environ)
            )
        except OSError:
            return None
        return str(done.stdout.decode(errors="replace")) if done.returncode == 0 else None
    return None


async def check_store(spec: JobSpec, shelf: Shelf, ident: str, payload: bytes) -> Passed | Failed:
    """Put and get a few MiB; *payload* is PROBE_BYTES of noise. Raises what the shelf raises."""
    assert len(payload) == PROBE_BYTES
    keys = [f"{job_prefix(spec.job)}nodes/{ident}/probe-{number}" for number in range(PROBES_AT_ONCE)]
    up_mbps = down_mbps = 0.0
    with trio.move_on_after(STORE_S):
        up_mbps = await _measured(keys, lambda key: shelf.put(key, payload))
        down_mbps = await _measured(keys, shelf.get)
        # Who may not delete, as is best for a node, leaves a few MiB to the controller.
        with suppress(StoreDenied, StoreUnavailable):
            await shelf.delete(keys)
    return judge_store(up_mbps, down_mbps, spec.store_floor_mbps)


async def _measured(keys: Sequence[str], call: Any) -> float:
    """Return the best round's Mbit/s."""
    best = 0.0
    for _ in range(ROUNDS_MAX):
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(call, key)
        lasted_s = max(1e-6, trio.current_time() - began_s)
        best = max(best, len(keys) * PROBE_BYTES * 8 / MEGA / lasted_s)
        if lasted_s > ROUND_S:
            break
    return best
