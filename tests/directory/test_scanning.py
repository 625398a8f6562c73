"""Does a plain directory become the states it should? Real files, a real session, states read back from the store."""

from __future__ import annotations

import mmap
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.types import BLOCK_BYTES
from spotwarp_fs.store.faults import FaultStore
from tests.support.directories import Served, directory, published_state, real_store
from tests.support.world import Node

pytestmark = pytest.mark.promise("P-03")


def in_real_time(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded)


def settle() -> None:
    """Let the newest changes become old enough to be trusted."""
    time.sleep(2.1)


def noise(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.mark.promise("P-11")
def test_a_tree_of_everything_is_published_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "w"
    root.mkdir()
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "sub" / "a.txt").write_bytes(b"hello")
    (root / "big.bin").write_bytes(noise(3 * BLOCK_BYTES + 17))
    (root / "empty").touch()
    with open(root / "sparse", "wb") as file:
        file.truncate(5 * BLOCK_BYTES)
        file.seek(2 * BLOCK_BYTES)
        file.write(b"x" * 100)
    os.link(root / "sub" / "a.txt", root / "hard")
    (root / "sym").symlink_to("sub/a.txt")
    os.mkfifo(root / "fifo")
    (root / os.fsdecode(b"caf\xe9")).write_bytes(b"latin")
    os.chmod(root / "sub" / "deep", 0o750)
    os.utime(root / "empty", ns=(1, -1_500_000_001))
    os.setxattr(root / "big.bin", "user.step", b"7")
    os.utime(root / "sub", ns=(5, 1_234_567_890_123_456_789))

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), root) as served:
            await served.sync()
            await _check(served)
            state = await published_state(store)
        assert state.names() == {
            "sub", "sub/deep", "sub/a.txt", "big.bin", "empty", "sparse", "hard", "sym", "fifo",
            os.fsdecode(b"caf\xe9"),
        }  # fmt: skip
        assert state.content[b"big.bin"] == (root / "big.bin").read_bytes()
        assert state.content[b"sparse"] == (root / "sparse").read_bytes()
        assert state.nodes[b"sparse"].record.allocated == BLOCK_BYTES
        assert state.nodes[b"hard"].ino == state.nodes[b"sub/a.txt"].ino
        assert state.nodes[b"hard"].record.nlink == 2
        assert state.nodes[b"sym"].record.target == b"sub/a.txt"
        assert stat.S_ISFIFO(state.nodes[b"fifo"].record.mode)
        assert state.nodes[b"empty"].record.mtime_ns == -1_500_000_001
        assert state.nodes[b"sub"].record.mtime_ns == 1_234_567_890_123_456_789
        assert stat.S_IMODE(state.nodes[b"sub/deep"].record.mode) == 0o750
        assert state.xattrs[b"big.bin"] == {b"user.step": b"7"}

    in_real_time(main)


async def _check(served: Served) -> None:
    """The known tree, the map and the disk agree."""
    on_disk = {b""}
    for top, directories, files in os.walk(os.fsencode(served.root)):
        relative = os.path.relpath(top, os.fsencode(served.root))
        on_disk |= {os.path.normpath(os.path.join(relative, name)) for name in (*directories, *files)}
    assert set(served.known) == on_disk


def test_changes_reach_the_next_state_and_only_they_are_sent(tmp_path: Path) -> None:
    data = bytearray(noise(8 * BLOCK_BYTES))

    async def main() -> None:
        store = real_store()
        (tmp_path / "weights").write_bytes(data)
        (tmp_path / "old").write_bytes(b"goes")
        (tmp_path / "kept").write_bytes(b"stays")
        async with directory(store, Node(), tmp_path) as served:
            await served.sync()
            sent = served.session.sealer.bytes_sealed
            data[3 * BLOCK_BYTES : 3 * BLOCK_BYTES + 4] = b"new!"
            (tmp_path / "weights").write_bytes(data)
            (tmp_path / "old").unlink()
            (tmp_path / "new").write_bytes(b"comes")
            await served.sync()
            assert served.session.sealer.bytes_sealed - sent < 1.1 * BLOCK_BYTES
            await _check(served)
        state = await published_state(store)
        assert state.content == {b"weights": bytes(data), b"kept": b"stays", b"new": b"comes"}

    in_real_time(main)


