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
    records = _load(record_path)
    known = records.get(path)
    if known is None or known.ino != found.st_ino:
        if _immutable(descriptor):
            return
        records[path] = UnderlayRecord(path, found.st_ino, stat.S_IMODE(found.st_mode))
        _store(record_path, records)
    try:
        syscalls.set_immutable(descriptor, immutable=True)
    except OSError:
        try:
            os.fchmod(descriptor, 0)
        except OSError as error:
            log.warning("underlay stays writable path=%s reason=%s", path, error.strerror)


def reopen(path: str, record_path: Path) -> None:
    """Give the directory at *path*, no longer covered by a mount, back as it was; nothing to do without a record."""
    records = _load(record_path)
    record = records.pop(path, None)
    if record is None:
        return
    try:
        if os.stat(path).st_ino == record.ino:
            _clear_immutable(path)
            os.chmod(path, record.mode)
    except FileNotFoundError:
        log.info("closed-off directory has gone path=%s", path)
    except OSError as error:
        log.warning("directory stays closed off path=%s mode=%o reason=%s", path, record.mode, error.strerror)
        return
    _store(record_path, records)


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


def _load(record_path: Path) -> dict[str, UnderlayRecord]:
    """Read the records by path: after a crash the cache may be mounted elsewhere, and the first one still counts."""
    try:
        return {entry["path"]: UnderlayRecord(**entry) for entry in json.loads(record_path.read_bytes())}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _store(record_path: Path, records: dict[str, UnderlayRecord]) -> None:
    if not records:
        record_path.unlink(missing_ok=True)
        return
    record_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = record_path.with_name(record_path.name + ".new")
    with open(draft, "w") as file:
        json.dump([asdict(record) for record in records.values()], file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, record_path)
