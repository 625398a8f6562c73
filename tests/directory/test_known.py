"""Does the picture of what was last seen stay one tree, with indexes that say the same?"""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.records import EntryRecord, NodeTable, entry_key, ino_key
from spotwarp_fs.core.types import ROOT_INODE, Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory.known import KnownTree
from tests.support.dict_tree import DictMap

FILE = Witness(7, 100, stat.S_IFREG | 0o644, 1, 0, 0, 0, 10, 1, 2, Seen.TRUSTED)
DIRECTORY = replace(FILE, mode=stat.S_IFDIR | 0o755, ino=50, seen=Seen.NOTHING)


def map_of(rows: dict[bytes, bytes]) -> DictMap:
    made = DictMap()
    made.rows.update(rows)
    return made


def test_it_is_loaded_from_entries_and_witnesses_whatever_the_order_of_inode_numbers() -> None:
    rows = {
        entry_key(ROOT_INODE, b"top"): EntryRecord(Inode(90), 4).encode(),
        entry_key(Inode(90), b"inner"): EntryRecord(Inode(5), 4).encode(),
        entry_key(Inode(5), b"\xff\xfe"): EntryRecord(Inode(300), 8).encode(),
        entry_key(ROOT_INODE, b"other name"): EntryRecord(Inode(300), 8).encode(),
        ino_key(NodeTable.WITNESS, Inode(300)): FILE.encode(),
        ino_key(NodeTable.WITNESS, Inode(90)): DIRECTORY.encode(),
    }
    known = KnownTree.load(map_of(rows))
    assert sorted(known) == [b"", b"other name", b"top", b"top/inner", b"top/inner/\xff\xfe"]
    assert len(known) == 5
    assert sorted(known.by_identity(7, 100)) == [b"other name", b"top/inner/\xff\xfe"]
    assert sorted(known.by_inode(Inode(300))) == [b"other name", b"top/inner/\xff\xfe"]
    assert known.by_identity(8, 100) == []
    top, file = known.get(b"top"), known.get(b"top/inner/\xff\xfe")
    assert top is not None
    assert top.witness == DIRECTORY
    assert file is not None
    assert (file.ino, file.witness, file.children) == (300, FILE, None)


def test_a_renamed_directory_keeps_what_lies_below_it() -> None:
    known = KnownTree()
    known.put(b"a", Inode(2), DIRECTORY)
    inner = known.put(b"a/b", Inode(3), FILE)
    known.put(b"z", Inode(4), replace(FILE, ino=101))
    known.move(b"a", b"z")
    assert sorted(known) == [b"", b"z", b"z/b"]
    assert known.get(b"z/b") is inner
    assert known.by_inode(Inode(3)) == [b"z/b"]
    assert known.by_inode(Inode(4)) == []
    with pytest.raises(ValueError, match="below itself"):
        known.move(b"z", b"z/b/c")
    with pytest.raises(KeyError):
        known.remove(b"nothing")
    with pytest.raises(KeyError):
        known.put(b"no/where", Inode(9), FILE)


def test_all_names_of_an_inode_share_one_witness() -> None:
    known = KnownTree()
    known.put(b"one", Inode(2), FILE)
    known.put(b"two", Inode(2), replace(FILE, nlink=2))
    one = known.get(b"one")
    assert one is not None
    assert one.witness == replace(FILE, nlink=2)
    known.put(b"one", Inode(3), replace(FILE, ino=102))
    two = known.get(b"two")
    assert two is not None
    assert two.witness == replace(FILE, nlink=2)
    assert known.by_identity(7, 100) == [b"two"]


def test_an_inode_of_another_kind_replaces_everything_below() -> None:
    known = KnownTree()
    known.put(b"a", Inode(2), DIRECTORY)
    known.put(b"a/b", Inode(3), FILE)
    known.put(b"a", Inode(2), replace(DIRECTORY, ino=51))
    assert b"a/b" in list(known)
    known.put(b"a", Inode(4), FILE)
    assert list(known) == [b"", b"a"]
    assert known.by_inode(Inode(3)) == []


NAMES = [b"a", b"b", b"a/c", b"a/c/d", b"b/e"]
steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(2, 6), st.integers(50, 53), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("move"), st.sampled_from(NAMES), st.sampled_from([*NAMES, b"c"])),
    st.tuples(st.just("ask")),
)


@given(st.lists(steps, max_size=30))
def test_the_indexes_say_what_the_tree_says(program: list[tuple[object, ...]]) -> None:
    known = KnownTree()
    for action, *arguments in program:
        try:
            if action == "put":
                path, ino, number, is_directory = arguments
                witness = replace(DIRECTORY if is_directory else FILE, ino=number)
                if is_directory and any(there != path for there in known.by_inode(Inode(ino + 100))):
                    continue
                known.put(path, Inode(ino + 100 * is_directory), witness)
            elif action == "ask":
                known.by_identity(7, 50)
            else:
                getattr(known, action)(*arguments)
        except (KeyError, ValueError):
            continue
    found = dict(known.items())
    assert len(found) == len(known)
    assert all(entry.path == path and known.get(path) is entry for path, entry in found.items())
    for ino in {entry.ino for entry in found.values()}:
        assert sorted(known.by_inode(ino)) == sorted(path for path, entry in found.items() if entry.ino == ino)
    for number in range(50, 54):
        there = sorted(path for path, entry in found.items() if entry.witness and entry.witness.ino == number)
        assert sorted(known.by_identity(7, number)) == there


def test_depth_needs_no_recursion() -> None:
    depth = 5_000
    names = {entry_key(Inode(level), b"d"): EntryRecord(Inode(level + 1), 4).encode() for level in range(1, depth + 1)}
    known = KnownTree.load(map_of(names))
    path = b"/".join([b"d"] * depth)
    entry = known.get(path)
    assert entry is not None
    assert (entry.ino, entry.path) == (depth + 1, path)
    assert len(list(known)) == depth + 1
    known.remove(b"d")
    assert len(known) == 1
