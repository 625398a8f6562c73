"""Does the watcher name every directory in which something happened, and say so when it cannot?"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from spotwarp_fs.directory import inotify, watching
from spotwarp_fs.directory.watching import Hints, Watcher, watch
from tests.support.plans import Follower, differences

DEADLINE_S = 60
MAX_QUEUED = Path("/proc/sys/fs/inotify/max_queued_events")


def nothing(_path: bytes) -> bool:
    return False


@asynccontextmanager
async def settled(root: Path, skip: Callable[[bytes], bool] = nothing) -> AsyncIterator[Watcher]:
    """A watcher that has all its watches, from which everything was taken."""
    async with watch(os.fsencode(root), skip=skip) as watcher:
        await until_quiet(watcher)
        yield watcher


async def until_quiet(watcher: Watcher) -> None:
    with trio.fail_after(DEADLINE_S):
        while watcher.take().whole:
            await trio.sleep(0.01)


async def test_a_start_asks_for_a_complete_walk_until_all_watches_are_there(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    async with watch(os.fsencode(tmp_path), skip=nothing) as watcher:
        assert watcher.take().whole
        await until_quiet(watcher)
        assert watcher.state == "intact"
        assert (watcher.watched, watcher.unwatched) == (3, 0)
        assert watcher.take() == Hints(frozenset(), False, "", None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: (root / "a" / "new").write_text(""), {b"a"}),
        (lambda root: (root / "a" / "b" / "file").open("a").write("more"), {b"a/b"}),
        (lambda root: (root / "a" / "b" / "file").chmod(0o600), {b"a/b"}),
        (lambda root: (root / "a" / "b" / "file").unlink(), {b"a/b"}),
        (lambda root: (root / "a" / "b" / "file").rename(root / "c" / "file"), {b"a/b", b"c"}),
        (lambda root: os.link(root / "a" / "b" / "file", root / "c" / "link"), {b"c"}),
        (lambda root: os.utime(root / "a" / "b" / "file", (1, 1)), {b"a/b"}),
        (lambda root: (root / "c").chmod(0o700), {b"", b"c"}),
        (lambda root: shutil.rmtree(root / "a" / "b"), {b"a", b"a/b"}),
        (lambda root: (root / "a").rename(root / "c" / "a"), {b"", b"c", b"c/a", b"c/a/b"}),
        (lambda root: (root / "x" / "y").mkdir(parents=True), {b"", b"x", b"x/y"}),
        (lambda root: (root / "a" / "b" / "file").read_text(), set()),
        (lambda root: (root / ".spotwarp" / "note").write_text(""), set()),
        (lambda root: (root / ".spotwarp" / "inner").mkdir(), set()),
        (lambda root: (root / "scratch" / "note").write_text(""), set()),
    ],
)
async def test_what_happens_names_its_directory(
    tmp_path: Path, change: Callable[[Path], object], named: set[bytes]
) -> None:
    for name in ("a/b", "c", ".spotwarp", "scratch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("content")
    async with settled(tmp_path, lambda path: path == b"scratch") as watcher:
        begun = trio.current_time()
        change(tmp_path)
        hints = watcher.take()
        assert not hints.whole
        assert hints.directories == named
        assert (hints.since_s is not None) == bool(named)
        assert hints.since_s is None or begun <= hints.since_s <= trio.current_time()
        assert watcher.take().directories == frozenset()


async def test_waiting_ends_when_something_happens(tmp_path: Path) -> None:
    async with settled(tmp_path) as watcher, trio.open_nursery() as nursery:
        with trio.move_on_after(0.05):
            await watcher.changed()
            raise AssertionError("nothing has happened yet")
        nursery.start_soon(trio.to_thread.run_sync, (tmp_path / "file").touch)
        with trio.fail_after(DEADLINE_S):
            await watcher.changed()
        await watcher.changed()
        assert watcher.take().directories == {b""}


async def test_what_is_made_in_a_new_directory_before_its_watch_is_not_missed(tmp_path: Path) -> None:
    async with settled(tmp_path) as watcher:
        (tmp_path / "a" / "b" / "c").mkdir(parents=True)
        (tmp_path / "a" / "b" / "c" / "file").write_text("")
        assert watcher.take().directories == {b"", b"a", b"a/b", b"a/b/c"}
        (tmp_path / "a" / "b" / "c" / "file").write_text("later")
        assert watcher.take().directories == {b"a/b/c"}


async def test_a_directory_keeps_being_watched_wherever_it_goes(tmp_path: Path) -> None:
    (tmp_path / "inside" / "one" / "deep").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "inside"
    async with settled(root) as watcher:
        (root / "one").rename(root / "two")
        (root / "two" / "deep" / "early").write_text("")
        (root / "two").rename(root / "three")
        assert {b"", b"three", b"three/deep"} <= watcher.take().directories
        (root / "three" / "deep" / "file").write_text("")
        assert watcher.take().directories == {b"three/deep"}
        (root / "three").rename(outside / "three")
        watcher.take()
        assert watcher.watched == 1
        (outside / "three" / "deep" / "file").write_text("elsewhere")
        assert watcher.take().directories == frozenset()
        (outside / "three").rename(root / "back")
        assert watcher.take().directories == {b"", b"back", b"back/deep"}
        (root / "back" / "deep" / "file").write_text("again")
        assert watcher.take().directories == {b"back/deep"}
        shutil.rmtree(root / "back")
        watcher.take()
        assert watcher.watched == 1
        (root / "a").mkdir()
        (root / "b").mkdir()
        watcher.take()
        os.rename(root / "a", root / "b")
        watcher.take()
        (root / "b" / "file").write_text("")
        assert watcher.take().directories == {b"b"}
        assert watcher.watched == 2


async def test_an_overflow_asks_for_a_complete_walk_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    one, other = tmp_path / "a" / "one", tmp_path / "a" / "other"
    one.write_text("")
    async with settled(tmp_path) as watcher:
        # Nobody reads while this runs: the event loop stands still. Two events each, never alike.
        for _ in range(int(MAX_QUEUED.read_text()) // 2 + 100):
            one.rename(other)
            one, other = other, one
        (tmp_path / "a" / "unseen").mkdir()
        hints = watcher.take()
        assert hints.whole
        assert "ran over" in hints.reason
        await until_quiet(watcher)
        assert watcher.state == "intact"
        (tmp_path / "a" / "unseen" / "file").write_text("")
        assert watcher.take().directories == {b"a/unseen"}


LIMITED = """
import os, sys, trio
from pathlib import Path
from spotwarp_fs.directory.watching import watch
assert os.readlink("/proc/self/ns/user") != sys.argv[2], "the limit of the whole machine is not ours to change"
Path("/proc/sys/user/max_inotify_watches").write_text("5")
root = Path(sys.argv[1])
async def main():
    async with watch(os.fsencode(root), skip=lambda path: False) as watcher:
        with trio.fail_after(60):
            while "so far" in watcher.state:
                await trio.sleep(0.01)
            watcher.take()
        print(watcher.state)
        print(watcher.take().whole, watcher.take().whole)
