"""Is each kind of change understood for what it is?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spotwarp_fs.core.treediff import plan
from spotwarp_fs.core.treeplan import Link, Plan
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.walked import Found, Walked
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.walking import walk
from tests.support.plans import Follower, differences


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


def following(root: Path) -> Follower:
    """Somebody who knows everything as it is."""
    follower = Follower(os.fsencode(root))
    follower.look()
    assert differences(follower) == []
    return follower


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or str(path))


def paths(found: list[Found]) -> list[bytes]:
    return [each.path for each in found]


def test_a_renamed_file_is_renamed(root: Path) -> None:
    write(root / "a" / "file")
    write(root / "b" / "other")
    follower = following(root)
    inode = follower.known.by_inode
    entry = follower.known.get(b"a/file")
    assert entry is not None
    (root / "a" / "file").rename(root / "b" / "moved")
    decided = follower.look()
    assert decided.renames == [(b"a/file", b"b/moved")]
    assert (decided.appeared, decided.removals, decided.pending) == ([], [], {})
    assert inode(entry.ino) == [b"b/moved"]
    assert differences(follower) == []


def test_a_renamed_directory_takes_everything_with_it_and_what_changed_in_it_is_seen(root: Path) -> None:
    for name in ("same", "changed", "removed", "moved"):
        write(root / "tmp-2" / "deep" / name)
    follower = following(root)
    (root / "tmp-2").rename(root / "checkpoint-2")
    write(root / "checkpoint-2" / "deep" / "changed", "other")
    (root / "checkpoint-2" / "deep" / "removed").unlink()
    (root / "checkpoint-2" / "deep" / "moved").rename(root / "outside")
    write(root / "checkpoint-2" / "new")
    decided = follower.look()
    # The directory has a new entry, so that its time does not say that it is the same; what it holds does.
    assert decided.renames == [(b"tmp-2", b"checkpoint-2"), (b"checkpoint-2/deep/moved", b"outside")]
    assert paths(decided.appeared) == [b"checkpoint-2/new"]
    assert b"checkpoint-2/deep/changed" in paths(decided.changed)
    assert decided.pending == {b"checkpoint-2/deep/removed": 2}
    assert follower.look().removals == [b"checkpoint-2/deep/removed"]
    assert differences(follower) == []


def exchange(one: Path, other: Path) -> None:
    aside = one.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def rotate(root: Path) -> None:
    for number in range(12, 0, -1):
        (root / f"log.{number}").rename(root / f"log.{number + 1}")


@pytest.mark.parametrize(
    ("change", "renames_min"),
    [
        (lambda root: exchange(root / "one", root / "two"), 3),
        (lambda root: exchange(root / "d" / "x", root / "e" / "x"), 3),
        (lambda root: exchange(root / "d", root / "e"), 6),
        (lambda root: exchange(root / "d", root / "one"), 2),
        (rotate, 12),
        (lambda root: ((root / "d").rename(root / "f"), (root / "e").rename(root / "d")), 2),
        (lambda root: ((root / "d").rename(root / "e" / "d"), (root / "e").rename(root / "d")), 1),
    ],
)
def test_circles_and_chains_lose_nothing_at_any_step(
    root: Path, change: Callable[[Path], object], renames_min: int
) -> None:
    for name in ("one", "two", "d/x", "d/y", "e/x", "e/y"):
        write(root / name)
    for number in range(1, 13):
        write(root / f"log.{number}")
    follower = following(root)
    before = follower.contents()
    change(root)
    decided = follower.look()
    assert len(decided.renames) >= renames_min
    assert decided.appeared == []
    assert follower.contents() == before
    while decided.needs_complete_walk:
        decided = follower.look()
        assert follower.contents() == before
    assert differences(follower) == []
    assert follower.walks <= 4


def test_more_names_of_a_file_are_links_and_fewer_are_removals(root: Path) -> None:
    write(root / "one")
    follower = following(root)
    os.link(root / "one", root / "two")
    decided = follower.look()
    assert decided.links == [Link(b"one", b"two")]
    assert decided.appeared == []
    os.link(root / "two", root / "three")
    (root / "one").unlink()
    decided = follower.look()
    assert (decided.renames, decided.pending) == ([(b"one", b"three")], {})
    assert differences(follower) == []
    (root / "three").unlink()
    assert follower.look().pending == {b"three": 4}
    assert follower.look().removals == [b"three"]
    assert differences(follower) == []


def test_names_found_at_once_are_one_file(root: Path) -> None:
    follower = following(root)
    write(root / "one")
    os.link(root / "one", root / "two")
    decided = follower.look()
    assert len(decided.appeared) == len(decided.links) == 1
    assert differences(follower) == []


def test_a_file_saved_over_one_of_several_names_is_a_file_of_its_own(root: Path) -> None:
    write(root / "one")
    os.link(root / "one", root / "two")
    follower = following(root)
    write(root / "new", "saved")
    (root / "new").rename(root / "one")
    decided = follower.look()
    assert paths(decided.appeared) == [b"one"]
    assert differences(follower) == []


def test_names_that_were_taken_for_two_files_become_one(root: Path) -> None:
    """The link was made in a directory that nobody looked at until both had been read, each for itself."""
    write(root / "one")
    os.link(root / "one", root / "two")
    follower = following(root)
    entry = follower.known.get(b"one")
    assert entry is not None
    assert entry.witness is not None
    follower.known.remove(b"two")
    follower.known.put(b"two", Inode(99), entry.witness.with_seen(Seen.NOTHING))
    assert follower.look().links == [Link(b"one", b"two")]
    assert differences(follower) == []


def test_of_a_file_that_moved_during_the_walk_the_later_look_counts(root: Path) -> None:
    """It was seen at a new place, and then at its old one again."""
    write(root / "home")
    follower = following(root)
    entry = follower.known.get(b"home")
    assert entry is not None
    assert entry.witness is not None
    status = Status(replace(entry.witness, ctime_ns=entry.witness.ctime_ns + 1))
    decided = plan(Walked([Found(b"away", status), Found(b"home", status)]), follower.known, {}, 2)
    assert (decided.renames, decided.appeared, paths(decided.changed)) == ([], [], [b"home"])
    decided = plan(Walked([Found(b"home", status), Found(b"away", status)]), follower.known, {}, 2)
    assert (decided.renames, decided.appeared) == ([(b"home", b"away")], [])


def test_a_placeholder_that_moves_is_never_new(root: Path) -> None:
    """What is new is read, and a placeholder reads as zeros."""
    write(root / "d" / "model.pt", "0" * 100)
    follower = following(root)
    entry = follower.known.get(b"d/model.pt")
    assert entry is not None
    assert entry.witness is not None
    follower.known.put(b"d/model.pt", entry.ino, entry.witness.with_seen(Seen.ABSENT))
    os.utime(root / "d" / "model.pt", (5, 5))
    (root / "d").rename(root / "e")
    (root / "e" / "model.pt").rename(root / "e" / "final.pt")
    decided = plan(walk(follower.root, follower.known, skip=lambda _path: False), follower.known, {}, 2)
    assert decided.appeared == []
    assert (b"d/model.pt", b"e/final.pt") in decided.renames or (b"e/model.pt", b"e/final.pt") in decided.renames


def test_a_number_that_is_used_again_is_not_the_same_file(root: Path) -> None:
    """As ext4 does it at once: the old checkpoint is deleted, and the new one's files get its numbers."""
    write(root / "old" / "model.pt", "old")
    follower = following(root)
    directory, file = follower.known.get(b"old"), follower.known.get(b"old/model.pt")
    assert directory is not None
    assert file is not None
    assert directory.witness is not None
    assert file.witness is not None
    found = [
        Found(b"new", Status(replace(directory.witness, mtime_ns=directory.witness.mtime_ns + 1))),
        Found(b"new/model.pt", Status(replace(file.witness, mtime_ns=file.witness.mtime_ns + 1))),
    ]
    decided = plan(Walked(found, [b"old"]), follower.known, {}, 2)
    assert decided.renames == []
    assert paths(decided.appeared) == [b"new/model.pt"]
    assert decided.pending == {b"old": 2}
    assert plan(Walked(found, [b"old"]), follower.known, {b"old": 2}, 3).removals == [b"old"]


