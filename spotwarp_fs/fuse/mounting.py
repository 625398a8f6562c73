"""Decide whether a workspace can be mounted at a path, clear away dead mounts, and say what to do if it can't be.

Invariant: every refusal is a UserError that names the thing and the remedy, within two seconds; nothing live is ever
unmounted here unless the caller asks for it by name.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import stat
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.fuse import syscalls, underlay
from spotwarp_fs.fuse.mountinfo import FSNAME_PREFIX, MountEntry, MountState, mounts_at, real_path, state_of, top_mount

CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
STACK_MAX: Final = 64
"""Dead mounts cleared from one path; a supervisor that loses a race may stack a few."""
_DEVICE: Final = "/dev/fuse"
_FUSE_CONF: Final = Path("/etc/fuse.conf")
_CAP_SYS_ADMIN: Final = 21
_UNMOUNT_DEADLINE_S: Final = 10.0
_INSTEAD: Final = "`spotwarp start --workspace DIR`, or `spotwarp run --mode directory`, needs none"


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How one workspace is mounted.

    Devices and set-user-id files of a workspace are data, not authority: otherwise whoever may write to the bucket were
    root on the node. They are stored and shown in any case; `devices` and `setuid` also let them act.
    """

    mountpoint: str
    workspace: str
    cache_dir: Path
    allow_other: bool | None = None
    """None: wherever it is permitted."""
    xattrs: bool = True
    writeback_cache: bool = False
    devices: bool = False
    setuid: bool = False
    read_ahead_kb: int = 4096
    max_background: int = 1024
    """Requests that may wait in the background queue; the kernel's 12 let an outage stop even closes (M1, M2)."""
    underlay_path: Path | None = None
    """Where it is noted how the directory below looked; by default in the cache, which may be lost before that."""
    tasks_max: int = 4096
    """Requests that may wait in handlers; pyfuse3's 99 let waiting writers stop an `unlink` that frees space (M4)."""

    @property
    def underlay_record(self) -> Path:
        """Where it is written down how the directory below looked."""
        return self.underlay_path or self.cache_dir / "underlay.json"


class AlreadyMounted(UserError):
    """A live FUSE mount is at the mountpoint; `workspace` is set if it is one of ours."""

    def __init__(self, mountpoint: str, entry: MountEntry) -> None:
        owner = f"workspace {entry.workspace}" if entry.workspace else f"{entry.source} ({entry.kind})"
        super().__init__(
            f"{mountpoint} is already mounted: {owner}; unmount it first (`spotwarp umount {mountpoint}`)",
            ExitCode.MOUNTPOINT,
        )
        self.workspace = entry.workspace


