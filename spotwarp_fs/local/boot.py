"""Which boot of the machine this is: page cache contents survive within one boot and no longer."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

_LINUX: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """Return an id that changes with every boot, or None when there is none: then nothing unsynced may be trusted."""
    if sys.platform == "darwin":
        return _sysctl(b"kern.bootsessionuuid")
    try:
        return _LINUX.read_text().strip()
    except OSError:
        return None


def _sysctl(name: bytes) -> str | None:
    buffer = ctypes.create_string_buffer(64)
    length = ctypes.c_size_t(len(buffer))
    failed = ctypes.CDLL(None).sysctlbyname(name, buffer, ctypes.byref(length), None, ctypes.c_size_t(0))
    return None if failed else buffer.value.decode()
