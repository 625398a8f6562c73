"""How a key below a store's prefix becomes a full key, and back.

Invariant: a prefix is either empty or ends in one slash, and no key can climb out of it.
"""

from __future__ import annotations

from spotwarp_fs.core.errors import Corrupt, UserError
from spotwarp_fs.core.types import ObjectKey


def prefix_of(text: str) -> str:
    """Bring a user's prefix to the form that keys are appended to.

    >>> prefix_of("/runs/[gpu] a+b/"), prefix_of("")
    ('runs/[gpu] a+b/', '')
    """
    trimmed = text.strip("/")
    if any(part in ("", ".", "..") for part in trimmed.split("/")) and trimmed:
        raise UserError(
            f"prefix {text!r} has an empty, '.' or '..' part: clients and servers rewrite those; choose another"
        )
    return f"{trimmed}/" if trimmed else ""


def checked(key: str) -> str:
    """Return *key* if it may name an object; a key that could climb out of its prefix is a programmer's error."""
    assert not any(part in ("", ".", "..") for part in key.split("/")), f"not a key: {key!r}"
    return key


def relative(full: str, prefix: str) -> ObjectKey:
    """Take *prefix* off a key that a listing below it gave."""
    assert full.startswith(prefix), f"{full!r} was listed below {prefix!r}"
    return ObjectKey(full[len(prefix) :])


def range_stop(key: str, size_bytes: int, start: int, length: int | None) -> int:
    """Return where a read of *length* bytes from *start* ends, or raise Corrupt when it begins beyond the object.

    A range is only ever read because a record says that bytes are there, so an object that ends before them is not the
    object the record names.

    >>> range_stop("packs/aa", 10, 4, 100)
    10
    """
    assert start >= 0, f"no range: {start}, {length}"
    assert length is None or length > 0, f"no range: {start}, {length}"
    if start > 0 and start >= size_bytes:
        raise Corrupt(f"{key} ends at byte {size_bytes}, before the range that starts at {start}")
    return size_bytes if length is None else min(size_bytes, start + length)
