"""Tell a close from a process's death: the kernel sends the same FLUSH for both (C12, M9).

Invariant: every doubt counts as a normal close. A wrong "dying" would withhold a good file; a missed one is what every
other filesystem does always. Of /proc only `status` and `stat` are read: they take no lock that a page fault holds, and
a page fault may be waiting for this very daemon.
"""

from __future__ import annotations

import os
import signal
from typing import Final

PF_EXITING: Final = 0x4
_STATUS_BYTES: Final = 512
_WHOLE_STATUS_BYTES: Final = 4096
_SIGKILL_BIT: Final = 1 << (signal.SIGKILL - 1)
_STAT_BYTES: Final = 1024
_FLAGS_FIELD: Final = 9
_EXIT_CODE_FIELD: Final = 52
_FIRST_FIELD_AFTER_NAME: Final = 3


def thread_group(pid: int) -> int | None:
    """Find the process that thread *pid* belongs to; ask at open, for the thread may be gone at the close.

    Costs one small read of /proc (7 µs), so ask for writers only. None when the caller lives in another pid namespace
    (the kernel then says pid 0) or has gone.
    """
    if pid <= 0:
        return None
    text = _read(f"/proc/{pid}/status", _STATUS_BYTES)
    for line in text.split(b"\n"):
        if line.startswith(b"Tgid:"):
            return int(line[5:])
    return None


def dying_of_signal(tgid: int) -> bool:
    """True while process *tgid* is being ended by a signal.

    The kernel hides the exit code (as 0) from a daemon that may not trace the process: then the answer is no.
    """
    text = _read(f"/proc/{tgid}/stat", _STAT_BYTES)
    # The name, in parentheses, may hold anything: fields are counted from its end.
    fields = text[text.rfind(b")") + 1 :].split()
    if len(fields) <= _EXIT_CODE_FIELD - _FIRST_FIELD_AFTER_NAME:
        return False
    flags = int(fields[_FLAGS_FIELD - _FIRST_FIELD_AFTER_NAME])
    exit_code = int(fields[_EXIT_CODE_FIELD - _FIRST_FIELD_AFTER_NAME])
    return bool(flags & PF_EXITING) and bool(exit_code & 0x7F)


def being_killed(tgid: int) -> bool:
    """True while a signal that will end process *tgid* waits for it: for a request, say, that nobody answers (M5).

    The kernel turns every fatal signal into a pending SIGKILL of each thread.
    """
    for line in _read(f"/proc/{tgid}/status", _WHOLE_STATUS_BYTES).split(b"\n"):
        if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line[7:], 16) & _SIGKILL_BIT:
            return True
    return False


def _read(path: str, limit: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, limit)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
