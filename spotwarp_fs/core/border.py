"""Keep tables S and T right while names come, go and move (see core/scratch.py for what they mean).

Invariant: called after the namespace rules, in the same transaction. What comes back from scratch has all its records
noted for the next cut, with every block that has local bytes dirty (C18); what goes there is noted as gone.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from spotwarp_fs.core import paths
from spotwarp_fs.core.changes import Recorder
from spotwarp_fs.core.policies import PathGlobs
from spotwarp_fs.core.records import (
    BLOCK_TABLE,
    DIRTY,
    ENTRY_TABLE,
    XATTR_TABLE,
    BlockState,
    EntryRecord,
    NodeTable,
    encode_u64,
    entry_key,
    ino_key,
    ino_range,
    inode_key,
    key_ino,
    key_name,
    table_range,
)
from spotwarp_fs.core.rename import RenameOutcome
from spotwarp_fs.core.requests import Node
from spotwarp_fs.core.scratch import (
    DIRECTORY_DTYPE,
    MADE_SO,
    is_scratch,
    is_scratch_name,
    join,
    scratch_name_key,
)
from spotwarp_fs.core.types import Inode

Entry = tuple[Inode, bytes]
"""A directory and a name in it."""


class Border:
    """The line between what is scratch and what is published, during one step."""

    __slots__ = ("_globs", "_recorder")

    def __init__(self, recorder: Recorder, globs: PathGlobs) -> None:
        self._recorder = recorder
        self._globs = globs

    def made(self, parent: Inode, name: bytes, ino: Inode) -> None:
        """A new inode has its first name."""
        if self._named(parent, name):
            self._recorder.put_local(ino_key(NodeTable.SCRATCH, ino), encode_u64(MADE_SO))

    def linked(self, parent: Inode, name: bytes, ino: Inode) -> None:
        """An inode has one more name."""
        self._named(parent, name)
        self._judge(ino)

    def unlinked(self, parent: Inode, name: bytes, node: Node) -> None:
        """A name is gone; the inode may have others, or none."""
        self._recorder.delete_local(scratch_name_key(parent, name))
        if node.record.nlink and not stat.S_ISDIR(node.record.mode):
            self._judge(node.ino)

    def renamed(self, source: Entry, target: Entry, outcome: RenameOutcome) -> None:
        """A name was moved, or two were exchanged.

        Whether a name is scratch depends on where it is, not on where it leads: an exchange leaves table T alone.
        """
        recorder = self._recorder
        if outcome.exchanged is None:
            if recorder.get(entry_key(*source)) is not None:
                return  # both were names of one inode, and still are
            recorder.delete_local(scratch_name_key(*source))
            if outcome.replaced is None:
                self._named(*target)
            elif outcome.replaced.record.nlink:
                self._judge(outcome.replaced.ino)
        for node in (outcome.moved, outcome.exchanged):
            if node is not None:
                self._moved(node, source[1], target[1])

    def derive(self) -> None:
        """Bring both tables in line with the globs, whatever they were made with before."""
        recorder = self._recorder
        wanted = dict(self._matched())
        known = {(key_ino(key), key_name(key)) for key, _ in recorder.scan(*table_range(NodeTable.SCRATCH_NAMES))}
        changed = {entry: paths.path_of(recorder, entry[0]) or b"" for entry in known - wanted.keys()}
        for entry in changed:
            recorder.delete_local(scratch_name_key(*entry))
        for entry in wanted.keys() - known:
            recorder.put_local(scratch_name_key(*entry), b"")
            changed[entry] = wanted[entry]
        for entry in sorted(changed, key=lambda entry: (changed[entry].count(b"/"), len(changed[entry]), entry)):
            found = recorder.get(entry_key(*entry))
            assert found is not None, f"table T has {entry}, which is no entry"
            child = EntryRecord.decode(found)
            self._touch_entry(entry, child.ino)
            before = is_scratch(recorder, child.ino)
            self._judge(child.ino)
            if child.dtype == DIRECTORY_DTYPE and before != is_scratch(recorder, child.ino):
                self._walk(child.ino, before=before)

    def _matched(self) -> Iterator[tuple[Entry, bytes]]:
        """Give every entry that a glob matches, outermost ones only, with the path of its directory."""
        at: Inode | None = None
        above: bytes | None = None
        found: list[tuple[Entry, bytes]] = []
        for key, _ in self._recorder.scan(*table_range(ENTRY_TABLE)):
            name = key[9:]
            if not self._globs.may_end(name):
                continue
            parent = key_ino(key)
            if parent != at:
                at, above = parent, paths.path_of(self._recorder, parent)
            if above is not None and self._globs.matches(join(above, name)) and not self._globs.covers(above):
                found.append(((parent, name), above))
        yield from found

    def _named(self, parent: Inode, name: bytes) -> bool:
        """Note a new name in table T if it belongs there; returns whether it is scratch."""
        if is_scratch(self._recorder, parent):
            return True
        if not self._globs.may_end(name):
            return False
        above = paths.path_of(self._recorder, parent)
        if above is None or not self._globs.matches(join(above, name)):
            return False
        self._recorder.put_local(scratch_name_key(parent, name), b"")
        return True

    def _moved(self, node: Node, *names: bytes) -> None:
        """Judge an inode anew whose name is another one now, or elsewhere; what is below a directory moves along."""
        if not stat.S_ISDIR(node.record.mode):
            self._judge(node.ino)
            return
        before = is_scratch(self._recorder, node.ino)
        self._judge(node.ino)
        after = is_scratch(self._recorder, node.ino)
        if before != after or (not after and any(self._globs.may_pass(name) for name in names)):
            self._walk(node.ino, before=before)

    def _walk(self, top: Inode, *, before: bool) -> None:
        """Judge anew everything below *top*, which is settled itself: directories first, files need all of them."""
        recorder = self._recorder
        pending = [(top, paths.path_of(recorder, top) or b"", before)]
        files: set[Inode] = set()
        while pending:
            directory, path, was = pending.pop()
            now = is_scratch(recorder, directory)
            for name, child in paths.children(recorder, directory):
                below = join(path, name)
                name_was = was or recorder.get(scratch_name_key(directory, name)) is not None
                name_is = self._settle_name(directory, name, below, inside=now)
                if name_was != name_is:
                    self._touch_entry((directory, name), child.ino)
                if child.dtype == DIRECTORY_DTYPE:
                    child_was = is_scratch(recorder, child.ino)
                    self._judge(child.ino)
                    if not (child_was and is_scratch(recorder, child.ino)):
                        pending.append((child.ino, below, child_was))
                elif name_was != name_is:
                    files.add(child.ino)
        for ino in sorted(files):
            self._judge(ino)

    def _settle_name(self, directory: Inode, name: bytes, path: bytes, *, inside: bool) -> bool:
        key = scratch_name_key(directory, name)
        matched = not inside and self._globs.may_end(name) and self._globs.matches(path)
        if matched:
            self._recorder.put_local(key, b"")
        else:
            self._recorder.delete_local(key)
        return inside or matched

    def _touch_entry(self, entry: Entry, child: Inode) -> None:
        """An entry is published from now on, or no longer: the link counts on both its ends change with it."""
        for key in (entry_key(*entry), inode_key(entry[0]), inode_key(child)):
            self._recorder.touch(key)

    def _judge(self, ino: Inode) -> None:
        """Bring the row of *ino* in table S in line with its names."""
        recorder = self._recorder
        before = is_scratch(recorder, ino)
        now: bool | None = None
        for parent, name in paths.each_name(recorder, ino):
            now = is_scratch_name(recorder, parent, name)
            if not now:
                break
        if now is True and not before:
            self._withdraw(ino)
        elif now is False and before:
            self._restore(ino)

    def _withdraw(self, ino: Inode) -> None:
        """The next cut says that *ino* is gone; its blocks go with it, without a row each."""
        recorder = self._recorder
        recorder.touch(inode_key(ino))
        for key, _ in list(recorder.scan(*ino_range(XATTR_TABLE, ino))):
            recorder.touch(key)
        recorder.put_local(ino_key(NodeTable.SCRATCH, ino), encode_u64(recorder.seq))

    def _restore(self, ino: Inode) -> None:
        """The next cut has all of *ino*. Frames that it once had may have been collected since: local bytes count."""
        recorder = self._recorder
        recorder.delete_local(ino_key(NodeTable.SCRATCH, ino))
        recorder.touch(inode_key(ino))
        for key, _ in list(recorder.scan(*ino_range(XATTR_TABLE, ino))):
            recorder.touch(key)
        for key, value in list(recorder.scan(*ino_range(BLOCK_TABLE, ino))):
            if value and BlockState.decode(value).local:
                recorder.put(key, DIRTY.encode())
            else:
                recorder.touch(key)
