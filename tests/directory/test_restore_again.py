"""Is a restore that was cut short, or meets a directory that is not empty, as good as one that began with nothing?"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.guard import Step, Wish, decide
from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory import identity, leases
from tests.directory.test_restore import EVERYTHING, published
from tests.support.inprocess_leases import InProcessLeases
from tests.support.laid_out import (
    OWNER,
    READ,
    MiB,
    Restored,
    all_filled,
    compare,
    filling,
    in_another_process,
    opened,
)
from tests.support.slow_store import SlowStore
from tests.support.world import Node

SLOW = {"latency_s": 0.004, "bytes_per_s": 40e6}


async def fill_everything(restored: Restored) -> None:
    async with filling(restored):
        await all_filled(restored)


def decision(restored: Restored, wish: Wish = Wish.PLAIN) -> Step:
    workspace = restored.session.workspace
    return decide(identity.situation(workspace, os.fsencode(restored.root), OWNER, number=1, cut_ns=0), wish)


@pytest.mark.promise("P-11")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keeper_dies", [False, True])
async def test_cut_short_anywhere_and_begun_again_it_is_the_same(
    tmp_path: Path, seed: int, *, keeper_dies: bool
) -> None:
    inner, expected = await published()
    store, node, leases = SlowStore(inner, **SLOW), Node(), InProcessLeases()
    rng = random.Random(seed)
    for _ in range(4):
        with trio.move_on_after(rng.uniform(0.0, 0.35)):
            async with opened(store, tmp_path / "w", node=node, leases=leases, settings=EVERYTHING) as restored:
                assert decision(restored, Wish.RESTORE) in (Step.LAY_OUT, Step.GO_ON)
                await restored.restorer.lay_out()
                await fill_everything(restored)
        if keeper_dies:
            leases.die()
        leases = leases.left_behind()
    async with opened(store, tmp_path / "w", node=node, leases=leases, settings=EVERYTHING) as restored:
        report = await restored.restorer.lay_out()
        await fill_everything(restored)
        compare(restored, expected)
        assert not report.damaged
        if not keeper_dies:
            assert not report.replaced
    leases.die()


async def test_nothing_that_is_complete_is_fetched_twice(tmp_path: Path) -> None:
    inner, expected = await published()
    store = SlowStore(inner, **SLOW)
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        await fill_everything(restored)
        (restored.root / "b/sparse").unlink()
        (restored.root / "lib/module3.py").write_bytes(b"changed")
        os.utime(restored.root / "lib/module4.py")
    store.forget()
    # Another node's cache knows no witness: the digests tell what is right.
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        report = await restored.restorer.lay_out()
        await fill_everything(restored)
        compare(restored, expected)
        assert report.replaced == ["lib/module3.py"]
        assert sum(get.length for get in store.data_gets) < 2 * MiB
        assert report.kept == report.files - 2


async def test_what_differs_is_moved_aside_and_named(tmp_path: Path) -> None:
    store, expected = await published()
    root = tmp_path / "w"
    (root / "a/small.txt").mkdir(parents=True)
    (root / "a/small.txt/inside").write_text("a directory where a file will be")
    (root / "b").write_text("a file where a directory will be")
    (root / "link").symlink_to("elsewhere")
    (root / "fifo").write_text("no fifo")
    (root / "old run/deep").mkdir(parents=True)
    (root / "old run/deep/weights.bin").write_bytes(b"not in the state")
    async with opened(store, root, settings=EVERYTHING) as restored:
        assert decision(restored, Wish.RESTORE) is Step.LAY_OUT
        report = await restored.restorer.lay_out()
        await fill_everything(restored)
        compare(restored, expected)
        assert sorted(report.replaced) == ["a/small.txt", "b", "fifo", "link", "old run"]
        kept = Path(report.replaced_in)
        assert (kept / "a/small.txt/inside").read_text() == "a directory where a file will be"
        assert (kept / "old run/deep/weights.bin").read_bytes() == b"not in the state"
        assert os.readlink(kept / "link") == "elsewhere"
        assert root / ".spotwarp/replaced" in kept.parents


async def test_a_local_hard_link_that_the_state_does_not_have_is_undone(tmp_path: Path) -> None:
    store, expected = await published()
    root = tmp_path / "w"
    async with opened(store, root, settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        await fill_everything(restored)
        tool = (root / "b/tool").read_bytes()
        (root / "b/tool").unlink()
        (root / "a/small.txt").unlink()
        os.link(root / "a/big.dat", root / "b/tool")
        (root / "a/small.txt").write_bytes(expected[b"a/small.txt"])
        assert tool == expected[b"b/tool"]
    async with opened(store, root, settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        await fill_everything(restored)
        compare(restored, expected)


@pytest.mark.promise("P-18")
async def test_a_killed_restore_is_never_taken_for_a_directory_with_deletions(tmp_path: Path) -> None:
    inner, expected = await published()
    store, node = SlowStore(inner, latency_s=0.05), Node()
    root = tmp_path / "w"
    async with opened(store, root, node=node) as restored, trio.open_nursery() as nursery:
        store.latency_s = 60.0  # nothing that is fetched arrives before the kill
        nursery.start_soon(restored.restorer.lay_out)
        while not (root / ".spotwarp/identity").exists():
            await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert not (root / "lib/module3.py").exists()
    restored.leases.die()
    store.latency_s = 0.02
    for known in (node, Node()):
        async with opened(store, root, node=known) as restored:
            for wish in (Wish.PLAIN, Wish.RESTORE):
                assert decision(restored, wish) is Step.LAY_OUT
    async with opened(store, root, node=known, settings=EVERYTHING) as restored:
        await restored.restorer.lay_out()
        assert decision(restored) is Step.GO_ON
        await fill_everything(restored)
        compare(restored, expected)


@pytest.mark.history("L5")
async def test_the_next_daemon_goes_on_with_what_the_keeper_held(tmp_path: Path) -> None:
    store, expected = await published()
    node, root = Node(), tmp_path / "w"
    async with opened(store, root, node=node) as restored:
        await restored.restorer.lay_out()
        (root / "notes").write_text("made here, not published yet")
        (root / "lib/module3.py").unlink()
        left = restored.leases.left_behind()
    async with trio.open_nursery() as nursery:
        found: list[bytes] = []

        async def read() -> None:
            found.append(await in_another_process(READ, root / "a/big.dat"))

        nursery.start_soon(read)  # while no daemon is there
        await trio.sleep(0.3)
        assert not found
        async with opened(store, root, node=node, leases=left) as restored:
            assert decision(restored) is Step.GO_ON
            report = await restored.restorer.take_up()
            assert report.kept == len(restored.restorer.filler.absent) == 6
            async with filling(restored):
                while not found:
                    await trio.sleep(0.01)
            assert found == [expected[b"a/big.dat"]]
            assert (root / "notes").exists()
            assert not (root / "lib/module3.py").exists()
            restored.leases.die()


@pytest.mark.history("L5")
async def test_what_lost_its_lease_is_held_again_or_cannot_be_opened(tmp_path: Path) -> None:
    store, expected = await published()
    node, root = Node(), tmp_path / "w"
    async with opened(store, root, node=node) as restored:
        await restored.restorer.lay_out()
        restored.leases.die()
    holder = os.open(root / "b/tool", os.O_RDONLY)  # nobody may hold a lease on it now
    written = os.open(root / "b/sparse", os.O_WRONLY)
    os.pwrite(written, b"the user's", 5)
    os.close(written)
    async with opened(store, root, node=node, leases=InProcessLeases()) as restored:
        await restored.restorer.take_up()
        os.close(holder)
        assert (root / "b/tool").read_bytes() == expected[b"b/tool"]
        assert restored.seen(b"b/tool") is Seen.TRUSTED
        with open(root / "b/sparse", "rb") as file:
            assert file.read(15) == b"\0" * 5 + b"the user's"
        assert not leases.absence(os.fsencode(root / "b/sparse"))
        async with filling(restored):
            assert await in_another_process(READ, root / "a/big.dat") == expected[b"a/big.dat"]
        restored.leases.die()


async def test_a_copied_placeholder_is_no_placeholder(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w") as restored:
        await restored.restorer.lay_out()
        marks = [os.getxattr(restored.root / "b/tool", "user.spotwarp.absent")]
        restored.leases.die()
    shutil.rmtree(tmp_path / "w")
    (tmp_path / "w/b").mkdir(parents=True)
    copy = tmp_path / "w/b/tool"
    copy.write_bytes(b"\0" * len(expected[b"b/tool"]))
    os.setxattr(copy, "user.spotwarp.absent", marks[0])
    if not leases.absence(os.fsencode(copy)):  # or the copy got the inode number that was free just now
        async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
            report = await restored.restorer.lay_out()
            await fill_everything(restored)
            assert report.replaced == ["b/tool"]
            compare(restored, expected)
