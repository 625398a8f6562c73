"""The cache directory: one workspace's local state on this node, held by one daemon at a time.

    <cache>/identity.json    format, workspace (store and name), workspace id, boot id, how the last daemon ended
    <cache>/lock             flock of the daemon that serves it
    <cache>/map/             the LMDB map; thrown away when the boot id has changed
    <cache>/data/ spool/     contents of files; what a cut still needs
    <cache>/journal          the fsync journal
    <cache>/salvage/<n>/     states that another writer went past, as they were

Invariant: nothing here is used without the lock; a cache that belongs to another workspace is refused, never reused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.local.disk import sync_directory

FORMAT: Final = 1
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
STATE: Final = ("map", "data", "spool", "journal")
"""What belongs to the state itself and moves into salvage together."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cache directory says about itself."""

    format: int
    workspace: str
    workspace_id: str | None = None
    boot_id: str = ""
    released: bool = False
    """The last daemon had published everything and said goodbye."""


class CacheDir:
    """An open, locked cache directory."""

    def __init__(self, path: Path, lock: int, identity: Identity, *, trusted: bool) -> None:
        self.path = path
        self._lock = lock
        self._identity = identity
        self.trusted = trusted
        """The map is from this boot; else it has been thrown away and must be rebuilt from head and journal."""

    @classmethod
    def open(cls, path: Path, workspace: str) -> CacheDir:
        """Create or take over the directory; raises UserError (CACHE) saying what is wrong with it and what to do."""
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _locked(path)
        except OSError as error:
            raise _bad(path, error) from error
        try:
            identity = _read_identity(path, workspace)
            trusted = identity.boot_id == boot_id()
            opened = cls(path, lock, identity, trusted=trusted)
            if not trusted:
                shutil.rmtree(opened.map_path, ignore_errors=True)
            shutil.rmtree(path / "spool", ignore_errors=True)
            opened._note(replace(identity, boot_id=boot_id()))
            return opened
        except OSError as error:
            os.close(lock)
            raise _bad(path, error) from error
        except UserError:
            os.close(lock)
            raise

    @property
    def map_path(self) -> Path:
        """Directory of the LMDB map."""
        return self.path / "map"

    @property
    def journal_path(self) -> Path:
        """The fsync journal."""
        return self.path / "journal"

    @property
    def workspace_id(self) -> str | None:
        """The id of the workspace whose state is here; None while there is none."""
        return self._identity.workspace_id

    @property
    def released(self) -> bool:
        """The last daemon left nothing unpublished here."""
        return self._identity.released

    def note_workspace_id(self, workspace_id: str) -> None:
        """Remember the workspace's id."""
        self._note(replace(self._identity, workspace_id=workspace_id))

    def note_released(self, *, released: bool) -> None:
        """Remember whether anything here is not in the store."""
        if released != self._identity.released:
            self._note(replace(self._identity, released=released))

    def _note(self, identity: Identity) -> None:
        if identity == self._identity and (self.path / "identity.json").exists():
            return  # a restart on a full disk must not need space
        draft = self.path / "identity.json.new"
        with open(draft, "w") as file:
            json.dump(asdict(identity), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / "identity.json")
        sync_directory(self.path)
        self._identity = identity

    def used_bytes(self) -> int:
        """What the state occupies on the disk (asked once, at start: it walks the data files)."""
        total = 0
        for name in STATE:
            for directory, _, files in os.walk(self.path / name):
                for file in files:
                    try:
                        total += os.lstat(os.path.join(directory, file)).st_blocks * 512
                    except FileNotFoundError:
                        continue
        return total

    def set_aside_as_salvage(self, reason: str) -> Path:
        """Move the state out of the way, whole, and say why it was left; returns where it lies."""
        salvage = self.path / "salvage"
        salvage.mkdir(exist_ok=True)
        taken = [int(entry.name) for entry in salvage.iterdir() if entry.name.isdecimal()]
        place = salvage / str(max(taken, default=0) + 1)
        place.mkdir()
        (place / "reason.json").write_text(json.dumps({"reason": reason, **asdict(self._identity)}))
        for name in STATE:
            if (self.path / name).exists():
                os.rename(self.path / name, place / name)
        sync_directory(place)
        sync_directory(self.path)
        self._note(replace(self._identity, released=False, workspace_id=None))
        return place

    def clear(self) -> None:
        """Throw the state away: everything in it is published."""
        for name in STATE:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        self._note(replace(self._identity, released=False, workspace_id=None))

    def close(self) -> None:
        """Let another daemon have it."""
        os.close(self._lock)


def boot_id() -> str:
    """Tell this boot of the machine from others: what was not synced does not survive into the next.

    Where the system does not say, every start counts as another boot.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid1().hex


def _locked(path: Path) -> int:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise UserError(
            f"the cache directory {path} is in use by another daemon (pid {holder or 'unknown'}): "
            "unmount that workspace, or choose another --cache-dir",
            ExitCode.CACHE,
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _read_identity(path: Path, workspace: str) -> Identity:
    file = path / "identity.json"
    if not file.exists():
        return Identity(FORMAT, workspace)
    try:
        identity = Identity(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({error}): move {path} away, or choose another --cache-dir", ExitCode.CACHE
        ) from error
    if identity.format > FORMAT:
        raise UserError(
            f"the cache {path} has format {identity.format}, this version knows {FORMAT}: upgrade spotwarp",
            ExitCode.NEWER_FORMAT,
        )
    if identity.workspace != workspace:
        raise UserError(
            f"the cache directory {path} belongs to {identity.workspace}, not to {workspace}: choose another "
            "--cache-dir",
            ExitCode.CACHE,
        )
    return identity


def _bad(path: Path, error: OSError) -> UserError:
    what = {
        errno.EROFS: "lies on a read-only filesystem",
        errno.EACCES: "is not writable for this user",
        errno.ENOSPC: "lies on a full disk: free some space",
        errno.ENOTDIR: "is not a directory",
    }.get(error.errno or 0, f"cannot be used: {error.strerror}")
    return UserError(f"the cache directory {path} {what}; choose another with --cache-dir", ExitCode.CACHE)
