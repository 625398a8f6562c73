"""What a simulated world must show: the tree after each acknowledged request, and what the store really holds.

A `Tree` is a value: every request makes a new one that shares its unchanged blocks with the one before, so that all
states of a world can be kept. The store is read here with the core's decoders alone, never through the engine.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from spotwarp_fs.core import changesets, layout
from spotwarp_fs.core.changesets import ChangeSet, decode_records
from spotwarp_fs.core.frames import open_frame
from spotwarp_fs.core.manifests import Manifest, check_successor, decode, digest_of
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    ENTRY_TABLE,
    INODE_TABLE,
    TREE_TABLES,
    XATTR_TABLE,
    EntryRecord,
    FrameRef,
    InodeRecord,
    key_block,
    key_ino,
    key_name,
)
from spotwarp_fs.core.sections import Root, parse_root
from spotwarp_fs.core.treecheck import check
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE
from spotwarp_fs.store.memory import MemoryStore
from tests.support.dict_tree import DictMap

Blocks = dict[int, bytes]
"""Content by block, without zeros at a block's end: a hole and a block of zeros are the same."""


@dataclass(frozen=True, slots=True)
class Thing:
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    target: bytes
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    blocks: Blocks = field(default_factory=dict)

    @classmethod
    def of(cls, record: InodeRecord, xattrs: tuple[tuple[bytes, bytes], ...], blocks: Blocks) -> Thing:
        return cls(
            record.mode, record.nlink, record.uid, record.gid, record.size, record.target,
            record.atime_ns, record.mtime_ns, record.ctime_ns, xattrs, blocks,
        )  # fmt: skip

    def content(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        parts = []
        while start < stop:
            block, at = divmod(start, BLOCK_BYTES)
            piece = self.blocks.get(block, b"")[at : at + stop - start]
            length = min(BLOCK_BYTES - at, stop - start)
            parts.append(piece.ljust(length, b"\0"))
            start += length
        return b"".join(parts)


def split(content: bytes) -> Blocks:
    """Cut a whole file's bytes into `Thing.blocks`."""
    pieces = (
        (at // BLOCK_BYTES, content[at : at + BLOCK_BYTES].rstrip(b"\0")) for at in range(0, len(content), BLOCK_BYTES)
    )
    return {block: piece for block, piece in pieces if piece}


@dataclass(frozen=True, slots=True)
class Op:
    """One request as it was acknowledged (or, with `now_ns` still 0, as it was sent)."""

    name: str
    args: tuple[object, ...]
    now_ns: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """One state of a workspace, by inode number."""

    things: dict[int, Thing]
    entries: dict[tuple[int, bytes], int]

    def visible(self) -> Tree:
        """Without what has no name: it is not part of any state that others see."""
        return Tree({ino: thing for ino, thing in self.things.items() if thing.nlink}, self.entries)

    def apply(self, op: Op) -> Tree:
        after = Tree(dict(self.things), dict(self.entries))
        getattr(after, f"_{op.name}")(op.now_ns, *op.args)
        return after

    def names_of(self, ino: int) -> list[tuple[int, bytes]]:
        return sorted(place for place, there in self.entries.items() if there == ino)

    def files(self) -> list[int]:
        return sorted(ino for ino, thing in self.things.items() if stat.S_ISREG(thing.mode) and thing.nlink)

    def directories(self) -> list[int]:
        return sorted(ino for ino, thing in self.things.items() if stat.S_ISDIR(thing.mode) and thing.nlink)

    def _set(self, ino: int, **changes: object) -> None:
        self.things[ino] = replace(self.things[ino], **changes)  # type: ignore[arg-type]

    def _touch(self, now: int, ino: int, subdirectories: int = 0) -> None:
        self._set(ino, nlink=self.things[ino].nlink + subdirectories, mtime_ns=now, ctime_ns=now)

    def _make(self, now: int, parent: int, name: bytes, ino: int, mode: int, target: bytes = b"") -> None:
        assert (parent, name) not in self.entries
        directory = stat.S_ISDIR(mode)
        self.things[ino] = Thing(mode, 2 if directory else 1, 1000, 1000, len(target), target, now, now, now)
        self.entries[parent, name] = ino
        self._touch(now, parent, int(directory))

    def _link(self, now: int, ino: int, parent: int, name: bytes) -> None:
        self._set(ino, nlink=self.things[ino].nlink + 1, ctime_ns=now)
        self.entries[parent, name] = ino
        self._touch(now, parent)

    def _unlink(self, now: int, parent: int, name: bytes) -> None:
        self._drop_link(now, self.entries.pop((parent, name)))
        self._touch(now, parent)

    def _rmdir(self, now: int, parent: int, name: bytes) -> None:
        self._drop_link(now, self.entries.pop((parent, name)))
        self._touch(now, parent, -1)

    def _drop_link(self, now: int, ino: int) -> None:
        thing = self.things[ino]
        self._set(ino, nlink=0 if stat.S_ISDIR(thing.mode) else thing.nlink - 1, ctime_ns=now)

    def _rename(self, now: int, parent: int, name: bytes, new_parent: int, new_name: bytes, exchange: bool) -> None:
        ino, there = self.entries[parent, name], self.entries.get((new_parent, new_name))
        if ino == there:
            return
        moves = int(stat.S_ISDIR(self.things[ino].mode))
        replaces = int(there is not None and stat.S_ISDIR(self.things[there].mode))
        if exchange:
            assert there is not None
            self.entries[parent, name] = there
            self._set(there, ctime_ns=now)
            self._touch(now, parent, replaces - moves)
            self._touch(now, new_parent, moves - replaces)
        else:
            del self.entries[parent, name]
            if there is not None:
                self._drop_link(now, there)
            self._touch(now, parent, -moves)
            self._touch(now, new_parent, moves - replaces)
        self.entries[new_parent, new_name] = ino
        self._set(ino, ctime_ns=now)

    def _write(self, now: int, ino: int, offset: int, data: bytes) -> None:
        thing = self.things[ino]
        blocks = dict(thing.blocks)
        at = 0
        while at < len(data):
            block, start = divmod(offset + at, BLOCK_BYTES)
            piece = data[at : at + BLOCK_BYTES - start]
            old = blocks.pop(block, b"")
            new = (old[:start].ljust(start, b"\0") + piece + old[start + len(piece) :]).rstrip(b"\0")
            if new:
                blocks[block] = new
            at += len(piece)
        size = max(thing.size, offset + len(data))
        self._set(ino, blocks=blocks, size=size, mtime_ns=now, ctime_ns=now)

    def _truncate(self, now: int, ino: int, size: int) -> None:
        cut = {
            block: data[: max(0, size - block * BLOCK_BYTES)].rstrip(b"\0")
            for block, data in self.things[ino].blocks.items()
        }
        blocks = {block: data for block, data in cut.items() if data}
        self._set(ino, blocks=blocks, size=size, mtime_ns=now, ctime_ns=now)

    def _chmod(self, now: int, ino: int, mode: int) -> None:
        self._set(ino, mode=stat.S_IFMT(self.things[ino].mode) | mode, ctime_ns=now)

    def _utimens(self, now: int, ino: int, atime_ns: int, mtime_ns: int) -> None:
        self._set(ino, atime_ns=atime_ns, mtime_ns=mtime_ns, ctime_ns=now)

    def _setxattr(self, now: int, ino: int, name: bytes, value: bytes) -> None:
        xattrs = tuple(sorted({**dict(self.things[ino].xattrs), name: value}.items()))
        self._set(ino, xattrs=xattrs, ctime_ns=now)

    def _removexattr(self, now: int, ino: int, name: bytes) -> None:
        self._set(ino, xattrs=tuple(x for x in self.things[ino].xattrs if x[0] != name), ctime_ns=now)


def same(one: Tree, other: Tree) -> bool:
    """Whether the two look the same to everybody."""
    return one.entries == other.entries and one.visible().things == other.visible().things


def differences(expected: Tree, seen: Tree) -> list[str]:
    """Say what differs, a line each."""
    expected, seen = expected.visible(), seen.visible()
    lines = [f"{place} is {seen.entries.get(place)}, expected {expected.entries.get(place)}"
             for place in sorted(expected.entries.keys() | seen.entries.keys())
             if seen.entries.get(place) != expected.entries.get(place)]  # fmt: skip
    for ino in sorted(expected.things.keys() | seen.things.keys()):
        want, have = expected.things.get(ino), seen.things.get(ino)
        if want is None or have is None:
            lines.append(f"inode {ino:#x} is {'missing' if have is None else 'unexpected'}")
        elif want != have:
            lines += [f"inode {ino:#x} {line}" for line in _thing_differences(want, have)]
    return lines


def _thing_differences(want: Thing, have: Thing) -> Iterator[str]:
    for name in ("mode", "nlink", "uid", "gid", "size", "target", "atime_ns", "mtime_ns", "ctime_ns", "xattrs"):
        if getattr(want, name) != getattr(have, name):
            yield f"{name} is {getattr(have, name)!r}, expected {getattr(want, name)!r}"
    for block in sorted(want.blocks.keys() | have.blocks.keys()):
        expected, seen = want.blocks.get(block, b""), have.blocks.get(block, b"")
        if expected != seen:
            at = _first_difference(expected, seen)
            yield (
                f"block {block} differs from byte {at} on: {len(seen)} bytes {seen[at : at + 8].hex()}, "
                f"expected {len(expected)} bytes {expected[at : at + 8].hex()}"
            )


def _first_difference(one: bytes, other: bytes) -> int:
    low, high = 0, max(len(one), len(other))
    one, other = one.ljust(high, b"\0"), other.ljust(high, b"\0")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if one[low:middle] != other[low:middle] else (middle, high)
    return low


def in_flight_outcome(before: Tree, seen: Tree, op: Op) -> bool:
    """Whether *seen* is what a kill in the middle of *op* may leave: all of it, nothing, or some bytes of a write."""
    if op.name == "make":
        parent, name, _, *rest = op.args
        assert isinstance(parent, int) and isinstance(name, bytes)  # noqa: PT018
        ino = seen.entries.get((parent, name))
        op = replace(op, args=(parent, name, ino, *rest))
        return ino is not None and not differences(before.apply(op), seen)
    try:
        after = before.apply(op)
    except (KeyError, AssertionError):
        return False
    if not differences(after, seen):
        return True
    if op.name not in ("write", "truncate"):
        return False
    changed = op.args[0]
    assert isinstance(changed, int)
    return _torn(before, after, seen, changed)


def _torn(before: Tree, after: Tree, seen: Tree, ino: int) -> bool:
    """Whether everything is as it was, but for *ino*, each byte of which is the old or the new one."""
    old, new, have = before.things[ino], after.things[ino], seen.things.get(ino)
    if have is None or have.size not in (old.size, new.size) or have.mtime_ns not in (old.mtime_ns, new.mtime_ns):
        return False
    elsewhere = replace(have, size=old.size, mtime_ns=old.mtime_ns, ctime_ns=old.ctime_ns, blocks=old.blocks)
    if differences(before, Tree({**seen.things, ino: elsewhere}, seen.entries)):
        return False
    seen_bytes = np.frombuffer(have.content(0, have.size), np.uint8)
    old_bytes, new_bytes = (np.frombuffer(_padded(thing, have.size), np.uint8) for thing in (old, new))
    return bool(((seen_bytes == old_bytes) | (seen_bytes == new_bytes)).all())


def _padded(thing: Thing, size: int) -> bytes:
    return thing.content(0, size).ljust(size, b"\0")


class StoreReader:
    """Reads every manifest of a store in turn and checks what must hold of all of them."""

    def __init__(self, store: MemoryStore, root: str) -> None:
        self._store = store
        self._root = root
        self._state: dict[bytes, bytes] = {}
        self._contents: dict[bytes, bytes] = {}
        self._checked: set[FrameRef] = set()
        self.manifests: list[Manifest] = []
        self._digest = ""

    def __iter__(self) -> Iterator[tuple[Manifest, Tree]]:
        """Give the manifests that came since the last time, with the trees that they name."""
        while True:
            key = layout.manifest_key(len(self.manifests) + 1)  # type: ignore[arg-type]
            found = self._store._objects.get(f"{self._root}{key}")
            if found is None:
                return
            manifest = decode(found.body)
            if self.manifests:
                check_successor(self.manifests[-1], manifest, parent_digest=self._digest)
            self._digest = digest_of(found.body)
            changesets.apply(self._state, self._changes(manifest))
            self.manifests.append(manifest)
            if manifest.base is not None and (len(self.manifests) < 2 or self.manifests[-2].base != manifest.base):
                self._check_base(manifest)
            yield manifest, self._tree()

    def _frame(self, ref: FrameRef) -> bytes:
        """A frame's bytes, which must exist and pass the digest of its record."""
        found = self._store._objects.get(f"{self._root}{layout.pack_key(ref.pack)}")
        assert found is not None, f"pack {ref.pack} is named by manifest {len(self.manifests) + 1} and does not exist"
        return open_frame(ref, found.body[ref.offset : ref.offset + ref.stored_bytes])

    def _changes(self, manifest: Manifest) -> ChangeSet:
        if manifest.changes is None:
            return ChangeSet()
        return self._records(parse_root(self._frame(manifest.changes)))

    def _records(self, root: Root) -> ChangeSet:
        if not root.sections:
            return root.records
        return changesets.concat([decode_records(self._frame(section.frame)) for section in root.sections])

    def _check_base(self, manifest: Manifest) -> None:
        """A base holds what the change sets up to its number make, no more and no less."""
        assert manifest.base is not None
        state: dict[bytes, bytes] = {}
        for earlier in self.manifests[: manifest.base_number]:
            changesets.apply(state, self._changes(earlier))
        held = dict(self._records(parse_root(self._frame(manifest.base))).changes)
        assert held == state, f"base({manifest.base_number}) of manifest {manifest.number} is not what it should be"

    def _tree(self) -> Tree:
        tree = DictMap()
        tree.rows = self._state
        problems = check(tree, node_tables=False)
        assert not problems, f"manifest {self.manifests[-1].number}: {problems}"
        records: dict[int, InodeRecord] = {}
        entries: dict[tuple[int, bytes], int] = {}
        xattrs: dict[int, list[tuple[bytes, bytes]]] = {}
        blocks: dict[int, Blocks] = {}
        held: dict[int, int] = {}
        of_tree = (key for key in self._state if key[:1] in TREE_TABLES)
        for key in sorted(of_tree, key=lambda key: (key[:1] != INODE_TABLE, key)):
            value, ino = self._state[key], key_ino(key)
            if key[:1] == INODE_TABLE:
                records[ino] = InodeRecord.decode(value)
            elif key[:1] == ENTRY_TABLE:
                entries[ino, key_name(key)] = EntryRecord.decode(value).ino
            elif key[:1] == XATTR_TABLE:
                xattrs.setdefault(ino, []).append((key_name(key), value))
            elif key[:1] == BLOCK_TABLE:
                held[ino] = held.get(ino, 0) + BLOCK_BYTES
                raw = self._content(FrameRef.decode(value), records[ino].size - key_block(key) * BLOCK_BYTES)
                if raw:
                    blocks.setdefault(ino, {})[key_block(key)] = raw
        for number, record in records.items():
            assert record.nlink > 0, f"inode {number:#x} without a name is published"
            bytes_held = held.get(number, 0)
            assert record.allocated == bytes_held, f"inode {number:#x}: {record.allocated} allocated, {bytes_held} held"
        things = {
            number: Thing.of(record, tuple(xattrs.get(number, ())), blocks.get(number, {}))
            for number, record in records.items()
        }
        return Tree(things, entries)

    def _content(self, ref: FrameRef, valid: int) -> bytes:
        assert valid > 0, "a block beyond the end of its file is published"
        assert ref.raw_bytes <= valid, f"a frame of {ref.raw_bytes} bytes for a block with {valid} valid bytes"
        if ref not in self._checked:
            self._checked.add(ref)
            self._contents[ref.digest] = self._frame(ref).rstrip(b"\0")
        raw = self._contents[ref.digest]
        return raw if len(raw) <= valid else raw[:valid].rstrip(b"\0")


def empty_tree(root: InodeRecord) -> Tree:
    return Tree({ROOT_INODE: Thing.of(root, (), {})}, {})
