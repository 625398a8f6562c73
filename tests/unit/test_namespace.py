"""Is each namespace decision right, with the errno that Linux gives?"""

from __future__ import annotations

import dataclasses
import errno
import stat

import pytest

from spotwarp_fs.core import attributes, namespace, paths, treecheck
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.records import EntryRecord, InodeRecord, counted, entry_key, inode_key, name_key, xattr_key
from spotwarp_fs.core.requests import Actor, AttributeChange, Node
from spotwarp_fs.core.types import FILE_BYTES_MAX, ROOT_INODE, Inode
from tests.support.dict_tree import DictTree

USER = Actor(uid=1000, gid=100, pid=1)
FILE, DIRECTORY, LINK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


@pytest.fixture
def tree() -> DictTree:
    tree = DictTree()
    namespace.make_root(tree, USER, 1)
    return tree


def make(tree: DictTree, path: bytes, mode: int, ino: int, now_ns: int = 5, **more: object) -> Node:
    above, _, name = path.rpartition(b"/")
    return namespace.create(tree, paths.walk(tree, above).ino, name, mode, USER, Inode(ino), now_ns, **more)


def refused(number: int) -> pytest.RaisesExc[Refused]:
    return pytest.RaisesExc(Refused, check=lambda refusal: refusal.errno == number)


def test_new_entry_carries_owner_times_and_counts_in_its_directory(tree: DictTree) -> None:
    node = make(tree, b"d", DIRECTORY, 2, now_ns=7)
    assert node.record == InodeRecord(DIRECTORY, 2, 1000, 100, 0, atime_ns=7, mtime_ns=7, ctime_ns=7)
    root = paths.inode(tree, ROOT_INODE)
    assert (root.nlink, root.atime_ns, root.mtime_ns, root.ctime_ns) == (3, 1, 7, 7)
    make(tree, b"d/f", FILE, 3, now_ns=9)
    assert paths.inode(tree, Inode(2)).nlink == 2
    assert paths.inode(tree, ROOT_INODE).mtime_ns == 7
    assert treecheck.check(tree) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (b"", errno.ENOENT),
        (b".", errno.EEXIST),
        (b"..", errno.EEXIST),
        (b"a/b", errno.EINVAL),
        (b"nul\0", errno.EINVAL),
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"taken", errno.EEXIST),
    ],
)
def test_names_that_cannot_be_created(tree: DictTree, name: bytes, number: int) -> None:
    make(tree, b"taken", FILE, 2)
    before = dict(tree.rows)
    with refused(number):
        namespace.create(tree, ROOT_INODE, name, FILE, USER, Inode(3), 6)
    with refused(number):
        namespace.link(tree, Inode(2), ROOT_INODE, name, 6)
    assert tree.rows == before


@pytest.mark.parametrize(
    "name", [b"x" * 255, b"\xff\xfe\x80", b"new\nline", b"...", b" ", "é".encode(), b"Foo", b"\x01"]
)
def test_any_other_byte_string_is_a_name_of_its_own(tree: DictTree, name: bytes) -> None:
    make(tree, b"foo", FILE, 2)
    make(tree, name, FILE, 3)
    assert paths.lookup(tree, ROOT_INODE, name).ino == 3
    assert {found for found, _ in paths.children(tree, ROOT_INODE)} == {b"foo", name}


def test_only_directories_hold_entries(tree: DictTree) -> None:
    make(tree, b"f", FILE, 2)
    with refused(errno.ENOTDIR):
        namespace.create(tree, Inode(2), b"x", FILE, USER, Inode(3), 6)
    with refused(errno.ENOTDIR):
        paths.lookup(tree, Inode(2), b".")
    with refused(errno.ENOTDIR):
        namespace.unlink(tree, Inode(2), b"x", 6)


def test_inode_that_is_gone_is_stale(tree: DictTree) -> None:
    with refused(errno.ESTALE):
        paths.inode(tree, Inode(99))


