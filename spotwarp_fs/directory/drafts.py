"""Make things below `.spotwarp/new` and give them their names when they are ready; move aside what is in the way.

Invariant: nothing that is there is ever replaced or deleted: a name is given only if it is free, and what holds it is
moved to `.spotwarp/replaced` first. All calls block.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from typing import Final

from spotwarp_fs.core.ownnames import NEW_NAME, REPLACED_NAME, absent_inode
from spotwarp_fs.core.types import Inode
from spotwarp_fs.core.witness import Seen, Witness
from spotwarp_fs.directory.applying import Applier
from spotwarp_fs.directory.identity import own_directory
from spotwarp_fs.directory.plan import Thing, place_of

AT_FDCWD: Final = -100
RENAME_EXCHANGE: Final = 2
TRIES: Final = 8
"""Something takes the name again and again while it is being given."""
UNLINKABLE: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
"""What link(2) says where it is forbidden (hard-link protection) or unknown."""


class Drafts:
    """Files on their way to their names."""

    def __init__(self, root: bytes, applier: Applier, replaced_name: bytes) -> None:
        self._root = root
        self._applier = applier
        own = own_directory(root)
        self._new = os.path.join(own, NEW_NAME)
        self.replaced = os.path.join(own, REPLACED_NAME, replaced_name)
        self.moved_aside: list[bytes] = []
        """Paths, as they were called."""
        self.refused_xattrs: dict[Inode, tuple[bytes, ...]] = {}

    def clear(self) -> None:
        """Begin with none: those of an earlier restore have no other name, or have one already."""
        os.makedirs(self._new, 0o700, exist_ok=True)
        with os.scandir(self._new) as entries:
            for entry in entries:
                os.unlink(entry.path)

    def path(self, ino: Inode, suffix: bytes = b"") -> bytes:
        """Give the place of a draft."""
        return os.path.join(self._new, b"%016x" % ino + suffix)

    def create(self, ino: Inode) -> int:
        """Make an empty draft; gives its descriptor."""
        place = self.path(ino)
        with suppress(FileNotFoundError):
            os.unlink(place)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(place, flags, 0o600)

    def drop(self, ino: Inode) -> None:
        """Take a draft away."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(ino))

    def apply(self, place: bytes | int, thing: Thing) -> None:
        """Give a thing its attributes, and remember what was refused."""
        refused = self._applier.finish(place, thing.record, thing.xattrs)
        if refused:
            self.refused_xattrs[thing.ino] = refused

    def name(self, thing: Thing, seen: Seen) -> Witness:
        """Give a finished draft all names of its thing; returns what it looks like here."""
        draft = self.path(thing.ino)
        try:
            first = place_of(self._root, thing.paths[0])
            self._give_name(draft, thing.paths[0])
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)
        self.link_others(thing, thing.paths[0])
        return Witness.of(os.lstat(first), seen)

    def link_others(self, thing: Thing, path: bytes) -> None:
        """Make the other names of a thing lead to what *path* does."""
        first = place_of(self._root, path)
        for other in thing.paths:
            if other == path:
                continue
            place = place_of(self._root, other)
            try:
                if os.path.samestat(os.lstat(place), os.lstat(first)):
                    continue
            except FileNotFoundError:
                pass
            self._give_name(first, other)

    def _give_name(self, present: bytes, path: bytes) -> None:
        """Make *path* one more name of what is at *present*, unless a rename is all that there is."""
        place = place_of(self._root, path)
        for _ in range(TRIES):
            try:
                os.link(present, place, follow_symlinks=False)
                return
            except FileExistsError:
                self.move_aside(path)
            except OSError as error:
                if error.errno not in UNLINKABLE or os.path.dirname(present) != self._new:
                    raise
                if os.path.lexists(place):
                    self.move_aside(path)
                os.rename(present, place)
                return
        raise FileExistsError(errno.EEXIST, "something takes the name again and again", place)

    def make_directory(self, thing: Thing) -> None:
        """Make a directory that is not there; its attributes come last."""
        path = thing.paths[0]
        place = place_of(self._root, path)
        try:
            os.mkdir(place, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                self.move_aside(path)
                os.mkdir(place, 0o700)

    def make_special(self, thing: Thing) -> bool:
        """Make a symlink, fifo, socket or device; False if this node cannot."""
        draft = self.path(thing.ino)
        if not self._applier.make_special(thing.record, draft):
            return False
        self.apply(draft, thing)
        return True

    def stand_in(self, path: bytes, target: bytes, draft: bytes) -> None:
        """Put a dangling symlink where something will be."""
        os.symlink(target, draft)
        try:
            self._give_name(draft, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)

    def replace_link(self, ino: Inode, path: bytes) -> bool:
        """Put a finished draft where a dangling symlink stands for it; False when that is no longer there.

        The draft stays, for the next name.
        """
        place, draft = place_of(self._root, path), self.path(ino, b".link")
        with suppress(FileNotFoundError):
            os.unlink(draft)
        os.link(self.path(ino), draft)
        try:
            if absent_link(place) != ino:
                return False
            if not _exchange(draft, place):
                os.replace(draft, place)
            elif absent_link(draft) != ino:
                _exchange(draft, place)  # somebody was quicker by a hair: what they put there stays
                return False
            return True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)

    def take_refused(self) -> dict[Inode, tuple[bytes, ...]]:
        """Give what was refused since the last time."""
        refused, self.refused_xattrs = self.refused_xattrs, {}
        return refused

    def move_aside(self, path: bytes) -> None:
        """Move what is at *path* to `.spotwarp/replaced`, under the same path."""
        kept, number = os.path.join(self.replaced, path), 0
        while os.path.lexists(kept):
            number += 1
            kept = os.path.join(self.replaced, path) + b".%d" % number
        os.makedirs(os.path.dirname(kept), 0o700, exist_ok=True)
        os.rename(place_of(self._root, path), kept)
        self.moved_aside.append(path)


def hold_writable(place: bytes) -> None:
    """Let this user put names into a directory; its own mode comes last."""
    mode = stat.S_IMODE(os.lstat(place).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(place, mode | 0o700)


def absent_link(place: bytes) -> Inode | None:
    """Tell for which absent file the symlink at *place* stands; None for anything else."""
    try:
        return absent_inode(os.readlink(place))
    except OSError:
        return None


def is_absent_link(place: bytes) -> bool:
    """Tell whether a symlink stands for a file that is not here: a scan carries its record over."""
    return absent_link(place) is not None


def _exchange(one: bytes, other: bytes) -> bool:
    """Let two names change places in one step; False where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE) == 0
