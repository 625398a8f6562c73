"""File leases and the mark of absence: what makes a file wait for its bytes.

A write lease on a placeholder makes anybody's `open` (and `truncate`) wait in the kernel; a read lease tells the
scanner that nobody wrote while it read. Both need no right but to own the file: where a file is to belong to somebody
else, and CAP_LEASE is missing, the lease is taken before the `chown`. Renames, `chmod`, `utimes` and `unlink` do not
break one. An open that does not want to wait (O_NONBLOCK) gets EAGAIN, and breaks the lease all the same.

Invariant: a mark counts only on the inode that it names, so a copy of it, or of the file, is not absent.

The kernel tells a holder by signal, and the default one (SIGIO) ends a process that did not ask for it. Every lease
taken here is therefore given SIGURG first, which is ignored unless somebody wants it; only the keeper asks for a real
one. Who takes a lease in any other way must ignore SIGIO.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

MARK: Final = "user.spotwarp.absent"
BREAK_TIME_FILE: Final = Path("/proc/sys/fs/lease-break-time")
BREAK_TIME_DEFAULT_S: Final = 45.0
UNHEARD: Final = signal.SIGURG

AnyPath = str | bytes | Path


class Kind(IntEnum):
    """What a lease excludes: READ the writers, WRITE everybody."""

    READ = fcntl.F_RDLCK
    WRITE = fcntl.F_WRLCK


@dataclass(frozen=True, slots=True)
class Absence:
    """A file whose bytes are in the store only. `late`: it was given up in its last lease, and is empty since."""

    session: str
    late: bool


def take(fd: int, kind: Kind, *, signal_number: int = UNHEARD) -> None:
    """Take a lease on the description of *fd*, or raise BlockingIOError while somebody is in the way.

    READ needs a descriptor opened for reading only. WRITE is refused while anybody else has the file open in any way.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal_number)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)


def release(fd: int) -> None:
    """End the lease and let in whoever waits; harmless if there is none."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return


def is_breaking(fd: int, kind: Kind) -> bool:
    """Say whether somebody waits for the lease *kind* of *fd* to end (or it has ended)."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETLEASE) != kind)


def is_leased(fd: int) -> bool:
    """Say whether there is a lease on the description of *fd*, also while it breaks (F_GETLEASE cannot)."""
    return b": LEASE " in Path(f"/proc/self/fdinfo/{fd}").read_bytes()


def lease_break_time_s() -> float:
    """Return how long the kernel lets an opener wait before it takes the lease away; 0 means for ever."""
    try:
        return float(BREAK_TIME_FILE.read_text())
    except (OSError, ValueError):
        return BREAK_TIME_DEFAULT_S


class ReadLease:
    """A read lease as its taker sees it."""

    def __init__(self, fd: int, *, held: bool, refused: bool = False) -> None:
        self._fd = fd
        self._whole = held
        self.refused: Final = refused
        """Somebody has the file open for writing or mapped writable."""
        self.held: Final = held
        """False: refused, or there are no leases here (or not for this user)."""

    def unbroken(self) -> bool:
        """Say whether nobody has opened the file for writing since; on the first break the writer is let in at once."""
        if self._whole and is_breaking(self._fd, Kind.READ):
            self.end()
        return self._whole

    def end(self) -> None:
        """Give the lease back."""
        if self._whole:
            self._whole = False
            release(self._fd)


@contextmanager
def read_lease(fd: int) -> Iterator[ReadLease]:
    """Hold a read lease on *fd*, which is open for reading only, if there is one to be had.

    A writer waits from its `open` on, so `unbroken` is asked between two blocks of the file, the last time after it.
    """
    try:
        take(fd, Kind.READ)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise
        yield ReadLease(fd, held=False, refused=error.errno == errno.EAGAIN)
        return
    lease = ReadLease(fd, held=True)
    try:
        yield lease
    finally:
        lease.end()


def mark_absent(fd: int, session: str) -> None:
    """Say on the inode itself that its bytes are not here; done before it gets its name."""
    _write_mark(fd, "absent", session)


def mark_late(fd: int) -> None:
    """Say that the bytes did not come in time; keeps the session."""
    known = absence(fd)
    _write_mark(fd, "late", known.session if known else "")


def clear_mark(fd: int) -> None:
    """Say that the bytes are here; done before the lease ends. A file without a mark is not touched at all."""
    try:
        os.getxattr(fd, MARK)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return
    _as_owner(fd, lambda: os.removexattr(fd, MARK))


def absence(file: AnyPath | int) -> Absence | None:
    """Read the mark of *file* (a symlink is not followed); None if it has none of its own, or can have none."""
    follow = isinstance(file, int)
    try:
        state, inode, session = os.getxattr(file, MARK, follow_symlinks=follow).decode().split(" ", 2)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
    except ValueError:
        return None  # not written by us
    if inode != str(os.stat(file, follow_symlinks=follow).st_ino):
        return None
    return Absence(session=session, late=state == "late")


def _write_mark(fd: int, state: str, session: str) -> None:
    value = f"{state} {os.fstat(fd).st_ino} {session}".encode()
    _as_owner(fd, lambda: os.setxattr(fd, MARK, value))


def _as_owner(fd: int, change: Callable[[], None]) -> None:
    """Make *change*; a read-only file is made writable to its owner for a moment, because user attributes follow."""
    try:
        change()
    except PermissionError:
        mode = os.fstat(fd).st_mode & 0o7777
        os.fchmod(fd, mode | 0o600)
        try:
            change()
        finally:
            os.fchmod(fd, mode)


def why_no_leases(directory: AnyPath) -> str:
    """Try a placeholder in *directory*: its mark, its lease, and that an open has to wait. Empty if all of it works."""
    try:
        probe, path = tempfile.mkstemp(prefix=".spotwarp-lease-", dir=_text(directory))
    except OSError as error:
        return f"{_text(directory)}: no file can be made there to try leases on ({error.strerror})"
    try:
        return _try(probe, path, _text(directory))
    finally:
        os.close(probe)
        os.unlink(path)


def _try(probe: int, path: str | bytes, name: str) -> str:
    try:
        mark_absent(probe, "probe")
    except OSError as error:
        return f"{name}: its filesystem keeps no user attributes ({error.strerror}); files there are fetched beforehand"
    try:
        take(probe, Kind.WRITE)
    except OSError as error:
        return f"{name}: its filesystem gives no file leases ({error.strerror}); files there are fetched beforehand"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except BlockingIOError:
        return "" if absence(probe) else f"{name}: a user attribute was kept but reads otherwise; see {MARK}"
    return f"{name}: its filesystem gives leases that an open does not heed; files there are fetched beforehand"


def _text(directory: AnyPath) -> str:
    return os.fsdecode(directory)
