"""Know what is mounted where, from /proc/self/mountinfo, without asking the mounted filesystem.

Invariant: nothing here can hang on a dead or wedged mount; only `state_of` asks it, from a child with a deadline.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

ANSWER_DEADLINE_S: Final = 2.0
FSNAME_PREFIX: Final = "spotwarp:"
_ESCAPE = re.compile(r"\\([0-7]{3})")
_PROBE: Final = "import os,sys\ntry: os.statvfs(sys.argv[1])\nexcept OSError as error: sys.exit(error.errno)"


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo."""

    mountpoint: str
    kind: str
    """Filesystem type, such as `fuse.spotwarp`."""
    source: str
    major: int
    minor: int

    @property
    def is_fuse(self) -> bool:
        """A FUSE mount, ours or another's."""
        return self.kind == "fuse" or self.kind.startswith(("fuse.", "fuseblk"))

    @property
    def workspace(self) -> str | None:
        """Workspace, if it is one of ours."""
        return self.source.removeprefix(FSNAME_PREFIX) if self.source.startswith(FSNAME_PREFIX) else None


class MountState(Enum):
    """What a mounted filesystem does when it is asked."""

    ALIVE = "alive"
    DEAD = "dead"
    """ENOTCONN: its daemon is gone."""
    STUCK = "stuck"
    """No answer in time: its daemon is there and does not serve."""


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes; names that are not UTF-8 keep their bytes.

    >>> _unescape("/a\\\\040b")
    '/a b'
    """
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


def parse(text: str) -> list[MountEntry]:
    """Read mountinfo's lines, lowest mount first."""
    entries = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        major, _, minor = fields[2].partition(":")
        entries.append(MountEntry(_unescape(fields[4]), tail[0], _unescape(tail[1]), int(major), int(minor)))
    return entries


def mounts_at(mountpoint: str) -> list[MountEntry]:
    """Give the mounts stacked on exactly *mountpoint* (a real path), topmost last."""
    text = Path("/proc/self/mountinfo").read_bytes().decode(errors="surrogateescape")
    return [entry for entry in parse(text) if entry.mountpoint == mountpoint]


def top_mount(mountpoint: str) -> MountEntry | None:
    """Give the mount that a visitor of *mountpoint* meets, if there is one."""
    stack = mounts_at(mountpoint)
    return stack[-1] if stack else None


def state_of(mountpoint: str, deadline_s: float = ANSWER_DEADLINE_S) -> MountState:
    """Ask the mounted filesystem for its figures: its root's attributes may still be cached an hour after its death.

    A child asks: who waits for a wedged FUSE daemon can't even be killed, and then it is left behind.
    """
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROBE, mountpoint],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        code = child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return MountState.STUCK
    return MountState.DEAD if code in (errno.ENOTCONN, errno.ECONNABORTED) else MountState.ALIVE


def real_path(path: str | os.PathLike[str]) -> str:
    """Resolve links in *path*, but never enter what is mounted there: it may be dead or wedged."""
    full = os.path.abspath(path)
    candidate = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
    return candidate if mounts_at(candidate) else os.path.realpath(full)