trio.run(main)
"""


def test_a_low_limit_of_watches_is_said_and_everything_is_walked(tmp_path: Path) -> None:
    """The limit is the user namespace's own, so that nobody else on this machine meets it."""
    for number in range(9):
        (tmp_path / str(number)).mkdir()
    tmp_path.chmod(0o755)
    ours = os.readlink("/proc/self/ns/user")
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", LIMITED, str(tmp_path), ours]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    if ran.returncode != 0 and ("unshare" in ran.stderr or "PermissionError" in ran.stderr):
        pytest.skip(f"no user namespace with a limit of its own: {ran.stderr.strip().splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "partial: 5 directories not watched, raise fs.inotify.max_user_watches from 5",
        "True True",
    ]


async def test_at_the_limit_everything_is_walked_and_the_limit_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    added, limit = inotify.add_watch, [2]

    def few(queue: int, path: bytes, mask: int) -> int:
        if limit[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        limit[0] -= 1
        return added(queue, path, mask)

    monkeypatch.setattr(inotify, "add_watch", few)
    monkeypatch.setattr(watching, "RETRY_S", 0.0)
    async with watch(os.fsencode(tmp_path), skip=nothing) as watcher:
        with trio.fail_after(DEADLINE_S):
            while watcher.unwatched != 3:
                await trio.sleep(0.01)
        assert watcher.state.startswith("partial: 3 directories not watched, raise fs.inotify.max_user_watches from ")
        for _ in range(2):
            with trio.fail_after(DEADLINE_S):
                while watcher.unwatched != 3:
                    await trio.sleep(0.01)
            hints = watcher.take()
            assert hints.whole
            assert hints.reason.startswith(("partial", "watches were added"))
        limit[0] = 100
        await until_quiet(watcher)
        assert (watcher.state, watcher.watched) == ("intact", 5)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS])
async def test_without_inotify_every_take_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(inotify, "create", refuse)
    async with watch(os.fsencode(tmp_path), skip=nothing) as watcher:
        assert watcher.state == f"off: inotify cannot be used: {os.strerror(number)}"
        (tmp_path / "file").touch()
        assert watcher.take().whole
        assert watcher.take().whole


async def test_a_root_that_goes_away_turns_it_off(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    async with settled(root) as watcher:
        root.rename(tmp_path / "renamed")
        with trio.fail_after(DEADLINE_S):
            await watcher.changed()
        hints = watcher.take()
        assert hints.whole
        assert watcher.state.startswith("off: the watched directory was moved")


async def test_scans_by_hints_alone_follow_a_directory(tmp_path: Path) -> None:
    """The watcher, the walk and the plan together, while a process is at work; then nothing is left to find."""
    (tmp_path / "a").mkdir()
    work = r"""
import os, random, shutil, sys
os.chdir(sys.argv[1])
random.seed(7)
names = ["a", "b", "a/c", "b/c", "a/c/d", "b/c/d", "e"]
for step in range(3000):
    one, other = random.choice(names), random.choice(names)
    try:
        match step % 6:
            case 0: os.mkdir(one)
            case 1 | 2: open(one + "/file%d" % (step % 5), "w").write(str(step))
            case 3: os.rename(one, other)
            case 4: os.rename(one + "/file1", other + "/file2")
            case 5 if step % 30 == 5: shutil.rmtree(one)
    except OSError:
        pass
"""
    follower = Follower(os.fsencode(tmp_path))
    async with settled(tmp_path) as watcher:
        follower.look()
        async with trio.open_nursery() as nursery:
            process = await nursery.start(
                lambda task_status: trio.run_process(
                    [sys.executable, "-c", work, os.fspath(tmp_path)], task_status=task_status
                )
            )
            with trio.fail_after(DEADLINE_S):
                while process.returncode is None:
                    hints = watcher.take()
                    follower.look(None if hints.whole else sorted(hints.directories))
                    await trio.sleep(0)
        hints = watcher.take()
        follower.look(None if hints.whole else sorted(hints.directories))
        # What vanished needs complete walks; nothing else may.
        real = {path for path in follower.known if os.path.lexists(os.fsencode(tmp_path) + b"/" + path)}
        assert {os.fsencode(str(path.relative_to(tmp_path))) for path in tmp_path.rglob("*")} <= real
        for _ in range(4):
            follower.look()
        assert differences(follower) == []
