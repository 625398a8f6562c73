"""Does a walk see exactly what changed, whatever lies in its way?"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.walked import Walked
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory import walking
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.opening import OPEN_PATH_BYTES
from spotwarp_fs.directory.walking import walk
from spotwarp_fs.fuse import syscalls
from tests.support.privileges import as_nobody


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


def nothing(_path: bytes) -> bool:
    return False


def look(root: Path, known: KnownTree, directories: list[bytes] | None = None) -> Walked:
    return walk(os.fsencode(root), known, skip=nothing, directories=directories)


def learn(root: Path, skip: Callable[[bytes], bool] = nothing) -> KnownTree:
    """Know everything as it is now."""
    known = KnownTree()
    adopt(known, walk(os.fsencode(root), known, skip=skip))
    return known


def adopt(known: KnownTree, walked: Walked) -> None:
    for found in walked.found:
        entry = known.get(found.path)
        ino = entry.ino if entry is not None else Inode(len(known) + 1000)
        regular = stat.S_ISREG(found.status.st_mode)
        known.put(found.path, ino, Witness.of(found.status, Seen.TRUSTED if regular else Seen.NOTHING))


def paths(walked: Walked) -> list[bytes]:
    return [found.path for found in walked.found]


def test_everything_is_found_once_parents_first_and_nothing_twice(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("x")
    (root / "a" / "link").symlink_to("/etc")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(root / "socket"))
    strange = os.fsencode(root) + b"/a/\xff\xfe\n"
    os.close(os.open(strange, os.O_CREAT | os.O_WRONLY))
    longest = "n" * 255
    (root / longest).write_text("")
    (root / ".spotwarp").mkdir()
    (root / ".spotwarp" / "identity").write_text("")
    known = KnownTree()
    walked = look(root, known)
    found = paths(walked)
    assert sorted(found) == sorted(
        [b"", b"a", b"a/b", b"a/b/file", b"a/link", b"fifo", b"socket", b"a/\xff\xfe\n", longest.encode()]
    )
    assert found.index(b"a") < found.index(b"a/b") < found.index(b"a/b/file")
    assert (walked.complete, walked.vanished, walked.unreadable, walked.other_filesystems) == (True, [], [], [])
    assert len(known) == 1
    adopt(known, walked)
    assert look(root, known) == Walked()


def test_what_is_not_settled_is_found_again(root: Path) -> None:
    for name in ("unread", "trusted", "absent", "filled", "no witness"):
        (root / name).write_text("12345")
    known = learn(root)
    for name, seen in ((b"unread", Seen.NOTHING), (b"absent", Seen.ABSENT), (b"filled", Seen.ABSENT)):
        witness = Witness.of(os.lstat(os.fsencode(root) + b"/" + name), seen)
        known.put(name, Inode(hash(name) & 0xFFFF), witness)
    known.put(b"no witness", Inode(77_777), None, is_directory=False)
    (root / "filled").write_text("other")
    assert sorted(paths(look(root, known))) == [b"filled", b"no witness", b"unread"]


KINDS = ["file", "directory", "symlink"]
CHANGES = [(one, other) for one in KINDS for other in [*KINDS, "nothing", "the same kind"] if one != other]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_thing_of_another_kind_has_vanished_and_is_new(root: Path, before: str, after: str) -> None:
    def make(kind: str) -> None:
        thing = root / "thing"
        if kind == "file":
            thing.write_text("x")
        elif kind == "directory":
            (thing / "below").mkdir(parents=True)
        elif kind == "symlink":
            thing.symlink_to("target")

    make(before)
    known = learn(root)
    (root / "thing").rename(root.parent / "aside")
    make(before if after == "the same kind" else after)
    walked = look(root, known)
    stays = after == "the same kind" and before != "directory"
    assert walked.vanished == ([] if stays else [b"thing"])
    now_a_directory = after == "directory" or (before == "directory" and after == "the same kind")
    new = [] if after == "nothing" else [b"thing", b"thing/below"] if now_a_directory else [b"thing"]
    assert paths(walked) == [b"", *new]


def test_only_the_topmost_of_what_vanished_is_named(root: Path) -> None:
    (root / "a" / "b" / "c").mkdir(parents=True)
    (root / "stays").mkdir()
    known = learn(root)
    (root / "a").rename(root.parent / "gone")
    assert look(root, known).vanished == [b"a"]
    assert look(root, known, [b"a/b/c", b"a/b"]).vanished == [b"a"]


def test_only_the_asked_directories_are_looked_at_and_what_is_new_in_them(root: Path) -> None:
    (root / "asked" / "inner").mkdir(parents=True)
    (root / "other").mkdir()
    known = learn(root)
    (root / "asked" / "inner" / "unseen").write_text("")
    (root / "asked" / "new" / "newer").mkdir(parents=True)
    (root / "asked" / "new" / "newer" / "file").write_text("")
    (root / "other" / "unseen").write_text("")
    walked = look(root, known, [b"asked", b"asked/new/newer"])
    assert sorted(paths(walked)) == [
        b"asked", b"asked/inner", b"asked/new", b"asked/new/newer", b"asked/new/newer/file",
    ]  # fmt: skip
    assert not walked.complete
    assert walked.directories == {b"asked", b"asked/new/newer"}


def test_scratch_is_neither_found_nor_vanished(root: Path) -> None:
    for name in ("cache", "work"):
        (root / name / "deep").mkdir(parents=True)
    known = learn(root)
    (root / "cache" / "deep" / "file").write_text("")
    (root / "work").rename(root.parent / "gone")

    def skip(path: bytes) -> bool:
        return path in (b"cache", b"work")

    assert paths(walk(os.fsencode(root), known, skip=skip)) == [b""]
    assert walk(os.fsencode(root), known, skip=skip).vanished == []
    assert paths(walk(os.fsencode(root), known, skip=skip, directories=[b"cache/deep"])) == []


def test_a_directory_that_may_not_be_read_keeps_what_was_known_in_it(root: Path) -> None:
    (root / "closed" / "inner").mkdir(parents=True)
    (root / "closed" / "file").write_text("")
    root.chmod(0o755)
    known = learn(root)
    # Nobody may not come here by name; the descriptor leads past the directories above.
    door = os.open(root, os.O_PATH)
    try:
        (root / "closed").chmod(0)
        walked = as_nobody(lambda: look(Path(f"/proc/self/fd/{door}"), known))
        assert walked.vanished == []
        assert walked.unreadable == [(b"closed", "Permission denied")]
        assert walked.complete
        (root / "closed").chmod(0o444)
        walked = as_nobody(lambda: look(Path(f"/proc/self/fd/{door}"), known))
    finally:
        os.close(door)
        (root / "closed").chmod(0o755)
    assert walked.vanished == []
    assert sorted(walked.unreadable) == [(b"closed/file", "Permission denied"), (b"closed/inner", "Permission denied")]


def test_a_mount_point_inside_is_not_entered_and_keeps_what_was_known(root: Path) -> None:
    for name in ("known", "new"):
        (root / name / "inner").mkdir(parents=True)
    (root / "new").rename(root.parent / "aside")
    known = learn(root)
    (root.parent / "aside").rename(root / "new")
    mounted = []
    try:
        for name in ("known", "new"):
            try:
                syscalls.mount("tmpfs", os.fspath(root / name), "tmpfs")
            except PermissionError:
                pytest.skip("may not mount")
            mounted.append(name)
            (root / name / "foreign").write_text("")
        walked = look(root, known)
        asked = look(root, known, [b"known", b"known/inner"])
    finally:
        for name in mounted:
            syscalls.unmount(os.fspath(root / name))
    assert sorted(walked.other_filesystems) == [b"known", b"new"]
    assert (walked.vanished, walked.complete) == ([], True)
    assert paths(walked) == [b"", b"new"]
    assert (asked.vanished, paths(asked)) == ([], [])
    assert b"known" in asked.other_filesystems


def test_what_comes_and_goes_during_the_walk(root: Path) -> None:
    """The walk asks about each new path whether it is scratch: a moment at which things can happen."""
    for name in ("one", "two", "three"):
        (root / name).mkdir()
        (root / name / "file").write_text("")
    removed: list[bytes] = []

    def skip(path: bytes) -> bool:
        if path.count(b"/") == 0 and not removed:
            for name in ("one", "two", "three"):
                if os.fsencode(name) != path:
                    (root / name).rename(root.parent / name)
                    removed.append(os.fsencode(name))
        return False

    walked = walk(os.fsencode(root), KnownTree(), skip=skip)
    assert len(removed) == 2
    assert not {path.split(b"/")[0] for path in paths(walked)} & set(removed)
    assert walked.complete
    assert walked.unreadable == []


@pytest.mark.history("C19")
def test_a_name_that_moves_while_its_directory_is_listed_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` becomes `previous` and a new `latest` appears, just after the directory was listed."""
    (root / "latest").write_text("old")
    (root / "gone").write_text("")
    known = learn(root)
    listing = walking._names
    lists: list[list[bytes]] = []

    def then_move(path: bytes, descriptor: int) -> list[bytes]:
        lists.append(listing(path, descriptor))
        if len(lists) == 1:
            (root / "latest").rename(root / "previous")
            (root / "latest").write_text("new")
            (root / "gone").rename(root / "renamed")
        return lists[-1]

    monkeypatch.setattr(walking, "_names", then_move)
    walked = look(root, known)
    assert sorted(lists[0]) == [b"gone", b"latest"]
    assert sorted(paths(walked)) == [b"latest", b"previous", b"renamed"]
    assert walked.vanished == [b"gone"]


