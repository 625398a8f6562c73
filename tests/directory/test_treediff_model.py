"""Does the known tree follow a real directory, whatever happens there, and never lose a file that stays?"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotwarp_fs.directory import walking
from spotwarp_fs.directory.walking import walk
from tests.support.plans import Follower, differences

WITHHELD_WALKS_MAX = 3
AT_FDCWD, RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)

paths = st.sampled_from([b"a", b"b", b"c", b"a/a", b"a/b", b"b/a", b"b/b", b"a/b/a", b"a/b/c", b"c/a/a", b"c/b"])
operations = st.one_of(
    st.tuples(st.sampled_from(["write", "write", "mkdir", "mkdir", "symlink", "remove", "save", "append"]), paths),
    st.tuples(st.just("chmod"), paths),
    st.tuples(st.sampled_from(["move", "move", "move", "exchange", "link"]), paths, paths),
)  # fmt: skip
BEGINNING = [
    ("mkdir", b"a"), ("mkdir", b"a/b"), ("mkdir", b"b"), ("write", b"a/a"), ("write", b"a/b/a"), ("write", b"a/b/c"),
    ("write", b"b/a"), ("write", b"c"), ("link", b"c", b"b/b"),
]  # fmt: skip
events = st.one_of(
    operations,
    operations,
    operations,
    st.tuples(st.sampled_from(["walk", "hints"])),
    st.tuples(st.just("some hints"), st.integers(0, 15)),
    st.tuples(st.just("busy walk"), st.lists(st.tuples(st.integers(1, 8), operations), max_size=4)),
)


@dataclass
class World:
    """A directory in which programs are at work, and who follows it."""

    root: bytes
    follower: Follower
    touched: set[bytes] = field(default_factory=set)
    fresh: count[int] = field(default_factory=count)

    def perform(self, action: str, *places: bytes) -> None:
        full = [self.root + b"/" + place for place in places]
        try:
            getattr(self, action)(*full)
        except OSError:
            return
        self.touched.update(place.rpartition(b"/")[0] for place in places)

    def _text(self) -> bytes:
        return b"content %d" % next(self.fresh)

    def write(self, path: bytes) -> None:
        with open(path, "wb") as file:
            file.write(self._text())

    def append(self, path: bytes) -> None:
        with open(path, "r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(self._text())

    def save(self, path: bytes) -> None:
        if not os.path.isfile(path):
            raise FileNotFoundError
        self.write(path + b".tmp")
        os.replace(path + b".tmp", path)

    def mkdir(self, path: bytes) -> None:
        os.mkdir(path)

    def symlink(self, path: bytes) -> None:
        os.symlink(b"/target", path)

    def chmod(self, path: bytes) -> None:
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) ^ 0o20, follow_symlinks=True)

    def remove(self, path: bytes) -> None:
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)

    def move(self, source: bytes, target: bytes) -> None:
        os.rename(source, target)

    def exchange(self, one: bytes, other: bytes) -> None:
        if _libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), "renameat2")

    def link(self, source: bytes, target: bytes) -> None:
        os.link(source, target, follow_symlinks=False)

    def contents(self) -> set[bytes]:
        return {
            path.read_bytes()
            for path in Path(os.fsdecode(self.root)).rglob("*")
            if path.is_file() and not path.is_symlink()
        }

    def walk_quietly(self, directories: list[bytes] | None) -> None:
        """Nothing happens meanwhile: every content that was known and is still there is known afterwards."""
        stays = self.follower.contents() & self.contents()
        self.touched.clear()
        self.follower.look(directories)
        lost = stays - self.follower.contents()
        assert not lost, lost

    def walk_partly(self, choice: int) -> None:
        """The watcher was late: only some of the directories in which something happened are looked at."""
        chosen = [path for number, path in enumerate(sorted(self.touched)) if choice >> number % 4 & 1]
        stays = self.follower.contents() & self.contents()
        before = {content: self.follower.names_of(content) for content in stays}
        self.touched.difference_update(chosen)
        self.follower.look(chosen)
        self._check(before)

    def walk_busily(self, meanwhile: list[tuple[int, tuple[str, ...]]]) -> None:
        """Operations happen between the walk's listings and looks."""
        moments = count(1)
        listing = walking._names
        stays = self.follower.contents() & self.contents()
        before = {content: self.follower.names_of(content) for content in stays}
        self.touched.clear()

        def pass_moment() -> None:
            now = next(moments)
            for moment, operation in meanwhile:
                if moment == now:
                    self.perform(*operation)  # type: ignore[arg-type]

        def skip(_path: bytes) -> bool:
            pass_moment()
            return False

        def names(path: bytes, descriptor: int) -> list[bytes]:
            found = listing(path, descriptor)
            pass_moment()
            return found

        with mock.patch.object(walking, "_names", names):
            walked = walk(self.root, self.follower.known, skip=skip)
        self.follower.take(walked)
        self._check(before)

    def _check(self, before: dict[bytes, set[bytes]]) -> None:
        """Only what had its name taken by another file, and went where nobody looked any more, may wait."""
        lost = before.keys() & self.contents() - self.follower.contents()
        untold = {content for content in lost if not self._was_replaced(before[content])}
        assert not untold, untold

    def _was_replaced(self, names: set[bytes]) -> bool:
        return any(os.path.lexists(self.root + b"/" + name) for name in names)


@pytest.mark.history("C19")
@pytest.mark.timeout(300)
@settings(max_examples=250, deadline=None)
@given(st.lists(events, min_size=6, max_size=30))
def test_the_tree_follows(program: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        world = World(os.fsencode(place), Follower(os.fsencode(place)))
        for action, *places in BEGINNING:
            world.perform(action, *places)
        for action, *arguments in [("walk",), *program]:
            match action:
                case "walk":
                    world.walk_quietly(None)
                case "hints":
                    world.walk_quietly(sorted(world.touched))
                case "some hints":
                    world.walk_partly(int(str(arguments[0])))
                case "busy walk":
                    world.walk_busily(arguments[0])  # type: ignore[arg-type]
                case _:
                    world.perform(str(action), *arguments)  # type: ignore[arg-type]
        for _ in range(2):
            last = world.follower.look()
        # What has the name of a thing of another type waits until that one is confirmed to be gone.
        for _ in range(WITHHELD_WALKS_MAX):
            if last.withheld:
                last = world.follower.look()
        assert differences(world.follower) == []
        settled = world.follower.look()
        assert (settled.steps, settled.appeared, settled.links, settled.changed) == ([], [], [], [])
        assert (settled.removals, settled.pending, settled.withheld) == ([], {}, [])
