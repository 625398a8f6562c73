"""Own the records of what is mounted on this machine: `<state_dir>/mounts/<id>.json`, one per mountpoint.

Invariant: looking a mount up never touches the mountpoint itself, which may be dead or hung; records of mounts that are
gone are passed over, and a record is replaced whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import ExitCode, UserError

MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountRecord:
    """Where a running workspace is and how to reach its daemon."""

    mountpoint: str
    workspace: str
    store: str
    cache_dir: str
    socket: str
    daemon_pid: int
    supervisor_pid: int
    started_ns: int
    form: str = "fuse"


def mounts_directory(state_dir: Path) -> Path:
    """Return the directory of the records."""
    return state_dir / "mounts"


def mount_id(mountpoint: str | Path) -> str:
    """Return the name of a mountpoint's record and socket: short, since a socket's path has 107 bytes at most."""
    return hashlib.blake2b(os.fsencode(_resolved(mountpoint)), digest_size=6).hexdigest()


def record_path(state_dir: Path, mountpoint: str | Path) -> Path:
    """Return the path of a mountpoint's record."""
    return mounts_directory(state_dir) / f"{mount_id(mountpoint)}.json"


def socket_path(state_dir: Path, mountpoint: str | Path) -> Path:
    """Return where the daemon of a mountpoint listens."""
    return mounts_directory(state_dir) / f"{mount_id(mountpoint)}.sock"


def keeper_socket(state_dir: Path, directory: str | Path) -> Path:
    """Return where the keeper of a plain directory's placeholders listens."""
    return mounts_directory(state_dir) / f"{mount_id(directory)}.keeper"


def underlay_path(state_dir: Path, mountpoint: str | Path) -> Path:
    """Return where it is noted how the directory below a mount looked."""
    return mounts_directory(state_dir) / f"{mount_id(mountpoint)}.underlay"


def write_record(state_dir: Path, record: MountRecord) -> None:
    """Create or replace a record."""
    path = record_path(state_dir, record.mountpoint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(record)))
    draft.replace(path)


def remove_record(state_dir: Path, mountpoint: str | Path) -> None:
    """Forget a mountpoint; fine if it is not known."""
    record_path(state_dir, mountpoint).unlink(missing_ok=True)
    socket_path(state_dir, mountpoint).unlink(missing_ok=True)


def read_records(state_dir: Path) -> list[MountRecord]:
    """Return every readable record, by mountpoint, also of mounts that are gone."""
    found = []
    for path in sorted(mounts_directory(state_dir).glob("*.json")):
        try:
            values = json.loads(path.read_text())
            found.append(MountRecord(**{item.name: values[item.name] for item in fields(MountRecord)}))
        except (OSError, ValueError, KeyError, TypeError):
            # Another version's record, or one that is being removed: not ours to judge, and `doctor` shows it.
            continue
    return sorted(found, key=lambda record: record.mountpoint)


def is_alive(pid: int) -> bool:
    """Tell whether a process of this number runs; one that only waits to be collected by its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        # In a container whose first process collects nobody, the dead stay in the table.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True


def mounted_paths() -> frozenset[str]:
    """Return what the kernel has mounted where; empty on systems without a mount table."""
    try:
        lines = MOUNT_TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return frozenset()
    # The kernel writes blanks and backslashes as octal.
    return frozenset(_OCTAL.sub(lambda found: chr(int(found[1], 8)), line.split(" ")[4]) for line in lines)


def current_records(state_dir: Path) -> list[MountRecord]:
    """Return the records whose daemon or supervisor lives, or whose mountpoint is still mounted, dead or alive."""
    mounted = mounted_paths()
    return [
        record
        for record in read_records(state_dir)
        if record.mountpoint in mounted or any(is_alive(pid) for pid in (record.daemon_pid, record.supervisor_pid))
    ]


def find_mount(state_dir: Path, mountpoint: str | Path | None = None) -> MountRecord:
    """Return the mount at or around *mountpoint*; without one, the mount around the working directory, or the only one.

    Raises UserError (NOT_MOUNTED) that names what is mounted.
    """
    records = current_records(state_dir)
    place = _resolved(mountpoint) if mountpoint is not None else _working_directory()
    if not (around := [record for record in records if _contains(record.mountpoint, place)]):
        # Only a path that is in no mount as written is resolved to its end: a walk into a dead mount may hang.
        around = [record for record in records if _contains(record.mountpoint, os.path.realpath(place))]
    if around:
        return max(around, key=lambda record: len(record.mountpoint))
    if mountpoint is None and len(records) == 1:
        return records[0]
    asked = f"{place} is not in a mounted workspace; " if mountpoint is not None else ""
    if not records:
        raise UserError(
            f"{asked}no workspace is mounted on this machine. `spotwarp mount DIR` mounts one, "
            "`spotwarp start --workspace DIR` serves a plain directory",
            ExitCode.NOT_MOUNTED,
        )
    known = ", ".join(f"{record.mountpoint} ({record.workspace})" for record in records)
    raise UserError(f"{asked or 'say which workspace you mean; '}mounted are: {known}", ExitCode.NOT_MOUNTED)


def _contains(mountpoint: str, place: str) -> bool:
    return place == mountpoint or place.startswith(mountpoint.rstrip("/") + "/")


def _resolved(path: str | Path) -> str:
    """Resolve symlinks above the last part only: looking at the mountpoint itself may hang."""
    absolute = os.path.abspath(path)
    parent, name = os.path.split(absolute)
    return os.path.join(os.path.realpath(parent), name)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD", "/")
