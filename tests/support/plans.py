"""Apply a plan to a known tree as the scanner does, with every file read at once and trusted."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from spotwarp_fs.core.treediff import plan
from spotwarp_fs.core.treeplan import Clear, Plan, Rename
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.walked import Found, Walked
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory.known import KnownTree
from spotwarp_fs.directory.walking import walk

_MULTIGRAIN = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 13)
"""Since then a change right after a `stat` always shows in the next one, so that a test need not wait."""


@dataclass(slots=True)
class Follower:
    """What a scanner keeps between walks."""

    root: bytes
    known: KnownTree = field(default_factory=KnownTree)
    pending: dict[bytes, int] = field(default_factory=dict)
    content: dict[Inode, bytes] = field(default_factory=dict)
    """What was read of each inode of the workspace."""
    walks: int = 0
    inodes: int = 1000

    def look(self, directories: list[bytes] | None = None) -> Plan:
        """Walk, decide, apply."""
        return self.take(walk(self.root, self.known, skip=lambda _path: False, directories=directories))

    def take(self, walked: Walked) -> Plan:
        """Decide about a walk and apply the plan."""
        self.walks += 1
        decided = plan(walked, self.known, self.pending, self.walks)
        self.apply(decided)
        self.pending = dict(decided.pending)
        return decided

    def apply(self, decided: Plan) -> None:
        """Do what the plan says, in its order; every step must be possible when its turn comes."""
        known = self.known
        for step in decided.steps:
            self._step(step)
        for found in decided.appeared:
            self._adopt(found, self._fresh())
        for link in decided.links:
            entry = known.get(link.source)
            if entry is not None:
                known.put(link.target, entry.ino, entry.witness)
        for found in decided.changed:
            entry = known.get(found.path)
            assert entry is not None, found
            assert (entry.children is not None) == stat.S_ISDIR(found.status.st_mode), found
            self._adopt(found, entry.ino)
        for path in decided.removals:
            known.remove(path)
        assert all(known.get(path) is not None for path in decided.pending), decided.pending

    def _step(self, step: Found | Rename | Clear) -> None:
        match step:
            case Rename(source, target):
                there, entry = self.known.get(target), self.known.get(source)
                assert entry is not None, step
                assert there is None or (there.children is None and entry.children is None), step
                self.known.move(source, target)
            case Clear(path):
                self.known.remove(path)
            case Found(path, status):
                assert self.known.get(path) is None, step
                self.known.put(path, self._fresh(), Witness.of(status))

    def _adopt(self, found: Found, ino: Inode) -> None:
        """Take over what was found, if it is still there as it was found: a read stands or is given up."""
        seen = Seen.NOTHING
        if stat.S_ISREG(found.status.st_mode):
            read = self._read(found)
            if read is None:
                return
            self.content[ino] = read
            seen = Seen.TRUSTED if _MULTIGRAIN else Seen.NOTHING
        self.known.put(found.path, ino, Witness.of(found.status, seen))

    def _read(self, found: Found) -> bytes | None:
        try:
            with open(self.root + b"/" + found.path, "rb") as file:
                return file.read() if Witness.of(found.status).unchanged(os.fstat(file.fileno())) else None
        except OSError:
            return None

    def contents(self) -> set[bytes]:
        """Everything that is in the state under some name."""
        return {self.content[entry.ino] for _, entry in self.known.items() if entry.ino in self.content}

    def names_of(self, content: bytes) -> set[bytes]:
        """Where a content is known to be."""
        return {path for path, entry in self.known.items() if self.content.get(entry.ino) == content}

    def _fresh(self) -> Inode:
        self.inodes += 1
        return Inode(self.inodes)


def differences(follower: Follower) -> list[str]:
    """Say in what the known tree is not the real one: names, types, numbers, hard links."""
    real = {b"": os.lstat(follower.root)}
    pending = [b""]
    while pending:
        above = pending.pop()
        for name in os.listdir(follower.root + b"/" + above):
            path = above + b"/" + name if above else name
            real[path] = os.lstat(follower.root + b"/" + path)
            if stat.S_ISDIR(real[path].st_mode):
                pending.append(path)
    known = dict(follower.known.items())
    found = [f"{path!r} is not known" for path in sorted(real.keys() - known.keys())]
    found += [f"{path!r} is not there" for path in sorted(known.keys() - real.keys())]
    for path in sorted(real.keys() & known.keys()):
        witness = known[path].witness
        if witness is None or not witness.unchanged(real[path]):
            found.append(f"{path!r} is known as {witness}, and is {real[path]}")
        if stat.S_ISREG(real[path].st_mode):
            with open(follower.root + b"/" + path, "rb") as file:
                content = file.read()
            if follower.content.get(known[path].ino) != content:
                found.append(f"{path!r} holds {content!r}, and not {follower.content.get(known[path].ino)!r}")
        same = {other for other, status in real.items() if status.st_ino == real[path].st_ino}
        linked = set(follower.known.by_inode(known[path].ino))
        if same != linked:
            found.append(f"{path!r} is linked with {sorted(linked)}, and really with {sorted(same)}")
    return found
