"""Notice what nothing saves: much written outside the workspace, or nothing inside it.

Invariant: a place is named once; looking costs one walk through /proc per sample, and never touches the workspace.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from spotwarp_fs.core.units import format_size
from spotwarp_fs.local.processes import OpenFile, files_changed
from spotwarp_fs.local.system import SystemWall

OUTSIDE_BYTES_MAX: Final = 100 << 20
"""Written below one directory outside the workspace, before that is worth a warning."""
INSIDE_WITHIN_S: Final = 15 * 60.0
SAMPLE_PERIOD_S: Final = 5.0
FILES_KNOWN_MAX: Final = 4096
WARNINGS_MAX: Final = 10
WALK_ENTRIES_MAX: Final = 20_000
WALK_PERIOD_S: Final = 30.0
_NUMBERED: Final = re.compile(r".*\d.*")


@dataclass(slots=True)
class _Known:
    """A file that was seen open for writing."""

    path: str
    first_size: int
    written: int = 0


class Outside:
    """Adds up what a process tree writes outside the workspace."""

    def __init__(self, workspace: Path, own: Iterable[Path], command: Sequence[str], directory: Path) -> None:
        """*own* are directories of SpotWarp itself; *directory* is the command's own."""
        self._inside = (*(os.path.realpath(path) for path in own), str(workspace))
        self._advice = Advice(workspace, command, directory)
        self._directory = directory
        self._since_ns = SystemWall().now_ns()
        self._chars: dict[int, int] = {}
        self._unexplained = 0
        """Bytes written since the last walk, to whatever."""
        self._next_walk_s = 0.0
        self._files: dict[tuple[int, int], _Known] = {}
        self._warned: set[str] = set()

    def look(self, files: Iterable[OpenFile], chars: Mapping[int, int]) -> list[str]:
        """Take a sample: open files, and bytes written by process; gives the warnings that are due."""
        self._unexplained += sum(max(0, now - self._chars.get(pid, 0)) for pid, now in chars.items())
        self._chars = dict(chars)
        self._note(files)
        if self._unexplained > OUTSIDE_BYTES_MAX and time.monotonic() >= self._next_walk_s:
            self._walk()
        self._follow_closed()
        return [self._advice.outside(place, size) for place, size in self._due()]

    def _walk(self) -> None:
        """A file may be opened, written and closed between two samples: most are in the command's own directory."""
        self._unexplained, self._next_walk_s = 0, time.monotonic() + WALK_PERIOD_S
        start = os.path.realpath(self._directory)
        if start != "/" and not any(_is_below(start, inside) for inside in self._inside):
            self._note(files_changed(start, self._since_ns, leave_out=self._inside, entries_max=WALK_ENTRIES_MAX))

    def _note(self, files: Iterable[OpenFile]) -> None:
        for file in files:
            if any(_is_below(file.path, inside) for inside in self._inside):
                continue
            known = self._files.get(file.identity)
            if known is None and len(self._files) < FILES_KNOWN_MAX:
                known = self._files[file.identity] = _Known(file.path, file.size)
            if known is not None:
                # Where an append began is not known; elsewhere the position tells what was written before we looked.
                grown = file.size - known.first_size
                known.written = max(known.written, grown, 0 if file.appends else file.position)

    def _follow_closed(self) -> None:
        """A file may have grown after the last look and before its close."""
        for identity, known in self._files.items():
            try:
                found = os.stat(known.path)
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == identity:
                known.written = max(known.written, found.st_size - known.first_size)

    def _due(self) -> list[tuple[str, int]]:
        sums: dict[str, int] = defaultdict(int)
        for known in self._files.values():
            sums[place_of(known.path)] += known.written
        due = [(place, size) for place, size in sums.items() if size > OUTSIDE_BYTES_MAX and place not in self._warned]
        due = due[: max(0, WARNINGS_MAX - len(self._warned))]
        self._warned |= {place for place, _ in due}
        return due

    def nothing_inside(self) -> str:
        """The warning that the workspace was not written to in time."""
        most = max(self._files.values(), key=lambda known: known.written, default=None)
        return self._advice.nothing_inside(place_of(most.path) if most is not None else None)


class Advice:
    """Says which line to change."""

    def __init__(self, workspace: Path, command: Sequence[str], directory: Path) -> None:
        self._workspace = workspace
        self._command = command
        self._directory = directory

    def outside(self, place: str, size: int) -> str:
        """Name a place outside, and the argument that leads there if there is one."""
        return (
            f"warning: the command has written {format_size(size)} to {place}, outside the workspace "
            f"{self._workspace}: nothing of it is saved. {self._remedy(place)}"
        )

    def nothing_inside(self, place: str | None) -> str:
        """Say that nothing arrives here."""
        where = f" It writes to {place}." if place is not None else ""
        return (
            f"warning: in {INSIDE_WITHIN_S / 60:.0f} minutes the command has written nothing to the workspace "
            f"{self._workspace}: there is nothing to save.{where} {self._remedy(place)}"
        )

    def _remedy(self, place: str | None) -> str:
        for option, value in _options(self._command):
            path = os.path.realpath(self._directory / value)
            if place is not None and path != "/" and _is_below(place, path):
                return f"Change `{option}{value}` to `{option}$SPOTWARP_CHECKPOINT_DIR`"
        return (
            "Have it write to $SPOTWARP_CHECKPOINT_DIR, for example with `--output_dir $SPOTWARP_CHECKPOINT_DIR` "
            "(in a script: os.environ['SPOTWARP_CHECKPOINT_DIR'])"
        )


def _options(command: Sequence[str]) -> list[tuple[str, str]]:
    """Split a command line into what stands before each value, and the value."""
    found = []
    for before, word in pairwise(command):
        name, equals, value = word.partition("=")
        if equals:
            found.append((f"{name}=", value))
        elif not word.startswith("-"):
            found.append((f"{before} " if before.startswith("-") else "", word))
    return found


def place_of(path: str) -> str:
    """Return the directory that stands for a file: above a directory with a number, as each save has its own.

    >>> place_of("/data/out/checkpoint-500/model.pt"), place_of("/data/out/model.pt")
    ('/data/out', '/data/out')
    """
    place = os.path.dirname(path)
    above = os.path.dirname(place)
    return above if _NUMBERED.fullmatch(os.path.basename(place)) and above != "/" else place


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
