"""Every error says what to do about it.

SpotwarpError
├── Refused             answer the request with this errno
├── Unavailable         try again later; nothing is known to have changed
│   └── Conflict        the store asks for the same request again (409)
├── StoreRefused        the store answered and said no: retrying the same thing is useless
│   ├── NotFound        proven absent (a real 404), never a guess
│   ├── PreconditionFailed   the key exists, or is not what was expected (412)
│   ├── Denied          credentials missing, refused or expired: re-resolve, then try again
│   └── Unsupported     the store lacks something that writing needs (P-16)
├── Fenced              another writer took the workspace over: stop
├── Corrupt             bytes are not what their record says: never retry blindly, never serve
└── UserError           bad input: show the message, exit with `exit_code`
"""

from __future__ import annotations

import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command; documented in docs/OPERATIONS.md."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CONFIG = 3
    STORE_UNREACHABLE = 4
    STORE_DENIED = 5
    STORE_UNSUITABLE = 6
    MOUNTPOINT = 7
    LIVE_WRITER = 8
    NO_FUSE = 9
    CACHE = 10
    CORRUPT = 11
    FENCED = 12
    NOT_SAVED = 13
    NOT_FOUND = 14
    WOULD_WIPE = 15
    NEWER_FORMAT = 16
    NOT_MOUNTED = 17


class SpotwarpError(Exception):
    """Root of the tree above."""

    exit_code: ExitCode = ExitCode.FAILED


class Refused(SpotwarpError):
    """A request that must be answered with an errno."""

    def __init__(self, errno: int, message: str = "") -> None:
        super().__init__(message or os.strerror(errno))
        self.errno = errno


class Unavailable(SpotwarpError):
    """The store or network did not answer usefully (timeout, 5xx, 429, bad body); try again later."""

    exit_code = ExitCode.STORE_UNREACHABLE


class Conflict(Unavailable):
    """409: a concurrent operation; the same request should be sent again."""


class StoreRefused(SpotwarpError):
    """The store answered and refused."""


class NotFound(StoreRefused):
    """The object is proven absent."""

    exit_code = ExitCode.NOT_FOUND


class PreconditionFailed(StoreRefused):
    """A conditional write met an object that should not be there, or is another one."""


class Denied(StoreRefused):
    """The store refused the credentials."""

    exit_code = ExitCode.STORE_DENIED


class Unsupported(StoreRefused):
    """The store does not do what safe writing needs."""

    exit_code = ExitCode.STORE_UNSUITABLE


class Fenced(SpotwarpError):
    """Another writer owns the workspace now."""

    exit_code = ExitCode.FENCED


class Corrupt(SpotwarpError):
    """Stored bytes do not match the record that names them."""

    exit_code = ExitCode.CORRUPT


class UserError(SpotwarpError):
    """Bad input or an impossible wish; the message says which thing, both values, and what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
