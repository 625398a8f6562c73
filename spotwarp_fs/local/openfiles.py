"""A bounded set of open file descriptors, each one stable while somebody uses it.

Invariant: a descriptor is closed only when nobody uses it, so a `pread` in a worker thread never meets a number that
the kernel has given to another file. Opening, renaming and forgetting happen under one lock, so a path and its
descriptor never come to mean different files.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Final

OPEN_FILES_MAX: Final = 512
OPEN_FILES_SHARE: Final = 4
"""At most one in so many of the descriptors that the process may have."""


def open_files_limit() -> int:
    """Return how many data files may be open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else min(OPEN_FILES_MAX, soft // OPEN_FILES_SHARE))


class OpenFile:
    """A descriptor and the number of those who use it now; use it as a context manager."""

    __slots__ = ("_forgotten", "_lock", "_users", "fd")

    def __init__(self, fd: int, lock: Lock) -> None:
        self.fd = fd
        self._lock = lock
        self._users = 0
        self._forgotten = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            unused = self._forgotten and not self._users
        if unused:
            os.close(self.fd)


class OpenFiles:
    """Open files by path, least recently used ones closed first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def use(self, path: str, *, create: bool = False) -> OpenFile | None:
        """Return the open file for one `with` block, or None when there is no such file and it shall not be created."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                fd = _open(path, create=create)
                if fd is None:
                    return None
                file = self._files[path] = OpenFile(fd, self._lock)
                file._users += 1
                if len(self._files) > self._limit:
                    self._forget(next(iter(self._files)))
                return file
            file._users += 1
            self._files.move_to_end(path)
            return file

    def rename(self, source: str, target: str) -> bool:
        """Rename; False when there is no *source*. Raises FileExistsError rather than replace *target*."""
        with self._lock:
            if not os.path.exists(source):
                return False
            if os.path.exists(target):
                raise FileExistsError(f"{target} exists: {source} is not renamed over it")
            os.rename(source, target)
            file = self._files.pop(source, None)
            if file is not None:
                self._files[target] = file
            return True

    def unlink(self, path: str) -> None:
        """Delete the file, if any; the space comes back outside the lock, when the last descriptor is closed."""
        with self._lock:
            self._forget(path)
            fd = _open(path, create=False)
            if fd is None:
                return
            os.unlink(path)
        os.close(fd)

    def forget_below(self, directory: str) -> None:
        """Close every file below *directory*."""
        with self._lock:
            for path in [path for path in self._files if path.startswith(directory + os.sep)]:
                self._forget(path)

    def close(self) -> None:
        """Close every file (those in use: when their use ends)."""
        with self._lock:
            for path in list(self._files):
                self._forget(path)

    def _forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file._forgotten = True
            if not file._users:
                os.close(file.fd)


def _open(path: str, *, create: bool) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        if not create:
            return None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
