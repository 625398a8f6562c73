"""Show a running job: a live display on a terminal, plain lines elsewhere, one JSON document per happening on request.

Invariant: an observer never waits and never raises for what it shows; the engine does not notice how it is watched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final, Protocol, TextIO

import trio

from provisioner.cli.screen import Screen, event, plain, reduced
from provisioner.core.happenings import Happening, Spent
from provisioner.core.ports import Clock
from spotwarp_fs.api import console, print_json, printable

REFRESH_S: Final = 0.5


class Shown(Protocol):
    """One way to watch."""

    def observe(self, happening: Happening) -> None:
        """Take one happening."""
        ...

    async def refresh(self) -> None:
        """Keep what is shown fresh until cancelled."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Give the terminal away for a question."""
        ...


class Lines:
    """One line each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._spent = ""

    def observe(self, happening: Happening) -> None:
        """Write it down; of what was spent only what has changed."""
        if isinstance(happening, Spent):
            words = plain(happening).partition(" ")[2]
            if words == self._spent:
                return
            self._spent = words
        self._stream.write(printable(plain(happening)) + "\n")
        self._stream.flush()

    async def refresh(self) -> None:
        """Do nothing: lines stay."""
        await trio.sleep_forever()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Go on: a question is one line more."""
        yield


class Events(Lines):
    """One JSON document each."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def observe(self, happening: Happening) -> None:
        """Write it down."""
        print_json(event(happening))


class Terminal:
    """A display that is drawn again and again."""

    def __init__(self, job: str, clock: Clock) -> None:
        from rich.live import Live

        self._clock = clock
        self._screen = Screen(job, clock.now_s(), clock.now_s())
        self._live = Live(console=console(stderr=True), auto_refresh=False, transient=True)

    def observe(self, happening: Happening) -> None:
        """Take it into the screen; it is drawn at the next refresh."""
        self._screen = reduced(self._screen, happening)

    async def refresh(self) -> None:
        """Draw until cancelled."""
        from provisioner.cli.screen_view import view

        with self._live:
            while True:
                if self._live.is_started:
                    self._screen = replace(self._screen, now_s=max(self._screen.now_s, self._clock.now_s()))
                    self._live.update(view(self._screen), refresh=True)
                await trio.sleep(REFRESH_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the display away, and bring it back."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()


def shown(job: str, clock: Clock, *, events: bool, as_json: bool) -> Shown:
    """Choose how to show: with `--json` eyes get standard error, and machines one document in the end."""
    if events:
        return Events()
    if sys.stderr.isatty() and not as_json:
        return Terminal(job, clock)
    return Lines(sys.stderr)
