"""Talk to the daemon of a mounted workspace over its control socket.

A request and each answer is one line of JSON: `{"op": …}` out; any number of `{"progress": {…}}` back, then
`{"ok": true, "result": {…}}` or `{"ok": false, "error": {"kind", "message", "exit_code"}}`. A daemon that works on a
long request sends progress at least every 10 s. Invariant: no call waits without an end; silence longer than the
timeout is an error that says what still runs.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spotwarp_fs.cli.mounts import MountRecord, current_records, find_mount, is_alive
from spotwarp_fs.cli.short_path import short_path
from spotwarp_fs.core import errors
from spotwarp_fs.core.errors import ExitCode, SpotwarpError, UserError

SILENCE_MAX_S: Final = 30.0
RESTART_ATTEMPTS: Final = 50
RESTART_PAUSE_S: Final = 0.1
LINE_BYTES_MAX: Final = 16 << 20

Progress = Callable[[Mapping[str, Any]], None]

__all__ = ["DaemonGone", "MountRecord", "Progress", "call", "current_records", "find_mount"]


class DaemonGone(SpotwarpError):
    """The daemon does not answer; its supervisor may be bringing it back."""

    exit_code = ExitCode.NOT_MOUNTED


def call(
    record: MountRecord,
    operation: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    on_progress: Progress | None = None,
    silence_max_s: float = SILENCE_MAX_S,
) -> dict[str, Any]:
    """Send one request and return its result.

    Raises DaemonGone when nobody answers, or the daemon's own error, with its kind and exit code.
    """
    with _connected(record, silence_max_s) as connection:
        try:
            connection.sendall(json.dumps({"op": operation, **(arguments or {})}).encode() + b"\n")
            for answer in _answers(connection):
                if "progress" in answer:
                    if on_progress is not None:
                        on_progress(answer["progress"])
                elif answer.get("ok"):
                    return dict(answer.get("result") or {})
                else:
                    raise remote_error(answer.get("error") or {})
        except TimeoutError:
            raise DaemonGone(
                f"the daemon of {record.mountpoint} (pid {record.daemon_pid}) has said nothing for "
                f"{silence_max_s:.0f} s to {operation!r}; it still runs, and what it began goes on"
            ) from None
        except OSError as error:
            raise DaemonGone(f"the connection to the daemon of {record.mountpoint} broke: {error.strerror}") from error
    raise DaemonGone(
        f"the daemon of {record.mountpoint} (pid {record.daemon_pid}) ended before it answered {operation!r}; "
        "its supervisor starts it again: ask once more"
    )


def _connected(record: MountRecord, silence_max_s: float) -> socket.socket:
    """Connect; while the supervisor lives, its daemon may be on its way back, so it gets some time."""
    for attempt in range(RESTART_ATTEMPTS):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(silence_max_s)
        try:
            with short_path(record.socket) as path:
                connection.connect(path)
        except OSError as error:
            connection.close()
            if attempt + 1 < RESTART_ATTEMPTS and is_alive(record.supervisor_pid):
                threading.Event().wait(RESTART_PAUSE_S)
                continue
            raise DaemonGone(
                f"the daemon of {record.mountpoint} (pid {record.daemon_pid}) does not listen at {record.socket}: "
                f"{error.strerror or error}. `spotwarp umount {record.mountpoint}` cleans up; a new mount continues "
                "where it stopped"
            ) from error
        return connection
    raise AssertionError("the last attempt returns or raises")


def _answers(connection: socket.socket) -> Iterator[dict[str, Any]]:
    buffered = bytearray()
    while True:
        end = buffered.find(b"\n")
        if end >= 0:
            line = bytes(buffered[:end])
            del buffered[: end + 1]
            yield _decoded(line)
            continue
        if len(buffered) > LINE_BYTES_MAX:
            raise SpotwarpError(f"the daemon's answer is longer than {LINE_BYTES_MAX} bytes; is it another program?")
        received = connection.recv(1 << 16)
        if not received:
            return
        buffered += received


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SpotwarpError(f"the daemon's answer is not a line of JSON: {line[:80]!r}")
    return answer


def remote_error(error: Mapping[str, Any]) -> SpotwarpError:
    """Rebuild the daemon's error: its kind if this version knows it, its message and its exit code in any case."""
    kind = getattr(errors, str(error.get("kind")), SpotwarpError)
    message = str(error.get("message") or "the daemon refused and gave no reason")
    if not (isinstance(kind, type) and issubclass(kind, SpotwarpError)) or kind in (UserError, errors.Refused):
        kind = UserError if kind is UserError else SpotwarpError
    rebuilt = kind(message)
    code = error.get("exit_code")
    if code in set(ExitCode):
        rebuilt.exit_code = ExitCode(code)
    return rebuilt


def state_directory(given: str | None = None) -> Path:
    """Return the state directory, *given* on the command line or as the settings say.

    Not all settings are needed for it: `umount` must work beside a broken configuration.
    """
    if given is not None:
        return Path(given)
    from spotwarp_fs.cli.sources import load_settings

    try:
        return load_settings().settings.state_dir
    except UserError:
        return Path(os.environ.get("SPOTWARP_STATE_DIR") or "~/.spotwarp").expanduser().absolute()