class NoFuse(UserError):
    """This node can't mount FUSE filesystems; `cause` says why, without the remedy."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"no FUSE mount is possible here: {cause}; {_INSTEAD}", ExitCode.NO_FUSE)
        self.cause = cause


def check_fuse() -> None:
    """Raise NoFuse with the cause if this node can't mount FUSE filesystems.

    Looks only; the last word is the mount itself, which `serving.serve` turns into the same error.
    """
    try:
        importlib.import_module("pyfuse3")
    except ImportError as error:
        raise NoFuse(
            f"pyfuse3 can't be loaded ({error}); `pip install 'spotwarp[fuse]'` brings it, and needs libfuse3"
        ) from error
    try:
        if not stat.S_ISCHR(os.stat(_DEVICE).st_mode):
            raise NoFuse(f"{_DEVICE} is not a character device")
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise NoFuse(f"{_DEVICE} is missing (a container without FUSE)") from None
    except OSError as error:
        raise NoFuse(f"{_DEVICE} can't be opened: {error.strerror}") from error
    if os.geteuid() == 0 and not _has_sys_admin():
        raise NoFuse("mounting is not permitted (this container has no CAP_SYS_ADMIN)")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise NoFuse("fusermount3 is not installed, and only root mounts without it (install the package fuse3)")


def _has_sys_admin() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return True


def prepare_mountpoint(options: MountOptions) -> str:
    """Clear dead mounts away, then check everything about the path; gives the real path to mount on.

    Raises AlreadyMounted, or UserError(MOUNTPOINT).
    """
    mountpoint = real_path(options.mountpoint)
    clear_dead_mounts(mountpoint)
    try:
        found = os.stat(mountpoint)
    except FileNotFoundError:
        raise _bad(f"{mountpoint} does not exist; create it with `mkdir -p {mountpoint}`") from None
    except OSError as error:
        raise _bad(f"{mountpoint} can't be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _bad(f"{mountpoint} is not a directory")
    _check_apart(mountpoint, os.path.realpath(options.cache_dir))
    if os.geteuid() != 0:
        # fusermount3 wants the directory to be writable by the user; root mounts on a closed-off one.
        underlay.reopen(mountpoint, options.underlay_record)
    try:
        names = os.listdir(mountpoint)
    except OSError as error:
        raise _bad(f"{mountpoint} can't be listed: {error.strerror}") from error
    if names:
        raise _bad(
            f"{mountpoint} is not empty ({len(names)} names, such as {names[0]!r}), and a mount would hide them; "
            "move them away, or choose another directory"
        )
    return mountpoint


def _bad(message: str) -> UserError:
    return UserError(message, ExitCode.MOUNTPOINT)


def _check_apart(mountpoint: str, cache_dir: str) -> None:
    """The daemon would wait for itself, for ever, if its cache were inside its own mount."""
    if os.path.commonpath([mountpoint, cache_dir]) == mountpoint:
        raise _bad(f"the cache directory {cache_dir} is inside the mountpoint {mountpoint}; put it elsewhere")
    if os.path.commonpath([mountpoint, cache_dir]) == cache_dir:
        raise _bad(f"the mountpoint {mountpoint} is inside the cache directory {cache_dir}; put it elsewhere")


def clear_dead_mounts(mountpoint: str) -> int:
    """Detach every dead FUSE mount on top of *mountpoint* (a real path); gives their number.

    Raises AlreadyMounted at a live one, UserError at one that does not answer.
    """
    for cleared in range(STACK_MAX):
        entry = top_mount(mountpoint)
        if entry is None or not entry.is_fuse:
            return cleared
        match state_of(mountpoint):
            case MountState.ALIVE:
                raise AlreadyMounted(mountpoint, entry)
            case MountState.STUCK:
                raise _bad(
                    f"the mount at {mountpoint} ({entry.source}) does not answer, though its daemon is there; "
                    f"`spotwarp umount --force {mountpoint}` ends it"
                )
            case MountState.DEAD:
                unmount(mountpoint, lazy=True)
    raise _bad(f"more than {STACK_MAX} dead mounts are stacked on {mountpoint}")


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Take the topmost mount off *mountpoint*; raises OSError (EBUSY while files are open, unless *lazy*)."""
    try:
        syscalls.unmount(mountpoint, lazy=lazy)
    except PermissionError:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_UNMOUNT_DEADLINE_S, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise OSError(errno.EPERM, f"fusermount3 failed: {error}", mountpoint) from error
        if done.returncode != 0:
            busy = "busy" in done.stderr
            raise OSError(errno.EBUSY if busy else errno.EPERM, done.stderr.strip(), mountpoint) from None


def connection_of(entry: MountEntry) -> Path:
    """Where the kernel shows the connection behind a FUSE mount; fusectl is mounted if it is missing and we may."""
    if not any(CONNECTIONS.iterdir()):
        with suppress(OSError):
            syscalls.mount("fusectl", str(CONNECTIONS), "fusectl")
    return CONNECTIONS / str(entry.minor)


def abort_connection(mountpoint: str) -> bool:
    """End every request that waits for the daemon behind *mountpoint*, also in processes that can't be killed (H2).

    The mount is dead afterwards. False if there is none, or it is not permitted.
    """
    aborted = False
    for entry in mounts_at(real_path(mountpoint)):
        if entry.is_fuse:
            aborted = _abort(entry) or aborted
    return aborted


def _abort(entry: MountEntry) -> bool:
    try:
        (connection_of(entry) / "abort").write_text("1")
    except OSError:
        # Without fusectl a forced unmount does the same to the topmost mount: the abort comes before the refusal.
        try:
            syscalls.unmount(entry.mountpoint, force=True)
        except OSError as error:
            return error.errno == errno.EBUSY
    return True


def kernel_options(options: MountOptions) -> set[str]:
    """Translate into what libfuse takes; the rest is negotiated by pyfuse3 or set by `tuning`."""
    # libfuse splits at commas, and pyfuse3 takes ASCII only.
    name = options.workspace.encode("ascii", "replace").decode().replace("\\", "\\\\").replace(",", "\\,")
    chosen = {"default_permissions", f"fsname={FSNAME_PREFIX}{name}", "subtype=spotwarp"}
    if may_allow_other() if options.allow_other is None else options.allow_other:
        chosen.add("allow_other")
    if options.devices:
        chosen.add("dev")
    if options.setuid:
        chosen.add("suid")
    return chosen


def may_allow_other() -> bool:
    """Root may always let other users in; others only if the administrator says so."""
    if os.geteuid() == 0:
        return True
    try:
        lines = _FUSE_CONF.read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)
