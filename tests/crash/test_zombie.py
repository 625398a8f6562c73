"""Is an old writer that wakes up after a takeover fenced, quickly, and without a trace of it in the workspace?"""

from __future__ import annotations

import errno
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.daemon import Fleet, RefusedToMount, await_true, manifests_of
from tests.support.daemon import fleet as fleet
from tests.support.load import Load, nearest, tree_of
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-06")]

READ_ONLY_WITHIN_S = 1.0 + 10.0 + 15.0
"""`interval` + 10 s, and what a busy machine may add."""


def test_a_resumed_zombie_is_fenced_and_nothing_of_it_is_visible(fleet: Fleet) -> None:
    old = fleet.node().start()
    load = Load(old.root, 31).start()
    time.sleep(2.5)
    old.send(signal.SIGSTOP)
    new = fleet.node().start("--takeover")
    taken = tree_of(new.root)
    (new.root / "new").write_text("written after the takeover")
    new.sync()
    before = tree_of(new.root)

    old.send(signal.SIGCONT)
    await_true(lambda: old.status()["fenced"], "the zombie learns that it was fenced", READ_ONLY_WITHIN_S)
    await_true(lambda: not load.running, "the load meets a read-only filesystem")
    load.stop()
    assert load.prefixes(taken), nearest(load, taken)
    assert load.error is not None
    assert load.error.errno == errno.EROFS
    with pytest.raises(OSError) as caught:
        os.mkdir(old.root / "too-late")
    assert caught.value.errno == errno.EROFS
    assert old.status()["read_only"]
    assert tree_of(old.root), "reading goes on"

    (new.root / "new").write_text("written after the zombie woke")
    new.sync()
    assert tree_of(new.root) == {**before, "new": b"written after the zombie woke"}
    check_epochs(fleet.store)
    new.kill()
    third = fleet.node().start("--takeover")
    assert tree_of(third.root) == {**before, "new": b"written after the zombie woke"}


@pytest.mark.slow
def test_an_idle_zombie_learns_it_too(fleet: Fleet) -> None:
    old = fleet.node().start()
    (old.root / "f").write_text("1")
    old.sync()
    old.send(signal.SIGSTOP)
    new = fleet.node().start("--takeover")
    old.send(signal.SIGCONT)
    await_true(lambda: old.status()["fenced"], "an idle zombie learns it by its heartbeat", 10.0 + 15.0)
    assert not new.status()["fenced"]


def test_a_killed_zombie_does_not_take_the_workspace_back(fleet: Fleet) -> None:
    """L11: the restart on its own cache finds a foreign head, keeps its data aside and ends as fenced."""
    old = fleet.node().start()
    (old.root / "published").write_text("1")
    old.sync()
    old.send(signal.SIGSTOP)
    new = fleet.node().start("--takeover")
    old.kill()
    with pytest.raises(RefusedToMount) as caught:
        old.restart()
    assert caught.value.code == 12
    (new.root / "goes-on").write_text("1")
    new.sync()
    check_epochs(fleet.store)


def test_a_second_mount_beside_a_live_writer_is_refused(fleet: Fleet) -> None:
    first = fleet.node().start()
    (first.root / "f").write_text("1")
    first.sync()
    await_true(lambda: _beats(fleet), "the first heartbeat")
    with pytest.raises(RefusedToMount) as caught:
        fleet.node().start()
    assert caught.value.code == 8
    (first.root / "g").write_text("1")
    first.sync()
    assert not first.status()["fenced"]


def _beats(fleet: Fleet) -> bool:
    root = Path(fleet.store.removeprefix("file://"))
    return any("heartbeat" in path.name for path in root.rglob("*"))


def check_epochs(store: str) -> None:
    """Writer epochs never fall from one manifest to the next, and a session keeps to its own."""
    manifests = manifests_of(store)
    assert [each.number for each in manifests] == list(range(1, len(manifests) + 1))
    for before, after in pairwise(manifests):
        assert before.writer_epoch <= after.writer_epoch
        assert (before.writer_epoch == after.writer_epoch) == (before.session == after.session)
