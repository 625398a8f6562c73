"""A daemon of the directory form that only restores, as a process that may be killed.

    python -m tests.support.restore_process STORE CACHE ROOT [late-after=S] [slow=BYTES_PER_S]

It decides as a start with `--restore` does, lays out or takes up, says `ready`, fills everything, says `done`, and
stays.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from spotwarp_fs.core.guard import Step, Wish, decide
from spotwarp_fs.core.ports import DataFiles, KVStore
from spotwarp_fs.directory import identity
from spotwarp_fs.directory.keeping import open_keeper
from spotwarp_fs.directory.restoring import Restorer
from spotwarp_fs.local.journal import Journal
from spotwarp_fs.local.kv import LmdbKV
from spotwarp_fs.local.memory import MemoryDataFiles
from spotwarp_fs.local.workers import ThreadWorkers
from spotwarp_fs.store.directory import DirectoryStore
from tests.support.laid_out import LIMITS, OWNER, SETTINGS
from tests.support.placeholders import socket_of
from tests.support.slow_store import SlowStore
from tests.support.world import start


@dataclass
class DiskNode:
    """What survives a kill."""

    kv: KVStore
    journal: Journal
    data: DataFiles


def disk_node(cache: Path) -> DiskNode:
    cache.mkdir(parents=True, exist_ok=True)
    return DiskNode(LmdbKV(cache / "map", map_bytes=1 << 28), Journal(cache / "journal"), MemoryDataFiles())


async def main(store_path: Path, cache: Path, root: Path, options: dict[str, float]) -> None:
    store = SlowStore(
        DirectoryStore(store_path),  # type: ignore[arg-type]
        latency_s=0.002,
        bytes_per_s=options.get("slow", 30e6),
    )
    settings = replace(SETTINGS, hydrate_all=True)
    late_after_s = options.get("late-after")
    async with (
        open_keeper(*socket_of(cache), late_after_s=late_after_s) as keeper,
        start(store, disk_node(cache), settings=settings, workers=ThreadWorkers()) as session,
    ):
        where = os.fsencode(root)
        restorer = Restorer(
            session, where, OWNER, session_id="a session", placeholders=keeper,
            why_no_leases=identity.why_no_placeholders(where), limits=LIMITS,
        )  # fmt: skip
        situation = identity.situation(session.workspace, where, OWNER, number=1, cut_ns=0)
        step = decide(situation, Wish.RESTORE)
        await (restorer.take_up() if step is Step.GO_ON else restorer.lay_out())
        print("ready", step.value, flush=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restorer.filler.run)
            while restorer.filler.absent:
                await trio.sleep(0.01)
            print("done", flush=True)
            await trio.sleep_forever()


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[4:])
    trio.run(main, *map(Path, sys.argv[1:4]), {name: float(value) for name, value in given.items()})
