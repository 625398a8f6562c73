"""Ask the kernel for one thing that libfuse 3.14 cannot ask for: FUSE_HANDLE_KILLPRIV_V2.

Without it Linux sends a `getxattr(security.capability)` before each write, which doubles the cost of a small one. With
it the kernel remembers that a file has no such attribute, and leaves it to us to take set-user-id bits away when
somebody without privileges writes or truncates (include/uapi/linux/fuse.h); `core/attributes.py` does.

libfuse's own answer to the first request (INIT) goes through a socket, is given the flag, and is passed on; from the
second request on libfuse reads the device as always. Invariant: the kernel gets exactly one answer to INIT, and when
anything is not as expected it is libfuse's own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
from typing import Final

log = logging.getLogger(__name__)

FUSE_INIT: Final = 26
FUSE_HANDLE_KILLPRIV_V2: Final = 1 << 28
REQUEST_BYTES_MAX: Final = 1 << 17
"""The kernel refuses to write a request into less than 8 KiB; INIT has about 100 bytes."""
INIT_WAIT_S: Final = 2.0
"""The kernel queues INIT in the mount itself: this only keeps a surprise from lasting."""
_REQUEST = struct.Struct("=IIQQIIII")
_REQUEST_FLAGS: Final = _REQUEST.size + 12
_ANSWER = struct.Struct("=IiQ")
_ANSWER_FLAGS: Final = _ANSWER.size + 12
_FLAGS = struct.Struct("=I")


class Handshake:
    """The first request is on its way through the socket."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._kernel = fcntl.fcntl(device, fcntl.F_DUPFD_CLOEXEC, 0)
        request = os.read(self._kernel, REQUEST_BYTES_MAX)
        self._is_offered = offers(request)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._ours.send(request)
            os.dup2(theirs.fileno(), device, inheritable=False)

    def is_over(self) -> bool:
        """Ask before each read of a request: once libfuse has answered the first one, the device is its own again."""
        try:
            answer = self._ours.recv(REQUEST_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        with self._ours:
            try:
                os.write(self._kernel, with_flag(answer) if self._is_offered else answer)
            except OSError as error:
                log.warning("the kernel refused the flag, and gets the answer without it: %s", error)
                os.write(self._kernel, answer)
            os.dup2(self._kernel, self._device, inheritable=False)
        os.close(self._kernel)
        return True


def begin() -> Handshake | None:
    """Put the socket in place; call between `pyfuse3.init` and `pyfuse3.main`, with one mount in this process.

    None if the first request is not where it should be: then everything goes on without the flag.
    """
    devices = _devices()
    if len(devices) != 1 or not select.select(devices, [], [], INIT_WAIT_S)[0]:
        log.warning("the first request was not found: each write costs a second one devices=%d", len(devices))
        return None
    return Handshake(devices[0])


def _devices() -> list[int]:
    """The descriptors of this process that are a FUSE device."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.append(int(name))
        except OSError:  # the directory's own descriptor, closed by now
            continue
    return found


def offers(request: bytes) -> bool:
    """Tell whether a request is an INIT in which the kernel offers to leave set-user-id bits to us."""
    if len(request) < _REQUEST_FLAGS + _FLAGS.size or _REQUEST.unpack_from(request)[1] != FUSE_INIT:
        return False
    return bool(_FLAGS.unpack_from(request, _REQUEST_FLAGS)[0] & FUSE_HANDLE_KILLPRIV_V2)


def with_flag(answer: bytes) -> bytes:
    """Give an answer to INIT that accepts the offer; one that refuses the session stays as it is."""
    if len(answer) < _ANSWER_FLAGS + _FLAGS.size or _ANSWER.unpack_from(answer)[1] != 0:
        return answer
    flags = _FLAGS.unpack_from(answer, _ANSWER_FLAGS)[0] | FUSE_HANDLE_KILLPRIV_V2
    return answer[:_ANSWER_FLAGS] + _FLAGS.pack(flags) + answer[_ANSWER_FLAGS + _FLAGS.size :]
