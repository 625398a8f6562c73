"""Does the cache keep to its budget, with files larger than it, and does a full one end in ENOSPC and not in a hang?"""

from __future__ import annotations

import errno
import hashlib
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, Node, await_true
from tests.support.daemon import fleet as fleet
from tests.support.link import link_to
from tests.support.mounts import needs_fuse
from tests.support.s3_server import S3Server
from tests.support.s3_server import s3_server as s3_server

pytestmark = [*needs_fuse, pytest.mark.promise("P-10")]

MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
METADATA_BYTES = 8 * MIB


def chunk(number: int) -> bytes:
    return random.Random(number).randbytes(4 * MIB)


def fill(path: Path, size: int) -> None:
    """Write until *size* or an error."""
    with path.open("wb", buffering=0) as file:
        written = 0
        while written < size:
            written += file.write(chunk(written // (4 * MIB)))


def occupied(node: Node) -> int:
    """What the cache directory really takes from the disk."""
    return sum(path.stat().st_blocks * 512 for path in node.cache.rglob("*") if path.is_file())


def test_a_file_larger_than_the_cache_is_written_read_and_restored(fleet: Fleet) -> None:
    node = fleet.node("--cache-size", "64M").start()
    written = hashlib.blake2b()
    most = 0
    with (node.root / "large").open("wb", buffering=0) as file:
        for number in range(28):
            body = chunk(number)
            assert file.write(body) == len(body)
            written.update(body)
            most = max(most, occupied(node))
    found = hashlib.blake2b()
    with (node.root / "large").open("rb", buffering=0) as file:
        while body := file.read(4 * MIB):
            found.update(body)
            most = max(most, occupied(node))
    assert found.digest() == written.digest()
    assert most <= BUDGET_BYTES + METADATA_BYTES
    with (node.root / "large").open("r+b") as file:
        file.seek(5 * MIB + 77)
        file.write(b"changed")
    node.sync()
    node.kill()
    node.restart()
    with (node.root / "large").open("rb") as file:
        file.seek(5 * MIB + 77)
        assert file.read(7) == b"changed"
        file.seek(4 * MIB)
        assert file.read(MIB) == chunk(1)[:MIB]


def test_a_full_cache_without_its_store_is_enospc_and_heals(tmp_path: Path, s3_server: S3Server) -> None:
    with link_to(s3_server.seaweed.endpoint) as link:
        store = s3_server.url.replace(s3_server.seaweed.endpoint, link.endpoint)
        fleet = Fleet(tmp_path, store, {**s3_server.environment, "SPOTWARP_WRITE_WAIT_MAX": "2s"})
        try:
            node = fleet.node("--cache-size", "64M").start()
            link.cut()
            with pytest.raises(OSError) as caught:
                fill(node.root / "full", 160 * MIB)
            assert caught.value.errno == errno.ENOSPC
            written = (node.root / "full").stat().st_size
            assert occupied(node) <= BUDGET_BYTES + METADATA_BYTES
            assert written > BUDGET_BYTES // 2
            (node.root / "small").mkdir()
            (node.root / "small").rmdir()
            kept = (node.root / "full").read_bytes()
            assert kept[: 4 * MIB] == chunk(0)

            link.mend(s3_server.seaweed.endpoint)
            await_true(lambda: takes_more(node.root / "full"), "room, now that the store is back")
            node.sync()
            assert (node.root / "full").read_bytes().startswith(kept)
        finally:
            fleet.close()


def takes_more(path: Path) -> bool:
    """Append a chunk. The store may need longer to take the first packs than a writer here waits (2 s)."""
    try:
        with path.open("ab", buffering=0) as file:
            return file.write(chunk(99)) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


@pytest.mark.history("H2")
def test_H2_a_writer_that_waits_for_room_can_be_killed(tmp_path: Path, s3_server: S3Server) -> None:
    with link_to(s3_server.seaweed.endpoint) as link:
        store = s3_server.url.replace(s3_server.seaweed.endpoint, link.endpoint)
        fleet = Fleet(tmp_path, store, s3_server.environment)
        try:
            node = fleet.node("--cache-size", "64M").start()
            link.cut()
            command = ["dd", "if=/dev/urandom", f"of={node.root / 'full'}", "bs=1M", "count=160"]
            writer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                await_true(lambda: occupied(node) > BUDGET_BYTES - 12 * MIB, "a full cache")
                writer.terminate()
                assert writer.wait(20) == -signal.SIGTERM
            finally:
                writer.kill()
        finally:
            fleet.close()
