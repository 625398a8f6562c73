"""Does a link that is too slow still get the newest checkpoint out, and does the status say how far behind it is?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio

from spotwarp_fs.engine.report import Reporter
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.memory import MemoryStore
from tests.support.overload import Saver, Uplink, payload, saving
from tests.support.training import names, read_at
from tests.support.virtual import create, in_virtual_time
from tests.support.world import FAST, Node, new_store, start

INTERVAL_S = 30.0
SAVE_S = 10.0
"""How long one save takes: a cut that waits for the end of what is in flight waits as long."""
SETTINGS = replace(
    FAST,
    interval_s=INTERVAL_S,
    heartbeat_s=10.0,
    frames_in_memory_max=4,
    pack_bytes_target=25_000,
    packs_in_flight_max=2,
)
"""The pipeline is small against a checkpoint, as a real one's 96 blocks are."""
METADATA_SHARE = 1.1
"""These checkpoints are small against the records that describe them, and against heartbeats."""


def reporter(session: Session) -> Reporter:
    return Reporter(session, workspace_name="w", store_url="memory://")


async def resumed_from(store: MemoryStore, saver: Saver) -> int:
    """Which checkpoint a program on another node finds at the newest name; raises if that is not whole."""
    async with start(store, Node(), rng=random.Random(7), settings=SETTINGS) as session:
        where = ""
        if saver.style.startswith("keep"):
            steps = [int(name.split("-")[1]) for name in await names(session) if name.startswith("checkpoint-")]
            where = f"checkpoint-{max(steps)}/"
        found = [await read_at(session, f"{where}model-{file}.pt".encode()) for file in range(saver.files)]
    whole = [
        step
        for step in range(1, saver.steps + 1)
        if all(found[file] == payload(step, file, saver.file_bytes) for file in range(saver.files))
    ]
    assert len(whole) == 1, f"{saver.style}: what is found is no checkpoint that was ever saved"
    return whole[0]


@pytest.mark.promise("P-17")
@pytest.mark.history("L9")
@pytest.mark.parametrize(("style", "held"), [("in place", 1), ("keep 1", 1), ("renamed", 2), ("keep 2", 2)])
def test_L9_the_newest_checkpoint_gets_out_however_slow_the_link(style: str, held: int) -> None:
    """*held*: how many checkpoints, whole or being written beside the old one, a cut may have to send."""
    link_bytes_per_s = 6_000.0

    async def main() -> None:
        store = new_store()
        uplink = Uplink(store, link_bytes_per_s)
        async with start(uplink, Node(), settings=SETTINGS) as session:
            saver = Saver(session, style, SAVE_S, pause_s=SAVE_S)
            async with saving(saver):
                await trio.sleep(600 + random.Random(style).random() * 60)
            newest_s, lost_s = saver.complete_s[saver.newest], trio.current_time()
        bound_s = 2 * held * saver.checkpoint_bytes / link_bytes_per_s * METADATA_SHARE + INTERVAL_S + SAVE_S
        assert saver.worst_age_s <= bound_s
        resumed = await resumed_from(store, saver)
        assert resumed == saver.newest
        assert lost_s - newest_s <= bound_s
        assert session.workspace.bytes_written > 1.9 * link_bytes_per_s * lost_s, "the link could take everything"

    in_virtual_time(main)


@pytest.mark.promise("P-17")
@pytest.mark.parametrize(("style", "held"), [("in place", 1), ("renamed", 2)])
def test_what_was_superseded_before_it_was_sent_is_not_sent(style: str, held: int) -> None:
    """After minutes of overload what is left to send is one cut under way and one state, not a backlog."""

    async def main() -> None:
        uplink = Uplink(new_store(), 2_000.0)
        async with start(uplink, Node(), settings=SETTINGS) as session:
            saver = Saver(session, style, SAVE_S, pause_s=SAVE_S)
            async with saving(saver):
                await trio.sleep(600)
            before = uplink.pack_bytes
            uplink.bytes_per_s = 1e9
            await session.streamer.barrier()
            left = uplink.pack_bytes - before
            assert saver.steps >= 30
            assert left <= 2 * held * saver.checkpoint_bytes * METADATA_SHARE

    in_virtual_time(main)


@pytest.mark.promise("P-17")
@pytest.mark.promise("P-04")
def test_status_says_that_it_is_falling_behind_and_when_it_no_longer_is() -> None:
    async def main() -> None:
        uplink = Uplink(new_store(), 6_000.0)
        async with start(uplink, Node(), settings=SETTINGS) as session, trio.open_nursery() as nursery:
            reports = reporter(session)
            nursery.start_soon(reports.run)
            saver = Saver(session, "keep 1", SAVE_S, pause_s=SAVE_S)
            async with saving(saver):
                await trio.sleep(300)
                seen = []
                for _ in range(60):
                    await trio.sleep(7)
                    seen.append(await reports.status())
            behind = [status for status in seen if status.falling_behind]
            assert len(behind) > len(seen) // 2
            for status in behind:
                assert status.produced_bytes_per_s > status.sent_bytes_per_s > 0
                assert status.rpo_seconds > INTERVAL_S
            await session.streamer.barrier()
            await trio.sleep(60)
            status = await reports.status()
            assert (status.falling_behind, status.rpo_seconds, status.dirty_bytes) == (False, 0.0, 0)
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


@pytest.mark.promise("P-04")
@pytest.mark.parametrize("link_bytes_per_s", [50_000.0, 1e8])
def test_files_that_stay_open_are_never_older_than_the_interval(link_bytes_per_s: float) -> None:
    """A log and a file of metrics, appended to for half an hour without a close; the link takes twice what comes."""

    async def main() -> None:
        uplink = Uplink(new_store(), link_bytes_per_s)
        settings = replace(SETTINGS, early_upload_period_s=1.0)
        async with start(uplink, Node(), settings=settings) as session, trio.open_nursery() as nursery:
            reports = reporter(session)
            written: list[tuple[float, int]] = []
            published: list[int] = []
            worst_said_s = worst_s = 0.0

            async def append(name: bytes, chunk: int, period_s: float) -> None:
                handle, _ = await create(session, name)
                size, rng = 0, random.Random(name)
                while True:
                    await session.filesystem.write(handle, size, rng.randbytes(chunk))
                    size += chunk
                    written.append((trio.current_time(), session.workspace.counter.seq))
                    await trio.sleep(period_s * (0.5 + rng.random()))

            session.streamer.on_published.append(lambda head, _: published.append(head.manifest.change_seq))
            nursery.start_soon(reports.run)
            nursery.start_soon(append, b"train.log", 80, 5.0)
            nursery.start_soon(append, b"metrics.jsonl", 800, 40.0)
            for _ in range(1800 // 9):
                await trio.sleep(9)
                head_seq = published[-1] if published else 0
                while written and written[0][1] <= head_seq:
                    del written[0]
                age_s = trio.current_time() - written[0][0] if written else 0.0
                said_s = reports.rpo_s()
                assert said_s >= age_s, "the risk is said to be smaller than it is"
                worst_said_s, worst_s = max(worst_said_s, said_s), max(worst_s, age_s)
                assert not (await reports.status()).falling_behind
            assert 0 < worst_s <= worst_said_s <= INTERVAL_S + 5
            nursery.cancel_scope.cancel()

    in_virtual_time(main)
