"""What has to be looked at again although nothing tells: files that were young, open or changing when they were read.

Invariant: a file is read for at most a tenth of the time, whatever it does; paths that are gone are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from spotwarp_fs.core.status import Scanning
from spotwarp_fs.core.witness import Seen
from spotwarp_fs.directory.reading import Outcome, Reading

REREAD_SHARE: Final = 10
"""After a read that is not trusted the file is left alone for so many times as long as that took."""
REREAD_S: Final = 60.0
"""A file that is open for writing and shows no change is read again this much later: a mapping shows nothing (M11)."""
SHOWN_MAX: Final = 20
_IN_VAIN: Final = (Outcome.UNSETTLED, Outcome.FAILED)


class Attention:
    """Remembers, by path."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._again_s: dict[bytes, float] = {}
        """When a file that shows no change is to be read again."""
        self._not_before_s: dict[bytes, float] = {}
        """Before then it is left alone also if it has changed."""
        self._in_flight: set[bytes] = set()
        self._fuzzy: set[bytes] = set()
        self._tries: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._again_s or self._in_flight or self._tries)

    @property
    def unread(self) -> bool:
        """Something changed under its last read, or could not be read."""
        return bool(self._tries)

    def tries(self, path: bytes) -> int:
        """How often it was read in vain since it last counted."""
        return self._tries.get(path, 0)

    def in_flight(self, path: bytes) -> bool:
        """A file that must be whole, itself or with its directory, and was not when it was last looked at."""
        return path in self._in_flight

    def is_due(self, path: bytes, now_s: float, *, unchanged: bool) -> bool:
        """Tell whether a file that is not known to be clean should be read now."""
        if self._not_before_s.get(path, 0.0) > now_s:
            return False
        return not (unchanged and self._again_s.get(path, 0.0) > now_s)

    def directories(self, now_s: float) -> set[bytes]:
        """Where something has to be looked at again now."""
        again = {path for path, due_s in self._again_s.items() if due_s <= now_s}
        return {path.rpartition(b"/")[0] for path in again | self._in_flight | self._tries.keys()}

    def hurry(self) -> None:
        """A barrier: everything is due now."""
        self._again_s = dict.fromkeys(self._again_s, 0.0)
        self._not_before_s.clear()

    def read(self, path: bytes, reading: Reading, now_s: float, took_s: float, *, young: bool, whole: bool) -> None:
        """A read has ended. *whole*: the file must be whole, or its directory."""
        for noted in (self._in_flight, self._fuzzy):
            noted.discard(path)
        self._again_s.pop(path, None)
        self._not_before_s.pop(path, None)
        outcome = reading.outcome
        if outcome is Outcome.IN_FLIGHT or (whole and (reading.written or outcome in _IN_VAIN)):
            self._in_flight.add(path)
        if outcome in _IN_VAIN:
            self._tries[path] = self._tries.get(path, 0) + 1
        else:
            self._tries.pop(path, None)
        if reading.seen & Seen.FUZZY:
            self._fuzzy.add(path)
        if not reading.seen & Seen.TRUSTED and outcome is not Outcome.IN_FLIGHT:
            self._not_before_s[path] = now_s + REREAD_SHARE * took_s
            pause_s = max(self._interval_s, REREAD_SHARE * took_s)
            if path not in self._in_flight:  # else it is looked at with every scan: its close changes nothing
                self._again_s[path] = now_s + (pause_s if young else max(pause_s, REREAD_S))

    def forget(self, path: bytes) -> None:
        """The path is gone."""
        for noted in (self._in_flight, self._fuzzy):
            noted.discard(path)
        for kept in (self._tries, self._again_s, self._not_before_s):
            kept.pop(path, None)

    def prune(self, is_gone: Callable[[bytes], bool]) -> None:
        """Forget what was renamed or removed meanwhile."""
        noted = self._in_flight | self._fuzzy | self._tries.keys() | self._again_s.keys()
        for path in [path for path in noted if is_gone(path)]:
            self.forget(path)

    def show(self, figures: Scanning) -> None:
        """Put it into the status."""
        figures.unsettled, figures.fuzzy = shown(self._tries), shown(self._fuzzy)


def shown(paths: Iterable[bytes]) -> list[str]:
    """The first of them, for people."""
    return [path.decode("utf-8", "replace") for path in sorted(paths)[:SHOWN_MAX]]
