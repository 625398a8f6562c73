"""A reproducible .tgz.

Invariant: its bytes are a function of the members' names, contents and executable bits, in the order of names, except
that the entry comes last: where it is unpacked, everything else is.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LEVEL: Final = 6


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive."""

    body: bytes
    executable: bool = False


def pack(members: Mapping[str, Member], *, last: str) -> bytes:
    """Return the archive of *members* by name."""
    assert last in members, last
    raw = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in [*sorted(name for name in members if name != last), last]:
            info = tarfile.TarInfo(name)
            info.size = len(members[name].body)
            info.mode = 0o755 if members[name].executable else 0o644
            archive.addfile(info, io.BytesIO(members[name].body))
    return raw.getvalue()


def files_below(root: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, bytes]]:
    """Give relative name and content of each file below *root*, without byte code and directories to leave out."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and "__pycache__" not in parts and not leave_out & set(parts[:1]):
            yield "/".join(parts), path.read_bytes()


def digest(body: bytes) -> str:
    """Name an archive."""
    return hashlib.sha256(body).hexdigest()
