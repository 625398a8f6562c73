"""Everything that happens to `run` arrives in one pipe: signals by number, reports of threads as a zero.

Invariant: a handler does nothing by itself, so no signal is lost and none interrupts a decision; before and after the
loop, a request to stop raises `StopRequested` instead.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final

FORWARDED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH,
)  # fmt: skip
"""Go to the command's process group."""
CAUGHT: Final = (*FORWARDED, signal.SIGCHLD, signal.SIGCONT)
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequested(KeyboardInterrupt):
    """A signal asked `run` to end while it was not watching a command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stop_raises() -> Iterator[None]:
    """Have a request to stop raise StopRequested while the block runs; as process 1 nothing else would end us."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(number)

    before = {number: signal.signal(number, stop) for number in ENDING if not _is_ignored(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored(number: int) -> bool:
    """Started with `nohup`, or by a script in the background: then it is to be ignored, by the command too."""
    return signal.getsignal(number) is signal.SIG_IGN


class Bell:
    """The pipe, for as long as the block runs."""

    def __init__(self) -> None:
        self._heard, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reports: SimpleQueue[Any] = SimpleQueue()

    @contextmanager
    def listening(self) -> Iterator[Bell]:
        """Catch the signals; the command gets the default handlers back when it is started."""
        caught = [number for number in CAUGHT if number == signal.SIGCHLD or not _is_ignored(number)]
        before = {number: signal.signal(number, lambda *_: None) for number in caught}
        wakeup = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def report(self, what: Any) -> None:
        """Hand over what a thread has found."""
        self._reports.put(what)
        try:
            os.write(self._told, b"\0")
        except BlockingIOError:
            return  # full of bytes: the loop is about to look anyway

    def wait(self, timeout_s: float) -> tuple[list[int], list[Any]]:
        """Return the signals and reports that came, after *timeout_s* at the latest."""
        select.select([self._heard], [], [], max(0.0, timeout_s))
        try:
            signals = [number for number in os.read(self._heard, 4096) if number]
        except BlockingIOError:
            signals = []
        reports = []
        while True:
            try:
                reports.append(self._reports.get_nowait())
            except Empty:
                return signals, reports

    def in_background(self, work: Callable[[], Any]) -> None:
        """Run *work* in a thread that nobody waits for, and report what it returns, if anything."""

        def run() -> None:
            found = work()
            if found is not None:
                self.report(found)

        thread = threading.Thread(target=run, daemon=True)
        # Signals are the main thread's: a thread in the kernel would only delay them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
        try:
            thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
