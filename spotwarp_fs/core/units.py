"""Read and write sizes and durations as people type them.

K, M, G, T and P always count in 1024s, with or without "iB" or "B": `1G` = `1GB` = `1GiB` = 1,073,741,824 bytes. A
size without a unit is in bytes, a duration without a unit in seconds. Invariant: what `exact_size` and `exact_duration`
write, `parse_size` and `parse_duration` read back as the same number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from spotwarp_fs.core.errors import UserError

SIZE_HELP: Final = "a number with an optional K, M, G, T or P (1024-based), such as 200G, 1.5GiB, 500MB or 1048576"
DURATION_HELP: Final = "numbers with ms, s, m, h or d, largest first, such as 30s, 5m, 1h30m, 250ms; or plain seconds"
SIZE_MAX: Final = (1 << 63) - 1
DURATION_MAX_S: Final = 366 * 100 * 86_400

_LETTERS: Final = "BKMGTPE"
_NUMBER: Final = r"[0-9]{1,30}(?:\.[0-9]{1,30})?"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([KMGTP]?)(I?B)?", re.IGNORECASE | re.ASCII)
_PLAIN: Final = re.compile(_NUMBER, re.ASCII)
_PART: Final = re.compile(rf"\s*({_NUMBER})\s*(ms|s|m|h|d)\s*", re.IGNORECASE | re.ASCII)
_UNIT_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


def parse_size(text: str | int) -> int:
    """Return the bytes that *text* means, fractions of a byte dropped, or raise UserError.

    >>> parse_size("1.5GiB"), parse_size("200G"), parse_size("7")
    (1610612736, 214748364800, 7)
    """
    found = _SIZE.fullmatch(str(text).strip())
    if found is None or ((found[3] or "").upper() == "IB" and not found[2]):
        raise UserError(f"{text!r} is not a size; write {SIZE_HELP}")
    size = int(Fraction(found[1]) * (1 << 10 * _LETTERS.index(found[2].upper() or "B")))
    if size > SIZE_MAX:
        raise UserError(f"{text!r} is too large a size; the most is {exact_size(SIZE_MAX)} bytes")
    return size


def parse_duration(text: str | int | float) -> float:
    """Return the seconds that *text* means, or raise UserError.

    >>> parse_duration("1h30m"), parse_duration("250ms"), parse_duration("30")
    (5400.0, 0.25, 30.0)
    """
    stripped = str(text).strip()
    milliseconds = Fraction(stripped) * 1000 if _PLAIN.fullmatch(stripped) else _sum_of_parts(stripped)
    if milliseconds is None:
        raise UserError(f"{text!r} is not a duration; write {DURATION_HELP}")
    if milliseconds > DURATION_MAX_S * 1000:
        raise UserError(f"{text!r} is too long a duration; the most is {exact_duration(DURATION_MAX_S)}")
    return float(milliseconds / 1000)


def _sum_of_parts(text: str) -> Fraction | None:
    """Add up `1h30m`; None unless each unit stands once and the largest comes first."""
    total, position, smallest = Fraction(0), 0, Fraction(86_400_001)
    while position < len(text):
        part = _PART.match(text, position)
        if part is None or (unit := _UNIT_MS[part[2].lower()]) >= smallest:
            return None
        total, position, smallest = total + Fraction(part[1]) * unit, part.end(), Fraction(unit)
    return total if position else None


def exact_size(size: int) -> str:
    """Write *size* without rounding, with the largest unit that divides it.

    >>> exact_size(200 << 30), exact_size(1000)
    ('200G', '1000')
    """
    power = 0
    while size and power < 5 and size % 1024 == 0:
        size, power = size // 1024, power + 1
    return f"{size}{_LETTERS[power] if power else ''}"


def exact_duration(seconds: float) -> str:
    """Write *seconds* without rounding beyond the millisecond.

    >>> exact_duration(5400), exact_duration(0.25), exact_duration(0)
    ('1h30m', '250ms', '0s')
    """
    rest, parts = round(seconds * 1000), ""
    for unit, size in _UNIT_MS.items():
        count, rest = divmod(rest, size)
        parts += f"{count}{unit}" if count else ""
    return parts or "0s"


def format_size(size: int | float) -> str:
    """Write *size* for a human: three figures and a unit.

    >>> format_size(999), format_size(1536), format_size(142 << 30)
    ('999 B', '1.5 KiB', '142 GiB')
    """
    value, power = float(size), 0
    while abs(value) >= 999.5 and power < len(_LETTERS) - 1:
        value, power = value / 1024, power + 1
    if not power:
        return f"{value:.0f} B"
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    figure = f"{value:.{digits}f}"
    return f"{figure.rstrip('0').rstrip('.') if digits else figure} {_LETTERS[power]}iB"


def format_duration(seconds: float) -> str:
    """Write *seconds* for a human: its two largest units.

    >>> format_duration(0.25), format_duration(7.26), format_duration(75), format_duration(183_600)
    ('250 ms', '7.3 s', '1 min 15 s', '2 d 3 h')
    """
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, size, lesser_name, lesser in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            count, rest = divmod(whole, size)
            return f"{count} {name}" + (f" {rest // lesser} {lesser_name}" if rest // lesser else "")
    return f"{whole} s"