def test_a_directory_that_becomes_a_symlink_is_not_followed(tmp_path: Path, root: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "secret").mkdir(parents=True)
    (root / "a" / "secret").mkdir(parents=True)
    known = learn(root)
    (root / "new").mkdir()
    (root / "new" / "x").mkdir()

    def skip(path: bytes) -> bool:
        if path == b"new/x":
            (root / "new").rename(tmp_path / "moved")
            (root / "new").symlink_to(outside)
            (outside / "x").mkdir()
            (outside / "x" / "leak").write_text("")
        return False

    walked = walk(os.fsencode(root), known, skip=skip)
    assert b"new/x/leak" not in paths(walked)
    assert not walked.complete
    (root / "a").rename(tmp_path / "elsewhere")
    (root / "a").symlink_to(outside)
    assert look(root, known, [b"a/secret"]).vanished == [b"a"]
    assert b"a/secret" not in paths(look(root, known, [b"a/secret"]))


def test_depth_has_no_limit(deep_root: Path) -> None:
    root = deep_root
    at = os.open(root, os.O_DIRECTORY)
    levels, name = 1_500, b"level"
    for _ in range(levels):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    assert levels * (len(name) + 1) > 2 * OPEN_PATH_BYTES
    known = KnownTree()
    walked = look(root, known)
    assert len(walked.found) == 1 + levels
    adopt(known, walked)
    assert look(root, known) == Walked()
    assert look(root, known, [b"/".join([name] * levels)]).found == []


@pytest.fixture
def deep_root(tmp_path: Path) -> Iterator[Path]:
    """What Python's own rmtree cannot remove, rm can."""
    made = tmp_path / "root"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-rf", made], check=True)


def test_width_has_no_limit(root: Path) -> None:
    at = os.open(root, os.O_DIRECTORY)
    for number in range(30_000):
        os.mknod(b"%d" % number, dir_fd=at)
    os.close(at)
    known = learn(root)
    assert len(known) == 30_001
    assert look(root, known) == Walked()


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        look(tmp_path / "nowhere", KnownTree())
