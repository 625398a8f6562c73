"""Are old checkpoints given back to the disk only when the store has them, and come back to whoever opens them?"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory import leases
from spotwarp_fs.directory.dropping import Dropper
from spotwarp_fs.engine.session import Session
from spotwarp_fs.store.memory import MemoryStore
from tests.directory.test_restore import EVERYTHING, published
from tests.support.laid_out import (
    READ,
    Maker,
    MiB,
    Restored,
    all_filled,
    compare,
    filling,
    in_another_process,
    noise,
    opened,
    publish,
)
from tests.support.world import Node

OLD = b"run/checkpoint-1/model.safetensors"


async def filled(restored: Restored) -> Dropper:
    await restored.restorer.lay_out()
    async with filling(restored):
        await all_filled(restored)
    return Dropper(restored.restorer.site, restored.restorer.filler)


async def test_all_but_the_newest_are_given_back_and_come_when_they_are_opened(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        dropper = await filled(restored)
        given_back = await dropper.keep_newest(2)
        assert given_back.files == 1
        assert given_back.bytes >= 3 * MiB
        place = restored.root / os.fsdecode(OLD)
        status = place.lstat()
        assert status.st_size == 3 * MiB
        assert status.st_blocks * 512 <= 8192
        assert restored.seen(OLD) is Seen.ABSENT
        assert leases.absence(place) is not None
        assert (await dropper.keep_newest(2)).files == 0
        assert (await dropper.keep_newest(1)).files == 1
        async with filling(restored):
            assert await in_another_process(READ, place) == expected[OLD]
            await all_filled(restored)
        compare(restored, expected)


@pytest.mark.parametrize("how", ["write", "touch", "open", "mapped", "unpublished", "no room"])
async def test_what_is_in_use_or_not_published_stays(tmp_path: Path, how: str) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        dropper = await filled(restored)
        place, ino = restored.root / os.fsdecode(OLD), restored.inode(OLD)
        holder = -1
        view: mmap.mmap | None = None
        match how:
            case "write":
                with place.open("r+b") as file:
                    file.write(b"changed")
            case "touch":
                os.utime(place)
            case "open":
                holder = os.open(place, os.O_RDONLY)
            case "mapped":
                with place.open("rb") as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            case "unpublished":
                await Maker(restored.session).attributes(ino, mode=0o600)
            case "no room":
                restored.leases.room = 0
        assert await dropper.drop(ino) == 0
        if holder >= 0:
            os.close(holder)
        if view is not None:
            view.close()
        assert place.read_bytes()[100:] == expected[OLD][100:]
        assert leases.absence(place) is None
        assert restored.seen(OLD) is Seen.TRUSTED
        assert ino not in restored.restorer.filler.absent


async def test_a_drop_that_was_cut_short_is_set_right(tmp_path: Path) -> None:
    store, expected = await published()
    node = Node()
    async with opened(store, tmp_path / "w", node=node, settings=EVERYTHING) as restored:
        dropper = await filled(restored)
        ino = restored.inode(OLD)
        assert await dropper.drop(ino)
        os.ftruncate(restored.leases.held[ino], 0)  # killed between the two steps
        left = restored.leases.left_behind()
    async with opened(store, tmp_path / "w", node=node, leases=left, settings=EVERYTHING) as restored:
        await restored.restorer.take_up()
        assert (restored.root / os.fsdecode(OLD)).stat().st_size == 3 * MiB
        async with filling(restored):
            with trio.fail_after(30):
                assert await in_another_process(READ, restored.root / os.fsdecode(OLD)) == expected[OLD]
            await all_filled(restored)
        compare(restored, expected)


async def test_parts_of_one_checkpoint_are_not_older_ones(tmp_path: Path) -> None:
    async def make(session: Session) -> None:
        made = Maker(session)
        for step in (1, 2):
            for part in (1, 2, 3):
                await made.file(b"run/checkpoint-%d/model-%05d-of-00003.safetensors" % (step, part), noise(part, MiB))
                await made.file(b"run/checkpoint-%d/rank_%d.pt" % (step, part), noise(-part, MiB))
            await made.file(b"run/checkpoint-%d/trainer_state.json" % step, b"{}")
        for part in (1, 2, 3):
            await made.file(b"base/model-%05d-of-00003.safetensors" % part, noise(part, MiB))
        for step in (1, 2, 3):
            await made.file(b"single/step_%d.pt" % step, noise(step, MiB))

    store = MemoryStore()
    await publish(store, make)
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        dropper = await filled(restored)
        assert (await dropper.keep_newest(1)).files == 6 + 2
        absent = {path for path in restored.root.rglob("*.*") if path.is_file() and leases.absence(path)}
        older = [path for path in restored.root.glob("run/checkpoint-1/*") if path.name != "trainer_state.json"]
        assert absent == {*older, restored.root / "single/step_1.pt", restored.root / "single/step_2.pt"}
