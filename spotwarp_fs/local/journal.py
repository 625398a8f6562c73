"""The fsync journal on disk: one append-only file of `core/journal.py` records.

Invariant: what `append` returned from is read back after a power loss. A file whose fdatasync failed is believed no
longer (Linux then calls the lost pages clean, H10): appends fail until `rewrite` has made a new file.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from spotwarp_fs.core.journal import Record, SessionBegun, decode_prefix, encode_record, still_needed
from spotwarp_fs.core.types import ChangeSeq
from spotwarp_fs.local.disk import fdatasync, sync_directory, write_all

log = logging.getLogger(__name__)


class Journal:
    """`core.journal.JournalLog` in the file *path*; a torn tail is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._failed: OSError | None = None
        _remove_if_there(self._new_path)
        created = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if created:
            sync_directory(path.parent)
        stream = path.read_bytes()
        _, self._length = decode_prefix(stream)
        if self._length < len(stream):
            log.info("journal_tail_cut path=%s valid_bytes=%d found_bytes=%d", path, self._length, len(stream))
            os.ftruncate(self._fd, self._length)
            fdatasync(self._fd)

    @property
    def size_bytes(self) -> int:
        """Length of the journal."""
        return self._length

    def append(self, records: Sequence[Record]) -> None:
        """Add records; they are on disk when this returns.

        After an OSError nothing is believed of this file any more: every later append fails until a `rewrite` succeeds.
        """
        stream = b"".join(map(encode_record, records))
        with self._lock:
            if self._failed is not None:
                raise OSError(
                    self._failed.errno or errno.EIO,
                    f"the journal failed earlier ({self._failed.strerror}) and was not rewritten since",
                    str(self._path),
                )
            try:
                write_all(self._fd, self._length, stream)
                fdatasync(self._fd)
            except OSError as error:
                self._failed = error
                raise
            self._length += len(stream)

    def rewrite(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others, at once; they are on disk when this returns."""
        with self._lock:
            self._rewrite(records)

    def compact(self, records: Sequence[Record]) -> None:
        """Put these records in the place of all others but the sessions, at once; on disk when this returns."""
        with self._lock:
            self._rewrite([*(record for record in self._read() if isinstance(record, SessionBegun)), *records])

    def prune(self, published: ChangeSeq, sessions: frozenset[str]) -> None:
        """Drop what the manifest at *published* covers, and every session but these."""
        with self._lock:
            self._rewrite(still_needed(self._read(), published, sessions))

    def records(self) -> list[Record]:
        """Read all records back."""
        with self._lock:
            return self._read()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(self._path.name + ".new")

    def _read(self) -> list[Record]:
        records, length = decode_prefix(os.pread(self._fd, self._length, 0))
        if length != self._length:
            raise OSError(
                errno.EIO, f"{self._length} bytes were journalled, {length} can be read back", str(self._path)
            )
        return records

    def _rewrite(self, records: Sequence[Record]) -> None:
        stream = b"".join(map(encode_record, records))
        fd = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, 0, stream)
            os.fsync(fd)
            os.rename(self._new_path, self._path)
        except OSError:
            os.close(fd)
            _remove_if_there(self._new_path)
            raise
        os.close(self._fd)
        self._fd, self._length, self._failed = fd, len(stream), None
        try:
            sync_directory(self._path.parent)
        except OSError as error:
            # A power loss might bring the old file back and lose what is appended to the new one.
            self._failed = error
            raise


def _remove_if_there(path: Path) -> None:
    path.unlink(missing_ok=True)