def test_dot_and_dot_dot(tree: DictTree) -> None:
    make(tree, b"d", DIRECTORY, 2)
    make(tree, b"d/e", DIRECTORY, 3)
    assert paths.lookup(tree, Inode(3), b".").ino == 3
    assert paths.lookup(tree, Inode(3), b"..").ino == 2
    assert paths.lookup(tree, ROOT_INODE, b"..").ino == ROOT_INODE


@pytest.mark.parametrize(
    ("mode", "type_bits"),
    [
        (stat.S_IFIFO | 0o600, stat.S_IFIFO),
        (stat.S_IFSOCK | 0o755, stat.S_IFSOCK),
        (stat.S_IFCHR | 0o666, stat.S_IFCHR),
        (stat.S_IFBLK | 0o660, stat.S_IFBLK),
        (0o640, stat.S_IFREG),
    ],
)
def test_special_files_keep_their_type(tree: DictTree, mode: int, type_bits: int) -> None:
    record = make(tree, b"special", mode, 2, rdev=0x103).record
    assert stat.S_IFMT(record.mode) == type_bits
    assert record.rdev == (0x103 if type_bits in (stat.S_IFCHR, stat.S_IFBLK) else 0)
    entry = EntryRecord.decode(tree.rows[entry_key(ROOT_INODE, b"special")])
    assert entry == EntryRecord(Inode(2), type_bits >> 12)


def test_unknown_type_is_refused(tree: DictTree) -> None:
    with refused(errno.EINVAL):
        make(tree, b"x", 0o150644, 2)


@pytest.mark.parametrize(
    ("target", "number"), [(b"", errno.ENOENT), (b"t" * 4096, errno.ENAMETOOLONG), (b"t" * 4095, None)]
)
def test_symlink_targets(tree: DictTree, target: bytes, number: int | None) -> None:
    if number is not None:
        with refused(number):
            make(tree, b"l", LINK, 2, target=target)
        return
    record = make(tree, b"l", LINK, 2, target=target).record
    assert (record.target, record.size, stat.S_IMODE(record.mode)) == (target, len(target), 0o777)
    assert paths.inode(tree, Inode(2)) == record


def test_setgid_directory_gives_its_group_and_setgid_to_directories_only(tree: DictTree) -> None:
    """B28."""
    make(tree, b"team", DIRECTORY, 2)
    attributes.set_attributes(tree, Inode(2), AttributeChange(gid=65_534), 6)
    attributes.set_attributes(tree, Inode(2), AttributeChange(mode=0o2775), 6)
    assert make(tree, b"team/f", FILE, 3).record.gid == 65_534
    sub = make(tree, b"team/sub", DIRECTORY, 4).record
    assert (sub.gid, stat.S_IMODE(sub.mode)) == (65_534, 0o2755)
    outside = make(tree, b"plain", stat.S_IFDIR | 0o3755, 5).record
    assert (outside.gid, stat.S_IMODE(outside.mode)) == (100, 0o1755), "mkdir(2) itself never sets setgid"


def test_links_are_counted_until_the_last_name_goes(tree: DictTree) -> None:
    """B10."""
    make(tree, b"f", FILE, 2)
    make(tree, b"d", DIRECTORY, 3)
    linked = namespace.link(tree, Inode(2), Inode(3), b"g", 8)
    assert (linked.record.nlink, linked.record.ctime_ns, linked.record.mtime_ns) == (2, 8, 5)
    assert paths.names(tree, Inode(2)) == [(ROOT_INODE, b"f"), (Inode(3), b"g")]
    assert namespace.unlink(tree, ROOT_INODE, b"f", 9).record.nlink == 1
    assert namespace.orphans(tree) == []
    assert paths.path_of(tree, Inode(2)) == b"d/g"
    last = namespace.unlink(tree, Inode(3), b"g", 10)
    assert (last.record.nlink, last.record.ctime_ns) == (0, 10)
    assert namespace.orphans(tree) == [2]
    assert paths.path_of(tree, Inode(2)) is None
    assert treecheck.check(tree) == []


def test_links_have_a_limit(tree: DictTree) -> None:
    node = make(tree, b"f", FILE, 2)
    full = node.record.__class__(node.record.mode, namespace.LINKS_MAX, 0, 0, 0)
    namespace.put_inode(tree, Inode(2), full)
    with refused(errno.EMLINK):
        namespace.link(tree, Inode(2), ROOT_INODE, b"one-more", 6)


