"""The directory in which one node keeps one workspace: whose it is, who holds it, and whether its map may be believed.

    <cache>/lock                     flock of the daemon that uses it; its pid
    <cache>/identity                 JSON: format version, workspace
    <cache>/state/map/               LMDB; `trusted` in it names the boot (and the directory) it was made under
    <cache>/state/journal            fsync journal
    <cache>/state/data, state/spool  data files, what cuts have set aside
    <cache>/state/rest               while a lost map is built anew: the salvage for bytes that nothing vouches for
    <cache>/salvage/<n>-<time>/      a `state` moved here whole, with `reason`; or, marked by `lost_map`, a damaged map
                                     and the bytes that only it vouched for (`rest.py`)

Invariant: one daemon per cache directory, one workspace per cache directory, and `state` is moved as one, so that a map
never stands beside another map's bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.local.boot import boot_id
from spotwarp_fs.local.disk import disk_free_bytes, sync_directory
from spotwarp_fs.local.mountinfo import fuse_mount_of
from spotwarp_fs.local.punching import probe_punching

CACHE_FORMAT: Final = 2
"""Format 1 placed data files otherwise; they are moved when they are first opened."""
LOST_MAP: Final = "lost_map"
FREE_BYTES_MIN: Final = 16 << 20

_ADVICE: Final = {
    errno.EROFS: "it lies on a read-only filesystem; choose another --cache-dir",
    errno.ENOSPC: "the disk is full; free some space or choose another --cache-dir",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --cache-dir",
    errno.EACCES: "this user may not write there; choose another --cache-dir or change its owner",
    errno.EPERM: "this user may not write there; choose another --cache-dir or change its owner",
    errno.ENOTDIR: "a file stands in its path; choose another --cache-dir",
    errno.EEXIST: "a file stands in its place; choose another --cache-dir",
    errno.EOPNOTSUPP: "its filesystem cannot punch holes into files, so nothing could ever be evicted; "
    "choose a --cache-dir on ext4, xfs, btrfs or tmpfs",
}


class CacheDir:
    """An open cache directory: locked, and of the right workspace."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.state = path / "state"
        self.map_path = self.state / "map"
        self.journal_path = self.state / "journal"
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, workspace: str, *, mountpoint: Path | None = None) -> CacheDir:
        """Lock *path* for *workspace*, making it if it does not exist.

        Raises UserError (ExitCode.CACHE) when it cannot be used, with the reason and what to do. Spools of an earlier
        daemon are gone when this returns. A full disk is refused for a new cache only: a daemon that died on a full
        disk must be able to come back and save what it has.
        """
        path = make_place(path, mountpoint=mountpoint)
        try:
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _lock(path, lock_fd)
            cache = cls(path, lock_fd)
            if cache._is_of(workspace):
                cache._prepare()
            else:
                cache._begin(workspace)
        except BaseException:
            os.close(lock_fd)
            raise
        return cache

    @property
    def map_trusted(self) -> bool:
        """May the map be believed: was it certified by this boot, and not copied here?"""
        stamp = _stamp(self.map_path)
        try:
            return stamp is not None and (self.map_path / "trusted").read_text() == stamp
        except FileNotFoundError:
            return False

    def certify_map(self) -> None:
        """Say that the map is complete (loaded or rebuilt) and may be believed until the next boot."""
        stamp = _stamp(self.map_path)
        if stamp is None or self.map_trusted:
            return
        # Whole or not at all: a kill or a full disk in between must not take the belief in a good map away.
        draft = self.map_path / "trusted.new"
        draft.write_text(stamp)
        draft.replace(self.map_path / "trusted")

    def discard_map(self) -> None:
        """Throw the map away: it comes from another boot, or was never completed. Data files and journal stay."""
        # Removed first: a map that is half deleted must not look certified.
        (self.map_path / "trusted").unlink(missing_ok=True)
        shutil.rmtree(self.map_path, ignore_errors=False)
        self.map_path.mkdir()

    def set_map_aside(self, reason: str) -> Path:
        """Move a damaged map into a salvage of its own, with a copy of the journal; everything else stays.

        From then on, and also after a kill, `rest` says where that salvage is, until `end_rest`.
        """
        place = self.rest or self._new_salvage()
        place.mkdir(parents=True, exist_ok=True)
        (place / "reason").write_text(f"the metadata map was damaged: {reason}\n")
        (place / LOST_MAP).touch()
        if self.journal_path.exists() and not (place / "journal").exists():
            shutil.copyfile(self.journal_path, place / "journal")
        draft = self.state / "rest.new"
        draft.write_text(place.name)
        draft.replace(self.state / "rest")
        if not (place / "map").exists():
            os.rename(self.map_path, place / "map")
            self.map_path.mkdir()
        for changed in (place.parent, self.path, self.state):
            sync_directory(changed)
        return place

    @property
    def rest(self) -> Path | None:
        """The salvage of the damaged map that is being replaced, if one is."""
        try:
            return self.path / "salvage" / (self.state / "rest").read_text()
        except FileNotFoundError:
            return None

    def end_rest(self) -> None:
        """The lost map is replaced."""
        (self.state / "rest").unlink(missing_ok=True)

    @property
    def workspace_id(self) -> str | None:
        """The id of the workspace whose state is here; None while there is none."""
        try:
            return (self.state / "workspace_id").read_text().strip() or None
        except FileNotFoundError:
            return None

    def note_workspace_id(self, workspace_id: str) -> None:
        """Remember the workspace's id, so that a start can do without the store."""
        (self.state / "workspace_id").write_text(workspace_id + "\n")

    @property
    def released(self) -> bool:
        """The last daemon had published everything here and said goodbye."""
        return (self.state / "released").exists()

    def note_released(self, *, released: bool) -> None:
        """Remember whether everything here is in the store."""
        if released:
            with contextlib.suppress(OSError):  # a full disk; then the next start finds out by itself
                (self.state / "released").touch()
        else:
            (self.state / "released").unlink(missing_ok=True)

    def clear(self) -> None:
        """Throw the state away: all of it is published, or none of it ever was."""
        shutil.rmtree(self.state)
        self._prepare()

    def used_bytes(self) -> int:
        """Return what the state occupies; walks it, so ask once."""
        total = 0
        for directory, _, files in os.walk(self.state):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
        return total

    def set_aside_as_salvage(self, reason: str) -> Path:
        """Move the whole state to `salvage/<n>-<time>` and begin an empty one; map and journal must be closed."""
        (self.state / "reason").write_text(reason + "\n")
        target = self._new_salvage()
        target.parent.mkdir(exist_ok=True)
        os.rename(self.state, target)
        for changed in (target.parent, self.path):
            sync_directory(changed)
        self._prepare()
        return target

    def salvages(self) -> list[Path]:
        """Return what was set aside, oldest first."""
        salvage = self.path / "salvage"
        return sorted(salvage.iterdir()) if salvage.is_dir() else []

    def _new_salvage(self) -> Path:
        number = max((int(place.name.split("-")[0]) for place in self.salvages()), default=0) + 1
        return self.path / "salvage" / f"{number:04d}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"

    def free_bytes(self) -> int:
        """Return what may still be written on its disk."""
        return disk_free_bytes(self.path)

    def close(self) -> None:
        """Let another daemon have it."""
        os.close(self._lock_fd)

    def sweep(self) -> None:
        """Delete the spools: every cut of an earlier daemon is abandoned (H8)."""
        spool = self.state / "spool"
        if spool.exists():
            shutil.rmtree(spool)
        spool.mkdir()

    def _prepare(self) -> None:
        """Make what is missing."""
        try:
            for directory in (self.state, self.map_path, self.state / "data"):
                directory.mkdir(exist_ok=True)
            self.sweep()
            sync_directory(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _begin(self, workspace: str) -> None:
        """Try out what the disk must be able to do; then the new cache is this workspace's."""
        self._prepare()
        try:
            probe_punching(self.state)
            if self.free_bytes() < FREE_BYTES_MIN:
                raise OSError(errno.ENOSPC, f"{self.free_bytes()} bytes are free")
            self._sign(workspace)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _sign(self, workspace: str) -> None:
        """Say whose the cache is, and in which format; an older program refuses it from now on."""
        identity = self.path / "identity"
        written = identity.with_suffix(".new")
        written.write_text(json.dumps({"format": CACHE_FORMAT, "workspace": workspace}) + "\n")
        os.rename(written, identity)

    def _is_of(self, workspace: str) -> bool:
        """Refuse another workspace's cache; False for a new one, and for one that never came to hold anything."""
        identity = self.path / "identity"
        try:
            found = json.loads(identity.read_bytes())
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            raise UserError(
                f"cache directory {self.path}: {identity} cannot be read ({error})", ExitCode.CACHE
            ) from error
        if found["format"] > CACHE_FORMAT:
            raise UserError(
                f"cache directory {self.path} has format {found['format']}, this program knows {CACHE_FORMAT}: "
                "use the newer program or another --cache-dir",
                ExitCode.NEWER_FORMAT,
            )
        if found["workspace"] != workspace:
            if self.workspace_id is None and not self.salvages():
                return False  # a first mount that failed, say for a store that was mistyped
            raise UserError(
                f"cache directory {self.path} belongs to workspace {found['workspace']}, not to {workspace}: "
                "choose another --cache-dir",
                ExitCode.CACHE,
            )
        if found["format"] < CACHE_FORMAT:
            self._sign(workspace)
        return True


def make_place(path: Path, *, mountpoint: Path | None = None) -> Path:
    """Make the directory for a cache and return its real path, or raise UserError (ExitCode.CACHE)."""
    real = _refuse_fuse(path, mountpoint)
    try:
        real.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _unusable(path, error) from error
    return real


def _refuse_fuse(path: Path, mountpoint: Path | None) -> Path:
    """Return the real path, or refuse one whose use would make the daemon wait for itself (or for a sibling)."""
    # First without touching it: a stat below a hung mount would hang here.
    for place in (Path(os.path.abspath(path)), None):
        real = place or Path(os.path.realpath(path))
        inside = fuse_mount_of(real)
        if inside is not None:
            raise UserError(
                f"cache directory {path} lies inside the FUSE mount {inside}: choose one on a local disk",
                ExitCode.CACHE,
            )
        if mountpoint is not None and real.is_relative_to(os.path.abspath(mountpoint)):
            raise UserError(
                f"cache directory {path} lies inside the mountpoint {mountpoint}: choose one outside of it",
                ExitCode.CACHE,
            )
    return real


def _lock(path: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise UserError(
            f"cache directory {path} is in use by a running daemon (pid {holder}): "
            "unmount it first, or choose another --cache-dir",
            ExitCode.CACHE,
        ) from None
    # Only a courtesy to whoever is refused; a full disk may refuse it to us.
    with contextlib.suppress(OSError):
        os.pwrite(lock_fd, f"{os.getpid():<20}\n".encode(), 0)


def _stamp(map_path: Path) -> str | None:
    """What a certified map carries: this boot, and this very directory (a copy of a live LMDB is torn)."""
    boot = boot_id()
    return None if boot is None else f"{boot} {map_path.stat().st_ino}\n"


def _unusable(path: Path, error: OSError) -> UserError:
    advice = _ADVICE.get(error.errno or 0, "choose another --cache-dir")
    return UserError(f"cache directory {path} cannot be used ({error.strerror}): {advice}", ExitCode.CACHE)
