"""Run a call as a user who may do nothing, in a thread of its own, where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def as_nobody(call: Callable[[], T]) -> T:
    """Return what *call* returns; its file accesses are those of nobody (root loses its powers over files)."""
    if os.geteuid() != 0:
        return call()
    results: list[T] = []

    def change_and_call() -> None:
        # Of this thread alone: glibc's setfsuid is the bare system call, and takes the file capabilities with it.
        _libc.setfsuid(NOBODY)
        results.append(call())

    thread = threading.Thread(target=change_and_call)
    thread.start()
    thread.join()
    return results[0]