def test_directories_and_the_unlinked_get_no_further_name(tree: DictTree) -> None:
    make(tree, b"d", DIRECTORY, 2)
    make(tree, b"f", FILE, 3)
    namespace.unlink(tree, ROOT_INODE, b"f", 6)
    with refused(errno.EPERM):
        namespace.link(tree, Inode(2), ROOT_INODE, b"x", 7)
    with refused(errno.ENOENT):
        namespace.link(tree, Inode(3), ROOT_INODE, b"x", 7)


def test_unlink_and_rmdir_know_their_kind(tree: DictTree) -> None:
    make(tree, b"d", DIRECTORY, 2)
    make(tree, b"f", FILE, 3)
    with refused(errno.EISDIR):
        namespace.unlink(tree, ROOT_INODE, b"d", 6)
    with refused(errno.ENOTDIR):
        namespace.rmdir(tree, ROOT_INODE, b"f", 6)
    for remove in (namespace.unlink, namespace.rmdir):
        with refused(errno.ENOENT):
            remove(tree, ROOT_INODE, b"absent", 6)
        with refused(errno.ENAMETOOLONG):
            remove(tree, ROOT_INODE, b"x" * 256, 6)


def test_removed_directory_takes_nothing_in(tree: DictTree) -> None:
    """B41: somebody still stands in it."""
    make(tree, b"d", DIRECTORY, 2)
    make(tree, b"d/f", FILE, 3)
    with refused(errno.ENOTEMPTY):
        namespace.rmdir(tree, ROOT_INODE, b"d", 6)
    namespace.unlink(tree, Inode(2), b"f", 6)
    removed = namespace.rmdir(tree, ROOT_INODE, b"d", 7).record
    assert (removed.nlink, paths.inode(tree, ROOT_INODE).nlink) == (0, 2)
    with refused(errno.ENOENT):
        namespace.create(tree, Inode(2), b"x", FILE, USER, Inode(4), 8)
    make(tree, b"g", FILE, 5)
    with refused(errno.ENOENT):
        namespace.link(tree, Inode(5), Inode(2), b"x", 8)
    with refused(errno.ENOENT):
        paths.lookup(tree, Inode(2), b"..")
    assert treecheck.check(tree) == []


def test_reap_leaves_no_record(tree: DictTree) -> None:
    clean = dict(tree.rows)
    make(tree, b"f", FILE, 2)
    tree.put(xattr_key(Inode(2), b"user.a"), b"1")
    with pytest.raises(AssertionError):
        namespace.reap(tree, Inode(2))
    namespace.unlink(tree, ROOT_INODE, b"f", 1)
    namespace.reap(tree, Inode(2))
    assert tree.rows.keys() == clean.keys()


def test_number_given_twice_is_a_programmer_s_error(tree: DictTree) -> None:
    """C15."""
    make(tree, b"f", FILE, 2)
    with pytest.raises(AssertionError, match="given before"):
        make(tree, b"g", FILE, 2)


@pytest.mark.parametrize(
    "time_ns", [1_490_219_287_999_999_900, 1, -1_500_000_000, 4_102_444_800_123_456_789, 1_700_000_000_000_000_001]
)
def test_times_come_back_to_the_nanosecond(tree: DictTree, time_ns: int) -> None:
    """B22; only what was asked for changes, except ctime."""
    make(tree, b"f", FILE, 2)
    attributes.set_attributes(tree, Inode(2), AttributeChange(mtime_ns=time_ns), 77)
    record = paths.inode(tree, Inode(2))
    assert (record.atime_ns, record.mtime_ns, record.ctime_ns) == (5, time_ns, 77)
    attributes.set_attributes(tree, Inode(2), AttributeChange(atime_ns=time_ns, ctime_ns=78), 79)
    record = paths.inode(tree, Inode(2))
    assert (record.atime_ns, record.mtime_ns, record.ctime_ns) == (time_ns, time_ns, 78)


