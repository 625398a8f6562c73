"""The histories of docs/HISTORIES.md that need the kernel: its caches, its xattr requests, its access times."""

from __future__ import annotations

import errno
import os
import time

import pytest

from tests.support.daemon import Fleet, await_true, manifests_of
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = needs_fuse


@pytest.mark.history("M-e")
@pytest.mark.promise("P-11")
def test_Me_what_a_command_brings_back_is_seen_at_once(fleet: Fleet) -> None:
    """Names, attributes and pages stay in the kernel for an hour: whatever changes the tree goes through it."""
    node = fleet.node(interval="1h").start()
    path, gone = node.root / "f", node.root / "gone"
    path.write_bytes(b"first")
    gone.write_bytes(b"was here")
    number = node.sync()
    path.write_bytes(b"the second")
    gone.unlink()
    assert path.read_bytes() == b"the second"
    assert not gone.exists()
    for name in ("f", "gone"):
        done = node.run("cp", f"work:{name}", str(node.root / name), "--at", str(number), "--store", node.store)
        assert done.returncode == 0, done.stderr
    assert (path.read_bytes(), path.stat().st_size) == (b"first", 5)
    assert gone.read_bytes() == b"was here"
    assert node.umount() == 0
    fresh = fleet.node().start()
    assert (fresh.root / "f").read_bytes() == b"first"


@pytest.mark.history("M-n")
@pytest.mark.promise("P-11")
def test_Mn_xattrs_outlive_a_mount_that_does_not_show_them(fleet: Fleet) -> None:
    first = fleet.node()
    first.environment = {"SPOTWARP_MOUNT_XATTRS": "true"}
    first.start()
    (first.root / "f").write_bytes(b"1")
    os.setxattr(first.root / "f", "user.kept", b"value")
    assert first.umount() == 0
    second = fleet.node()
    second.environment = {"SPOTWARP_MOUNT_XATTRS": "false"}
    second.start()
    with pytest.raises(OSError) as refused:
        os.getxattr(second.root / "f", "user.kept")
    assert refused.value.errno == errno.EOPNOTSUPP
    (second.root / "f").write_bytes(b"2")
    os.rename(second.root / "f", second.root / "g")
    assert second.umount() == 0
    third = fleet.node()
    third.environment = first.environment
    third.start()
    assert os.getxattr(third.root / "g", "user.kept") == b"value"
    assert third.umount() == 0


@pytest.mark.history("M-d")
def test_Md_access_times_alone_make_no_manifest(fleet: Fleet) -> None:
    node = fleet.node()
    node.environment = {"SPOTWARP_MOUNT_ATIME": "relatime"}
    node.start()
    path = node.root / "f"
    path.write_bytes(b"1")
    os.utime(path, ns=(1, path.stat().st_mtime_ns))
    node.sync()
    before = len(manifests_of(node.store))
    assert path.read_bytes() == b"1"
    await_true(lambda: path.stat().st_atime_ns > 1, "the access time is noted")
    time.sleep(3)
    assert len(manifests_of(node.store)) == before
    (node.root / "g").touch()
    await_true(lambda: len(manifests_of(node.store)) > before, "a change makes one")
