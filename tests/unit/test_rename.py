"""Is each outcome of a rename right, and each refusal the one that Linux gives?"""

from __future__ import annotations

import errno
import stat

import pytest

from spotwarp_fs.core import namespace, paths, treecheck
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.records import entry_key
from spotwarp_fs.core.rename import RenameFlags, RenameOutcome, rename
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.core.types import ROOT_INODE, Inode
from tests.support.dict_tree import DictTree

USER = Actor(uid=0, gid=0, pid=1)
FILE, DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755
A, A_F, A_SUB, A_SUB_G, B, EMPTY, H = (Inode(ino) for ino in range(2, 9))
PATHS = {
    b"a": (DIRECTORY, A),
    b"a/f": (FILE, A_F),
    b"a/sub": (DIRECTORY, A_SUB),
    b"a/sub/g": (FILE, A_SUB_G),
    b"b": (DIRECTORY, B),
    b"empty": (DIRECTORY, EMPTY),
    b"h": (FILE, H),
}


@pytest.fixture
def tree() -> DictTree:
    tree = DictTree()
    namespace.make_root(tree, USER, 1)
    for path, (mode, ino) in PATHS.items():
        parent, name = place(tree, path)
        namespace.create(tree, parent, name, mode, USER, ino, 5)
    return tree


def place(tree: DictTree, path: bytes) -> tuple[Inode, bytes]:
    above, _, name = path.rpartition(b"/")
    return paths.walk(tree, above).ino, name


def move(tree: DictTree, source: bytes, target: bytes, flags: int = 0, now_ns: int = 9) -> RenameOutcome:
    outcome = rename(tree, *place(tree, source), *place(tree, target), flags, now_ns)
    assert treecheck.check(tree) == []
    return outcome


def times(tree: DictTree, ino: Inode) -> tuple[int, int]:
    record = paths.inode(tree, ino)
    return record.mtime_ns, record.ctime_ns


def nlink(tree: DictTree, ino: Inode) -> int:
    return paths.inode(tree, ino).nlink


def test_move_keeps_the_inode_and_touches_both_directories(tree: DictTree) -> None:
    outcome = move(tree, b"a/f", b"b/new")
    assert (outcome.moved.ino, outcome.replaced, outcome.exchanged) == (A_F, None, None)
    assert outcome.moved.record == paths.inode(tree, A_F)
    assert times(tree, A_F) == (5, 9)
    assert times(tree, A) == times(tree, B) == (9, 9)
    assert times(tree, ROOT_INODE) == (5, 5)
    assert paths.names(tree, A_F) == [(B, b"new")]


def test_moved_directory_takes_its_tree_along(tree: DictTree) -> None:
    """B14: identity is the inode, so nothing below it changes at all."""
    below = {key: value for key, value in tree.rows.items() if key.startswith(entry_key(A_SUB, b""))}
    move(tree, b"a/sub", b"b/sub")
    assert (nlink(tree, A), nlink(tree, B), nlink(tree, A_SUB)) == (2, 3, 2)
    assert paths.lookup(tree, A_SUB, b"..").ino == B
    assert paths.path_of(tree, A_SUB_G) == b"b/sub/g"
    assert below.items() <= tree.rows.items()


def test_replaced_file_loses_this_name_only(tree: DictTree) -> None:
    namespace.link(tree, H, B, b"other", 6)
    first = move(tree, b"a/f", b"h")
    assert first.replaced is not None
    assert (first.replaced.ino, first.replaced.record.nlink, first.replaced.record.ctime_ns) == (H, 1, 9)
    assert namespace.orphans(tree) == []
    last = move(tree, b"h", b"b/other", now_ns=10)
    assert last.replaced is not None
    assert (last.replaced.ino, last.replaced.record.nlink) == (H, 0)
    assert namespace.orphans(tree) == [H]


def test_empty_directory_may_be_replaced(tree: DictTree) -> None:
    outcome = move(tree, b"a", b"empty")
    assert outcome.replaced is not None
    assert (outcome.replaced.ino, outcome.replaced.record.nlink) == (EMPTY, 0)
    assert paths.path_of(tree, A_SUB_G) == b"empty/sub/g"
    assert nlink(tree, ROOT_INODE) == 4
    assert namespace.orphans(tree) == [EMPTY]


def test_directory_replaced_across_directories_counts_once(tree: DictTree) -> None:
    namespace.create(tree, B, b"sub", DIRECTORY, USER, Inode(20), 6)
    move(tree, b"a/sub", b"b/sub")
    assert (nlink(tree, A), nlink(tree, B)) == (2, 3)


