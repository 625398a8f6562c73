"""Does a mount that cannot be say why, with its exit code, and leave nothing behind?"""

from __future__ import annotations

import os

import pytest

from spotwarp_fs.core.errors import ExitCode
from tests.support.daemon import Fleet, RefusedToMount
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse]


def test_a_cache_inside_a_workspace_is_refused_before_anything_is_written_there(fleet: Fleet) -> None:
    first = fleet.node().start()
    second = fleet.node()
    inside = first.root / "cache"
    with pytest.raises(RefusedToMount, match="lies inside the FUSE mount") as caught:
        second.start_supervised("--cache-dir", str(inside))
    assert caught.value.code == ExitCode.CACHE
    assert os.listdir(first.root) == []
    with pytest.raises(RefusedToMount, match="inside the mountpoint") as caught:
        second.start_supervised("--cache-dir", str(second.root / "cache"))
    assert caught.value.code == ExitCode.CACHE
    assert os.listdir(second.root) == []


def test_a_file_in_place_of_the_cache_is_refused_with_advice(fleet: Fleet) -> None:
    node = fleet.node()
    node.cache.write_text("")
    with pytest.raises(RefusedToMount, match="choose another --cache-dir") as caught:
        node.start_supervised()
    assert caught.value.code == ExitCode.CACHE


def test_after_a_mistyped_store_the_right_one_may_be_named(fleet: Fleet) -> None:
    node = fleet.node()
    blocker = node.home / "blocker"
    blocker.write_text("")
    with pytest.raises(RefusedToMount):
        node.start_supervised("--store", f"file://{blocker}/below")
    node.start_supervised()
    (node.root / "f").write_text("x")
    assert node.umount() == 0


def test_an_older_state_of_a_workspace_that_does_not_exist_makes_none(fleet: Fleet) -> None:
    node = fleet.node()
    with pytest.raises(RefusedToMount, match="no workspace") as caught:
        node.start_supervised("--at", "12")
    assert caught.value.code == ExitCode.NOT_FOUND
    node.start_supervised()
    assert node.report["created"]
    assert node.umount() == 0
