"""What `run` itself has to say: lines on standard error, each marked, for standard output is the command's.

Invariant: nothing here fails, whatever standard error is connected to.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from spotwarp_fs.cli.output import printable


def say(message: str) -> None:
    """Print a line."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"spotwarp: {printable(message)}\n")
        sys.stderr.flush()


class Line:
    """A line that changes in place on a terminal; elsewhere it is printed once in a while."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = 0.0
        self._width = 0

    def show(self, text: str, now_s: float) -> None:
        """Replace the line by *text*."""
        if not sys.stderr.isatty():
            if now_s >= self._next_s:
                self._next_s = now_s + self._period_s
                say(text)
            return
        shown = f"spotwarp: {printable(text)}"
        with suppress(OSError):
            sys.stderr.write("\r" + shown.ljust(self._width))
            sys.stderr.flush()
        self._width = len(shown)

    def end(self) -> None:
        """Leave the line as it is."""
        if self._width:
            with suppress(OSError):
                sys.stderr.write("\n")
        self._width = 0
