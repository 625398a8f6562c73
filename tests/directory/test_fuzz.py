"""Random programs change files beside a running scan: is everything that is published something that existed?

Each file carries its number and a version in its bytes; the program notes what existed. Then every published state
is read back: each content must be one that existed under such a name, an atomic file's one that was closed, and a file
that is only ever renamed may be missing from no state once it has been in one (C19 a).
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import trio

from spotwarp_fs.core.types import BLOCK_BYTES
from tests.support.directories import directory, published_state, real_store
from tests.support.world import Node

pytestmark = [pytest.mark.history("C19"), pytest.mark.promise("P-03"), pytest.mark.promise("P-05")]

RUN_S = 6.0
STEPS_MIN = 100
LOADED_S_MAX = 60.0
"""A machine that is busy with others has so much longer for as many steps."""
HEADER = 16
NUMBER = 8


class Program:
    """Changes files in a thread, as fast as it can."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.stop = threading.Event()
        self.hosted: dict[bytes, set[bytes]] = defaultdict(set)
        """By path: the numbers of the files that were there at some moment."""
        self.existed: dict[bytes, set[bytes]] = defaultdict(set)
        """By number: every content that the file had at some moment."""
        self.eternal: dict[int, bytes] = {}
        """Files that are never removed or rewritten: number, and the header of their content."""
        self.steps = 0
        self._prefixes: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        self._paths: dict[int, Path] = {}
        self._last = 0

    def run(self) -> None:
        for place in ("a", "b", "a/deep"):
            (self.root / place).mkdir(parents=True, exist_ok=True)
        actions = [self.make, self.overwrite, self.append, self.replace, self.rename, self.rename, self.remove,
                   self.save_atomic, self.make_eternal, self.swap_directories]  # fmt: skip
        while not self.stop.is_set():
            self.rng.choice(actions)()
            self.steps += 1
            self.stop.wait(self.rng.random() * 0.02)

    def _note(self, path: Path, data: bytes) -> None:
        self.existed[data[:NUMBER]].add(data)
        self.hosted[os.fsencode(path.relative_to(self.root))].add(data[:NUMBER])

    def _place(self, suffix: str = "") -> Path:
        return self.root / self.rng.choice(["", "a", "b", "a/deep"]) / f"f{self.rng.randrange(40)}{suffix}"

    def _data(self, number: int) -> bytes:
        size = self.rng.choice([0, 100, 5000, BLOCK_BYTES - 3, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 77])
        return b"%08d-%06d|" % (number, self.rng.randrange(10**6)) + self.rng.randbytes(size)

    def _free(self) -> Path | None:
        place = self._place()
        return None if place.exists() else place

    def _any(self) -> int | None:
        mutable = [number for number in self._paths if number not in self.eternal]
        return self.rng.choice(mutable) if mutable else None

    def make(self) -> None:
        path = self._free()
        if path is None:
            return
        self._last += 1
        data = self._data(self._last)
        self._note(path, b"")
        with open(path, "wb", buffering=0) as file:
            file.write(data)
        self._partly(path, data)
        self._paths[self._last] = path

    def _partly(self, path: Path, data: bytes, start: int = 0) -> None:
        """A write may be seen half done, page by page, from its beginning."""
        self._note(path, data)
        self._prefixes[data[:NUMBER]].append((start, data))

    def overwrite(self) -> None:
        """In place, as a database does: one page-sized write, which is there or is not."""
        number = self._any()
        if number is None:
            return
        path = self._paths[number]
        data = bytearray(path.read_bytes())
        offset = self.rng.randrange(max(1, len(data)))
        piece = self.rng.randbytes(min(512, 4096 - offset % 4096))
        data[offset : offset + len(piece)] = piece
        self._note(path, bytes(data))
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), piece, offset)

    def append(self) -> None:
        number = self._any()
        if number is None:
            return
        path = self._paths[number]
        before = path.read_bytes()
        piece = self.rng.randbytes(self.rng.choice([10, 300]))
        self._partly(path, before + piece, len(before))
        with open(path, "ab", buffering=0) as file:
            file.write(piece)

    def replace(self) -> None:
        """Write beside, rename over."""
        number = self._any()
        if number is None:
            return
        path = self._paths[number]
        draft = path.with_name(f".draft-{number}")
        data = self._data(number)
        self._note(draft, b"")
        self._partly(draft, data)
        draft.write_bytes(data)
        self._note(path, data)
        os.replace(draft, path)

    def rename(self) -> None:
        target = self._free()
        if target is None or not self._paths:
            return
        number = self.rng.choice(list(self._paths))
        path = self._paths[number]
        self._note(target, path.read_bytes())
        os.rename(path, target)
        self._paths[number] = target

    def remove(self) -> None:
        number = self._any()
        if number is not None:
            self._paths.pop(number).unlink()

    def save_atomic(self) -> None:
        """As torch.save does: in place, in pieces."""
        path = self.root / f"model{self.rng.randrange(3)}.pt"
        data = self._data(99_000_000)
        self._note(path, data)
        with open(path, "wb", buffering=0) as file:
            for at in range(0, len(data), BLOCK_BYTES // 2):
                file.write(data[at : at + BLOCK_BYTES // 2])
                self.stop.wait(0.01)

    def make_eternal(self) -> None:
        if len(self.eternal) >= 6:
            return
        path = self._free()
        if path is None:
            return
        self._last += 1
        data = self._data(self._last)
        draft = self.root / f".eternal-{self._last}"
        self._note(draft, b"")
        self._partly(draft, data)
        draft.write_bytes(data)
        self._note(path, data)
        os.rename(draft, path)
        self._paths[self._last] = path
        self.eternal[self._last] = data[:HEADER]

    def swap_directories(self) -> None:
        """Rename a directory with all that it holds, and back."""
        away = self.root / "b2"
        for path in self._paths.values():
            if path.parent == self.root / "b":
                self._note(away / path.name, path.read_bytes())
        os.rename(self.root / "b", away)
        self.stop.wait(0.01)
        os.rename(away, self.root / "b")

    def could_be(self, path: bytes, data: bytes) -> bool:
        """Tell whether such a file was ever at *path*, and ever held this; the name may be newer than the content."""
        number = data[:NUMBER]
        # A state is a scan: the name of a directory may be of another moment than that of a file in it.
        names = {path, path.replace(b"b2/", b"b/", 1)} if path.startswith(b"b2/") else {path}
        if not any(number in self.hosted[name] for name in names):
            return False
        if data in self.existed[number]:
            return True
        return any(len(data) >= start and whole.startswith(data) for start, whole in self._prefixes[number])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everything_published_existed(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "w"
    root.mkdir()
    program = Program(root, seed)
    thread = threading.Thread(target=program.run)

    async def main() -> None:
        store = real_store()
        async with directory(store, Node(), root, interval_s=0.1) as served:
            thread.start()
            try:
                await trio.sleep(RUN_S)
                with trio.move_on_after(LOADED_S_MAX):
                    while program.steps <= STEPS_MIN:
                        await trio.sleep(0.1)
            finally:
                program.stop.set()
                await trio.to_thread.run_sync(thread.join)
            last = await served.sync()
            said = list(served.session.workspace.reports)
        seen: set[int] = set()
        for number in range(2, last + 1):
            state = await published_state(store, number)
            for path, data in state.content.items():
                assert _existed(program, path, data), f"state {number}: {path!r} holds {data[:24]!r}, {len(data)} bytes"
            here = {data[:HEADER] for data in state.content.values()}
            lost = {each for each in seen if program.eternal[each] not in here}
            assert not lost, f"state {number} has none of the names of {lost}"
            seen = {each for each, header in program.eternal.items() if header in here}
        state = await published_state(store)
        assert state.content == {
            os.fsencode(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
        }
        assert program.steps > STEPS_MIN
        assert last > 4, said

    trio.run(main)
    shutil.rmtree(root)


def _existed(program: Program, path: bytes, data: bytes) -> bool:
    if path.endswith(b".pt"):
        # Empty: listed in flight, before it was closed for the first time.
        return data == b"" or data in program.existed[data[:NUMBER]]
    return program.could_be(path, data)
