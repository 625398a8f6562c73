"""The system calls that a test program is made of, as values.

A path is bytes below the workspace's root. In a program that was only drawn, a path may still be an operand (`Place`,
`Existing`): an index modulo what exists when its turn comes, which is what `settle` replaces it by.
"""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol

NAMES = (b"a", b"b", b"c", b"ckpt.pt", b".tmp-x", b"\xff\xfe", b"new\nline", b"n" * 255, b"n" * 256)
NOWHERE = b"does-not-exist"
OPERAND_BYTES_MAX = 1_500
"""Longer paths are not operands any more, so that PATH_MAX is never met by chance."""

FILES, DIRECTORIES, SYMLINKS, OTHERS = "f", "d", "l", "o"
"""Kinds of things, as letters: a string of them is a set."""
NOT_OPENABLE = {DIRECTORIES: errno.EISDIR, SYMLINKS: errno.ELOOP, OTHERS: errno.ENXIO}
"""What open(O_WRONLY | O_NOFOLLOW) answers for what is not a file. (`perform` gives ENXIO without trying: a fifo would
wait for its reader.)"""


def kind_of(mode: int) -> str:
    return {stat.S_IFREG: FILES, stat.S_IFDIR: DIRECTORIES, stat.S_IFLNK: SYMLINKS}.get(stat.S_IFMT(mode), OTHERS)


def content(seed: int, length: int) -> bytes:
    """Bytes that compression and dedup can do nothing with."""
    return random.Random(seed).randbytes(length)


@dataclass(frozen=True, slots=True)
class Place:
    """A name, taken or not, in some directory (now and then in something that is none)."""

    parent: int
    name: int


@dataclass(frozen=True, slots=True)
class Existing:
    """Something that exists, of one of the *kinds*."""

    index: int
    kinds: str


Operand = bytes | Place | Existing


@dataclass(frozen=True, slots=True)
class Mkdir:
    path: Operand
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Create:
    """open(O_CREAT | O_EXCL)."""

    path: Operand
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Mknod:
    path: Operand
    mode: int
    rdev: int = 0


@dataclass(frozen=True, slots=True)
class Symlink:
    path: Operand
    target: bytes


@dataclass(frozen=True, slots=True)
class Link:
    source: Operand
    path: Operand


@dataclass(frozen=True, slots=True)
class Unlink:
    path: Operand


@dataclass(frozen=True, slots=True)
class Rmdir:
    path: Operand


@dataclass(frozen=True, slots=True)
class Rename:
    source: Operand
    path: Operand
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """pwrite to an existing file."""

    path: Operand
    offset: int
    length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Append:
    path: Operand
    length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Save:
    """open(O_CREAT | O_TRUNC) and write, as torch.save does."""

    path: Operand
    length: int
    seed: int
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Truncate:
    path: Operand
    size: int


@dataclass(frozen=True, slots=True)
class Chmod:
    path: Operand
    mode: int


@dataclass(frozen=True, slots=True)
class Chown:
    path: Operand
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Utimens:
    path: Operand
    atime_ns: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class SetXattr:
    path: Operand
    name: bytes
    value: bytes
    flags: int = 0


@dataclass(frozen=True, slots=True)
class RemoveXattr:
    path: Operand
    name: bytes


@dataclass(frozen=True, slots=True)
class WriteUnlinked:
    """Open, unlink, write at the start, read it back, close."""

    path: Operand
    length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Fsync:
    path: Operand


@dataclass(frozen=True, slots=True)
class Sync:
    """Marker: the runner publishes."""


@dataclass(frozen=True, slots=True)
class Remount:
    """Marker: the runner ends the filesystem and starts it again on the same node."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """Marker: the runner starts the filesystem on a fresh node, from the store alone."""


Marker = Sync | Remount | Takeover
Call = (
    Mkdir | Create | Mknod | Symlink | Link | Unlink | Rmdir | Rename | Write | Append | Save | Truncate | Chmod
    | Chown | Utimens | SetXattr | RemoveXattr | WriteUnlinked | Fsync | Marker
)  # fmt: skip


class Paths(Protocol):
    def paths(self, kinds: str) -> Iterable[bytes]:
        """Every path that leads to one of *kinds*, in a stable order; `b""` is the root."""
        ...


def settle(call: Call, tree: Paths) -> Call:
    """Replace the operands of *call* by paths of *tree*, as it is now."""
    settled = {
        field.name: _path(value, tree)
        for field in fields(call)
        if isinstance(value := getattr(call, field.name), Place | Existing)
    }
    return replace(call, **settled)


def _path(operand: Place | Existing, tree: Paths) -> bytes:
    if isinstance(operand, Existing):
        found = [path for path in tree.paths(operand.kinds) if 0 < len(path) <= OPERAND_BYTES_MAX]
        return found[operand.index % len(found)] if found else NOWHERE
    parents = [path for path in tree.paths(DIRECTORIES) if len(path) <= OPERAND_BYTES_MAX]
    parents += [path for path in tree.paths(FILES) if len(path) <= OPERAND_BYTES_MAX][:1]
    parent = parents[operand.parent % len(parents)]
    name = NAMES[operand.name % len(NAMES)]
    return parent + b"/" + name if parent else name
