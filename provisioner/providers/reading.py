"""Read fields of a service's answers, which may lack anything, hold null, or say a number as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from provisioner.core.errors import ProviderUnavailable


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else.

    >>> number("1.5"), number(3), number(None), number("nan"), number(True)
    (1.5, 3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def text(value: object) -> str:
    """Return a string or number as text without space around it (Vast ends addresses with a newline), else nothing."""
    return str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def version(value: object) -> tuple[int, int] | None:
    """Read a CUDA version.

    >>> version("12.8"), version(12.4), version(None)
    ((12, 8), (12, 4), None)
    """
    major, _, minor = text(value).partition(".")
    return (int(major), int(minor or "0")) if major.isdigit() and (minor or "0").isdigit() else None


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def rows(document: object, name: str, whose: str) -> list[Mapping[str, Any]]:
    """Return the list of objects under *name*, or raise ProviderUnavailable: a list that is not whole is none."""
    found = mapping(document).get(name)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ProviderUnavailable(f"{whose}: the answer has no list of objects under {name!r}; try again later")
    return found