def test_a_file_that_shrinks_and_grows_again_reads_as_zeros_in_between(tmp_path: Path) -> None:
    path = tmp_path / "f"

    async def main() -> None:
        store = real_store()
        path.write_bytes(noise(3 * BLOCK_BYTES))
        async with directory(store, Node(), tmp_path) as served:
            await served.sync()
            os.truncate(path, 100)
            await served.sync()
            assert (await published_state(store)).content[b"f"] == path.read_bytes()
            os.truncate(path, 2 * BLOCK_BYTES)
            await served.sync()
        state = await published_state(store)
        assert state.content[b"f"] == path.read_bytes()

    in_real_time(main)


@pytest.mark.history("C19")
def test_C19_a_rename_between_two_walks_never_loses_both_names(tmp_path: Path) -> None:
    """1. tmp-2 becomes checkpoint-2 and checkpoint-1 is removed, just after the root was listed.

    Naive: both have vanished in that scan, and its state has no checkpoint at all.
    """

    def checkpoint(name: str, seed: int) -> None:
        (tmp_path / name).mkdir()
        for part in ("model.bin", "trainer_state.json"):
            (tmp_path / name / part).write_bytes(noise(5000, seed))

    async def main() -> None:
        store = real_store()
        checkpoint("checkpoint-1", 1)
        checkpoint("tmp-2", 2)
        async with directory(store, Node(), tmp_path) as served:
            await served.sync()
            before = await published_state(store)
            assert {"checkpoint-1", "tmp-2"} <= before.names()
            os.rename(tmp_path / "tmp-2", tmp_path / "checkpoint-2")
            subprocess.run(["rm", "-r", tmp_path / "checkpoint-1"], check=True)
            # A walk that met the moment in between: it has seen neither.
            (tmp_path / "checkpoint-2").rename(tmp_path.parent / "away")
            await served.scanner._cycle(whole=True)
            await served.session.streamer.barrier()
            between = (await published_state(store)).names()
            assert "checkpoint-1" in between or "checkpoint-2" in between or "tmp-2" in between
            (tmp_path.parent / "away").rename(tmp_path / "checkpoint-2")
            await served.sync()
            after = await published_state(store)
        assert after.names() == {"checkpoint-2", "checkpoint-2/model.bin", "checkpoint-2/trainer_state.json"}
        assert after.nodes[b"checkpoint-2"].ino == before.nodes[b"tmp-2"].ino, "a rename keeps the inode (P-11)"

    in_real_time(main)


@pytest.mark.history("C19")
def test_C19_a_store_through_a_mapping_that_no_stat_shows_is_published(tmp_path: Path) -> None:
    path = tmp_path / "mapped.dat"
    path.write_bytes(bytes(2 * BLOCK_BYTES))
    settle()

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served:
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
                mapped[0:3] = b"one"
                await served.sync()
                before = os.stat(path)
                mapped[0:3] = b"two"
                after = os.stat(path)
                assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
                served.scanner._attention.hurry()  # as if the time for another look had come
                await served.sync()
            state = await published_state(store)
        assert state.content[b"mapped.dat"][:3] == b"two"

    in_real_time(main)


def test_a_trusted_file_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(noise(BLOCK_BYTES))
    settle()

    async def main() -> None:
        async with directory(real_store(), Node(), tmp_path) as served:
            await served.sync()
            read = served.scanner.figures.bytes_read
            assert read == BLOCK_BYTES
            await served.sync()
            await served.sync()
            assert served.scanner.figures.bytes_read == read
            # Young when it was read: read again, and found to be what it was. That is no new state.
            (tmp_path / "young").write_bytes(b"x")
            number = await served.sync()
            served.scanner._attention.hurry()
            assert await served.sync() == number
            assert served.scanner.figures.bytes_read == read + 2

    in_real_time(main)


WRITER = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as log:
    n = 0
    print("ready", flush=True)
    while True:
        log.write(b"line %08d\\n" % n)
        n += 1
