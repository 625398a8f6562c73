"""A node as a container without rights sees it: an ordinary user, no capability, no /dev/fuse, a home of root's.

Every command gets a mount namespace of its own with the same view: /dev holds a few harmless devices, and what the
tests need of this machine (interpreter, sources, the node's own directories) can be entered by everybody. Files,
sockets and process ids are those of the machine, so other processes meet the workspace at its usual path.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.daemon import Node
from tests.support.privileges import NOBODY
from tests.tidy.sources import ROOT

DEVICES: Final = ("null", "zero", "full", "random", "urandom")
DROP: Final = (
    f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps -all --ambient-caps -all --bounding-set -all "
    "--no-new-privs"
)


def can_make() -> bool:
    """Say whether such a node can be made here: it takes root, and the right to mount."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


needs_namespace = pytest.mark.skipif(not can_make(), reason="a mount namespace with another user needs root")


def _closed_above(path: Path) -> list[Path]:
    """Directories on the way to *path* that an ordinary user can't enter, outermost first."""
    return [above for above in reversed(path.parents) if not above.stat().st_mode & 0o001]


def _opened(needed: Iterable[Path]) -> str:
    """Shell text that puts an enterable directory over each closed one, with nothing in it but what is needed."""
    opened: dict[Path, list[Path]] = {}
    for path in needed:
        closed = _closed_above(path)
        if closed:
            opened.setdefault(closed[0], []).append(path)
    lines = []
    for number, (closed_one, paths) in enumerate(opened.items()):
        for index, path in enumerate(paths):
            stash = f"/mnt/{number}-{index}"
            lines.append(f"mkdir -p {stash} && mount --rbind {shlex.quote(str(path))} {stash}")
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed_one))}")
        for index, path in enumerate(paths):
            there = shlex.quote(str(path))
            lines.append(f"mkdir -p {there} && mount --rbind /mnt/{number}-{index} {there}")
    return "\n".join(lines)


def namespace(needed: Iterable[Path]) -> list[str]:
    """Return the words that stand before a command to run it on such a node."""
    devices = "\n".join(f"touch /dev/{name} && mount --bind /mnt/dev/{name} /dev/{name}" for name in DEVICES)
    script = f"""set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/dev && mount --rbind /dev /mnt/dev
{_opened(needed)}
mount -t tmpfs -o mode=755 tmpfs /dev
{devices}
ln -s /proc/self/fd /dev/fd
mkdir -m 1777 /dev/shm
umount -l /mnt/dev
exec {DROP} "$@"
"""
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@dataclass
class PoorNode(Node):
    """A node in the directory form whose commands have no rights. `start` and `run` are told --state-dir."""

    form: str = "directory"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read_only_home.mkdir(exist_ok=True)
        for path in (self.home.parent, self.home, self.read_only_home):
            path.chmod(0o755)
        for path in (self.home, self.root, self.state):
            os.chown(path, NOBODY, NOBODY)
        store = Path(self.store.removeprefix("file://"))
        store.mkdir(exist_ok=True)
        os.chown(store, NOBODY, NOBODY)

    @property
    def read_only_home(self) -> Path:
        """Belongs to root, and this user can't write there."""
        return self.home / "home"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `spotwarp` without rights."""
        where = {} if arguments[0] in ("start", "run") else {"SPOTWARP_STATE_DIR": str(self.state)}
        return self.without_rights(*super().command(*arguments), environment=where)

    def _environment(self) -> dict[str, str]:
        kept = super()._environment()
        del kept["SPOTWARP_STATE_DIR"]
        return {**kept, "HOME": str(self.read_only_home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def without_rights(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run any command on this node."""
        needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT, self.home.parent}
        return subprocess.run(
            [*namespace(sorted(needed)), *command], env={**self._environment(), **(environment or {})}, cwd="/",
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
