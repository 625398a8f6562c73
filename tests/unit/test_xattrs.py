"""Is each rule of extended attributes the one that Linux has?"""

from __future__ import annotations

import errno
import stat

import pytest

from spotwarp_fs.core import namespace, paths, xattrs
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.core.types import ROOT_INODE, XATTR_BYTES_MAX, Inode
from spotwarp_fs.core.xattrs import XattrFlags
from tests.support.dict_tree import DictTree

USER = Actor(uid=0, gid=0, pid=1)
FILE, LINK = Inode(2), Inode(3)


@pytest.fixture
def tree() -> DictTree:
    tree = DictTree()
    namespace.make_root(tree, USER, 1)
    namespace.create(tree, ROOT_INODE, b"f", stat.S_IFREG | 0o644, USER, FILE, 5)
    namespace.create(tree, ROOT_INODE, b"l", stat.S_IFLNK | 0o777, USER, LINK, 5, target=b"f")
    return tree


def number_of(refusal: pytest.ExceptionInfo[Refused]) -> str:
    return errno.errorcode[refusal.value.errno]


def test_set_get_list_remove(tree: DictTree) -> None:
    for name, value in (
        (b"user.b", b"\0\xff"),
        (b"user.a", b""),
        (b"security.capability", b"cap"),
        (b"trusted.t", b"1"),
    ):
        xattrs.set_xattr(tree, FILE, name, value, 0, 9)
        assert xattrs.get_xattr(tree, FILE, name) == value
    assert xattrs.list_xattrs(tree, FILE) == [b"security.capability", b"trusted.t", b"user.a", b"user.b"]
    xattrs.set_xattr(tree, FILE, b"user.a", b"changed", 0, 10)
    assert xattrs.get_xattr(tree, FILE, b"user.a") == b"changed"
    xattrs.remove_xattr(tree, FILE, b"user.a", 11)
    assert b"user.a" not in xattrs.list_xattrs(tree, FILE)
    assert xattrs.list_xattrs(tree, ROOT_INODE) == []


def test_change_moves_ctime_only(tree: DictTree) -> None:
    after = xattrs.set_xattr(tree, FILE, b"user.a", b"1", 0, 9).record
    assert (after.mtime_ns, after.ctime_ns) == (5, 9)
    assert paths.inode(tree, FILE) == after
    assert xattrs.remove_xattr(tree, FILE, b"user.a", 10).record.ctime_ns == 10


def test_flags_decide_whether_it_must_be_there(tree: DictTree) -> None:
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.a", b"1", XattrFlags.REPLACE, 9)
    assert number_of(refusal) == "ENODATA"
    xattrs.set_xattr(tree, FILE, b"user.a", b"1", XattrFlags.CREATE, 9)
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.a", b"2", XattrFlags.CREATE, 10)
    assert number_of(refusal) == "EEXIST"
    xattrs.set_xattr(tree, FILE, b"user.a", b"3", XattrFlags.REPLACE, 11)
    assert xattrs.get_xattr(tree, FILE, b"user.a") == b"3"
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.a", b"3", 8, 11)
    assert number_of(refusal) == "EINVAL"


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        (b"user.absent", "ENODATA"),
        (b"system.posix_acl_access", "ENOTSUP"),
        (b"system.posix_acl_default", "ENOTSUP"),
        (b"nonsense", "ENOTSUP"),
        (b"user.", "EINVAL"),
        (b"", "ERANGE"),
        (b"user." + b"x" * 251, "ERANGE"),
    ],
)
def test_names_without_a_value(tree: DictTree, name: bytes, symbol: str) -> None:
    with pytest.raises(Refused) as refusal:
        xattrs.get_xattr(tree, FILE, name)
    assert number_of(refusal) == symbol
    with pytest.raises(Refused) as refusal:
        xattrs.remove_xattr(tree, FILE, name, 9)
    assert number_of(refusal) == symbol


def test_acls_are_refused_rather_than_stored_unenforced(tree: DictTree) -> None:
    before = dict(tree.rows)
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"system.posix_acl_access", b"\2\0\0\0", 0, 9)
    assert number_of(refusal) == "ENOTSUP"
    assert tree.rows == before


def test_user_attributes_are_for_files_and_directories(tree: DictTree) -> None:
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, LINK, b"user.a", b"1", 0, 9)
    assert number_of(refusal) == "EPERM"
    xattrs.set_xattr(tree, LINK, b"trusted.a", b"1", 0, 9)
    xattrs.set_xattr(tree, ROOT_INODE, b"user.a", b"1", 0, 9)


def test_limits(tree: DictTree) -> None:
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.big", bytes(XATTR_BYTES_MAX + 1), 0, 9)
    assert number_of(refusal) == "E2BIG"
    for letter in b"abc":
        xattrs.set_xattr(tree, FILE, b"user.%c" % letter, bytes(XATTR_BYTES_MAX), 0, 9)
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.d", bytes(XATTR_BYTES_MAX), 0, 9)
    assert number_of(refusal) == "ENOSPC"
    xattrs.set_xattr(tree, FILE, b"user.c", bytes(XATTR_BYTES_MAX), 0, 9)
    xattrs.set_xattr(tree, FILE, b"user.d", b"small", 0, 9)


def test_every_name_that_is_kept_can_be_listed(tree: DictTree) -> None:
    fitting = xattrs.XATTR_LIST_BYTES_MAX // 256
    for count in range(fitting):
        xattrs.set_xattr(tree, FILE, b"user.%0250d" % count, b"", 0, 9)
    with pytest.raises(Refused) as refusal:
        xattrs.set_xattr(tree, FILE, b"user.one-more", b"", 0, 9)
    assert number_of(refusal) == "ENOSPC"
    assert len(xattrs.list_xattrs(tree, FILE)) == fitting


def test_attributes_of_one_inode_are_not_those_of_the_next(tree: DictTree) -> None:
    xattrs.set_xattr(tree, FILE, b"trusted.a", b"file", 0, 9)
    xattrs.set_xattr(tree, LINK, b"trusted.a", b"link", 0, 9)
    assert xattrs.attributes_of(tree, FILE) == [(b"trusted.a", b"file")]
    xattrs.remove_xattr(tree, FILE, b"trusted.a", 10)
    assert xattrs.get_xattr(tree, LINK, b"trusted.a") == b"link"


def test_missing_inode_is_stale(tree: DictTree) -> None:
    for call in (
        lambda: xattrs.get_xattr(tree, Inode(9), b"user.a"),
        lambda: xattrs.list_xattrs(tree, Inode(9)),
        lambda: xattrs.set_xattr(tree, Inode(9), b"user.a", b"", 0, 1),
    ):
        with pytest.raises(Refused) as refusal:
            call()
        assert number_of(refusal) == "ESTALE"
