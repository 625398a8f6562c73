"""What daemon, supervisor and `spotwarp mount` tell each other over one pipe, one JSON object per line.

Invariant: a writer never fails and never waits for long: the reader may be gone, and then nobody wants to know.

    {"supervisor": pid}                    supervisor, first of all
    {"busy": directory}                    supervisor: another one keeps this cache directory, and this one ends
    {"daemon": pid}                        supervisor, at every start of the daemon
    {"ready": message}                     daemon, when the workspace is usable
    {"failed": message, "exit_code": n}    daemon or supervisor: it will not become usable
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from spotwarp_fs.core.errors import ExitCode


def tell(descriptor: int, **line: Any) -> None:
    """Write one line."""
    with suppress(OSError):
        os.write(descriptor, json.dumps(line).encode() + b"\n")


def report_ready(descriptor: int, message: str) -> None:
    """The daemon's workspace is usable; the descriptor is closed, so call it once."""
    tell(descriptor, ready=message)
    with suppress(OSError):
        os.close(descriptor)


def report_failure(descriptor: int, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
    """The daemon is about to exit with *exit_code*; *message* is what the user reads."""
    tell(descriptor, failed=message, exit_code=int(exit_code))
    with suppress(OSError):
        os.close(descriptor)
