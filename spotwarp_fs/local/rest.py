"""Local bytes that only a damaged map vouched for: brought to its salvage before they are given up.

    <salvage>/lost_map        marks this kind of salvage
    <salvage>/map, journal    as they were found
    <salvage>/data/           data files as in a cache; holes where the bytes are published, proven or were never here
    <salvage>/contents        one JSON object a line: inode, bytes, path (null when the rebuilt tree has no such inode)
    <salvage>/reason          in words, as `status` shows it

Invariant: a data file is linked or copied before the cache gives its bytes up, so a kill at any moment loses none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotwarp_fs.core.types import BLOCK_BYTES, BlockIndex, Inode
from spotwarp_fs.local.cachedir import LOST_MAP
from spotwarp_fs.local.datafiles import arrange, data_extents, data_path
from spotwarp_fs.local.system import SystemWall

CLOCK_MARGIN_S: Final = 300.0
"""How much this node's clock may have been set since a file was written."""
COPY_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class RestFile:
    """A data file in the salvage of a damaged map."""

    path: Path
    inode: Inode
    size: int
    name: bytes | None
    """Its path in the workspace, where that is known."""


class RestPlace:
    """`engine.recover.Rest`: the salvage *place* for the data files below *state*."""

    def __init__(self, state: Path, place: Path) -> None:
        self._state = state
        self.place = place

    @property
    def name(self) -> str:
        """Where it is, for the report."""
        return str(self.place)

    def keep(self, ino: Inode, proven: frozenset[BlockIndex], settled_age_s: float) -> int:
        """Bring every block but the *proven* ones here; gives what that occupies.

        A file that was last written before the newest published cut began, *settled_age_s* ago, has nothing that the
        store lacks, and is left alone.
        """
        source, target = data_path(self._state, ino), data_path(self.place, ino)
        if os.stat(source).st_mtime < SystemWall().now_ns() / 1e9 - settled_age_s - CLOCK_MARGIN_S:
            return 0
        target.parent.mkdir(parents=True, exist_ok=True)
        if not proven and not target.exists():
            os.link(source, target)
        elif proven:
            _copy_blocks(source, target, proven)
        return target.stat().st_blocks * 512

    def tell(self, message: str, kept: Sequence[tuple[Inode, int, bytes | None]]) -> None:
        """Write down what was kept and why; a second start after a kill adds to it."""
        with open(self.place / "contents", "a", encoding="utf-8") as lines:
            for ino, size, name in kept:
                text = None if name is None else name.decode("utf-8", "surrogateescape")
                lines.write(json.dumps({"inode": f"{ino:x}", "bytes": size, "path": text}) + "\n")
        (self.place / "reason").write_text(message + "\n", encoding="utf-8", errors="surrogateescape")
        os.sync()


def is_rest(place: Path) -> bool:
    """Tell whether a salvage is that of a damaged map."""
    return (place / LOST_MAP).exists()


def rest_files(place: Path) -> list[RestFile]:
    """List what a salvage of this kind holds."""
    try:
        lines = (place / "contents").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    if (place / "data").exists():
        arrange(place)
    found: dict[Path, RestFile] = {}
    for line in lines:
        item = json.loads(line)
        ino, name = Inode(int(item["inode"], 16)), item["path"]
        known = None if name is None else name.encode("utf-8", "surrogateescape")
        path = data_path(place, ino)
        found[path] = RestFile(path, ino, item["bytes"], known)
    return list(found.values())


def copy_sparse(source: Path, target: Path) -> int:
    """Copy a data file, its holes as holes; gives the bytes copied."""
    with open(source, "rb") as read, open(target, "wb") as written:
        size = os.fstat(read.fileno()).st_size
        written.truncate(size)
        return sum(_copy(read.fileno(), written.fileno(), *part) for part in data_extents(read.fileno()))


def _copy_blocks(source: Path, target: Path, proven: frozenset[BlockIndex]) -> None:
    read = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    written = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for start, stop in _unproven(read, proven):
            _copy(read, written, start, stop)
    finally:
        os.close(read)
        os.close(written)


def _unproven(fd: int, proven: frozenset[BlockIndex]) -> Iterator[tuple[int, int]]:
    for start, stop in data_extents(fd):
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if block not in proven:
                yield max(start, block * BLOCK_BYTES), min(stop, (block + 1) * BLOCK_BYTES)


def _copy(source: int, target: int, start: int, stop: int) -> int:
    done = start
    while done < stop:
        count = os.pwrite(target, os.pread(source, min(COPY_BYTES, stop - done), done), done)
        if not count:
            break
        done += count
    return done - start
