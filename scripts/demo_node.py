"""One rented machine, played by a directory: its home, its cache, its mount, its processes, and its sudden end.

Everything goes through the spotwarp command, as a user's shell would. Invariant: after `die` nothing of the node is
left: no process, no mount, no file.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPOTWARP = str(Path(sys.executable).with_name("spotwarp"))
COMMAND_S_MAX = 60.0
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE = 0x80086601, 0x40086602, 0x10


class DemoFailed(Exception):
    """Something that the product promises did not happen; the message says what."""


def is_alive(pid: int) -> bool:
    """Tell whether *pid* still runs; a dead process that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def end(pids: list[int]) -> None:
    """SIGKILL them in order, at once, and wait until they are gone."""
    for pid in pids:
        if pid > 1 and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids if pid > 1):
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"processes survive SIGKILL: {[pid for pid in pids if is_alive(pid)]}")
        time.sleep(0.005)


def is_mounted(mountpoint: Path) -> bool:
    return any(line.split()[1] == str(mountpoint) for line in Path("/proc/mounts").read_text().splitlines())


def unmount_lazily(mountpoint: Path) -> None:
    while is_mounted(mountpoint):
        subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=True, capture_output=True, timeout=20)


def lose(mountpoint: Path) -> None:
    """Remove the directory below a mount; one that ended badly leaves it closed off (chattr +i, or mode 0)."""
    if not mountpoint.exists():
        return
    if not os.access(mountpoint, os.R_OK):
        mountpoint.chmod(0o700)
    descriptor = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = bytearray(8)
        fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, flags)
        fcntl.ioctl(
            descriptor, FS_IOC_SETFLAGS, (int.from_bytes(flags, "little") & ~FS_IMMUTABLE).to_bytes(8, "little")
        )
    except OSError:
        pass  # a filesystem without such flags, or a user who may not set them: then it was never set
    finally:
        os.close(descriptor)
    shutil.rmtree(mountpoint)


@dataclass
class Node:
    """A machine with an empty disk, at *home*, that mounts the workspace at *mountpoint*."""

    name: str
    home: Path
    mountpoint: Path
    store: str
    environment: Mapping[str, str]
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir()
        self.mountpoint.mkdir(exist_ok=True)

    def spotwarp(self, *arguments: str) -> str:
        """Run the command and return what it printed, or raise DemoFailed with its own words."""
        inherited = {key: os.environ[key] for key in ("PATH", "LANG", "TERM", "TMPDIR") if key in os.environ}
        environment = {
            **inherited,
            **self.environment,
            "HOME": str(self.home),
            "SPOTWARP_STATE_DIR": str(self.home / "state"),
        }
        # Output goes to a file: a daemon that keeps the descriptor open must not keep this call waiting.
        log = self.home / "commands.log"
        with log.open("a+b") as output:
            began_at = output.seek(0, os.SEEK_END)
            run = subprocess.run(
                [SPOTWARP, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, timeout=COMMAND_S_MAX, check=False,
            )  # fmt: skip
            output.seek(began_at)
            printed = output.read().decode(errors="replace")
        if run.returncode != 0:
            raise DemoFailed(f"{self.name}: spotwarp {' '.join(arguments)} exited with {run.returncode}:\n{printed}")
        return printed

    def mount(self, *, takeover: bool) -> str:
        printed = self.spotwarp(
            "mount", str(self.mountpoint), "--store", self.store, "--workspace", "demo", "--interval", "1s",
            "--cache-dir", str(self.home / "cache"), *(["--takeover"] if takeover else []),
        )  # fmt: skip
        status = self.status()
        self.pids = [status["supervisor_pid"], status["daemon_pid"]]
        return " · ".join(printed.split("\n")).strip(" ·")

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.spotwarp("status", str(self.mountpoint), "--json").splitlines()[-1])
        return document

    def umount(self) -> None:
        self.spotwarp("umount", str(self.mountpoint))
        if is_mounted(self.mountpoint):
            raise DemoFailed(f"{self.mountpoint} is still mounted after spotwarp umount")

    def die(self, *with_it: int) -> float:
        """Kill supervisor, daemon and the processes *with_it* with SIGKILL, lose the disk; return when it began."""
        began_s = time.monotonic()
        # The supervisor first: it would bring the daemon back, which is its job but not what losing a node is like.
        end([*self.pids, *with_it])
        self.pids = []
        unmount_lazily(self.mountpoint)
        lose(self.mountpoint)
        shutil.rmtree(self.home)
        return began_s

    def clean_up(self) -> None:
        """End what is left of the node after a failure; a node that died or was unmounted has nothing left."""
        # A mount that was interrupted halfway has told nobody its pids, but it has recorded them.
        records = [json.loads(path.read_text()) for path in self.home.glob("state/mounts/*.json")]
        recorded = [record[kind] for kind in ("supervisor_pid", "daemon_pid") for record in records]
        end([*self.pids, *recorded])
        unmount_lazily(self.mountpoint)
        lose(self.mountpoint)