class Status:
    """A `stat` that never was."""

    def __init__(self, witness: Witness) -> None:
        for name in ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "mtime_ns", "ctime_ns"):
            setattr(self, f"st_{name}", getattr(witness, name))


@pytest.mark.history("C19")
def test_a_name_that_is_missing_stays_until_a_complete_walk_that_began_later_misses_it_too(root: Path) -> None:
    write(root / "a" / "file")
    write(root / "b" / "file")
    follower = following(root)
    (root / "a" / "file").unlink()
    assert follower.look([b"a"]).pending == {b"a/file": 2}
    assert follower.look([b"a"]).pending == {b"a/file": 2}
    shutil.rmtree(root / "a")
    decided = follower.look()
    # The file was missed before this walk began, its directory only now.
    assert decided.removals == [b"a/file"]
    assert decided.pending == {b"a": 4}
    (root / "a").mkdir()
    assert follower.look().pending == {}
    (root / "a").rmdir()
    assert follower.look([b""]).pending == {b"a": 6}
    assert follower.look([b"b"]).pending == {b"a": 6}
    assert follower.look().removals == [b"a"]
    assert differences(follower) == []


@pytest.mark.history("C19")
def test_a_rename_during_the_scan_never_loses_both_checkpoints(root: Path) -> None:
    """C19 a: the root is listed; tmp-2 becomes checkpoint-2, and checkpoint-1 is removed; then the scan descends."""
    write(root / "checkpoint-1" / "model.pt", "first")
    write(root / "tmp-2" / "model.pt", "second")
    follower = following(root)
    write(root / "zz")
    done: list[bool] = []

    def skip(_path: bytes) -> bool:
        if not done:
            done.append(True)
            (root / "tmp-2").rename(root / "checkpoint-2")
            shutil.rmtree(root / "checkpoint-1")
        return False

    follower.take(walk(follower.root, follower.known, skip=skip))
    assert done
    assert b"second" in follower.contents()
    while follower.pending:
        assert b"second" in follower.contents()
        follower.look()
    follower.look()
    assert differences(follower) == []