"""


@pytest.mark.promise("P-04")
def test_a_log_that_is_appended_all_the_time_is_published_as_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "train.log"

    async def main() -> None:
        store = real_store()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            async with directory(store, Node(), tmp_path) as served:
                sizes = []
                for _ in range(3):
                    await served.sync()
                    found = (await published_state(store)).content[b"train.log"]
                    assert path.read_bytes().startswith(found)
                    sizes.append(len(found))
        finally:
            writer.kill()
            writer.wait()
        assert 0 < sizes[0] < sizes[1] < sizes[2]

    in_real_time(main)


@pytest.mark.promise("P-05")
def test_an_atomic_file_that_is_being_written_is_in_flight_and_never_half_published(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    async def main() -> None:
        store = real_store()
        path.write_bytes(b"whole" * 1000)
        settle()
        async with directory(store, Node(), tmp_path) as served:
            await served.sync()
            with open(path, "r+b", buffering=0) as file:
                file.write(b"HALF")
                await served.sync()
                state = await published_state(store)
                assert state.content[b"model.pt"] == b"whole" * 1000
                assert state.in_flight == [b"model.pt"]
                file.write(b"DONE")
            await served.sync()
            state = await published_state(store)
        assert state.content[b"model.pt"] == path.read_bytes()
        assert state.in_flight == []

    in_real_time(main)


@pytest.mark.promise("P-05")
def test_a_new_checkpoint_directory_is_in_flight_until_its_last_file_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served:
            place = tmp_path / "checkpoint-1"
            place.mkdir()
            (place / "trainer_state.json").write_text("{}")
            with open(place / "model.safetensors", "wb", buffering=0) as file:
                file.write(b"half")
                await served.sync()
                assert b"checkpoint-1" in (await published_state(store)).in_flight
                file.write(b"rest")
            await served.sync()
            state = await published_state(store)
        assert state.in_flight == []
        assert state.content[b"checkpoint-1/model.safetensors"] == b"halfrest"

    in_real_time(main)


def test_a_writer_is_let_in_while_its_file_is_read_and_the_read_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(noise(200 * BLOCK_BYTES))
    settle()

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served, trio.open_nursery() as nursery:
            nursery.start_soon(served.scanner.sync)
            while served.scanner._reader.bytes_read == 0:
                await trio.sleep(0.005)
            begun = time.monotonic()
            opened = await trio.to_thread.run_sync(os.open, path, os.O_WRONLY)
            assert time.monotonic() - begun < 10, "the kernel alone would take 45 s"
            os.pwrite(opened, b"changed", 0)
            os.close(opened)
            await served.sync()
            assert (await published_state(store)).content[b"data.bin"] == path.read_bytes()

    in_real_time(main)


def test_a_restart_reads_nothing_that_has_not_changed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"f{number}").write_bytes(noise(3000, number))
    settle()

    async def main() -> None:
        store, node = real_store(), Node()
        async with directory(store, node, tmp_path) as served:
            await served.sync()
        (tmp_path / "f3").write_bytes(b"changed while nobody looked")
        (tmp_path / "f4").unlink()
        async with directory(store, node, tmp_path) as served:
            await served.sync()
            assert served.scanner.figures.bytes_read == len(b"changed while nobody looked")
        state = await published_state(store)
        assert state.content[b"f3"] == b"changed while nobody looked"
        assert b"f4" not in state.content

    in_real_time(main)


def test_what_cannot_be_read_is_named_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "ok").write_bytes(b"fine")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "socket").touch()

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served:
            await served.sync()
            (tmp_path / "ok").unlink()
            (tmp_path / "ok").mkdir()
            (tmp_path / "ok" / "inner").write_bytes(b"now a directory")
            await served.sync()
            await _check(served)
        state = await published_state(store)
        assert state.content[b"ok/inner"] == b"now a directory"
        assert state.nodes[b"dangling"].record.target == b"nowhere"

    in_real_time(main)


@pytest.mark.promise("P-09")
def test_an_outage_stops_nothing_and_is_made_up_for(tmp_path: Path) -> None:
    async def main() -> None:
        inner = real_store()
        store = FaultStore(inner, random.Random(1))
        (tmp_path / "before").write_bytes(b"1")
        async with directory(store, Node(), tmp_path, interval_s=0.1) as served:
            await served.sync()
            store.partitioned = True
            (tmp_path / "during").write_bytes(noise(2 * BLOCK_BYTES))
            (tmp_path / "before").unlink()
            await trio.sleep(2)
            store.partitioned = False
            await served.sync()
        state = await published_state(inner)
        assert state.content == {b"during": noise(2 * BLOCK_BYTES)}

    in_real_time(main)
