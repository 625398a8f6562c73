"""Does an ordered end save everything, or say with its exit code that it did not?"""

from __future__ import annotations

import errno
import os
import random
import signal
from pathlib import Path

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import Fleet, await_true
from tests.support.daemon import fleet as fleet
from tests.support.link import link_to
from tests.support.mounts import needs_fuse
from tests.support.s3_server import S3Server
from tests.support.s3_server import s3_server as s3_server

pytestmark = [*needs_fuse, pytest.mark.promise("P-12")]

BODY = random.Random(1).randbytes(9 << 20)


def test_sigterm_publishes_what_no_interval_has(fleet: Fleet) -> None:
    node = fleet.node(interval="1h").start()
    (node.root / "f").write_bytes(BODY)
    node.send(signal.SIGTERM)
    assert node.ended() == ExitCode.OK
    assert not node.root.is_mount()
    (node.root / "writable-again").touch()
    fresh = fleet.node().start()
    assert (fresh.root / "f").read_bytes() == BODY


def test_sigterm_with_an_open_file_ends_all_the_same(fleet: Fleet) -> None:
    """A trainer with its log open held the detached mount, and with it the daemon, for ever."""
    node = fleet.node(interval="1h").start()
    fd = os.open(node.root / "open", os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, BODY) == len(BODY)
    node.send(signal.SIGTERM)
    assert node.ended() == ExitCode.OK
    for call in (lambda: os.write(fd, b"too late"), lambda: os.close(fd)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ENOTCONN
    fresh = fleet.node().start()
    assert (fresh.root / "open").read_bytes() == BODY


def test_umount_of_an_idle_workspace_ends_with_success(fleet: Fleet) -> None:
    node = fleet.node().start_supervised()
    (node.root / "f").write_bytes(b"1")
    assert node.umount() == ExitCode.OK
    assert not node.root.is_mount()


def test_what_a_slow_link_could_not_take_is_said_and_kept(tmp_path: Path, s3_server: S3Server) -> None:
    with link_to(s3_server.seaweed.endpoint) as link:
        store = s3_server.url.replace(s3_server.seaweed.endpoint, link.endpoint)
        environment = {**s3_server.environment, "SPOTWARP_NOTICE_TIMEOUT": "2s"}
        fleet = Fleet(tmp_path, store, environment)
        try:
            node = fleet.node(interval="1h").start()
            node.sync()
            link.upload_bytes_per_s = 300_000.0
            (node.root / "f").write_bytes(BODY)
            node.send(signal.SIGTERM)
            assert node.ended() == ExitCode.NOT_SAVED
            assert "saved=False" in node.log()

            link.upload_bytes_per_s = None
            node.start()
            assert (node.root / "f").read_bytes() == BODY
            node.sync()
            node.kill()
            fresh = fleet.node().start("--takeover")
            assert (fresh.root / "f").read_bytes() == BODY
        finally:
            fleet.close()


@pytest.mark.slow
def test_umount_in_an_outage_fails_and_loses_nothing(tmp_path: Path, s3_server: S3Server) -> None:
    with link_to(s3_server.seaweed.endpoint) as link:
        store = s3_server.url.replace(s3_server.seaweed.endpoint, link.endpoint)
        fleet = Fleet(tmp_path, store, {**s3_server.environment, "SPOTWARP_DRAIN_TIMEOUT": "2s"})
        try:
            node = fleet.node(interval="1h").start_supervised()
            (node.root / "f").write_bytes(BODY)
            link.cut()
            assert node.umount() == ExitCode.NOT_SAVED
            await_true(lambda: not os.path.ismount(node.root), "unmounted")
            link.mend(s3_server.seaweed.endpoint)
            node.start()
            assert (node.root / "f").read_bytes() == BODY
            node.sync()
        finally:
            fleet.close()
