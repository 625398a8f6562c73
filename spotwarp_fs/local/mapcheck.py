"""Is the metadata map on disk damaged? Asked before a daemon opens a map that it did not close.

    <map>/damaged     what LMDB said when it found the open map damaged; the daemon ended at once after writing it
    <map>/fault       where `faulthandler` writes when the process dies of SIGSEGV, SIGBUS, SIGABRT, ...; else empty

Invariant: a map is called damaged on LMDB's own word, or because a process of its own could not read it to the end; a
daemon that died of something else keeps its map. Nothing here changes the map.

    python -m spotwarp_fs.local.mapcheck DIRECTORY     exit code 0: every page and row could be read
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from spotwarp_fs.core.errors import Corrupt
from spotwarp_fs.local.kv import LmdbKV

META_PAGES: Final = 2
PAGE_BYTES_MIN: Final = 4096
CHECK_TIMEOUT_S: Final = 600.0
SAID_MAX: Final = 500
_BAD: Final = 3
"""The exit code of a check that found damage."""


def note_damage(map_path: Path, reason: str) -> None:
    """Leave word for the next start; without the space for it, that start finds out by itself."""
    with contextlib.suppress(OSError):
        (map_path / "damaged").write_text(reason + "\n")


def fault_path(map_path: Path) -> Path:
    """Return where `faulthandler` writes; a new daemon empties it after it has looked."""
    return map_path / "fault"


def damage_of(map_path: Path) -> str | None:
    """Say what is wrong with a map that was complete, or None; reads all of it only when there is a doubt."""
    told = _text(map_path / "damaged")
    if told:
        return told
    data = map_path / "data.mdb"
    size = data.stat().st_size if data.exists() else 0
    if size < META_PAGES * PAGE_BYTES_MIN:
        return f"data.mdb has {size} bytes, and not even its {META_PAGES} head pages"
    if not _text(fault_path(map_path)) and not _is_short(map_path, size):
        return None
    return examine(map_path)


def examine(map_path: Path) -> str | None:
    """Read every page in a process that may die of it; gives what it found, or None for a whole map."""
    command = [sys.executable, "-m", "spotwarp_fs.local.mapcheck", str(map_path)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT_S, cwd="/", check=False)
    except subprocess.TimeoutExpired:
        return f"it could not be read to its end in {CHECK_TIMEOUT_S:.0f} s"
    if ended.returncode < 0:
        return f"reading it ends the process ({signal.Signals(-ended.returncode).name})"
    if ended.returncode == _BAD:
        return ended.stdout.decode(errors="replace").strip()[:SAID_MAX]
    if ended.returncode != 0:
        # No verdict, say for lack of memory: a map is not given up for that.
        raise OSError(f"the check of {map_path} failed: {ended.stderr.decode(errors='replace').strip()[-SAID_MAX:]}")
    return None


def _is_short(map_path: Path, size: int) -> bool:
    """Is the file shorter than the pages it counts? A page freed before it was ever written makes it so, too."""
    try:
        kv = LmdbKV(map_path)
    except Corrupt:
        return True
    try:
        return size < kv.length_bytes()
    finally:
        kv.close()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def main(arguments: list[str]) -> int:
    """Check the map in the directory that is named."""
    try:
        LmdbKV(Path(arguments[0])).check_pages()
    except Corrupt as error:
        print(error)
        return _BAD
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
