"""Does a restored directory hold the state, and does nobody ever read anything else?"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.witness import Seen
from spotwarp_fs.store.memory import MemoryStore
from tests.support.inprocess_leases import InProcessLeases
from tests.support.laid_out import (
    LIMITS,
    READ,
    SETTINGS,
    MiB,
    all_filled,
    compare,
    contents,
    filling,
    in_another_process,
    make_everything,
    opened,
    publish,
)
from tests.support.world import Node, start

EVERYTHING = replace(SETTINGS, hydrate_all=True)
BIG = [b"a/big.dat", b"run/checkpoint-1/model.safetensors", b"b/tool"]


async def published() -> tuple[MemoryStore, dict[bytes, bytes]]:
    store = MemoryStore()
    await publish(store, make_everything)
    async with start(store, Node(), settings=SETTINGS) as session:
        return store, await contents(session)


@pytest.mark.promise("P-11")
async def test_everything_that_a_tree_may_hold_survives(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", settings=EVERYTHING) as restored:
        report = await restored.restorer.lay_out()
        assert report.placeholders == 6
        assert report.filled == report.files - 6
        async with filling(restored):
            await all_filled(restored)
        compare(restored, expected)
        assert {restored.seen(path) for path in expected} == {Seen.TRUSTED}
        assert not report.left_out


@pytest.mark.promise("P-07")
async def test_laying_out_fetches_no_large_file(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w") as restored:
        before = restored.session.packs.bytes_fetched
        report = await restored.restorer.lay_out()
        assert restored.session.packs.bytes_fetched - before < 2 * MiB
        assert report.absent_bytes > 14 * MiB
        assert {restored.seen(path) for path in BIG} == {Seen.ABSENT}
        for path in BIG:
            status = os.lstat(restored.root / os.fsdecode(path))
            assert status.st_size == len(expected[path])
            assert status.st_blocks <= 8  # its attributes, where they do not fit into the inode


async def test_other_processes_read_the_right_bytes_while_files_are_filled(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w") as restored:
        await restored.restorer.lay_out()
        found: dict[bytes, bytes] = {}

        async def read(path: bytes) -> None:
            found[path] = await in_another_process(READ, os.path.join(os.fsencode(restored.root), path))

        async with filling(restored), trio.open_nursery() as nursery:
            for path in expected:
                if len(expected[path]) > MiB or path == b"b/tool":
                    nursery.start_soon(read, path)
        for path, data in found.items():
            assert hashlib.sha256(data).digest() == hashlib.sha256(expected[path]).digest(), path
        assert len(found) == 7


async def test_without_leases_everything_is_filled_before_the_command_starts(tmp_path: Path) -> None:
    store, expected = await published()
    async with opened(store, tmp_path / "w", why_no_leases="this filesystem has none") as restored:
        report = await restored.restorer.lay_out()
        assert not restored.restorer.filler.absent
        assert any("this filesystem has none" in line for line in report.said)
        compare(restored, expected)


@pytest.mark.parametrize(("room", "refuse"), [(2, False), (1000, True)])
async def test_what_gets_no_lease_is_filled_and_it_is_said(tmp_path: Path, room: int, *, refuse: bool) -> None:
    store, expected = await published()
    async with opened(
        store, tmp_path / "w", leases=InProcessLeases(room, refuse=refuse), settings=EVERYTHING
    ) as restored:
        report = await restored.restorer.lay_out()
        assert report.placeholders == (0 if refuse else 2)
        assert any("before the command starts" in line for line in report.said)
        async with filling(restored):
            await all_filled(restored)
        compare(restored, expected)


async def test_what_cannot_come_in_time_cannot_be_opened_until_it_is_here(tmp_path: Path) -> None:
    store, expected = await published()
    limits = replace(LIMITS, sure_bytes=2 * MiB, arrival_s=0.0)
    async with opened(store, tmp_path / "w", limits=limits) as restored:
        report = await restored.restorer.lay_out()
        newest, older = (restored.root / f"run/checkpoint-{step}/model.safetensors" for step in (3, 1))
        assert newest.read_bytes() == expected[b"run/checkpoint-3/model.safetensors"]
        big = restored.root / "a/big.dat"
        for place in (big, restored.root / "b/c/big too", older):
            assert place.is_symlink()
            for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_TRUNC):
                with pytest.raises(FileNotFoundError):
                    os.open(place, flags)
        assert report.links == 3
        async with filling(restored):
            await all_filled(restored, but=4)
            assert big.read_bytes() == expected[b"a/big.dat"]
            assert await restored.restorer.filler.fill(restored.inode(b"run/checkpoint-1/model.safetensors"))
            assert await restored.restorer.filler.fill(restored.inode(b"run/checkpoint-2/model.safetensors"))
            for ino in list(restored.restorer.filler.absent):
                await restored.restorer.filler.fill(ino)
        compare(restored, expected)
