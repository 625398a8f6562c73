"""Who keeps a mount busy, and the pages that the kernel still has to hand over.

Invariant: nothing here is called from the event loop that serves the mount.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HOLDERS_NAMED_MAX: Final = 5


def holders(mountpoint: str) -> list[str]:
    """Name programs, but not us, that have a file or directory below *mountpoint*, as `name (pid 7)`."""
    prefix = mountpoint.rstrip("/") + "/"
    found = []
    for process in Path("/proc").iterdir():
        if (
            process.name.isdecimal()
            and int(process.name) != os.getpid()
            and any(_below(link, mountpoint, prefix) for link in _links(process))
        ):
            found.append(f"{_name(process)} (pid {process.name})")
            if len(found) == HOLDERS_NAMED_MAX:
                break
    return found


def _links(process: Path) -> Iterator[Path]:
    yield process / "cwd"
    yield process / "root"
    try:
        yield from (process / "fd").iterdir()
    except OSError:
        return


def _below(link: Path, mountpoint: str, prefix: str) -> bool:
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return target == mountpoint or target.startswith(prefix)


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"


def flush_pages(mountpoint: str) -> None:
    """Have the kernel hand over pages dirtied through mappings (syncfs), and wait for that."""
    try:
        descriptor = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        ctypes.CDLL(None, use_errno=True).syncfs(descriptor)
    finally:
        os.close(descriptor)
