"""What a directory tree is, in plain Python: the model that every level of the filesystem is compared with.

It shares no code with the filesystem, and it is held against a plain directory of the local disk with real system calls
(tests/model/test_reference.py), so that Linux has the last word on it. Link counts are never stored: they are counted.
"""

from __future__ import annotations

import copy
import errno
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from tests.support import calls
from tests.support.calls import Call, kind_of

NAME_BYTES_MAX = 255
ROOT = 1
NOREPLACE, EXCHANGE = 1, 2
XATTR_CREATE, XATTR_REPLACE = 1, 2


class Errno(Exception):
    """The call fails."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.number = number


@dataclass
class Thing:
    """An inode: whatever a name can lead to."""

    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int | None
    """None once nobody can say: it is not compared until the next change."""
    data: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    rdev: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    entries: dict[bytes, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return kind_of(self.mode)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that can be seen of one path. A field that is None on either side of a comparison is not compared."""

    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    """0 for directories, whose size means something else on every filesystem."""
    target: bytes
    rdev: int
    same_as: bytes
    """The first path, in byte order, that leads to the same inode."""
    xattrs: tuple[tuple[bytes, bytes], ...]
    atime_ns: int | None
    mtime_ns: int | None
    ctime_ns: int | None
    content: bytes | None
    ino: int | None = None


Snapshot = dict[bytes, Facts]
"""Path below the root (`b""` for the root itself) → what is there."""


class Clock:
    """Decides whether two times are the same; this one wants the same number."""

    def same(self, expected_ns: int, seen_ns: int) -> bool:
        return expected_ns == seen_ns


def diff(expected: Snapshot, seen: Snapshot, clock: Clock | None = None) -> list[str]:
    """Say what differs, a line each; an empty list means that nothing does."""
    clock = clock or Clock()
    lines = [f"{path!r} is missing" for path in sorted(expected.keys() - seen.keys())]
    lines += [f"{path!r} should not be there" for path in sorted(seen.keys() - expected.keys())]
    for path in sorted(expected.keys() & seen.keys()):
        lines += [f"{path!r}: {line}" for line in _fact_diff(expected[path], seen[path], clock)]
    return lines


