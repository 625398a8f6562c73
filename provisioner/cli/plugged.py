"""Find the providers that other packages bring, by the entry points that `providers.plugin` describes.

Invariant: nothing is imported before its name is used, and a package that cannot be loaded is named in an error that
says so; the built-in names (vast, runpod, local, local-NAME) always mean the built-in providers.
"""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from provisioner.core.errors import BadWish
from provisioner.providers.plugin import Plugin

GROUP: Final = "spotwarp.providers"
_NAME: Final = re.compile(r"(?!local(?:-|$))[a-z][a-z0-9-]{0,31}")
_BUILT_IN: Final = frozenset({"vast", "runpod"})


def _points() -> dict[str, EntryPoint]:
    found = entry_points(group=GROUP)
    return {point.name: point for point in found if _NAME.fullmatch(point.name) and point.name not in _BUILT_IN}


def plugged_names() -> tuple[str, ...]:
    """Name them, without loading any."""
    return tuple(sorted(_points()))


def plugged(name: str) -> Plugin | None:
    """Load the provider *name*; None when no package brings it, BadWish when it cannot be loaded."""
    point = _points().get(name)
    if point is None:
        return None
    try:
        found = point.load()
    except Exception as error:  # whatever a stranger's module does, the user learns which it is
        problem = f"{type(error).__name__}: {error}"
        raise BadWish(f"the provider {name} ({point.value}) cannot be loaded ({problem}); install it again") from error
    if not isinstance(found, Plugin):
        raise BadWish(f"the provider {name} ({point.value}) is a {type(found).__name__}, and must be a Plugin")
    return found