def test_two_names_of_one_inode_stay(tree: DictTree) -> None:
    """B10: POSIX wants nothing to happen."""
    namespace.link(tree, H, A, b"h2", 6)
    before = dict(tree.rows)
    assert move(tree, b"h", b"a/h2").moved.ino == H
    assert move(tree, b"h", b"h").replaced is None
    assert move(tree, b"h", b"a/h2", RenameFlags.EXCHANGE).exchanged is None
    assert tree.rows == before


@pytest.mark.parametrize(
    ("left", "right"), [(b"a/f", b"h"), (b"a", b"h"), (b"a/f", b"b"), (b"a/sub", b"b"), (b"a", b"b")]
)
def test_exchange_swaps_whatever_is_there(tree: DictTree, left: bytes, right: bytes) -> None:
    """B16, also a directory with a file."""
    outcome = move(tree, left, right, RenameFlags.EXCHANGE)
    assert outcome.replaced is None
    assert outcome.exchanged is not None
    assert (outcome.moved.ino, outcome.exchanged.ino) == (PATHS[left][1], PATHS[right][1])
    assert (paths.walk(tree, left).ino, paths.walk(tree, right).ino) == (PATHS[right][1], PATHS[left][1])
    assert times(tree, outcome.moved.ino)[1] == times(tree, outcome.exchanged.ino)[1] == 9
    assert namespace.orphans(tree) == []
    assert outcome.moved.record == paths.inode(tree, outcome.moved.ino)
    assert outcome.exchanged.record == paths.inode(tree, outcome.exchanged.ino)


@pytest.mark.parametrize(
    ("source", "target", "flags", "number"),
    [
        (b"absent", b"x", 0, errno.ENOENT),
        (b"h", b"x" * 256, 0, errno.ENAMETOOLONG),
        (b"y" * 256, b"x", 0, errno.ENAMETOOLONG),
        (b"h", b"..", 0, errno.EBUSY),
        (b"a/.", b"x", 0, errno.EBUSY),
        (b"h", b"a/f", RenameFlags.NOREPLACE, errno.EEXIST),
        (b"h", b"h", RenameFlags.NOREPLACE, errno.EEXIST),
        (b"h", b"absent", RenameFlags.EXCHANGE, errno.ENOENT),
        (b"h", b"empty", 0, errno.EISDIR),
        (b"empty", b"h", 0, errno.ENOTDIR),
        (b"b", b"a", 0, errno.ENOTEMPTY),
        (b"a", b"a/x", 0, errno.EINVAL),
        (b"a", b"a/sub/x", 0, errno.EINVAL),
        (b"a", b"a/sub/g", 0, errno.EINVAL),
        (b"a/sub/g", b"a", 0, errno.ENOTEMPTY),
        (b"a/sub", b"a", 0, errno.ENOTEMPTY),
        (b"a/sub/g", b"a", RenameFlags.EXCHANGE, errno.EINVAL),
        (b"a", b"a/sub", RenameFlags.EXCHANGE, errno.EINVAL),
        (b"a/f", b"new", 4, errno.EINVAL),
        (b"a/f", b"new", 3, errno.EINVAL),
        (b"a/f", b"new", 8, errno.EINVAL),
    ],
)
def test_refused_and_unchanged(tree: DictTree, source: bytes, target: bytes, flags: int, number: int) -> None:
    before = dict(tree.rows)
    with pytest.raises(Refused) as refusal:
        move(tree, source, target, flags)
    assert errno.errorcode[refusal.value.errno] == errno.errorcode[number]
    assert tree.rows == before


def test_nothing_moves_into_a_removed_directory(tree: DictTree) -> None:
    namespace.rmdir(tree, ROOT_INODE, b"empty", 6)
    with pytest.raises(Refused) as refusal:
        rename(tree, ROOT_INODE, b"h", EMPTY, b"h", 0, 9)
    assert refusal.value.errno == errno.ENOENT


def test_only_directories_are_parents(tree: DictTree) -> None:
    for parent, new_parent in ((H, ROOT_INODE), (ROOT_INODE, H)):
        with pytest.raises(Refused) as refusal:
            rename(tree, parent, b"h", new_parent, b"x", 0, 9)
        assert refusal.value.errno == errno.ENOTDIR


def test_noreplace_moves_where_nothing_is(tree: DictTree) -> None:
    assert move(tree, b"h", b"b/h", RenameFlags.NOREPLACE).moved.ino == H
    assert paths.path_of(tree, H) == b"b/h"


def test_exchange_of_a_directory_and_a_file_moves_the_link_counts(tree: DictTree) -> None:
    move(tree, b"a/sub", b"h", RenameFlags.EXCHANGE)
    assert (nlink(tree, A), nlink(tree, ROOT_INODE)) == (2, 6)
