"""What a daemon and its keeper say to each other: one JSON document a packet, descriptors beside it.

    daemon → keeper   {"op": "join" | "take" | "hold" | "release" | "stopped" | "ping" | "end", "files": […], …}
    keeper → daemon   {"re": op, …}                                  the answer; requests are answered in order
                      {"event": "wanted" | "stop" | "late", "files": […]}           at any time between answers;
                                          the first one is "welcome", or "busy" for a second daemon

A file is named by its ident, the inode number in the workspace. Invariant: as many descriptors come with a packet as it
names files, or the packet is refused as a whole and its descriptors are closed.
"""

from __future__ import annotations

import array
import json
import os
import resource
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

FILES_PER_PACKET: Final = 200
"""The kernel passes 253 descriptors at once."""
EXIT_RUNNING: Final = 3
"""A keeper that finds another one at its socket."""
PACKET_BYTES_MAX: Final = 32 << 10
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(253 * array.array("i").itemsize)

Packet = dict[str, Any]
Ancillary = tuple[int, int, bytes]


def encode(packet: Packet) -> bytes:
    """Return the bytes of *packet*."""
    body = json.dumps(packet, separators=(",", ":")).encode()
    assert len(body) <= PACKET_BYTES_MAX, f"a packet has {len(body)} bytes, the limit is {PACKET_BYTES_MAX}"
    return body


def beside(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the ancillary data that carry *fds*."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def decode(body: bytes, ancillary: Iterable[Ancillary]) -> tuple[Packet, list[int]]:
    """Return the packet and the descriptors that came with it, which are the caller's now."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        packet = json.loads(body)
        if isinstance(packet, dict):
            return packet, list(fds)
    except ValueError:
        pass
    close_all(fds)
    return {}, []


def close_all(fds: Iterable[int]) -> None:
    """Close every one of *fds*."""
    for fd in fds:
        os.close(fd)


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may without asking, and return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Give a short path to the socket *path*: the kernel takes 107 bytes, home directories are longer."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