def _fact_diff(expected: Facts, seen: Facts, clock: Clock) -> Iterator[str]:
    for item in fields(Facts):
        want, have = getattr(expected, item.name), getattr(seen, item.name)
        if want is None or have is None:
            continue
        if item.name.endswith("_ns"):
            if not clock.same(want, have):
                yield f"{item.name} should be {want}, is {have} ({have - want:+} ns)"
        elif want == have:
            continue
        elif item.name == "content":
            at = next(
                (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(map(len, (want, have)))
            )
            yield f"content differs from byte {at} on: should be {want[at : at + 8]!r}, is {have[at : at + 8]!r}"
        elif item.name == "mode":
            yield f"mode should be {want:o}, is {have:o}"
        else:
            yield f"{item.name} should be {want!r}, is {have!r}"


class Reference:
    """A directory tree and what each call does to it.

    *privileged*: the caller is root, whose writes leave setuid alone.
    """

    def __init__(self, *, now_ns: int, uid: int = 0, gid: int = 0, mode: int = 0o755, privileged: bool = True) -> None:
        self.uid = uid
        self.gid = gid
        self.privileged = privileged
        self.things = {ROOT: Thing(stat.S_IFDIR | mode, uid, gid, now_ns, now_ns, now_ns)}
        self._next = ROOT + 1
        self._now_ns = now_ns

    def copy(self) -> Reference:
        """The tree as it is now, which later calls leave alone: one of the states a crash may lead back to."""
        return copy.deepcopy(self)

    def apply(self, call: Call, now_ns: int) -> int:
        """Carry *call* out, or return the errno it fails with (0 for success); markers do nothing."""
        self._now_ns = now_ns
        try:
            _ACTIONS.get(type(call), lambda _reference, _call: None)(self, call)
        except Errno as error:
            return error.number
        return 0

    # What can be seen

    def walk(self) -> Iterator[tuple[bytes, int]]:
        """Every path and the thing that it leads to, the root first."""
        pending = [(b"", ROOT)]
        while pending:
            path, ino = pending.pop()
            yield path, ino
            prefix = path + b"/" if path else b""
            pending += [(prefix + name, child) for name, child in self.things[ino].entries.items()]

    def paths(self, kinds: str) -> list[bytes]:
        """Every path that leads to one of *kinds*, sorted."""
        return sorted(path for path, ino in self.walk() if self.things[ino].kind in kinds)

    def nlink(self, ino: int) -> int:
        if self.things[ino].kind == calls.DIRECTORIES:
            return 2 + sum(self.things[child].kind == calls.DIRECTORIES for child in self.things[ino].entries.values())
        return sum(child == ino for thing in self.things.values() for child in thing.entries.values())

    def snapshot(self) -> Snapshot:
        seen = sorted(self.walk())
        first: dict[int, bytes] = {}
        for path, ino in seen:
            first.setdefault(ino, path)
        return {path: self._facts(ino, first[ino]) for path, ino in seen}

    def _facts(self, ino: int, same_as: bytes) -> Facts:
        thing = self.things[ino]
        is_file = thing.kind == calls.FILES
        return Facts(
            thing.mode, self.nlink(ino), thing.uid, thing.gid, len(thing.data) if is_file else len(thing.target),
            thing.target, thing.rdev, same_as, tuple(sorted(thing.xattrs.items())),
            thing.atime_ns, thing.mtime_ns, thing.ctime_ns, bytes(thing.data) if is_file else None,
        )  # fmt: skip

    # Finding one's way

    def _parent(self, path: bytes) -> tuple[int, bytes]:
        *above, name = path.split(b"/")
        ino = ROOT
        for part in above:
            ino = self._entry(ino, part)
        if self.things[ino].kind != calls.DIRECTORIES:
            raise Errno(errno.ENOTDIR)
        if len(name) > NAME_BYTES_MAX:
            raise Errno(errno.ENAMETOOLONG)
        return ino, name

    def _entry(self, parent: int, name: bytes) -> int:
        if self.things[parent].kind != calls.DIRECTORIES:
            raise Errno(errno.ENOTDIR)
        if len(name) > NAME_BYTES_MAX:
            raise Errno(errno.ENAMETOOLONG)
        if name not in self.things[parent].entries:
            raise Errno(errno.ENOENT)
        return self.things[parent].entries[name]

    def _find(self, path: bytes) -> int:
        return self._entry(*self._parent(path)) if path else ROOT

    def _openable(self, path: bytes) -> Thing:
        """What open(O_WRONLY | O_NOFOLLOW) finds."""
        thing = self.things[self._find(path)]
        if thing.kind in calls.NOT_OPENABLE:
            raise Errno(calls.NOT_OPENABLE[thing.kind])
        return thing

    def _holds(self, ino: int, wanted: int) -> bool:
        return ino == wanted or any(self._holds(child, wanted) for child in self.things[ino].entries.values())

    # Changing things

    def _touch(self, ino: int) -> None:
        self.things[ino].mtime_ns = self.things[ino].ctime_ns = self._now_ns

    def _new(self, path: bytes, mode: int) -> Thing:
        parent, name = self._parent(path)
        if name in self.things[parent].entries:
            raise Errno(errno.EEXIST)
        holder = self.things[parent]
        gid = self.gid
        if holder.mode & stat.S_ISGID:
            gid = holder.gid
            mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
        thing = Thing(mode, self.uid, gid, self._now_ns, self._now_ns, self._now_ns)
        self.things[self._next] = thing
        holder.entries[name] = self._next
        self._next += 1
        self._touch(parent)
        return thing

    def _remove(self, parent: int, name: bytes) -> None:
        ino = self.things[parent].entries.pop(name)
        self._touch(parent)
        self.things[ino].ctime_ns = self._now_ns
        if not any(ino in thing.entries.values() for thing in self.things.values()):
            del self.things[ino]

    def _put(self, thing: Thing, offset: int, data: bytes) -> None:
        thing.data.extend(bytes(max(0, offset + len(data) - len(thing.data))))
        thing.data[offset : offset + len(data)] = data
        thing.mtime_ns = thing.ctime_ns = self._now_ns
        if not self.privileged:
            _drop_privileges(thing)

    def mkdir(self, call: calls.Mkdir) -> None:
        self._new(call.path, stat.S_IFDIR | call.mode & 0o1777)

    def create(self, call: calls.Create) -> None:
        self._new(call.path, stat.S_IFREG | call.mode)

    def mknod(self, call: calls.Mknod) -> None:
        self._new(call.path, call.mode).rdev = call.rdev

    def symlink(self, call: calls.Symlink) -> None:
        self._new(call.path, stat.S_IFLNK | 0o777).target = call.target

    def link(self, call: calls.Link) -> None:
        ino = self._find(call.source)
        parent, name = self._parent(call.path)
        if name in self.things[parent].entries:
            raise Errno(errno.EEXIST)
        if self.things[ino].kind == calls.DIRECTORIES:
            raise Errno(errno.EPERM)
        self.things[parent].entries[name] = ino
        self.things[ino].ctime_ns = self._now_ns
        self._touch(parent)

    def unlink(self, call: calls.Unlink) -> None:
        parent, name = self._parent(call.path)
        if self.things[self._entry(parent, name)].kind == calls.DIRECTORIES:
            raise Errno(errno.EISDIR)
        self._remove(parent, name)

    def rmdir(self, call: calls.Rmdir) -> None:
        parent, name = self._parent(call.path)
        thing = self.things[self._entry(parent, name)]
        if thing.kind != calls.DIRECTORIES:
            raise Errno(errno.ENOTDIR)
        if thing.entries:
            raise Errno(errno.ENOTEMPTY)
        self._remove(parent, name)

    def rename(self, call: calls.Rename) -> None:
        if call.flags not in (0, NOREPLACE, EXCHANGE):
            raise Errno(errno.EINVAL)
        exchange = call.flags == EXCHANGE
        # A kernel that walks both parents first sees a bad parent before a name that is too long.
        for path in (call.source, call.path):
            self._parent(path.rpartition(b"/")[0] + b"/x" if b"/" in path else b"x")
        parent, name = self._parent(call.source)
        ino = self._entry(parent, name)
        new_parent, new_name = self._parent(call.path)
        there = self.things[new_parent].entries.get(new_name)
        if there is not None and call.flags == NOREPLACE:
            raise Errno(errno.EEXIST)
        if there is None and exchange:
            raise Errno(errno.ENOENT)
        if self._holds(ino, new_parent):
            raise Errno(errno.EINVAL)
        if there is not None and self._holds(there, parent):
            raise Errno(errno.EINVAL if exchange else errno.ENOTEMPTY)
        if there == ino:
            return
        if there is not None and not exchange:
            self._check_replaceable(self.things[ino], self.things[there])
            self._remove(new_parent, new_name)
        self.things[new_parent].entries[new_name] = ino
        if exchange:
            self.things[parent].entries[name] = there
            self.things[there].ctime_ns = self._now_ns
        else:
            del self.things[parent].entries[name]
        self._touch(parent)
        self._touch(new_parent)
        self.things[ino].ctime_ns = self._now_ns

    def _check_replaceable(self, moved: Thing, there: Thing) -> None:
        moves_directory = moved.kind == calls.DIRECTORIES
        if moves_directory != (there.kind == calls.DIRECTORIES):
            raise Errno(errno.ENOTDIR if moves_directory else errno.EISDIR)
        if there.entries:
            raise Errno(errno.ENOTEMPTY)

    def write(self, call: calls.Write) -> None:
        self._put(self._openable(call.path), call.offset, calls.content(call.seed, call.length))

    def append(self, call: calls.Append) -> None:
        thing = self._openable(call.path)
        self._put(thing, len(thing.data), calls.content(call.seed, call.length))

    def save(self, call: calls.Save) -> None:
        parent, name = self._parent(call.path)
        if name not in self.things[parent].entries:
            self._new(call.path, stat.S_IFREG | call.mode)
        thing = self._openable(call.path)
        thing.data.clear()
        self._put(thing, 0, calls.content(call.seed, call.length))

    def truncate(self, call: calls.Truncate) -> None:
        thing = self._openable(call.path)
        del thing.data[call.size :]
        self._put(thing, call.size, b"")

    def chmod(self, call: calls.Chmod) -> None:
        thing = self.things[self._find(call.path)]
        thing.mode = stat.S_IFMT(thing.mode) | call.mode
        thing.ctime_ns = self._now_ns

    def chown(self, call: calls.Chown) -> None:
        thing = self.things[self._find(call.path)]
        thing.uid, thing.gid, thing.ctime_ns = call.uid, call.gid, self._now_ns
        if thing.kind != calls.DIRECTORIES:
            _drop_privileges(thing)

    def utimens(self, call: calls.Utimens) -> None:
        thing = self.things[self._find(call.path)]
        thing.atime_ns, thing.mtime_ns, thing.ctime_ns = call.atime_ns, call.mtime_ns, self._now_ns

    def set_xattr(self, call: calls.SetXattr) -> None:
        thing = self._bearer(call.path, call.name)
        if call.flags & XATTR_CREATE and call.name in thing.xattrs:
            raise Errno(errno.EEXIST)
        if call.flags & XATTR_REPLACE and call.name not in thing.xattrs:
            raise Errno(errno.ENODATA)
        # ext4 leaves ctime alone when the value stays what it was, tmpfs does not: both are fine.
        thing.ctime_ns = None if thing.xattrs.get(call.name) == call.value else self._now_ns
        thing.xattrs[call.name] = call.value

    def remove_xattr(self, call: calls.RemoveXattr) -> None:
        thing = self._bearer(call.path, call.name)
        if call.name not in thing.xattrs:
            raise Errno(errno.ENODATA)
        del thing.xattrs[call.name]
        thing.ctime_ns = self._now_ns

    def _bearer(self, path: bytes, name: bytes) -> Thing:
        thing = self.things[self._find(path)]
        if name.startswith(b"user.") and thing.kind not in calls.FILES + calls.DIRECTORIES:
            raise Errno(errno.EPERM)
        return thing

    def write_unlinked(self, call: calls.WriteUnlinked) -> None:
        thing = self._openable(call.path)
        self._remove(*self._parent(call.path))
        self._put(thing, 0, calls.content(call.seed, call.length))

    def fsync(self, call: calls.Fsync) -> None:
        self._find(call.path)


def _drop_privileges(thing: Thing) -> None:
    thing.mode &= ~stat.S_ISUID
    if thing.mode & stat.S_IXGRP:
        thing.mode &= ~stat.S_ISGID


_ACTIONS: dict[type, Callable[[Reference, Call], None]] = {
    calls.Mkdir: Reference.mkdir,
    calls.Create: Reference.create,
    calls.Mknod: Reference.mknod,
    calls.Symlink: Reference.symlink,
    calls.Link: Reference.link,
    calls.Unlink: Reference.unlink,
    calls.Rmdir: Reference.rmdir,
    calls.Rename: Reference.rename,
    calls.Write: Reference.write,
    calls.Append: Reference.append,
    calls.Save: Reference.save,
    calls.Truncate: Reference.truncate,
    calls.Chmod: Reference.chmod,
    calls.Chown: Reference.chown,
    calls.Utimens: Reference.utimens,
    calls.SetXattr: Reference.set_xattr,
    calls.RemoveXattr: Reference.remove_xattr,
    calls.WriteUnlinked: Reference.write_unlinked,
    calls.Fsync: Reference.fsync,
}  # fmt: skip
