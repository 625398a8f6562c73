"""Does a scan beside the filling leave the state alone, and see what the user does to what was filled?"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core import paths
from spotwarp_fs.core.records import InodeRecord
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.scanner import Scanner
from spotwarp_fs.directory.watching import watch
from spotwarp_fs.store.memory import MemoryStore
from tests.directory.test_restore import EVERYTHING, published
from tests.support.laid_out import LIMITS, MiB, Restored, all_filled, opened, publish
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
