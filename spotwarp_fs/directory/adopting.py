"""Take what a walk found into the map: names, attributes and the blocks that were read, a batch in one step.

Invariants: a batch is one change of the map (no await), so that a cut has all of it or nothing; what a batch removes
was found missing by two walks (the caller sees to that); an attribute that was not changed on this node keeps the value
of the workspace (M-i); every inode that is adopted has a witness afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spotwarp_fs.core import namespace, paths, rename, xattrs
from spotwarp_fs.core.border import Border
from spotwarp_fs.core.changes import Recorder
from spotwarp_fs.core.errors import Refused
from spotwarp_fs.core.inflight import Mark
from spotwarp_fs.core.ownnames import absent_inode
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    BlockState,
    FrameState,
    InodeRecord,
    NodeTable,
    block_key,
    ino_key,
    ino_range,
    inode_key,
    key_block,
)
from spotwarp_fs.core.requests import Actor, Node
from spotwarp_fs.core.treeplan import Clear, Link, Rename
from spotwarp_fs.core.types import BLOCK_BYTES, ROOT_INODE, BlockIndex, Inode
from spotwarp_fs.core.witness import Seen, Witness, merged
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.reading import COUNTED, Reading
from spotwarp_fs.directory.witnessing import refused_xattrs
from spotwarp_fs.engine.blocks import LOADED
from spotwarp_fs.engine.session import Session


@dataclass(slots=True)
class Arrival:
    """An entry that is new or changed."""

    path: bytes
    status: os.stat_result
    xattrs: Mapping[bytes, bytes] | None
    """None: they cannot be read here, and are carried over."""
    target: bytes = b""
    """Of a symlink."""
    reading: Reading | None = None
    """Of a regular file; None: only its name and attributes are taken."""
    fresh: bool = False
    """Another file than the one that the map has there, which goes."""


@dataclass(slots=True)
class Batch:
    """What is taken over in one step, in this order."""

    steps: list[Arrival | Rename | Clear] = field(default_factory=list)
    """Directories that are new, renames, and what is in the way of these."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Parents before children."""
    links: list[Link] = field(default_factory=list)
    removals: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps or self.arrivals or self.links or self.removals)


class Adopter:
    """Brings batches into the map of one session, and keeps the known tree in step."""

    def __init__(self, session: Session, known: KnownTree) -> None:
        self._session = session
        self._ws = session.workspace
        self._known = known

    def commit(self, batch: Batch) -> None:
        """Take *batch* over; raises OSError when the map's disk is full, and has changed nothing then."""
        # Before the change: a number whose batch was not kept must not come again.
        numbers = [self._ws.new_inode() for _ in (*batch.steps, *batch.arrivals)]
        step = _Step(self._session, self._known, numbers)
        with self._ws.change() as recorder:
            step.run(recorder, batch)
        step.finish()