def test_what_cannot_be_looked_at_is_not_missing(root: Path) -> None:
    write(root / "closed" / "file")
    follower = following(root)
    walked = Walked(unreadable=[(b"closed", "Permission denied")])
    decided = plan(walked, follower.known, {b"closed/file": 1}, 2)
    assert decided.removals == []
    assert decided.pending == {b"closed/file": 1}
    walked = Walked(vanished=[b"closed/file"], complete=False)
    assert plan(walked, follower.known, {b"closed/file": 1}, 2).removals == []


def test_many_changes_are_decided_about_quickly() -> None:
    """Two directories of 5,000 files change places: time in proportion, not to the square."""
    known, count = KnownTree(), 5_000
    file = Witness(7, 0, 0o100644, 1, 0, 0, 0, 10, 1, 2, Seen.TRUSTED)
    for number, name in ((1, b"a"), (2, b"b")):
        known.put(name, Inode(10 + number), replace(file, mode=0o40755, ino=number, size=4096))
        for each in range(count):
            ino = number * 1_000_000 + each
            known.put(name + b"/%d" % each, Inode(ino), replace(file, ino=ino))
    found = []
    for name, other in ((b"a", b"b"), (b"b", b"a")):
        for path in (b"", *(b"/%d" % each for each in range(count))):
            entry = known.get(other + path)
            assert entry is not None
            assert entry.witness is not None
            found.append(Found(name + path, Status(entry.witness)))
    decided: Plan = plan(Walked(found, [b"a", b"b"]), known, {}, 2)
    assert decided.appeared == []
    assert decided.pending == {}
    assert len(decided.renames) == 4 * count