@pytest.mark.parametrize("time_ns", [1 << 63, -(1 << 64)])
def test_times_no_record_can_hold_are_clamped(tree: DictTree, time_ns: int) -> None:
    make(tree, b"f", FILE, 2)
    attributes.set_attributes(tree, Inode(2), AttributeChange(mtime_ns=time_ns), 6)
    assert abs(paths.inode(tree, Inode(2)).mtime_ns) == attributes.TIME_NS_MAX


@pytest.mark.parametrize(
    ("mode", "after"), [(0o4755, 0o755), (0o6777, 0o777), (0o2755, 0o755), (0o2644, 0o2644), (0o1644, 0o1644)]
)
def test_change_of_owner_takes_privileges_from_files(tree: DictTree, mode: int, after: int) -> None:
    make(tree, b"f", FILE, 2)
    make(tree, b"d", DIRECTORY, 3)
    for ino in (Inode(2), Inode(3)):
        attributes.set_attributes(tree, ino, AttributeChange(mode=mode), 6)
        attributes.set_attributes(tree, ino, AttributeChange(uid=7, gid=8), 7)
    of_file, of_directory = paths.inode(tree, Inode(2)), paths.inode(tree, Inode(3))
    assert (of_file.mode, of_file.uid, of_file.gid) == (stat.S_IFREG | after, 7, 8)
    assert of_directory.mode == stat.S_IFDIR | mode
    assert attributes.without_privileges(stat.S_IFREG | mode) == stat.S_IFREG | after


def test_chmod_never_changes_the_type(tree: DictTree) -> None:
    make(tree, b"f", FILE, 2)
    record = attributes.set_attributes(tree, Inode(2), AttributeChange(mode=stat.S_IFDIR | 0o4600), 6).record
    assert record.mode == stat.S_IFREG | 0o4600
    assert (record.mtime_ns, record.ctime_ns) == (5, 6)


def test_resize_moves_both_times_and_has_a_limit(tree: DictTree) -> None:
    record = make(tree, b"f", FILE, 2).record
    grown = attributes.resized(record, 10, 4, 9)
    assert (grown.size, grown.allocated, grown.atime_ns, grown.mtime_ns, grown.ctime_ns) == (10, 4, 5, 9, 9)
    assert attributes.resized(record, FILE_BYTES_MAX, 0, 9).size == FILE_BYTES_MAX
    with refused(errno.EFBIG):
        attributes.resized(record, FILE_BYTES_MAX + 1, 0, 9)


def test_walk_follows_symlinks_as_asked(tree: DictTree) -> None:
    make(tree, b"runs", DIRECTORY, 2)
    make(tree, b"runs/7", DIRECTORY, 3)
    make(tree, b"runs/7/model.pt", FILE, 4)
    make(tree, b"latest", LINK, 5, target=b"runs/7")
    make(tree, b"runs/abs", LINK, 6, target=b"/runs/../latest")
    make(tree, b"loop", LINK, 7, target=b"loop")
    for path in (b"runs/7/model.pt", b"/runs//7/./model.pt/", b"latest/model.pt", b"runs/abs/model.pt"):
        assert paths.walk(tree, path).ino == 4
    assert paths.walk(tree, b"latest/..").ino == 2, ".. means the parent of where a symlink leads"
    assert paths.walk(tree, b"latest").ino == 5
    assert paths.walk(tree, b"latest", follow=True).ino == 3
    assert paths.walk(tree, b"../..").ino == ROOT_INODE
    with refused(errno.ELOOP):
        paths.walk(tree, b"loop/x")
    with refused(errno.ENOTDIR):
        paths.walk(tree, b"runs/7/model.pt/x")
    with refused(errno.ENOENT):
        paths.walk(tree, b"runs/8")


def test_subtree_gives_parents_first_and_in_order(tree: DictTree) -> None:
    for ino, path in enumerate((b"b", b"b/x", b"a", b"a/z", b"a/y"), 2):
        make(tree, path, DIRECTORY, ino)
    assert [path for path, _ in paths.subtree(tree, ROOT_INODE)] == [b"", b"a", b"a/y", b"a/z", b"b", b"b/x"]
    assert [path for path, _ in paths.subtree(tree, Inode(4))] == [b"", b"y", b"z"]


