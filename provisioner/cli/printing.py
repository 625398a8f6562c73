"""Where tables go: to a terminal in its own width, elsewhere wide enough that nothing is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spotwarp_fs.api import console

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH_MIN: Final = 140


def show(what: RenderableType, *, stderr: bool = False) -> None:
    """Print *what*."""
    shown = console(stderr=stderr)
    if not shown.is_terminal:
        shown.width = max(shown.width, WIDTH_MIN)
    shown.print(what)