class _Step:
    """One change of the map, and what follows from it once it is committed."""

    def __init__(self, session: Session, known: KnownTree, numbers: list[Inode]) -> None:
        self._session = session
        self._ws = session.workspace
        self._known = known
        self._numbers = numbers
        self._now_ns = self._ws.wall.now_ns()
        self._made: list[Inode] = []
        self._gone: list[Node] = []
        self._marks: dict[Inode, Mark | None] = {}
        self._times: dict[Inode, tuple[int, int]] = {}
        """What directories said before a name in them changed: their own arrival says what is new."""
        self._after: list[tuple[str, bytes, bytes, Inode, Witness | None]] = []
        """What the known tree learns after the commit."""
        self._here: dict[bytes, Inode] = {}

    def run(self, recorder: Recorder, batch: Batch) -> None:
        self._recorder = recorder
        self._border = Border(recorder, self._ws.policies.scratch)
        for step in batch.steps:
            self._take(step)
        for arrival in batch.arrivals:
            self._arrive(arrival)
        for link in batch.links:
            self._link(link)
        for path in batch.removals:
            self._remove(path)
        self._restore_times()
        for arrival in batch.arrivals:
            if stat.S_ISDIR(arrival.status.st_mode):
                self._attributes(self._at(arrival.path), arrival)

    def _take(self, step: Arrival | Rename | Clear) -> None:
        match step:
            case Arrival():
                self._arrive(step)
                self._attributes(self._at(step.path), step)
            case Rename():
                self._rename(step.source, step.target)
            case Clear():
                self._remove(step.path)

    def _restore_times(self) -> None:
        """Directories keep the times that they have on disk, not those of our changes."""
        for ino, (mtime_ns, ctime_ns) in self._times.items():
            value = self._recorder.get(inode_key(ino))
            if value is not None:
                record = replace(InodeRecord.decode(value), mtime_ns=mtime_ns, ctime_ns=ctime_ns)
                self._recorder.put(inode_key(ino), record.encode())

    def finish(self) -> None:
        """After the commit, in the same step."""
        files = self._session.files
        for ino in self._made:
            files.made(ino)
        for ino, mark in self._marks.items():
            files.set_mark(ino, mark)
        for node in self._gone:
            files.lost_name(node)
        for what, path, source, ino, witness in self._after:
            if what == "put":
                self._known.put(path, ino, witness, is_directory=False if witness is None else None)
            elif what == "move":
                self._known.move(source, path)
            elif self._known.get(path) is not None:
                self._known.remove(path)

    def _at(self, path: bytes) -> Inode:
        """The inode at *path*, by the map as it is in this step."""
        if not path:
            return ROOT_INODE
        found = self._here.get(path)
        if found is None:
            parent, name = self._place(path)
            found = self._here[path] = paths.existing_entry(self._recorder, parent, name).ino
        return found

    def _place(self, path: bytes) -> tuple[Inode, bytes]:
        directory, _, name = path.rpartition(b"/")
        return self._at(directory), name

    def _touch(self, parent: Inode) -> None:
        if parent not in self._times:
            record = paths.inode(self._recorder, parent)
            self._times[parent] = (record.mtime_ns, record.ctime_ns)

    def _rename(self, source: bytes, target: bytes) -> None:
        """Move a name; what the target's name led to goes."""
        recorder = self._recorder
        (parent, name), (new_parent, new_name) = self._place(source), self._place(target)
        self._touch(parent)
        self._touch(new_parent)
        if paths.entry(recorder, new_parent, new_name) is not None:
            self._remove(target)
        outcome = rename.rename(recorder, parent, name, new_parent, new_name, 0, self._now_ns)
        self._border.renamed((parent, name), (new_parent, new_name), outcome)
        self._forget_paths(source)
        self._after.append(("move", target, source, outcome.moved.ino, None))

    def _arrive(self, arrival: Arrival) -> None:
        if stat.S_ISLNK(arrival.status.st_mode) and (absent := absent_inode(arrival.target)) is not None:
            self._stand_in(absent, arrival)
            return
        present = self._present(arrival)
        if present is None:
            present = self._make(arrival)
        mode = arrival.status.st_mode
        if stat.S_ISREG(mode):
            self._file(present.ino, arrival)
        elif not stat.S_ISDIR(mode):
            self._attributes(present.ino, arrival)

    def _stand_in(self, absent: Inode, arrival: Arrival) -> None:
        """A symlink that stands for a file which is not here: that file's record is carried over, not a symlink's.

        A copy of one stands for nothing in the workspace, and is left out.
        """
        parent, name = self._place(arrival.path)
        entry = paths.entry(self._recorder, parent, name)
        if entry is not None and entry.ino == absent:
            self._see(arrival.path, absent, Witness.of(arrival.status, Seen.ABSENT))
        else:
            self._ws.report(
                f"{os.fsdecode(arrival.path)} is a copy of what stands for a file that is not here: left out"
            )

    def _present(self, arrival: Arrival) -> Node | None:
        """What the map has at the path, if it can stay; something of another kind is removed."""
        if not arrival.path:
            return Node(ROOT_INODE, paths.inode(self._recorder, ROOT_INODE))
        parent, name = self._place(arrival.path)
        entry = paths.entry(self._recorder, parent, name)
        if entry is None:
            return None
        record = paths.inode(self._recorder, entry.ino)
        same = stat.S_IFMT(record.mode) == stat.S_IFMT(arrival.status.st_mode)
        if same and not arrival.fresh and (not stat.S_ISLNK(record.mode) or record.target == arrival.target):
            return Node(entry.ino, record)
        self._remove(arrival.path)
        return None

    def _make(self, arrival: Arrival) -> Node:
        ino = self._numbers.pop()
        parent, name = self._place(arrival.path)
        status = arrival.status
        self._touch(parent)
        actor = Actor(status.st_uid, status.st_gid, 0)
        node = namespace.create(
            self._recorder, parent, name, status.st_mode, actor, ino, self._now_ns,
            rdev=status.st_rdev, target=arrival.target,
        )  # fmt: skip
        self._border.made(parent, name, ino)
        self._here[arrival.path] = ino
        if stat.S_ISREG(status.st_mode):
            self._recorder.put_local(ino_key(NodeTable.UNLOADED, ino), LOADED)
            self._made.append(ino)
        return node

    def _link(self, link: Link) -> None:
        """Give a file that the map has one more name, in place of what that led to."""
        ino = self._at(link.source)
        parent, name = self._place(link.target)
        entry = paths.entry(self._recorder, parent, name)
        if entry is not None:
            if entry.ino == ino:
                return
            self._remove(link.target)
        self._touch(parent)
        namespace.link(self._recorder, ino, parent, name, self._now_ns)
        self._border.linked(parent, name, ino)
        self._here[link.target] = ino
        self._after.append(("put", link.target, b"", ino, self._witness(ino)))

    def _file(self, ino: Inode, arrival: Arrival) -> None:
        """Take over a file's content, if the read counts, and its attributes; else it is in flight."""
        reading = arrival.reading
        if reading is None or reading.outcome in COUNTED:
            if reading is not None:
                self._content(ino, reading)
                self._mark(ino, written=reading.written)
            self._attributes(ino, arrival, seen=reading.seen if reading is not None else None)
            return
        # The attributes stay those of the content that the map has, and the next walk finds the file again.
        self._mark(ino, written=True)
        before = self._witness(ino)
        if before is None:
            # Without a witness the first read takes every attribute: those of a file just made are not the disk's.
            self._after.append(("put", arrival.path, b"", ino, None))
        else:
            self._see(arrival.path, ino, before.with_seen(Seen.NOTHING))

    def _mark(self, ino: Inode, *, written: bool) -> None:
        """Say whether it is being written: the directory around it may have to be whole, whatever its own name says."""
        self._marks[ino] = Mark(since_ns=self._now_ns) if written else None
        if written and not self._session.files.is_marked(ino):
            self._recorder.touch(inode_key(ino))  # the next manifest has to say so, though nothing else changed

    def _content(self, ino: Inode, reading: Reading) -> None:
        recorder = self._recorder
        size = reading.status.st_size
        record = paths.inode(recorder, ino)
        count = BlockIndex(-(-size // BLOCK_BYTES))
        if record.size > size:
            recorder.drop_blocks(ino, count)
        for block, offer in reading.changed.items():
            key = block_key(ino, block)
            if offer is None:
                recorder.delete(key)
                continue
            assert offer.frame is not None, "a read counts only when the store has all its frames"
            recorder.put(key, BlockState(False, FrameState.UNPUBLISHED, offer.frame).encode())
        held = sum(1 for key, value in recorder.scan(*ino_range(BLOCK_TABLE, ino)) if value and key_block(key) < count)
        changed = replace(record, size=size, allocated=held * BLOCK_BYTES)
        if changed != record:
            recorder.put(inode_key(ino), changed.encode())

    def _attributes(self, ino: Inode, arrival: Arrival, seen: Seen | None = None) -> None:
        """Take over what changed on this node, and note what was seen. *seen* None: as it was."""
        recorder, before = self._recorder, self._witness(ino)
        status = arrival.status if arrival.reading is None else arrival.reading.status
        record = paths.inode(recorder, ino)
        changed = merged(record, before, status)
        if changed != record:
            recorder.put(inode_key(ino), changed.encode())
        self._xattrs(ino, arrival, changed)
        if seen is None:
            seen = before.seen if before is not None else Seen.NOTHING
        self._see(arrival.path, ino, Witness.of(status, seen) if before is None else before.seen_again(status, seen))

    def _xattrs(self, ino: Inode, arrival: Arrival, record: InodeRecord) -> None:
        if arrival.xattrs is None:
            return
        present = dict(xattrs.attributes_of(self._recorder, ino))
        refused = refused_xattrs(self._recorder, ino)
        kept = {name: value for name, value in present.items() if name in refused or not is_visible(name)}
        wanted = {**kept, **arrival.xattrs}
        if wanted == present:
            return
        for name in present.keys() - wanted.keys():
            xattrs.remove_xattr(self._recorder, ino, name, record.ctime_ns)
        for name, value in wanted.items():
            if present.get(name) != value:
                try:
                    xattrs.set_xattr(self._recorder, ino, name, value, 0, record.ctime_ns)
                except Refused as error:
                    self._ws.report(f"{os.fsdecode(arrival.path)}: attribute {os.fsdecode(name)} is not kept: {error}")

    def _see(self, path: bytes, ino: Inode, witness: Witness) -> None:
        self._recorder.put_local(ino_key(NodeTable.WITNESS, ino), witness.encode())
        self._after.append(("put", path, b"", ino, witness))

    def _witness(self, ino: Inode) -> Witness | None:
        value = self._recorder.get(ino_key(NodeTable.WITNESS, ino))
        return Witness.decode(value) if value is not None else None

    def _remove(self, top: bytes) -> None:
        """Remove a name and everything below it."""
        recorder = self._recorder
        parent, name = self._place(top)
        entry = paths.entry(recorder, parent, name)
        if entry is None:
            return
        self._touch(parent)
        below = list(paths.subtree(recorder, entry.ino)) if stat.S_ISDIR(paths.inode(recorder, entry.ino).mode) else []
        for path, _ in reversed(below):
            if path:
                self._unlink(top + b"/" + path)
        self._unlink(top)
        self._forget_paths(top)
        self._after.append(("remove", top, b"", entry.ino, None))

    def _unlink(self, path: bytes) -> None:
        recorder = self._recorder
        parent, name = self._place(path)
        ino = paths.existing_entry(recorder, parent, name).ino
        rule = namespace.rmdir if stat.S_ISDIR(paths.inode(recorder, ino).mode) else namespace.unlink
        node = rule(recorder, parent, name, self._now_ns)
        self._border.unlinked(parent, name, node)
        if node.record.nlink == 0:
            recorder.delete_local(ino_key(NodeTable.WITNESS, ino))
            self._times.pop(ino, None)
            self._gone.append(node)

    def _forget_paths(self, top: bytes) -> None:
        below = top + b"/"
        for path in [path for path in self._here if path == top or path.startswith(below)]:
            del self._here[path]


def is_visible(name: bytes) -> bool:
    """Tell whether this process sees such an attribute where there is one: what it cannot see is carried over."""
    return name.startswith(b"user.") or (os.geteuid() == 0 and name.startswith((b"trusted.", b"security.")))