def _damage_count(tree: DictTree) -> None:
    namespace.put_inode(tree, Inode(3), InodeRecord(FILE, 2, 0, 0, 0))


def _damage_backward_name(tree: DictTree) -> None:
    del tree.rows[name_key(Inode(3), Inode(2), b"f")]


def _damage_stale_backward_name(tree: DictTree) -> None:
    tree.put_local(name_key(Inode(3), Inode(2), b"old"), b"")


def _damage_lost_inode(tree: DictTree) -> None:
    del tree.rows[inode_key(Inode(3))]


def _damage_type(tree: DictTree) -> None:
    tree.put(entry_key(Inode(2), b"f"), EntryRecord(Inode(3), stat.S_IFDIR >> 12).encode())


def _damage_lost_entry(tree: DictTree) -> None:
    del tree.rows[entry_key(Inode(2), b"f")]
    del tree.rows[name_key(Inode(3), Inode(2), b"f")]


def _damage_cycle(tree: DictTree) -> None:
    """Directory 2 hangs below its own child."""
    make(tree, b"d/e", DIRECTORY, 4)
    namespace.delete_entry(tree, ROOT_INODE, b"d", Inode(2))
    namespace.put_entry(tree, Inode(4), b"d", Node(Inode(2), paths.inode(tree, Inode(2))))
    namespace.touch_directory(tree, ROOT_INODE, 9, subdirectories=-1)
    namespace.touch_directory(tree, Inode(4), 9, subdirectories=1)


def _damage_second_name(tree: DictTree) -> None:
    namespace.put_entry(tree, ROOT_INODE, b"d2", Node(Inode(2), paths.inode(tree, Inode(2))))
    namespace.touch_directory(tree, ROOT_INODE, 9, subdirectories=1)


def _damage_strange_xattr(tree: DictTree) -> None:
    tree.put(xattr_key(Inode(77), b"user.a"), b"1")


def _damage_forgotten_orphan(tree: DictTree) -> None:
    namespace.put_inode(tree, Inode(9), InodeRecord(FILE, 0, 0, 0, 0))


def _damage_name(tree: DictTree) -> None:
    namespace.put_entry(tree, Inode(2), b"a/b", Node(Inode(3), paths.inode(tree, Inode(3))))
    namespace.put_inode(tree, Inode(3), InodeRecord(FILE, 2, 0, 0, 0))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_damage_count, "link count 2, its names make 1"),
        (_damage_backward_name, "missing in table N"),
        (_damage_stale_backward_name, "table e does not"),
        (_damage_lost_inode, "which does not exist"),
        (_damage_type, "says type 4"),
        (_damage_lost_entry, "link count 1, its names make 0"),
        (_damage_cycle, "can't be reached from the root"),
        (_damage_second_name, "directory 2 has 2 names"),
        (_damage_strange_xattr, "table x has records of inode 77"),
        (_damage_forgotten_orphan, "not noted as an orphan"),
        (_damage_name, "not a possible name"),
    ],
)
def test_check_finds_each_kind_of_damage(tree: DictTree, damage, sentence: str) -> None:  # type: ignore[no-untyped-def]
    make(tree, b"d", DIRECTORY, 2)
    make(tree, b"d/f", FILE, 3)
    assert treecheck.check(tree) == []
    damage(tree)
    assert any(sentence in problem for problem in treecheck.check(tree)), treecheck.check(tree)


def test_what_is_counted_of_a_record_is_what_it_decodes_to() -> None:
    record = InodeRecord(FILE, 3, 1, 2, 1 << 40, 1 << 41, 0, -5, 6, 7, b"target")
    assert counted(record.encode()) == (record.mode, record.nlink, record.size)


def test_a_write_changes_size_allocation_and_two_times_only() -> None:
    record = InodeRecord(LINK, 3, 1, 2, 10, 20, 30, 40, 50, 60, b"target")
    expected = dataclasses.replace(record, size=11, allocated=21, mtime_ns=99, ctime_ns=99)
    assert record.with_content(11, 21, 99) == expected
