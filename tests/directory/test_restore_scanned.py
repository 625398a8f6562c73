"""Does a scan beside the filling leave the state alone, and see what the user does to what was filled?"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.core.walked import Found
from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory.adopting import Arrival
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.reading import Reading
from spotwarp_fs.directory.scanner import Scanner
from spotwarp_fs.directory.watching import watch
from spotwarp_fs.store.memory import MemoryStore
from tests.directory.test_restore import EVERYTHING, published
from tests.support.laid_out import LIMITS, SETTINGS, MiB, Restored, all_filled, opened, publish
from tests.support.world import Node, start

BIG, TOOL = b"a/big.dat", b"b/tool"


@asynccontextmanager
async def scanned(restored: Restored) -> AsyncIterator[Scanner]:
    """Scan and fill while the body runs, as a start does."""
    session, root = restored.session, os.fsencode(restored.root)
    with session.workspace.kv.read() as view:
        known = KnownTree.load(view)
    async with watch(root, skip=lambda path: False) as watcher:
        scanner = Scanner(session, root, known, watcher, interval_s=0.05)
        filler = restored.restorer.filler
        filler.tree, filler.on_seen = scanner.tree, scanner.saw
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scanner.run)
            nursery.start_soon(filler.run)
            yield scanner
            nursery.cancel_scope.cancel()


def records(restored: Restored) -> dict[bytes, tuple[int, InodeRecord]]:
    """Every path with its inode; a directory's ctime is not compared, because names in it came and went."""
    with restored.session.workspace.kv.read() as view:
        found = {path: node for path, node in paths.subtree(view, paths.walk(view, b"").ino)}
    return {path: (node.ino, replace(node.record, ctime_ns=0)) for path, node in found.items()}


@pytest.mark.history("C19")
@pytest.mark.parametrize("long", [False, True])
async def test_filling_changes_nothing_and_later_changes_are_seen(tmp_path: Path, *, long: bool) -> None:
    store, expected = await published()
    limits = replace(LIMITS, sure_bytes=MiB // 2, arrival_s=0.0) if long else LIMITS
    async with opened(store, tmp_path / "w", limits=limits, settings=EVERYTHING) as restored:
        report = await restored.restorer.lay_out()
        assert bool(report.links) == long
        before = records(restored)
        async with scanned(restored) as scanner:
            await scanner.sync()
            assert records(restored) == before
            await all_filled(restored)
            await scanner.sync()
            assert records(restored) == before
            with open(restored.root / "b/tool", "r+b") as file:
                file.write(b"the same size")
            await scanner.sync()
            changed = {path for path, found in records(restored).items() if found != before[path]}
            assert changed == {TOOL}
            assert records(restored)[TOOL][0] == before[TOOL][0]
            await restored.session.streamer.barrier()
    async with start(store, Node(), settings=EVERYTHING) as session:
        from tests.support.laid_out import contents

        now = await contents(session)
    assert now[TOOL] == b"the same size" + expected[TOOL][13:]
    assert {path: data for path, data in now.items() if path != TOOL} == {
        path: data for path, data in expected.items() if path != TOOL
    }


@pytest.mark.history("C19")
async def test_what_is_absent_is_never_read(tmp_path: Path) -> None:
    store = MemoryStore()

    async def make(session: object) -> None:
        from tests.support.laid_out import Maker, noise

        await Maker(session).file(b"big", noise("big", 3 * MiB))  # type: ignore[arg-type]

    await publish(store, make)
    async with opened(store, tmp_path / "w") as restored:
        await restored.restorer.lay_out()
        before = records(restored)
        async with scanned(restored) as scanner:
            for _ in range(3):
                await scanner.sync()
            os.chmod(restored.root / "big", 0o600)
            await scanner.sync()
            ino, record = records(restored)[b"big"]
            assert (ino, record.size, record.mode & 0o777) == (before[b"big"][0], 3 * MiB, 0o600)
            assert not restored.restorer.filler.progress().waiting
        assert len(restored.restorer.filler.absent) == 1


@pytest.mark.history("C19")
async def test_a_file_that_is_filled_between_a_walk_and_its_adoption_keeps_its_time(tmp_path: Path) -> None:
    """What the walk saw was the time of the filling: it must not get into the state."""
    store, _ = await published()
    async with opened(store, tmp_path / "w", settings=SETTINGS) as restored:
        await restored.restorer.lay_out()
        before, filler = records(restored), restored.restorer.filler
        ino = before[BIG][0]
        async with scanned(restored) as scanner:
            await scanner.sync()
            os.pwrite(restored.leases.descriptor(ino), b"\0", 0)  # as a filling that is under way
            os.utime(restored.root / os.fsdecode(BIG), ns=(1, 2))
            look_at = scanner._look_at

            async def filled_meanwhile(found: list[Found], *readings: Mapping[bytes, Reading]) -> list[Arrival]:
                if any(each.path == BIG for each in found):
                    await filler.fill(ino)
                return await look_at(found, *readings)

            scanner._look_at = filled_meanwhile  # type: ignore[method-assign]
            await scanner.sync()
            assert not restored.seen(BIG) & Seen.ABSENT
            assert records(restored)[BIG] == before[BIG]
            assert os.stat(restored.root / os.fsdecode(BIG)).st_mtime_ns == before[BIG][1].mtime_ns


async def test_a_mode_that_is_changed_just_before_the_filling_is_published(tmp_path: Path) -> None:
    store, _ = await published()
    async with opened(store, tmp_path / "w", settings=SETTINGS) as restored:
        await restored.restorer.lay_out()
        before, place = records(restored), restored.root / os.fsdecode(BIG)
        os.chmod(place, 0o604)
        await restored.restorer.filler.fill(before[BIG][0])
        async with scanned(restored) as scanner:
            await scanner.sync()
            assert os.stat(place).st_mode & 0o777 == 0o604
            record = before[BIG][1]
            assert records(restored)[BIG][1] == replace(record, mode=record.mode & ~0o777 | 0o604)
