"""A node whose disk refuses a commit, a write or a punch when the test says so."""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Any

from spotwarp_fs.core.types import Inode
from spotwarp_fs.local.memory import MemoryDataFiles, MemoryKV


def _full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


class Faults:
    """How many more commits, writes and punches succeed before one (or, with *stays*, each) fails."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.stays = False
        self.met = 0

    def step(self, what: str) -> None:
        if what not in self.left:
            return
        self.left[what] -= 1
        if self.left[what] < 0:
            self.met += 1
            if not self.stays:
                del self.left[what]
            raise _full()


class FullKV(MemoryKV):
    """Commits fail by plan; nothing of a failed one is in the map."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def write(self) -> Any:
        return _Write(super().write(), self.faults)


class _Write:
    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._faults.step("commit")
            except OSError as full:
                self._inner.__exit__(OSError, full, None)
                raise
        self._inner.__exit__(kind, error, trace)


class FullData(MemoryDataFiles):
    """Writes and punches fail by plan."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def pwrite(self, ino: Inode, offset: int, data: bytes | memoryview) -> None:
        try:
            self.faults.step("pwrite")
        except OSError:
            super().pwrite(ino, offset, bytes(data)[: len(data) // 2])
            raise
        super().pwrite(ino, offset, data)

    def punch(self, ino: Inode, offset: int, length: int) -> None:
        self.faults.step("punch")
        super().punch(ino, offset, length)
