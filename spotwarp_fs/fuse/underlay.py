"""Close off the plain directory below a mount, so that nobody writes into it when the workspace is not mounted (D02).

Invariant: what is changed on the directory is written to the record file first, so a crash at any point leaves either
an untouched directory or one that the next start can give back exactly as it was.

Root sets `chattr +i`: it binds root too and leaves the directory readable. Others, and filesystems without inode flags,
get mode 0, which binds everybody but root.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from spotwarp_fs.fuse import syscalls

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnderlayRecord:
    """Which directory was closed off, and how it looked before."""

    path: str
    ino: int
    """Says whether the path still leads to the same directory; device numbers change with a boot."""
    mode: int


def close_off(descriptor: int, path: str, record_path: Path) -> None:
    """Make the directory behind *descriptor* (opened before the mount covered *path*) refuse every new name.

    A directory that somebody else made immutable is left alone. Logs it when the filesystem allows neither way.
    """
    found = os.fstat(descriptor)
    if _load(record_path, path, found.st_ino) is None:
        if _immutable(descriptor):
            return
        _store(record_path, UnderlayRecord(path, found.st_ino, stat.S_IMODE(found.st_mode)))
    try:
        syscalls.set_immutable(descriptor, immutable=True)
    except OSError:
        try:
            os.fchmod(descriptor, 0)
        except OSError as error:
            log.warning("underlay stays writable path=%s reason=%s", path, error.strerror)


def reopen(path: str, record_path: Path) -> None:
    """Give the directory at *path*, no longer covered by a mount, back as it was; nothing to do without a record."""
    try:
        found = os.stat(path)
    except OSError:
        return
    record = _load(record_path, path, found.st_ino)
    if record is not None:
        _clear_immutable(path)
        with suppress(PermissionError):
            os.chmod(path, record.mode)
    with suppress(FileNotFoundError):
        record_path.unlink()


def _clear_immutable(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # mode 0 and not root: then it was never made immutable
    try:
        if _immutable(descriptor):
            syscalls.set_immutable(descriptor, immutable=False)
    finally:
        os.close(descriptor)


def _immutable(descriptor: int) -> bool:
    try:
        return syscalls.is_immutable(descriptor)
    except OSError:
        return False  # a filesystem without inode flags


def _load(record_path: Path, path: str, ino: int) -> UnderlayRecord | None:
    """Read the record, if there is one and it is about this very directory."""
    try:
        record = UnderlayRecord(**json.loads(record_path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return record if (record.path, record.ino) == (path, ino) else None


def _store(record_path: Path, record: UnderlayRecord) -> None:
    draft = record_path.with_name(record_path.name + ".new")
    with open(draft, "w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, record_path)
