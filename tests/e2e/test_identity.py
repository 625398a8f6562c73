"""Is everything that `stat` tells the same on the next node, so that git and its like read nothing again?"""

from __future__ import annotations

import os
import random
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.daemon import Fleet
from tests.support.daemon import fleet as fleet
from tests.support.mounts import needs_fuse

pytestmark = [*needs_fuse, pytest.mark.promise("P-11")]

MiB = 1 << 20
AGES_NS = (-1, 1_234_567_890_123_456_789, 4_294_967_296_000_000_001)


def described(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below *root*, without reading a byte of content."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in [".", *names, *files]:
            path = Path(directory, name)
            seen = path.lstat()
            attributes = (
                {name: os.getxattr(path, name) for name in os.listxattr(path)} if stat.S_ISREG(seen.st_mode) else {}
            )
            target = os.readlink(path) if path.is_symlink() else ""
            found[str(path.relative_to(root))] = (
                seen.st_ino, seen.st_mode, seen.st_nlink, seen.st_uid, seen.st_gid, seen.st_size, seen.st_blocks,
                seen.st_mtime_ns, seen.st_ctime_ns, seen.st_rdev, target, attributes,
            )  # fmt: skip
    return found


def git(root: Path, *arguments: str) -> str:
    """Run git as it is, on a repository that is ours, with nobody's configuration."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(root.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    options = ["-c", "safe.directory=*", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
    command = ["git", "-C", str(root), *options, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_what_stat_tells_is_the_same_on_the_next_node(fleet: Fleet) -> None:
    first = fleet.node(interval="1h")
    first.environment = {"SPOTWARP_MOUNT_XATTRS": "true"}
    root = first.start().root
    (root / "d" / "e").mkdir(parents=True)
    for number, age_ns in enumerate(AGES_NS):
        path = root / "d" / f"f{number}"
        path.write_bytes(random.Random(number).randbytes(number * 700_000))
        os.setxattr(path, "user.n", b"%d" % number)
        os.link(path, root / "d" / "e" / f"link{number}")
        os.chmod(path, 0o4750 + number)
        os.utime(path, ns=(age_ns, age_ns))
    with (root / "holes").open("wb") as file:
        file.write(b"head")
        file.seek(40 * MiB)
        file.write(b"tail")
    os.symlink("../nowhere/\udcff", root / "d" / "symlink")
    os.mkfifo(root / "d" / "fifo", 0o600)
    if os.geteuid() == 0:
        os.chown(root / "d" / "f1", 12345, 54321)
    before = described(root)
    assert before["holes"][6] < 5 * MiB // 512  # type: ignore[operator]
    assert first.umount() == 0
    second = fleet.node(interval="1h")
    second.environment = first.environment
    assert described(second.start().root) == before


def test_git_status_on_the_next_node_reads_no_file_again(fleet: Fleet) -> None:
    root = fleet.node(interval="1h").start().root / "repo"
    root.mkdir()
    git(root, "init", "-q")
    for number in range(30):
        (root / f"module_{number}.py").write_text(f"NUMBER = {number}\n" * 200)
    (root / "weights.bin").write_bytes(random.Random(1).randbytes(12 * MiB))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    os.sync()
    git(root, "update-index", "--refresh")
    assert fleet.nodes[0].umount() == 0

    second = fleet.node(interval="1h").start()
    there = second.root / "repo"
    for path in (there / ".git").rglob("*"):
        if path.is_file() and "objects" not in path.parts:
            path.read_bytes()
    before = second.status()["totals"]["bytes_fetched"]
    assert git(there, "diff-files", "--name-only") == ""
    assert git(there, "status", "--porcelain", "--untracked-files=no", "--no-ahead-behind") == ""
    assert second.status()["totals"]["bytes_fetched"] - before < 2 * MiB
    assert (there / "weights.bin").read_bytes() == random.Random(1).randbytes(12 * MiB)
