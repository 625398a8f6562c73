"""Is what a start read kept small, by role, and never trusted further than that?"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.policies import Policies
from spotwarp_fs.core.records import EntryRecord, entry_key, name_key
from spotwarp_fs.core.trace import (
    ENCODED_BYTES_MAX,
    EXTENTS_MAX,
    MISSED_MAX,
    RAW_BYTES_MAX,
    VERSION,
    Entry,
    Roles,
    decode,
    encode,
    extents_of,
    merged,
)
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, Inode
from tests.support.dict_tree import DictMap

FILE, DIRECTORY = 8, 4
EXTENTS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1)), max_size=4).map(tuple)
ENTRIES = st.lists(st.builds(Entry, st.binary(max_size=60), EXTENTS, st.integers(0, MISSED_MAX)), max_size=8)


def block(number: int) -> BlockIndex:
    return BlockIndex(number)


@given(ENTRIES)
def test_a_trace_comes_back_as_it_was(entries: list[Entry]) -> None:
    assert decode(encode(entries)) == tuple(entries)


@given(ENTRIES, st.data())
def test_damage_is_no_trace_and_no_error(entries: list[Entry], data: st.DataObject) -> None:
    value = bytearray(encode(entries))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(value)) in ((), tuple(entries))
    assert decode(bytes(value[:at])) == ()


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        bytes([VERSION]),
        bytes([VERSION]) + b"not a frame",
        bytes([VERSION + 1]) + encode([Entry(b"a", ((block(0), 1),))])[1:],
        bytes([VERSION]) + zstandard.compress(b"\0\0\5\0\1short"),
        bytes([VERSION]) + zstandard.compress(bytes(RAW_BYTES_MAX + 1)),
    ],
)
def test_what_nobody_knows_is_no_trace(value: bytes | None) -> None:
    assert decode(value) == ()


def test_a_long_trace_loses_its_end() -> None:
    rng = random.Random(1)
    entries = [Entry(rng.randbytes(100), ((block(at), 1),)) for at in range(3000)]
    value = encode(entries)
    kept = decode(value)
    assert len(value) <= ENCODED_BYTES_MAX
    assert 300 < len(kept) < 3000
    assert kept == tuple(entries[: len(kept)])


def test_a_file_read_at_random_keeps_a_limited_number_of_extents() -> None:
    extents = tuple((block(2 * at), 1) for at in range(EXTENTS_MAX * 2))
    assert decode(encode([Entry(b"tokens", extents)])) == (Entry(b"tokens", extents[:EXTENTS_MAX]),)


@given(st.sets(st.integers(0, 40)))
def test_extents_say_exactly_the_blocks(blocks: set[int]) -> None:
    extents = extents_of(map(block, blocks))
    assert {at for first, count in extents for at in range(first, first + count)} == blocks
    assert all(a[0] + a[1] < b[0] for a, b in pairwise(extents))


def test_a_short_look_erases_nothing_but_what_is_never_read_goes() -> None:
    usual = [Entry(b"model", ((block(0), 9),)), Entry(b"train.py", ((block(0), 1),))]
    look = [Entry(b"train.py", ((block(0), 2),))]
    after = merged(look, usual)
    assert after == [look[0], replace(usual[0], missed=1)]
    for _ in range(MISSED_MAX - 1):
        after = merged(look, after)
    assert [entry.role for entry in after] == [b"train.py", b"model"]
    assert merged(look, after) == look
    assert merged(usual, after) == usual


def tree_of(*paths: bytes) -> tuple[DictMap, dict[bytes, Inode]]:
    """A tree with these files; a role needs entries alone."""
    tree, inodes = DictMap(), {b"": ROOT_INODE}
    for path in paths:
        parts = path.split(b"/")
        for depth in range(1, len(parts) + 1):
            here, above = b"/".join(parts[:depth]), b"/".join(parts[: depth - 1])
            if here in inodes:
                continue
            inodes[here] = ino = Inode(len(inodes) + 100)
            kind = FILE if depth == len(parts) else DIRECTORY
            tree.rows[entry_key(inodes[above], parts[depth - 1])] = EntryRecord(ino, kind).encode()
            tree.rows[name_key(ino, inodes[above], parts[depth - 1])] = b""
    return tree, inodes


@pytest.mark.parametrize(
    ("path", "role"),
    [
        (b"src/train.py", b"src/train.py"),
        (b"run/checkpoint-1000/model.safetensors", b"run/\0checkpoint-#/model.safetensors"),
        (b"run/checkpoint-900/model.safetensors", b"run/checkpoint-900/model.safetensors"),
        (b"flat/step=20.ckpt", b"flat/\0step=#.ckpt"),
        (b"flat/step=3.ckpt", b"flat/step=3.ckpt"),
        (b"ds/global_step7/epoch_2/m.raw", b"ds/\0global_step#/\0epoch_#/m.raw"),
    ],
)
def test_only_the_newest_of_a_family_has_a_role_of_its_own(path: bytes, role: bytes) -> None:
    paths = (
        b"src/train.py",
        b"run/checkpoint-900/model.safetensors",
        b"run/checkpoint-1000/model.safetensors",
        b"flat/step=3.ckpt",
        b"flat/step=20.ckpt",
        b"ds/global_step7/epoch_2/m.raw",
    )
    tree, inodes = tree_of(*paths)
    assert Roles(Policies.build()).role_of(tree, inodes[path]) == role
    assert Roles(Policies.build()).find(tree, role) == inodes[path]


def test_a_role_moves_on_to_the_next_checkpoint() -> None:
    roles = Roles(Policies.build())
    tree, inodes = tree_of(b"run/checkpoint-900/model.bin", b"run/checkpoint-10000/model.bin")
    assert roles.find(tree, b"run/\0checkpoint-#/model.bin") == inodes[b"run/checkpoint-10000/model.bin"]


@pytest.mark.parametrize(
    "role", [b"", b"gone", b"run/\0step-#/x", b"\0", b"/", b"run//model.bin", b"x" * 300, b"a\0b/c"]
)
def test_a_role_that_leads_nowhere_is_passed_over(role: bytes) -> None:
    tree, _ = tree_of(b"run/checkpoint-900/model.bin")
    assert Roles(Policies.build()).find(tree, role) is None
