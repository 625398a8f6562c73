"""An error that nobody foresaw, in a task of the daemon: the mount, and every file open in it, must outlive it."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from spotwarp_fs.engine.budget import Budget
from spotwarp_fs.engine.collect import Collector
from spotwarp_fs.engine.control import ControlServer
from spotwarp_fs.engine.early import EarlyUpload
from spotwarp_fs.engine.packstore import PackStore
from spotwarp_fs.engine.rebase import Rebaser
from spotwarp_fs.engine.seal import Sealer
from spotwarp_fs.engine.stream import Streamer
from tests.support.virtual import NEW, OLD, content, create, in_virtual_time, published
from tests.support.world import FAST, Node, new_store, start

PLACES: list[tuple[Any, str]] = [
    (Budget, "_excess"),
    (Collector, "collect"),
    (PackStore, "upload"),
    (Rebaser, "merge"),
    (Sealer, "_known"),
    (EarlyUpload, "_cold"),
    (Streamer, "_judge"),
    (Streamer, "_manifest"),
]


@pytest.mark.promise("P-09")
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda part: getattr(part, "__name__", part))
def test_an_unforeseen_error_in_a_task_ends_no_mount(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A task meets an error that its author did not think of. 2. A daemon that ends of it takes every descriptor,
    working directory and mapping of the job along. 3. It must say so, and try again."""
    original, met = getattr(owner, name), [0]

    def fails_once(*arguments: Any, **options: Any) -> Any:
        met[0] += 1
        if met[0] == 1:
            raise ValueError("nobody thought of this")
        return original(*arguments, **options)

    settings = replace(
        FAST, cold_after_s=0.0, collect_first_s=5.0, rebase_manifests_max=1, cache_bytes_max=20 << 20, retry_max_s=2.0
    )

    async def main() -> None:
        store = new_store()
        async with start(store, Node(), settings=settings) as session:
            monkeypatch.setattr(owner, name, fails_once)
            handle, _ = await create(session, b"f", OLD)
            await trio.sleep(30)
            for number in range(12):
                await create(session, b"%d" % number, bytes([number]) * len(OLD))
                await trio.sleep(3)
            await session.filesystem.write(handle, 0, NEW)
            with trio.fail_after(60):
                await session.streamer.barrier()
            assert met[0] > 1
            assert any("nobody thought of this" in report for report in session.workspace.reports)
            assert await content(session, b"f") == NEW
        assert await published(store, b"f") == NEW

    in_virtual_time(main)


async def test_a_daemon_that_is_out_of_descriptors_for_a_moment_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The process has no descriptor left. 2. `status` connects: `accept` fails. 3. The mount must not end of it."""

    async def status(request: Any) -> dict[str, Any]:
        return {"fine": True}

    path, left = str(tmp_path / "sock"), [2]
    server = ControlServer(path, {"status": status}, dict)
    kind = type(trio.socket.socket(trio.socket.AF_UNIX))
    accept = kind.accept

    async def no_descriptor(listener: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listener)

    monkeypatch.setattr(kind, "accept", no_descriptor)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        stream = await trio.open_unix_socket(path)
        await stream.send_all(b'{"op": "status"}\n')
        with trio.fail_after(30):
            answer = await stream.receive_some(1000)
        assert json.loads(answer) == {"ok": True, "result": {"fine": True}}
        nursery.cancel_scope.cancel()
