"""Is a checkpoint directory in flight until all of it is in the map, whatever its files are called and how large?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.types import Inode
from spotwarp_fs.directory.reading import FileReader, Reading
from tests.directory.test_scanning import in_real_time, noise, settle
from tests.support.directories import directory, published_state, real_store
from tests.support.world import Node

pytestmark = pytest.mark.promise("P-05")
LARGE_BYTES = 9 << 20
"""More than what is read together with other files."""


class Gate:
    """Reads of one file wait here, as behind a slow link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: bytes) -> None:
        self.asked, self.open = trio.Event(), trio.Event()
        read = FileReader.read

        async def waiting(
            reader: FileReader, path: bytes, found: os.stat_result, ino: Inode | None, *, atomic: bool, tries: int = 0
        ) -> Reading:
            if path.endswith(b"/" + name):
                self.asked.set()
                await self.open.wait()
            return await read(reader, path, found, ino, atomic=atomic, tries=tries)

        monkeypatch.setattr(FileReader, "read", waiting)


def save(place: Path, seed: int) -> None:
    """Write a checkpoint as a program does: the large file first, the marker last."""
    place.mkdir(exist_ok=True)
    (place / "model.bin").write_bytes(noise(LARGE_BYTES, seed))
    (place / "trainer_state.json").write_text(f'{{"step": {seed}}}')


def test_a_marker_that_is_open_and_empty_vouches_for_nothing(tmp_path: Path) -> None:
    """Its name is no atomic one, so that what it holds is published as it grows."""
    place = tmp_path / "checkpoint-1"

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served:
            place.mkdir()
            (place / "model.bin").write_bytes(noise(5000))
            with open(place / "trainer_state.json", "wb", buffering=0) as file:
                for more in (b"", b'{"step"', b": 1}"):
                    file.write(more)
                    await served.sync()
                    assert (await published_state(store)).in_flight == [b"checkpoint-1"]
            await served.sync()
            state = await published_state(store)
        assert state.in_flight == []
        assert state.content[b"checkpoint-1/trainer_state.json"] == b'{"step": 1}'

    in_real_time(main)


def test_the_close_of_the_last_file_ends_it_at_the_next_scan(tmp_path: Path) -> None:
    """Nothing changes then but who has it open, and a file that shows no change is left alone for long."""
    place = tmp_path / "checkpoint-1"

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path, interval_s=0.2) as served:
            place.mkdir()
            with open(place / "trainer_state.json", "wb", buffering=0) as file:
                file.write(b"{}")
                settle()
                await served.sync()
                assert (await published_state(store)).in_flight == [b"checkpoint-1"]
            while (await published_state(store)).in_flight:
                await trio.sleep(0.1)

    in_real_time(main)


@pytest.mark.parametrize("first", [True, False], ids=["new", "saved over"])
def test_a_large_file_that_is_still_to_be_read_holds_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    gate = Gate(monkeypatch, b"model.bin")
    place = tmp_path / "checkpoint-1"

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), tmp_path) as served, trio.open_nursery() as nursery:
            if not first:
                gate.open.set()
                save(place, 1)
                await served.sync()
                gate.open, gate.asked = trio.Event(), trio.Event()
            save(place, 2)
            nursery.start_soon(served.scanner.sync)
            await gate.asked.wait()
            while b"checkpoint-1/trainer_state.json" not in served.known or served.scanner._cycling.locked():
                await trio.sleep(0.01)
            await served.session.streamer.barrier()
            state = await published_state(store)
            assert state.content[b"checkpoint-1/trainer_state.json"] == b'{"step": 2}'
            assert b"checkpoint-1" in state.in_flight
            gate.open.set()
            await served.sync()
            state = await published_state(store)
        assert state.in_flight == []
        assert state.content[b"checkpoint-1/model.bin"] == noise(LARGE_BYTES, 2)
        status = (place / "model.bin").stat()
        record = state.nodes[b"checkpoint-1/model.bin"].record
        assert (record.mtime_ns, record.mode) == (status.st_mtime_ns, status.st_mode)

    in_real_time(main)
