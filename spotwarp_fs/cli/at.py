"""Read what `--at` says: a rule, a number, a time, an age or a snapshot's name.

Invariant: a text means one thing only. Numbers, times, ages and the two rules are never names of snapshots: `snapshot
create` refuses them; and a time without a zone is refused, since `ls -l` shows local times and logs often do not.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from spotwarp_fs.core.errors import UserError
from spotwarp_fs.core.manifests import NO_MANIFEST
from spotwarp_fs.core.types import ManifestNumber
from spotwarp_fs.core.units import parse_duration
from spotwarp_fs.engine.states import Ago, AtTime, Latest, Named, Numbered, Quiescent, StateWish

SNAPSHOT_NAME_BYTES_MAX: Final = 200
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?", re.ASCII)
_RULES: Final[dict[str, StateWish]] = {"latest": Latest(), "quiescent": Quiescent()}
_SNAPSHOT: Final = re.compile(r"[^\s/:\x00-\x1f\x7f][^/:\x00-\x1f\x7f]*")


def read_at(text: str | None) -> StateWish:
    """Return the state that *text* asks for; the head without one. Raises UserError.

    >>> read_at("1200"), read_at("2h"), read_at("2026-01-31T12:00Z"), read_at("before-lr-change")
    (Numbered(number=1200), Ago(age_s=7200.0), AtTime(time_s=1769860800.0), Named(name=b'before-lr-change'))
    """
    if text is None:
        return Latest()
    if text in _RULES:
        return _RULES[text]
    if text.isascii() and text.isdecimal():
        if int(text) == NO_MANIFEST:
            raise UserError("manifests are numbered from 1")
        return Numbered(ManifestNumber(int(text)))
    if _TIME.fullmatch(text):
        return AtTime(_time_s(text))
    age_s = _age_s(text)
    if age_s is not None:
        return Ago(age_s)
    return Named(text.encode("utf-8", "surrogateescape"))


def check_snapshot_name(text: str) -> bytes:
    """Return the name as the store keeps it, or raise UserError if `--at` would take it for something else."""
    name = text.encode("utf-8", "surrogateescape")
    if not isinstance(read_at(text), Named):
        raise UserError(f"{text!r} cannot name a snapshot: --at reads it as a number, a time, an age or a rule")
    if not _SNAPSHOT.fullmatch(text) or len(name) > SNAPSHOT_NAME_BYTES_MAX:
        raise UserError(
            f"{text!r} cannot name a snapshot: use up to {SNAPSHOT_NAME_BYTES_MAX} bytes without '/', ':' and controls"
        )
    return name


def _time_s(text: str) -> float:
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{text!r} is not a time: {error}; write it as 2026-01-31T12:00Z") from None
    if when.tzinfo is None:
        raise UserError(f"{text!r} names no time zone; add Z for UTC, or an offset as in 2026-01-31T12:00+02:00")
    return when.timestamp()


def _age_s(text: str) -> float | None:
    try:
        return parse_duration(text)
    except UserError:
        return None
