"""How long a trainer stands still for a sharded save, per form of the workspace: `save_stall_s`.

Eight ranks write their shards side by side into a draft, which is then renamed, as every trainer does; the workspace
streams meanwhile, with its defaults. Invariant: each save is in the store before the next system has its turn.
"""

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_node import spotwarp_directory, spotwarp_node
from bench_systems import Site
from bench_workloads import MIB, Scale

SHARDS = 8
SAVE_MIB = 4096
SHIFT_BYTES = 4_099
"""Each shard begins so much further on: no block of one is a block of another."""

Note = Callable[[str, str, float], None]


@dataclass(frozen=True)
class Form:
    """Where a trainer may save."""

    root: Path
    settle: Callable[[], object]


def measure_stall(site: Site, scale: Scale, rounds: int, note: Note) -> None:
    """Save on each form in each round; each goes first as often as any other."""
    shard_mib = scale.of(SAVE_MIB) // SHARDS
    with ExitStack() as held:
        forms = [(name, held.enter_context(form(site))) for name, form in FORMS.items()]
        for number in range(rounds):
            weights = np.random.default_rng(number).standard_normal((shard_mib + 1) * MIB // 4, dtype=np.float32)
            content = memoryview((weights * np.float32(0.02)).view(np.uint8))  # type: ignore[arg-type]
            for name, form in forms[number % len(forms) :] + forms[: number % len(forms)]:
                note("save_stall_s", name, _save(form.root, content, shard_mib))
                form.settle()
                shutil.rmtree(form.root / "checkpoint-1")
                form.settle()
            print(f"bench: stall of a save, round {number + 1} of {rounds} done", file=sys.stderr)


@contextmanager
def _fuse(site: Site) -> Iterator[Form]:
    with spotwarp_node(site, "stall-fuse", "stall-fuse") as node:
        yield Form(node.root, node.sync)


@contextmanager
def _directory(site: Site) -> Iterator[Form]:
    with spotwarp_directory(site, "stall-directory", "stall-directory") as node:
        yield Form(node.root, node.sync)


@contextmanager
def _ext4(site: Site) -> Iterator[Form]:
    yield Form(site.made("stall-ext4"), os.sync)


FORMS = {"spotwarp": _fuse, "spotwarp-directory": _directory, "ext4": _ext4}


def _save(root: Path, content: memoryview, shard_mib: int) -> float:
    draft = root / "tmp-checkpoint-1"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(draft, number, content, shard_mib)) for number in range(SHARDS)]
    begun_s = time.perf_counter()
    draft.mkdir()
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    draft.rename(root / "checkpoint-1")
    took_s = time.perf_counter() - begun_s
    if any(rank.exitcode for rank in ranks):
        raise OSError(f"a rank failed: exit codes {[rank.exitcode for rank in ranks]}")
    return took_s


def _rank(draft: Path, number: int, content: memoryview, mib: int) -> None:
    fd = os.open(draft / f"model-{number}.safetensors", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for at in range(number * SHIFT_BYTES, number * SHIFT_BYTES + mib * MIB, MIB):
            os.write(fd, content[at : at + MIB])
    finally:
        os.close(fd)
