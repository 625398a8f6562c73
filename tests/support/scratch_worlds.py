"""A tree that only the namespace rules and the border change, and what must come of it, worked out from full paths."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field, replace

from spotwarp_fs.core import namespace, paths
from spotwarp_fs.core.border import Border
from spotwarp_fs.core.changes import ChangeCounter, Recorder, confirm_ranges
from spotwarp_fs.core.changesets import apply
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.policies import PathGlobs
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    DIRTY,
    ENTRY_TABLE,
    TREE_TABLES,
    XATTR_TABLE,
    BlockState,
    EntryRecord,
    FrameRef,
    FrameState,
    NodeTable,
    block_key,
    changelog_key,
    entry_key,
    ino_range,
    inode_key,
    key_block,
    key_ino,
    key_name,
    table_range,
    xattr_key,
)
from spotwarp_fs.core.rename import rename
from spotwarp_fs.core.requests import Actor
from spotwarp_fs.core.scratch import FIRST_ROW, MADE_SO, join
from spotwarp_fs.core.types import ROOT_INODE, BlockIndex, ChangeSeq, Inode, PackId
from spotwarp_fs.engine.cut import Cut
from spotwarp_fs.engine.export import export
from tests.support.dict_tree import DictMap

USER = Actor(0, 0, 1)


class Snapshot(DictMap):
    """A copy that can be closed."""

    def close(self) -> None:
        pass


def frame(version: int) -> FrameRef:
    """The frame of one content."""
    return FrameRef(PackId("00000001-0000000000000001"), 0, 1, 1, version.to_bytes(32))


@dataclass
class ScratchWorld:
    """A live map, the head that its cuts have made, and at most one cut on its way."""

    globs: PathGlobs
    tree: DictMap = field(default_factory=DictMap)
    head: dict[bytes, bytes] = field(default_factory=dict)
    head_seq: ChangeSeq = MADE_SO
    versions: dict[tuple[Inode, BlockIndex], int] = field(default_factory=dict)
    cut: Cut | None = None
    cut_versions: dict[tuple[Inode, BlockIndex], int] = field(default_factory=dict)
    serial: int = 1 << 40

    def __post_init__(self) -> None:
        self.counter = ChangeCounter(ChangeSeq(0))
        namespace.make_root(self.recorder(), USER, 1)

    def recorder(self) -> Recorder:
        return Recorder(self.tree, self.counter)

    def number(self) -> int:
        self.serial += 1
        return self.serial

    def place(self, path: bytes) -> tuple[Inode, bytes]:
        above, _, name = path.rpartition(b"/")
        return paths.walk(self.tree, above).ino, name

    def perform(self, operation: tuple[object, ...]) -> bool:
        """Carry one operation out; False when the namespace refuses it."""
        try:
            getattr(self, str(operation[0]))(*operation[1:])
        except Refused:
            return False
        return True

    def make(self, path: bytes, mode: int) -> None:
        recorder, (parent, name), ino = self.recorder(), self.place(path), Inode(self.number())
        namespace.create(recorder, parent, name, mode | 0o700, USER, ino, 1)
        Border(recorder, self.globs).made(parent, name, ino)

    def mkdir(self, path: bytes) -> None:
        self.make(path, stat.S_IFDIR)

    def create(self, path: bytes) -> None:
        self.make(path, stat.S_IFREG)

    def link(self, source: bytes, path: bytes) -> None:
        recorder, (parent, name), node = self.recorder(), self.place(path), paths.walk(self.tree, source)
        namespace.link(recorder, node.ino, parent, name, 1)
        Border(recorder, self.globs).linked(parent, name, node.ino)

    def remove(self, path: bytes) -> None:
        recorder, (parent, name) = self.recorder(), self.place(path)
        found = paths.lookup(self.tree, parent, name)
        rule = namespace.rmdir if stat.S_ISDIR(found.record.mode) else namespace.unlink
        node = rule(recorder, parent, name, 1)
        Border(recorder, self.globs).unlinked(parent, name, node)
        if node.record.nlink == 0:
            recorder.drop_blocks(node.ino, BlockIndex(0))
            recorder.delete_local(NodeTable.SCRATCH + node.ino.to_bytes(8))
            namespace.reap(recorder, node.ino)

    def move(self, source: bytes, path: bytes, flags: int) -> None:
        recorder, old, new = self.recorder(), self.place(source), self.place(path)
        outcome = rename(recorder, *old, *new, flags, 1)
        Border(recorder, self.globs).renamed(old, new, outcome)
        if outcome.replaced is not None and outcome.replaced.record.nlink == 0:
            recorder.drop_blocks(outcome.replaced.ino, BlockIndex(0))
            recorder.delete_local(NodeTable.SCRATCH + outcome.replaced.ino.to_bytes(8))
            namespace.reap(recorder, outcome.replaced.ino)

    def write(self, path: bytes, block: int) -> None:
        node, recorder = paths.walk(self.tree, path), self.recorder()
        if not stat.S_ISREG(node.record.mode):
            return
        self.versions[node.ino, BlockIndex(block)] = self.number()
        recorder.put(block_key(node.ino, BlockIndex(block)), DIRTY.encode())
        recorder.put(xattr_key(node.ino, b"user.%d" % block), b"")

    def truncate(self, path: bytes, block: int) -> None:
        node = paths.walk(self.tree, path)
        if stat.S_ISREG(node.record.mode):
            self.recorder().drop_blocks(node.ino, BlockIndex(block))
            if self.tree.get(xattr_key(node.ino, b"user.0")) is not None:
                self.recorder().delete(xattr_key(node.ino, b"user.0"))

    def settings(self, globs: tuple[str, ...]) -> None:
        """A start with other globs."""
        self.globs = PathGlobs(globs)
        Border(self.recorder(), self.globs).derive()

    def begin(self) -> None:
        if self.cut is None:
            snapshot = Snapshot()
            snapshot.rows = dict(self.tree.rows)
            self.cut = Cut(None, "", self.counter.barrier(), snapshot, 0.0, 0, {})  # type: ignore[arg-type]
            self.cut_versions = dict(self.versions)

    def publish(self, kept: bool) -> None:
        """End the cut; its frames are marked where nothing has changed since."""
        if self.cut is None:
            return
        cut, self.cut = self.cut, None
        if not kept:
            return
        cut.sealed.update({place: frame(version) for place, version in self.cut_versions.items()})
        apply(self.head, export(cut, self.head_seq))
        self.head_seq = cut.seq
        confirm_ranges(self.tree, cut.seq)
        for row, key in list(self.tree.scan(NodeTable.CHANGELOG, changelog_key(ChangeSeq(cut.seq + 1)))):
            self.tree.delete(row)
            self.tree.delete(NodeTable.CHANGES + key)
        for key, value in list(self.tree.scan(*table_range(BLOCK_TABLE))):
            place = key_ino(key), key_block(key)
            if key in self.head and self.cut_versions.get(place) == self.versions[place] and value == DIRTY.encode():
                state = BlockState(local=True, state=FrameState.PUBLISHED, frame=frame(self.versions[place]))
                self.tree.put(key, state.encode())

    def entries(self) -> list[tuple[Inode, bytes, EntryRecord]]:
        rows = self.tree.scan(*table_range(ENTRY_TABLE))
        return [(key_ino(key), key_name(key), EntryRecord.decode(value)) for key, value in rows]

    def expected_tables(self) -> tuple[set[Inode], set[tuple[Inode, bytes]]]:
        """Tables S and T, by full paths."""
        scratch: dict[Inode, bool] = {}
        border = set()
        for parent, name, child in self.entries():
            above = paths.path_of(self.tree, parent)
            assert above is not None
            covered = self.globs.covers(join(above, name))
            scratch[child.ino] = scratch.get(child.ino, True) and covered
            if covered and not (above and self.globs.covers(above)):
                border.add((parent, name))
        return {ino for ino, yes in scratch.items() if yes}, border

    def tables(self) -> tuple[set[Inode], set[tuple[Inode, bytes]]]:
        """Tables S and T as they are."""
        inodes = {key_ino(key) for key, _ in self.tree.scan(FIRST_ROW, table_range(NodeTable.SCRATCH)[1])}
        names = {(key_ino(key), key_name(key)) for key, _ in self.tree.scan(*table_range(NodeTable.SCRATCH_NAMES))}
        return inodes, names

    def expected_head(self) -> dict[bytes, bytes]:
        """What a cut now must make of the head, by full paths."""
        kept: dict[bytes, bytes] = {}
        for parent, name, child in self.entries():
            above = paths.path_of(self.tree, parent)
            assert above is not None
            if not self.globs.covers(join(above, name)):
                kept[entry_key(parent, name)] = child.encode()
        for ino, count in self._link_counts(kept).items():
            kept[inode_key(ino)] = replace(paths.inode(self.tree, ino), nlink=count).encode()
            kept.update(self.tree.scan(*ino_range(XATTR_TABLE, ino)))
            for key, _ in self.tree.scan(*ino_range(BLOCK_TABLE, ino)):
                kept[key] = frame(self.versions[ino, key_block(key)]).encode()
        return kept

    def _link_counts(self, kept: dict[bytes, bytes]) -> dict[Inode, int]:
        """Names of files, and two and one per subdirectory of directories."""
        links: dict[Inode, int] = {ROOT_INODE: 2}
        for value in kept.values():
            child = EntryRecord.decode(value)
            links[child.ino] = links.get(child.ino, 0) + 1
        for value in kept.values():
            child = EntryRecord.decode(value)
            if child.dtype == stat.S_IFDIR >> 12:
                links[child.ino] = 2
        for key, value in kept.items():
            if EntryRecord.decode(value).dtype == stat.S_IFDIR >> 12:
                links[key_ino(key)] += 1
        return links

    def wrong_tables(self) -> list[str]:
        """Say in which rows tables S and T differ from what paths say."""
        found = []
        for name, is_now, wanted in zip("ST", self.tables(), self.expected_tables(), strict=True):
            found += [f"{name}: {row} is too much" for row in is_now - wanted]  # type: ignore[operator]
            found += [f"{name}: {row} is missing" for row in wanted - is_now]  # type: ignore[operator]
        return found

    def wrong_head(self) -> list[str]:
        """Say where the head differs from what paths say, when it has everything."""
        wanted = self.expected_head()
        head = {key: value for key, value in self.head.items() if key[:1] in TREE_TABLES}
        return [
            f"{key!r} is {head.get(key)!r}, not {wanted.get(key)!r}"
            for key in sorted(wanted.keys() | head.keys())
            if head.get(key) != wanted.get(key)
        ]
