"""Does a restore survive what happens to processes: SIGKILL at any moment, readers of every kind, and lateness?"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.lateness import BESIDE
from spotwarp_fs.store.directory import DirectoryStore
from tests.directory.test_restore import EVERYTHING, published
from tests.support.laid_out import (
    READ,
    SETTINGS,
    all_filled,
    compare,
    contents,
    filling,
    in_another_process,
    make_everything,
    opened,
    publish,
)
from tests.support.placeholders import end_keeper, give_to, ordinary
from tests.support.restore_process import disk_node
from tests.support.world import Node, start

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


class Daemon:
    """A restoring process."""

    def __init__(self, place: Path, *options: str, prefix: Sequence[str] = ()) -> None:
        command = [
            *prefix,
            sys.executable,
            "-m",
            "tests.support.restore_process",
            *map(str, arguments(place)),
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True)

    def until(self, word: str) -> str:
        """Wait until it says *word*; returns the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise AssertionError(f"it ended without saying {word}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def arguments(place: Path) -> tuple[Path, Path, Path]:
    return place / "store", place / "cache", place / "w"


@contextlib.contextmanager
def running(place: Path, *options: str, prefix: Sequence[str] = ()) -> Iterator[Daemon]:
    daemon = Daemon(place, *options, prefix=prefix)
    try:
        yield daemon
    finally:
        daemon.kill()


@pytest.fixture
async def place(tmp_path: Path) -> Path:
    store, cache, root = arguments(tmp_path)
    cache.mkdir()
    root.mkdir()
    await publish(DirectoryStore(store), make_everything)
    return tmp_path


async def expectation(place: Path) -> dict[bytes, bytes]:
    async with start(DirectoryStore(arguments(place)[0]), Node(), settings=SETTINGS) as session:
        return await contents(session)


async def check(place: Path, expected: dict[bytes, bytes], *, owners: bool = True) -> None:
    store, cache, root = arguments(place)
    async with opened(DirectoryStore(store), root, node=disk_node(cache)) as restored:
        compare(restored, expected, owners=owners)


@pytest.fixture(autouse=True)
def no_keeper_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_keeper(tmp_path / "cache")


@pytest.mark.promise("P-11")
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_killed_again_and_again_it_comes_to_the_same_tree(place: Path, seed: int) -> None:
    expected, rng = await expectation(place), random.Random(seed)
    for _ in range(5):
        with running(place):
            await trio.sleep(rng.uniform(0.4, 1.6))
    with running(place) as daemon:
        await trio.to_thread.run_sync(daemon.until, "done")
    await check(place, expected)
    assert not (arguments(place)[2] / ".spotwarp/replaced").exists()


@pytest.mark.history("L5")
async def test_readers_outwait_the_death_of_the_daemon(place: Path) -> None:
    expected = await expectation(place)
    root = arguments(place)[2]
    wanted = [b"a/big.dat", b"b/tool", b"run/checkpoint-1/model.safetensors"]
    found: dict[bytes, bytes] = {}

    async def read(path: bytes) -> None:
        found[path] = await in_another_process(READ, os.path.join(os.fsencode(root), path))

    async with trio.open_nursery() as nursery:
        with running(place, "slow=1e6") as daemon:
            await trio.to_thread.run_sync(daemon.until, "ready")
            for path in wanted:
                nursery.start_soon(read, path)
            await trio.sleep(0.5)
        assert b"a/big.dat" not in found
        with running(place, "slow=1e8") as daemon:
            assert "go on" in await trio.to_thread.run_sync(daemon.until, "ready")
            with trio.fail_after(DEADLINE_S):
                while len(found) < len(wanted):
                    await trio.sleep(0.02)
            await trio.to_thread.run_sync(daemon.until, "done")
    for path in wanted:
        assert hashlib.sha256(found[path]).digest() == hashlib.sha256(expected[path]).digest()
    await check(place, expected)


SAVE_OVER = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(b"saved over")
"""
APPEND = """
import os, sys
with open(sys.argv[1], "ab") as file:
    file.write(b"appended")
"""
MAP = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
    sys.stdout.buffer.write(view[:])
"""


async def test_whoever_opens_a_placeholder_meets_its_bytes(place: Path) -> None:
    expected = await expectation(place)
    root = arguments(place)[2]
    with running(place, "slow=2e6") as daemon:
        await trio.to_thread.run_sync(daemon.until, "ready")
        assert (
            await in_another_process(MAP, root / "run/checkpoint-1/model.safetensors")
            == (expected[b"run/checkpoint-1/model.safetensors"])
        )
        await in_another_process(APPEND, root / "run/checkpoint-2/model.safetensors")
        await in_another_process(SAVE_OVER, root / "b/tool")
        assert subprocess.run(["cp", root / "a/big.dat", place / "copy"], check=False).returncode == 0
        await trio.to_thread.run_sync(daemon.until, "done")
    assert (place / "copy").read_bytes() == expected[b"a/big.dat"]
    appended = (root / "run/checkpoint-2/model.safetensors").read_bytes()
    assert appended == expected[b"run/checkpoint-2/model.safetensors"] + b"appended"
    assert (root / "b/tool").read_bytes() == b"saved over"


@pytest.mark.history("L6")
async def test_what_comes_too_late_is_empty_and_then_a_placeholder_again(place: Path) -> None:
    expected = await expectation(place)
    root = arguments(place)[2]
    with running(place, "slow=2e5", "late-after=1.5") as daemon:
        await trio.to_thread.run_sync(daemon.until, "ready")
        begun = time.monotonic()
        assert await in_another_process(READ, root / "a/big.dat") == b""
        assert time.monotonic() - begun < DEADLINE_S
    with running(place, "slow=1e8", "late-after=1.5") as daemon:
        await trio.to_thread.run_sync(daemon.until, "done")
        assert await in_another_process(READ, root / "a/big.dat") == expected[b"a/big.dat"]
    await check(place, expected)


@pytest.mark.history("L6")
@pytest.mark.parametrize("is_open", [False, True])
async def test_a_late_placeholder_is_refilled_when_nobody_has_it_open(tmp_path: Path, *, is_open: bool) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        place, ino = restored.root / "a/big.dat", restored.inode(b"a/big.dat")
        restored.leases.give_up(ino)
        assert place.stat().st_size == 0
        holder = os.open(place, os.O_RDONLY) if is_open else -1
        async with filling(restored):
            if is_open:
                await all_filled(restored, but=1)
                with trio.fail_after(DEADLINE_S):
                    while restored.seen(b"a/big.dat") is not Seen.LATE:
                        await trio.sleep(0.01)
                assert place.stat().st_size == 0
                os.close(holder)
            await all_filled(restored)
        compare(restored, expected)


@pytest.mark.history("L6")
async def test_a_late_placeholder_that_was_written_is_the_users(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        place, ino = restored.root / "a/big.dat", restored.inode(b"a/big.dat")
        restored.leases.give_up(ino)
        with open(place, "r+b") as file:
            file.write(b"the user's")
        async with filling(restored):
            await all_filled(restored)
        assert place.read_bytes() == b"the user's"
        assert leases.absence(place) is None
        assert restored.seen(b"a/big.dat") is Seen.NOTHING
        beside = place.with_name(place.name + BESIDE.decode())
        assert beside.read_bytes() == expected[b"a/big.dat"]
        assert any("was written before its bytes came" in line for line in restored.session.workspace.reports)


async def test_without_any_capability_only_owners_are_left_out(place: Path) -> None:
    """As in a container: no CAP_CHOWN, no CAP_LEASE, no CAP_DAC_OVERRIDE."""
    expected, prefix = await expectation(place), ordinary()
    for each in [place, *place.rglob("*")]:
        give_to(each, prefix)
    with running(place, prefix=prefix) as daemon:
        await trio.to_thread.run_sync(daemon.until, "ready")
        status = os.lstat(arguments(place)[2] / "a/big.dat")
        assert status.st_blocks <= 8
        assert await in_another_process(READ, arguments(place)[2] / "a/big.dat") == expected[b"a/big.dat"]
        await trio.to_thread.run_sync(daemon.until, "done")
    await check(place, expected, owners=False)
