"""Does work go on while the store is away, and does publishing resume by itself?"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, await_true
from tests.support.link import Link, link_to
from tests.support.mounts import needs_fuse
from tests.support.s3_server import seaweed

pytestmark = [*needs_fuse, pytest.mark.promise("P-09")]

BUCKET = "work"


@dataclass
class Cloud:
    """A server that can be killed and started again on its directory, and the link that leads to it."""

    link: Link
    directory: Path
    fleet: Fleet
    _server: object = None

    def start(self) -> None:
        self._server = seaweed(self.directory)
        server = self._server.__enter__()
        server.create_bucket(BUCKET)
        self.fleet.environment = server.environment
        self.link.mend(server.endpoint)

    def kill(self) -> None:
        """SIGKILL."""
        if self._server is not None:
            self._server.__exit__(None, None, None)  # type: ignore[attr-defined]
            self._server = None
        self.link.cut()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with link_to(None) as link:
        (tmp_path / "s3").mkdir()
        made = Cloud(link, tmp_path / "s3", Fleet(tmp_path, f"s3://{BUCKET}/p?endpoint={link.endpoint}"))
        try:
            made.start()
            yield made
        finally:
            made.fleet.close()
            made.kill()


def test_local_work_goes_on_and_publishing_resumes(cloud: Cloud) -> None:
    node = cloud.fleet.node().start()
    (node.root / "before").write_bytes(random.Random(1).randbytes(3 << 20))
    published = node.sync()
    cloud.kill()
    bodies = {f"during{number}": random.Random(number).randbytes(300_000) for number in range(20)}
    for name, body in bodies.items():
        (node.root / name).write_bytes(body)
    (node.root / "before").rename(node.root / "renamed")
    assert (node.root / "renamed").read_bytes() == random.Random(1).randbytes(3 << 20)
    await_true(lambda: not node.status()["store_reachable"], "the outage shows")
    status = node.status()
    assert status["head_number"] == published
    assert status["rpo_seconds"] > 0
    assert status["store_error"]
    assert sorted(path.name for path in node.root.iterdir()) == sorted([*bodies, "renamed"])

    # A daemon that dies in the outage serves its own state again without the store.
    node.kill()
    node.restart()
    assert {path.name: path.read_bytes() for path in node.root.iterdir() if path.name != "renamed"} == bodies

    cloud.start()
    await_true(lambda: node.status()["rpo_seconds"] == 0 and node.status()["store_reachable"], "publishing resumes")
    assert node.sync() > published
    node.kill()
    fresh = cloud.fleet.node().start("--takeover")
    assert {path.name: path.read_bytes() for path in fresh.root.iterdir() if path.name != "renamed"} == bodies


def test_a_read_of_what_is_not_here_waits_for_the_store(cloud: Cloud) -> None:
    old = cloud.fleet.node().start()
    body = random.Random(2).randbytes(2 << 20)
    (old.root / "far").write_bytes(body)
    old.umount()
    node = cloud.fleet.node().start()
    cloud.kill()
    assert (node.root / "far").stat().st_size == len(body)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((node.root / "far").read_bytes()), daemon=True)
    reader.start()
    reader.join(2.0)
    assert reader.is_alive(), "a read was answered without the bytes"
    (node.root / "meanwhile").write_bytes(b"1")
    cloud.start()
    reader.join(60)
    assert found == [body]
